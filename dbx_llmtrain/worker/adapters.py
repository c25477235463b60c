"""What was trained of a model with adapters, for others: merged into its base, or in peft's format.

Nothing here touches the model that trains. Layers are built once more without storage, take the
tensors that rank 0 has collected, and peft itself merges them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.worker import four_bit, lora
from dbx_llmtrain.worker.lora import ADAPTER
from dbx_llmtrain.worker.model import build, load_model, named_weights
from dbx_llmtrain.worker.weight_files import WeightFiles
from dbx_llmtrain.worker.whole import shape_of, whole
from dbx_llmtrain.worker.world import World

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"

PREFIX = "base_model.model."
"""What peft's files put before the names of the model."""


@dataclass(frozen=True)
class Adapter:
    """What peft stores of an adapter: tensors (CPU; fp32 as they were trained, or rounded) by the
    names in its files, and its configuration. ``rows``: of the embeddings that it was trained with;
    ``four_bit``: over a base in 4 bits."""

    tensors: dict[str, Tensor]
    config: Any
    rows: int
    four_bit: bool


def collect(
    model: nn.Module,
    source: Path,
    dtype: torch.dtype,
    world: World,
    *,
    objective: str = "sft",
    trusted: bool = False,
) -> tuple[dict[str, Tensor], Adapter | None]:
    """What ``split`` gives on rank 0, nothing on the others; all ranks call it.

    Tensors pass one by one. Where the base is held in fewer bits than ``source`` has (4, or a half
    type), the adapter is merged into the weights of ``source``.
    """
    tensors, rounded = {}, set()
    for name, tensor in named_weights(model):
        if is_frozen_copy(name):
            continue
        frozen = not tensor.requires_grad and isinstance(tensor, nn.Parameter)
        if frozen and tensor.dtype not in (torch.float32, dtype):
            rounded.add(name)
        found = whole(tensor)
        if world.rank == 0:
            tensors[name] = found.to("cpu", copy=True)  # the model may be given other weights
    if world.rank != 0:
        return {}, None
    if rounded and has_weights(source):
        base = _base(source, objective=objective, trusted=trusted)
        original = dict(base.named_parameters(remove_duplicate=False))
        for name in rounded:
            exact = original[str(lora.original_name(name))].detach()
            packed = not tensors[name].is_floating_point()
            if packed or exact.shape == tensors[name].shape:  # (not where rows were added)
                tensors[name] = exact
    return split(model, tensors, dtype)


def is_frozen_copy(name: str) -> bool:
    """Whether a tensor is the base's of a module that is trained as a whole: nobody uses it."""
    return "original_module" in name.split(".")


def split(
    model: nn.Module, tensors: dict[str, Tensor], dtype: torch.dtype
) -> tuple[dict[str, Tensor], Adapter]:
    """The merged model's tensors in ``dtype`` under its own names, and the adapter by itself.

    ``tensors`` are the whole tensors of the adapted ``model`` on the CPU, by its names, tied ones
    once; the frozen copies of what is trained as a whole may be left out. None is left in it: each
    goes when what it becomes is there. Merged in fp32, and cast afterwards: a delta is mostly
    rounded away in a half type.
    """
    skeleton = _skeleton(model)
    adapter = Adapter(
        _adapter_tensors(skeleton, tensors),
        model.peft_config[ADAPTER],
        shape_of(model.get_input_embeddings().weight)[0],
        four_bit.count(model) > 0,
    )
    merged: dict[str, Tensor] = {}
    for name, layer in _outermost(skeleton):
        prefix = f"{name}."
        keys = [key for key in tensors if key.startswith(prefix)]
        parts = {key.removeprefix(prefix): tensors.pop(key) for key in keys}
        for key, tensor in _merge(layer, parts).items():
            merged[f"{name}.{key}"] = _cast(tensor, dtype)
        layer.to("meta")
    for name in list(tensors):
        tensor = tensors.pop(name)
        if not is_frozen_copy(name):
            merged[str(lora.original_name(name))] = _cast(tensor, dtype)
    return merged, adapter


def rounded(adapter: Adapter, dtype: torch.dtype) -> Adapter:
    """The adapter in another type."""
    tensors = {name: tensor.to(dtype) for name, tensor in adapter.tensors.items()}
    return replace(adapter, tensors=tensors)


def write(folder: Path, adapter: Adapter, *, base: str, revision: str | None) -> None:
    """peft's two files. ``base`` is the name of the model that the adapter belongs on."""
    from safetensors.torch import save_file

    config = copy.copy(adapter.config)
    config.base_model_name_or_path, config.revision = base, revision
    config.inference_mode = True
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)
    config.save_pretrained(str(folder))
    # (Tied tensors are in the file twice, as peft has them; safetensors takes no shared memory.)
    tensors = {name: tensor.clone().contiguous() for name, tensor in adapter.tensors.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def reopen(
    folder: Path, adapter: Adapter, source: Path, *, objective: str = "sft", trusted: bool = False
) -> nn.Module:
    """The adapter of a folder on the base from ``source``, in fp32, as anyone would open it.

    Raises ``CheckpointError`` unless it holds the tensors that were trained, bit by bit.
    """
    base = _base(source, objective=objective, trusted=trusted)
    opened: Any = put_on(folder, base, adapter.rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {
            name: parameter.detach()
            for name, parameter in opened.base_model.model.named_parameters(remove_duplicate=False)
        }
        found = _adapter_tensors(opened.base_model.model, state)
    differing = [
        name
        for name in found.keys() | adapter.tensors.keys()
        if name not in found
        or name not in adapter.tensors
        or not _same(found[name], adapter.tensors[name])
    ]
    if differing:
        names = ", ".join(sorted(differing)[:8])
        raise CheckpointError(f"the adapter does not hold what was trained: {names} differ")
    ready: nn.Module = opened.eval()
    return ready


def put_on(folder: Path, base: Any, rows: int) -> nn.Module:
    """The adapter of a folder on a base that is given as many ``rows`` of the vocabulary."""
    from peft import PeftModel

    with warnings.catch_warnings():
        # peft warns of missing keys, which whoever compares the tensors finds.
        warnings.simplefilter("ignore")
        _grow(base, rows)
        opened: nn.Module = PeftModel.from_pretrained(base, str(folder))
    return opened


def _same(found: Tensor, trained: Tensor) -> bool:
    return bool(torch.equal(found.to(trained.dtype).nan_to_num(), trained.nan_to_num()))


def has_weights(folder: Path) -> bool:
    """Whether there are weights in a staged folder (none are for a model that starts at random)."""
    return any(folder.glob("model*.safetensors"))


def _base(folder: Path, *, objective: str, trusted: bool) -> nn.Module:
    """The model of a staged folder with the weights in its files and as many rows of the vocabulary
    as these have (the configuration may count new ones), fp32 on the CPU."""
    built: Any = build(folder, attention="auto", objective=objective, trusted=trusted)
    embedding = built.get_input_embeddings().weight
    name = next(name for name, one in built.named_parameters() if one is embedding)
    ending = ".".join(name.split(".")[-2:])
    files = WeightFiles(folder)
    key = next((key for key in files.keys() if f".{key}".endswith(f".{ending}")), None)
    rows = embedding.shape[0] if key is None else min(files.shape(key)[0], embedding.shape[0])
    return load_model(folder, attention="auto", objective=objective, trusted=trusted, rows=rows)


def _grow(base: Any, rows: int) -> None:
    """Give a base as many rows of the vocabulary; new ones are the mean of the others, as when they
    were trained."""
    known = base.get_input_embeddings().weight.shape[0]
    if known == rows:
        return
    base.resize_token_embeddings(rows)
    for end in (base.get_input_embeddings(), base.get_output_embeddings()):
        with torch.no_grad():
            end.weight[known:] = end.weight[:known].mean(dim=0)


def _skeleton(model: Any) -> Any:
    """The adapted model once more, without storage and without what a strategy did to it."""
    with torch.device("meta"):
        bare = type(model)(copy.deepcopy(model.config))
    lora.inject(bare, copy.deepcopy(model.peft_config[ADAPTER]))
    return bare


def _outermost(model: nn.Module) -> list[tuple[str, Any]]:
    """Layers with adapters that lie in no other one (peft nests those of several parameters)."""
    found: list[tuple[str, Any]] = []
    for name, layer in lora.named_layers(model):
        if not any(name.startswith(f"{outer}.") for outer, _ in found):
            found.append((name, layer))
    return found


def _merge(layer: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The base of a layer with its adapter merged into it, fp32, by the base's names."""
    state = {name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}
    layer.load_state_dict(state, assign=True)
    chain = [layer]
    while hasattr(chain[-1], "base_layer"):
        chain.append(chain[-1].base_layer)
    for inner in reversed(chain[:-1]):
        inner.merge(safe_merge=False)
    return {name: tensor.detach() for name, tensor in chain[-1].state_dict().items()}


def _adapter_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that peft stores of an adapter, under the names in its files."""
    from peft import get_peft_model_state_dict

    names: dict[int, str] = {}
    state = dict(tensors)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if name not in state and first in state:
            state[name] = state[first]  # tied
    chosen = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    return {f"{PREFIX}{name}": tensor.detach().cpu() for name, tensor in chosen.items()}


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
