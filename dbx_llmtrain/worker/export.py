"""The trained model as a Hugging Face folder that loads anywhere and computes the same.

Everything but the weights comes from the folder that was trained: configuration, tokenizer and
template are its files. The export is re-opened and compared before anyone sees it (``reopened``).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dbx_llmtrain import custom_code, storage
from dbx_llmtrain.compat import dtype_argument
from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.outcomes import KIND
from dbx_llmtrain.worker import adapters, lora, reopened
from dbx_llmtrain.worker.adapters import Adapter
from dbx_llmtrain.worker.generation import GENERATION_FILE, Generation, sampling_keys
from dbx_llmtrain.worker.loss import inference
from dbx_llmtrain.worker.model import load_tokenizer, model_class, named_weights
from dbx_llmtrain.worker.whole import shape_of, whole
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
    """What rank 0 needs for an export: every tensor in ``dtype``, the type of the export, and a
    batch (1, L) with the running model's logits for it (1, L, V), in the type it computes in.

    ``objective`` says which kind of model it is. Of a model with adapters ``weights`` are the
    merged ones, and ``adapter`` is what was trained by itself.
    """

    weights: dict[str, Tensor]
    input_ids: Tensor
    logits: Tensor
    dtype: torch.dtype
    objective: str = "sft"
    adapter: Adapter | None = None


@dataclass(frozen=True)
class Place:
    """What an export is made beside: ``source`` is the folder that was trained, ``scratch`` one on
    local disk. ``trusted``: the Python code that came with the model is part of it, and runs
    (inside ``custom_code.private_modules``).

    ``chat_template`` takes the place of the source's where the model was trained with another;
    ``told`` is what the manifest says of the run.
    """

    source: Path
    scratch: Path
    chat_template: str | None = None
    trusted: bool = False
    told: Mapping[str, str] = field(default_factory=dict)


def collect(
    root: nn.Module,
    model: nn.Module,
    source: Path,
    world: World,
    *,
    objective: str = "sft",
    trusted: bool = False,
) -> Collected | None:
    """Bring the whole model to rank 0; all ranks call it. ``None`` on the others.

    ``root`` is what the strategy wrapped around ``model``. Afterwards no rank needs another, so the
    files can be written without anyone waiting in a collective.
    """
    input_ids = reference_batch(model).to(world.device)
    with inference(root):
        logits: Tensor = root(input_ids=input_ids, logits=True)
    dtype, adapter = source_dtype(source), None
    if lora.is_adapted(model):
        weights, adapter = adapters.collect(
            model, source, dtype, world, objective=objective, trusted=trusted
        )
    else:
        weights = gather(model, dtype, world)
    if world.rank != 0:
        return None
    return Collected(weights, input_ids, logits, dtype, objective, adapter)


def reference_batch(model: Any) -> Tensor:
    """Ids (1, 16) from all over the vocabulary, the same in every run."""
    vocabulary = shape_of(model.get_input_embeddings().weight)[0]
    return (torch.arange(1, 17) * 7919 % vocabulary)[None, :]


def write_export(
    target: Path, *, collected: Collected, place: Place, generation: Generation
) -> Path:
    """Write the model to ``target`` on shared storage; rank 0 alone calls it.

    ``collected.weights`` is empty afterwards: the model that is opened again takes their place in
    memory. Raises ``CheckpointError`` when what was written does not load completely, holds other
    tensors, gives other logits than the running model did or would not stop generating; ``target``
    is not touched then.
    """
    source, trusted, weights = place.source, place.trusted, collected.weights
    expected = reopened.Expected(
        reopened.tensors_of(weights),
        collected.input_ids,
        collected.logits,
        collected.objective,
        generation.ends,
        collected.adapter is not None and collected.adapter.four_bit,
    )

    def make(folder: Path) -> None:
        copy_code(source, folder, trusted=trusted)
        write_weights(folder, collected, place)
        weights.clear()
        copy_code(source, folder, trusted=trusted)
        write_config(folder, source, collected.dtype)
        copy_tokenizer(source, folder, place.chat_template)
        write_generation(folder, source, generation)
        if not trusted:
            drop_auto_map(folder)
        reopened.check_model(folder, expected, trusted=trusted)
        check_tokenizer(folder, source, place.chat_template, trusted=trusted)

    return _publish(target, "export", place, make)


def write_adapter(
    target: Path,
    *,
    collected: Collected,
    place: Place,
    generation: Generation,
    base: str,
    revision: str | None,
) -> Path | None:
    """Write the adapter by itself in peft's format, with the tokenizer and what ends a generation,
    to ``target`` on shared storage; rank 0 alone calls it. ``base`` is the name of the model that
    it belongs on.

    Nothing is written (``None``) without adapters, and for one over random weights, which nobody
    else has. Raises ``CheckpointError`` when what was written, put on the base from the source,
    holds other tensors or gives other logits than the running model did.
    """
    adapter = collected.adapter
    if adapter is None or not adapters.has_weights(place.source):
        return None
    expected = reopened.Expected(
        {}, collected.input_ids, collected.logits, four_bit=adapter.four_bit
    )
    rounded = any(tensor.dtype != torch.float32 for tensor in adapter.tensors.values())

    def make(folder: Path) -> None:
        adapters.write(folder, adapter, base=base, revision=revision)
        copy_tokenizer(place.source, folder, place.chat_template)
        write_generation(folder, place.source, generation)
        opened = adapters.reopen(
            folder, adapter, place.source, objective=collected.objective, trusted=place.trusted
        )
        reopened.check_logits(opened, expected, exact=not rounded, what="adapter")

    return _publish(target, "adapter", place, make)


def _publish(target: Path, kind: str, place: Place, make: Callable[[Path], None]) -> Path:
    """Make a folder on local disk and put it at ``target``, in place of what was there; the
    manifest comes last. Raises ``CheckpointError``."""
    try:
        place.scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{kind}-", dir=place.scratch) as name:
            make(Path(name))
            storage.remove(target)
            files = storage.publish_folder(Path(name), target)
            content = {"files": [entry.model_dump() for entry in files]}
            storage.write_manifest(target, content | {KIND: kind, **place.told})
    except OSError as error:
        raise CheckpointError(f"the {kind} {target} cannot be written: {error}") from error
    return target


def gather(model: nn.Module, dtype: torch.dtype, world: World) -> dict[str, Tensor]:
    """Every tensor of the model, whole, on the CPU of rank 0, in ``dtype``; elsewhere nothing.

    All ranks call it. Tensors pass one by one, so that no rank but 0 holds more than one of them.
    They are copies: the model may be given other weights afterwards.
    """
    gathered = {}
    for name, tensor in named_weights(model):
        found = whole(tensor)
        if world.rank == 0:
            kept = dtype if found.is_floating_point() else found.dtype
            gathered[name] = found.to("cpu", kept, copy=True)
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


def write_weights(folder: Path, collected: Collected, place: Place) -> None:
    """Safetensors files of at most ``MAX_SHARD``, under the names that the architecture publishes.

    transformers itself writes them, from a model without storage: it knows how names and layouts in
    memory differ from those on disk. What it writes beside the weights is replaced later.
    """
    from transformers import AutoConfig

    config = _read_json(place.source / "config.json")
    kept = {name: value for name, value in config.items() if name not in sampling_keys()}
    storage.write_text(folder / "config.json", json.dumps(kept))
    arguments = custom_code.load_from(folder, trusted=place.trusted)
    shape = AutoConfig.from_pretrained(**arguments, local_files_only=True)
    with torch.device("meta"):
        skeleton = model_class(collected.objective).from_config(
            shape, trust_remote_code=place.trusted, **dtype_argument(collected.dtype)
        )
    skeleton.save_pretrained(folder, state_dict=dict(collected.weights), max_shard_size=MAX_SHARD)
    (folder / GENERATION_FILE).unlink(missing_ok=True)


def write_config(folder: Path, source: Path, dtype: torch.dtype) -> None:
    """The source's ``config.json`` with the type of the weights in it, under the key it uses."""
    config = _read_json(source / "config.json")
    config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
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
