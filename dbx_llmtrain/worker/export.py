"""The trained model as a Hugging Face folder that loads anywhere and computes the same.

Everything but the weights comes from the folder that was trained: configuration, tokenizer and
template are its files. The export is re-opened and compared before anyone sees it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dbx_llmtrain import custom_code, storage
from dbx_llmtrain.compat import dtype_argument
from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.worker.generation import GENERATION_FILE, Generation, sampling_keys
from dbx_llmtrain.worker.loss import inference
from dbx_llmtrain.worker.model import check_loading, load_tokenizer, model_class, named_weights
from dbx_llmtrain.worker.world import World

MAX_SHARD = "5GB"
"""Above it, uploads to object stores need more than one request."""

_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt",
    "*.tiktoken", "*.model", "chat_template*", "additional_chat_templates/*",
)  # fmt: skip
_SAMPLES = (
    "The quick brown fox jumps over the lazy dog.",
    "  two  spaces,\ttabs\nand line breaks\r\n",
    "def f(x):\n    return x ** 2  # 3.14",
    "\u00fcml\u00e4ut \u65e5\u672c\u8a9e \U0001f600",
)


@dataclass(frozen=True)
class Collected:
    """What rank 0 needs for an export: every tensor in the type of the export, and a batch (1, L)
    with the running model's logits for it (1, L, V), in the type it computes in. ``objective`` says
    which kind of model it is."""

    weights: dict[str, Tensor]
    input_ids: Tensor
    logits: Tensor
    objective: str = "sft"


def collect(
    root: nn.Module, model: nn.Module, source: Path, world: World, *, objective: str = "sft"
) -> Collected | None:
    """Bring the whole model to rank 0; all ranks call it. ``None`` on the others.

    ``root`` is what the strategy wrapped around ``model``. Afterwards no rank needs another, so the
    files can be written without anyone waiting in a collective.
    """
    input_ids = _reference_batch(model).to(world.device)
    with inference(root):
        logits: Tensor = root(input_ids=input_ids, logits=True)
    weights = gather(model, source_dtype(source), world)
    return Collected(weights, input_ids, logits, objective) if world.rank == 0 else None


def _reference_batch(model: Any) -> Tensor:
    """Ids from all over the vocabulary, the same in every run."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return (torch.arange(1, 17) * 7919 % vocabulary)[None, :]


def write_export(
    target: Path,
    *,
    collected: Collected,
    source: Path,
    generation: Generation,
    scratch: Path,
    chat_template: str | None = None,
    trusted: bool = False,
) -> Path:
    """Write the model to ``target`` on shared storage; rank 0 alone calls it. ``trusted``: with the
    Python code that came with it, which runs (inside ``custom_code.private_modules``).

    ``chat_template`` takes the place of the source's where the model was trained with another.
    Raises ``CheckpointError`` when what was written does not load completely, holds other tensors,
    or gives other logits than the running model did; ``target`` is not touched then.
    """
    weights = collected.weights
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="export-", dir=scratch) as name:
            folder = Path(name)
            copy_code(source, folder, trusted=trusted)
            write_weights(folder, source, weights, objective=collected.objective, trusted=trusted)
            copy_code(source, folder, trusted=trusted)
            write_config(folder, source)
            copy_tokenizer(source, folder, chat_template)
            write_generation(folder, source, generation)
            if not trusted:
                drop_auto_map(folder)
            check_model(folder, collected, trusted=trusted)
            check_tokenizer(folder, source, chat_template, trusted=trusted)
            storage.remove(target)
            files = storage.publish_folder(folder, target)
            storage.write_manifest(target, {"files": [entry.model_dump() for entry in files]})
    except OSError as error:
        raise CheckpointError(f"the export {target} cannot be written: {error}") from error
    return target


def gather(model: nn.Module, dtype: torch.dtype, world: World) -> dict[str, Tensor]:
    """Every tensor of the model, whole, on the CPU of rank 0, in ``dtype``; elsewhere nothing.

    All ranks call it. Tensors pass one by one, so that no rank but 0 holds more than one of them.
    """
    gathered = {}
    for name, tensor in named_weights(model):
        whole = tensor.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        if world.rank == 0:
            gathered[name] = (whole.to(dtype) if whole.is_floating_point() else whole).cpu()
    return gathered


def source_dtype(source: Path) -> torch.dtype:
    """The type of a folder's weights: as its ``config.json`` says, else as its first tensor has."""
    config = _read_json(source / "config.json")
    name = config.get("dtype") or config.get("torch_dtype")
    found = getattr(torch, str(name), None)
    if isinstance(found, torch.dtype) and found.is_floating_point:
        return found
    from safetensors import safe_open

    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():
                tensor: Tensor = file.get_tensor(key)
                if tensor.is_floating_point():
                    return tensor.dtype
    return torch.float32


def copy_code(source: Path, folder: Path, *, trusted: bool) -> None:
    """The Python files of a staged model, byte for byte where they were, and no others."""
    for path in [*folder.rglob("*.py")]:
        path.unlink()
    for path in source.rglob("*.py") if trusted else ():
        copy = folder / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def drop_auto_map(folder: Path) -> None:
    """Without the code that an ``auto_map`` names, nobody could follow it."""
    for name in ("config.json", "tokenizer_config.json"):
        content = _read_json(folder / name) if (folder / name).is_file() else {}
        if content.pop("auto_map", None) is not None:
            text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
            storage.write_text(folder / name, text)


def write_weights(
    folder: Path,
    source: Path,
    weights: dict[str, Tensor],
    *,
    objective: str = "sft",
    trusted: bool = False,
) -> None:
    """Safetensors files of at most ``MAX_SHARD``, under the names that the architecture publishes.

    transformers itself writes them, from a model without storage: it knows how names and layouts in
    memory differ from those on disk. What it writes beside the weights is replaced later.
    """
    from transformers import AutoConfig

    config = _read_json(source / "config.json")
    kept = {name: value for name, value in config.items() if name not in sampling_keys()}
    storage.write_text(folder / "config.json", json.dumps(kept))
    arguments = custom_code.load_from(folder, trusted=trusted)
    shape = AutoConfig.from_pretrained(**arguments, local_files_only=True)
    with torch.device("meta"):
        skeleton = model_class(objective).from_config(
            shape, trust_remote_code=trusted, **dtype_argument(source_dtype(source))
        )
    skeleton.save_pretrained(folder, state_dict=dict(weights), max_shard_size=MAX_SHARD)
    (folder / GENERATION_FILE).unlink(missing_ok=True)


def write_config(folder: Path, source: Path) -> None:
    """The source's ``config.json`` with the type of the weights in it, under the key it uses."""
    config = _read_json(source / "config.json")
    config["dtype" if "dtype" in config else "torch_dtype"] = str(
        source_dtype(source)
    ).removeprefix("torch.")
    storage.write_text(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")


def copy_tokenizer(source: Path, folder: Path, chat_template: str | None = None) -> None:
    """The tokenizer's files and the chat template, byte for byte; ``chat_template`` in its place,
    and in that of all its variants, where there is one."""
    for pattern in _TOKENIZER_FILES:
        for path in source.glob(pattern):
            if path.is_file():
                copy = folder / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
    if chat_template is not None:
        storage.remove(folder / "additional_chat_templates")
        storage.write_text(folder / "chat_template.jinja", chat_template)


def write_generation(folder: Path, source: Path, generation: Generation) -> None:
    """The repaired generation configuration, or the source's file as it is."""
    if generation.content is not None:
        text = json.dumps(generation.content, indent=2, sort_keys=True) + "\n"
        storage.write_text(folder / GENERATION_FILE, text)
    elif (source / GENERATION_FILE).is_file():
        shutil.copyfile(source / GENERATION_FILE, folder / GENERATION_FILE)


def check_model(folder: Path, collected: Collected, *, trusted: bool) -> None:
    """Re-open the folder as anyone would: no key too few or too many, the same tensors bit by bit,
    and logits that differ from the running model's by no more than the types round."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reopened, report = model_class(collected.objective).from_pretrained(
            **custom_code.load_from(folder, trusted=trusted),
            local_files_only=True,
            output_loading_info=True,
            **dtype_argument("auto"),
        )
    check_loading(folder, report, strict=True)
    found, weights = dict(named_weights(reopened)), collected.weights
    differing = [
        name
        for name, tensor in weights.items()
        if name not in found or not _same(found[name], tensor)
    ]
    if differing or found.keys() - weights.keys():
        names = ", ".join(sorted({*differing, *(found.keys() - weights.keys())})[:8])
        raise CheckpointError(f"the export does not hold the trained weights: {names} differ")
    rounding = {tensor.dtype for tensor in weights.values()} - {torch.float32}
    _check_logits(reopened.float().eval(), collected, exact=not rounding)


def _same(found: Tensor, trained: Tensor) -> bool:
    """Bitwise, in the type that was written. NaN equals NaN: the run reports those itself."""
    found = found.detach().to(trained.dtype)
    return bool(torch.equal(_bits(found), _bits(trained)))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _check_logits(reopened: nn.Module, collected: Collected, *, exact: bool) -> None:
    """Relative error (L2) of all logits. 1e-5 is fp32 on one kind of device, 1e-4 between two, 0.1
    the rounding of bf16 weights or sums over dozens of layers; another model is off by 1 or more.
    """
    with torch.no_grad():
        ours = reopened(input_ids=collected.input_ids.cpu()).logits.float()
    theirs = collected.logits.float().cpu()
    error = float(torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs))
    exact = exact and collected.logits.dtype == torch.float32
    limit = 0.1 if not exact else 1e-5 if collected.logits.device.type == "cpu" else 1e-4
    if not error <= limit:
        raise CheckpointError(
            f"the export's logits are {error:.1e} off the running model's (limit {limit:.0e}), "
            "although it holds the same weights: its configuration is not the one that was trained"
        )


def check_tokenizer(
    folder: Path, source: Path, chat_template: str | None = None, *, trusted: bool = False
) -> None:
    """The exported tokenizer gives the ids of the one that was trained with, and its template."""
    ours, theirs = (load_tokenizer(path, trusted=trusted) for path in (folder, source))
    same = all(ours(text)["input_ids"] == theirs(text)["input_ids"] for text in _SAMPLES)
    same = same and ours.chat_template == (chat_template or theirs.chat_template)
    same = same and len(ours) == len(theirs)
    if not same:
        raise CheckpointError(
            f"the exported tokenizer differs from that of {source}: a file that it needs is none "
            f"of {', '.join(_TOKENIZER_FILES)}"
        )


def _read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
