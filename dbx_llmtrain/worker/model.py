"""The model and its tokenizer, from a folder on the node's own disk."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from dbx_llmtrain.compat import dtype_argument
from dbx_llmtrain.custom_code import load_from
from dbx_llmtrain.errors import CheckpointError


def model_class(objective: str) -> Any:
    """The class of transformers that loads a model for a ``data.objective``."""
    import transformers

    masked = objective == "mlm"
    return transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM


def build(
    folder: Path, *, attention: str, objective: str = "sft", trusted: bool = False
) -> nn.Module:
    """The language model of a Hugging Face folder, ready to be trained but for its weights: a
    causal one, or for the objective ``mlm`` one that predicts masked tokens.

    Parameters are fp32 and have no storage (``meta``): ``weights.Fill`` gives them their values.
    Buffers are those of a normal build, on the CPU. No cache, because a cache switches the mask of
    packed rows off. ``attention`` is ``sdpa``, ``eager``, or ``auto``: ``sdpa`` where the model has
    it. ``trusted``: the model's own code runs (inside ``custom_code.private_modules``).

    Raises ``CheckpointError`` when the model does not run with the ``attention`` that the plan asks
    for, or insists on another type than fp32.
    """
    from transformers import AutoConfig

    arguments = load_from(folder, trusted=trusted)
    config = AutoConfig.from_pretrained(**arguments, local_files_only=True)
    chosen = {} if attention == "auto" else {"attn_implementation": attention}
    with _no_contradictions(), _without_storage():
        model = model_class(objective).from_config(
            config, trust_remote_code=trusted, **chosen, **dtype_argument(torch.float32)
        )
    model.tie_weights()
    return _ready(model, folder, attention)


def load_model(
    folder: Path,
    *,
    attention: str,
    objective: str = "sft",
    trusted: bool = False,
    rows: int | None = None,
) -> nn.Module:
    """The model of ``build`` with its weights, read whole by transformers onto the CPU; with that
    many ``rows`` of the vocabulary instead of those in ``config.json``.

    They are fp32 whatever the folder holds: AdamW's updates of a bf16 weight are mostly rounded
    away. Raises ``CheckpointError`` also when a weight is missing (it would be random) or has
    another shape.
    """
    from transformers import AutoConfig

    arguments = load_from(folder, trusted=trusted)
    if rows is not None:
        config = AutoConfig.from_pretrained(**arguments, local_files_only=True)
        config.get_text_config().vocab_size = rows
        arguments["config"] = config
    with _no_contradictions():
        model, report = model_class(objective).from_pretrained(
            **arguments,
            attn_implementation=None if attention == "auto" else attention,
            local_files_only=True,
            output_loading_info=True,
            **dtype_argument(torch.float32),
        )
    check_loading(folder, report, strict=False)
    return _ready(model, folder, attention)


@contextmanager
def _no_contradictions() -> Iterator[None]:
    """Without the warning of a contradicting generation configuration: it is repaired and reported
    for the export."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*do_sample")
        yield


@contextmanager
def _without_storage() -> Iterator[None]:
    """Within, every parameter of a module that is built loses its storage when it is registered.

    (Under ``torch.device("meta")`` buffers would lose theirs too, and some, such as rotary
    frequencies, are in no file.) Vectors keep the value they were built with as ``built``: where
    weights start at random, some initialisers rely on it.
    """
    register = nn.Module.register_parameter
    moved = WeakTensorKeyDictionary()

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        held = module._parameters[name]
        if held is None or held.is_meta:
            return
        if held not in moved:
            moved[held] = nn.Parameter(held.detach().to("meta"), requires_grad=held.requires_grad)
            moved[held].__dict__.update(held.__dict__)
            if held.ndim <= 1:
                moved[held].built = held.detach().clone()
        module._parameters[name] = moved[held]

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _ready(model: Any, folder: Path, attention: str) -> nn.Module:
    used = attention_of(model)
    if attention not in ("auto", used):
        raise CheckpointError(
            f"{folder} runs with {used} attention, the plan says {attention}: set model.attention"
        )
    model.config.use_cache = False
    model.train()
    for name, weight in model.named_parameters():
        if weight.dtype != torch.float32:
            raise CheckpointError(f"{folder}: {name} was loaded as {weight.dtype}, not as float32")
    ready: nn.Module = model
    return ready


def attention_of(model: Any) -> str:
    """The attention implementation that a model runs."""
    return str(model.config._attn_implementation)


def load_tokenizer(folder: Path, *, trusted: bool = False) -> Any:
    """The tokenizer of a Hugging Face folder; see ``load_model`` for ``trusted``."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        **load_from(folder, trusted=trusted), local_files_only=True
    )


def check_loading(folder: Path, report: Mapping[str, Any], *, strict: bool) -> None:
    """Refuse a folder whose weights do not fit the model, naming them.

    ``report`` is transformers' loading info. Weights that the model does not know are an error only
    where ``strict``: published checkpoints often carry some (old rotary tables).
    """
    kinds = ("missing_keys", "mismatched_keys", *(("unexpected_keys",) if strict else ()))
    faults = [
        f"{kind.removesuffix('_keys')}: {', '.join(_some(names))}"
        for kind in kinds
        if (names := [_key(item) for item in report.get(kind) or ()])
    ]
    if faults:
        raise CheckpointError(
            f"the weights of {folder} do not fit its config.json: {'; '.join(faults)}. "
            "A model that is loaded so has random weights in their place"
        )


def _key(item: Any) -> str:
    """A mismatched key comes with its two shapes."""
    return item if isinstance(item, str) else str(item[0])


def _some(names: list[str], limit: int = 8) -> list[str]:
    shown = sorted(names)[:limit]
    return shown + [f"and {len(names) - limit} more"] * (len(names) > limit)


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a model's checkpoint and export hold: every parameter, tied ones once, and the buffers
    that belong to the state dict. Names are those of the Hugging Face model, whatever wraps it."""
    yield from model.named_parameters()
    kept = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


def check_same_weights(model: nn.Module, sources: Mapping[str, str] | None = None) -> None:
    """Raise ``CheckpointError`` on every rank unless all ranks hold the same model.

    Called when the weights are there: a strategy that shards takes each part from its own rank, and
    would build a patchwork of different models without a word. Whole tensors are compared bit by
    bit, buffers too, also those that are not saved; of a sharded one no rank has more than its
    part, so what the parts were taken from is compared: ``sources`` (``Fill.digests``).
    """
    ours = {
        name: digest(tensor)
        for tensors in (model.named_parameters(), model.named_buffers())
        for name, tensor in tensors
        if is_whole(tensor)
    } | dict(sources or {})
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, _combined(ours))
    if len(set(everyone)) == 1:
        return
    dist.all_gather_object(everyone, ours)
    first = everyone[0]
    names = sorted(
        {name for other in everyone for name in first.keys() | other.keys()
         if first.get(name) != other.get(name)}
    )  # fmt: skip
    ranks = [rank for rank, other in enumerate(everyone) if other != first]
    raise CheckpointError(
        f"ranks {ranks} hold other weights than rank 0 in {len(names)} of {len(first)} tensors "
        f"({', '.join(_some(names))}): delete the staged model on their nodes"
    )


def is_whole(tensor: Tensor) -> bool:
    """Whether this rank holds all of a tensor, and not a shard or a partition of DeepSpeed's."""
    return not isinstance(tensor, DTensor) and not hasattr(tensor, "ds_id")


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's type, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()


def _combined(digests: Mapping[str, str]) -> str:
    text = "\n".join(f"{name} {value}" for name, value in sorted(digests.items()))
    return hashlib.sha256(text.encode()).hexdigest()
