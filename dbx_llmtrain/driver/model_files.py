"""The files of a Hugging Face model folder: which are needed, their hashes, what they say."""

from __future__ import annotations

import hashlib
import json
import math
import struct
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from dbx_llmtrain import storage
from dbx_llmtrain.errors import ConfigError, Problem
from dbx_llmtrain.records import Artifact, FileEntry, ModelInfo

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
OTHERS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
MORE_TEMPLATES = "additional_chat_templates"


def refuse(message: str, path: str = "model.source") -> ConfigError:
    """The error for a model that cannot be used."""
    return ConfigError([Problem(path, message)])


def needed_files(folder: Path, name: str) -> list[Path]:
    """Every file of ``folder`` that training needs: config, safetensors, tokenizer, templates.

    ``name`` is what the user calls the folder. Raises ``ConfigError`` that names what is missing.
    """
    if not (folder / "config.json").is_file():
        raise refuse(f"{name} has no config.json{_instead(folder)}")
    small = [folder / file for file in (*OTHERS, *VOCABULARIES) if (folder / file).is_file()]
    if not any(path.name in VOCABULARIES for path in small):
        raise refuse(f"{name} has no tokenizer: expected one of {', '.join(VOCABULARIES)}")
    templates = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    return sorted([*small, *templates, *_weight_files(folder, name)])


def _weight_files(folder: Path, name: str) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        if (folder / WEIGHTS).is_file():
            return [folder / WEIGHTS]
        old = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
        advice = (
            f", only {old[0]}, an older format: convert it once with "
            "AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW) and save the tokenizer "
            "there too"
            if old
            else f" (nor {INDEX})"
        )
        raise refuse(f"{name} has no {WEIGHTS}{advice}")
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise refuse(f"{name}: {INDEX} is broken: {error!r}") from error
    for shard in sorted(shards):
        if not (folder / shard).is_file():
            raise refuse(f"{name} has no {shard}, which its {INDEX} names")
    return [index, *(folder / shard for shard in sorted(shards))]


def _instead(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return ", only an adapter: merge it into its base model first"
    files = sorted(folder.glob("*.gguf"))
    return f": give the file {files[0]} itself" if files else ""


def hashed(folder: Path, files: Iterable[Path], cache_dir: Path) -> tuple[FileEntry, ...]:
    """Size and SHA-256 of files below ``folder``.

    A file that kept its size and time is not read again: hashes are remembered in ``cache_dir``.
    """
    memo = cache_dir / "models" / ".hashes" / f"{digest(str(folder.absolute()))}.json"
    known = _read_memo(memo)
    entries = []
    for path in files:
        name, stat = path.relative_to(folder).as_posix(), path.stat()
        state = [stat.st_size, stat.st_mtime_ns]
        found = known.get(name)
        if not found or found[:2] != state:
            known[name] = [*state, storage.hash_file(path)]
        entries.append(FileEntry(path=name, size=stat.st_size, sha256=known[name][2]))
    text = json.dumps(known, indent=1, sort_keys=True)
    if known != _read_memo(memo):
        storage.write_text(memo, text)
    return tuple(entries)


def _read_memo(memo: Path) -> dict[str, Any]:
    try:
        known = json.loads(memo.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def digest(*parts: str) -> str:
    """24 hex digits that name the parts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def fingerprint(entries: Iterable[FileEntry], *extra: str) -> str:
    """Name of a folder's content: its files' names, sizes and hashes."""
    return digest(*(f"{entry.path} {entry.size} {entry.sha256}" for entry in entries), *extra)


def publish(
    cache_dir: Path, name: str, work_dir: Path | None, make: Callable[[Path], None]
) -> Artifact:
    """The model folder ``name`` of the cache; made by ``make(folder)`` where it is not there yet.

    ``make`` writes to the driver's own disk, the result is copied, the manifest comes last.
    """
    target = cache_dir / "models" / name
    manifest = storage.read_manifest(target)
    if manifest is None:
        with tempfile.TemporaryDirectory(prefix="dbx_llmtrain-", dir=work_dir) as temporary:
            folder = Path(temporary) / "model"
            folder.mkdir()
            make(folder)
            files = storage.publish_folder(folder, target)
        manifest = {"files": [entry.model_dump() for entry in files]}
        storage.write_manifest(target, manifest)
    entries: Any = manifest["files"]
    return Artifact(
        kind="models",
        source=str(target),
        fingerprint=name,
        files=tuple(FileEntry.model_validate(entry) for entry in entries),
    )


def describe(artifact: Artifact, source: str, revision: str | None) -> ModelInfo:
    """What the plan needs to know of a model. ``ConfigError`` for one that cannot be trained."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    folder = Path(artifact.source)
    try:
        config = AutoConfig.from_pretrained(folder)
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise refuse(f"{source}: transformers cannot read its config.json: {error}") from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise refuse(f"{source} is of type {config.model_type}: expected a causal language model")
    if getattr(config, "quantization_config", None):
        raise refuse(f"{source} has quantised weights: expected bf16, fp16 or fp32 weights")
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    return ModelInfo(
        artifact=artifact,
        source=source,
        revision=revision,
        model_type=config.model_type,
        parameters=_parameters(artifact, source),
        vocab_size=text.vocab_size,
        max_positions=getattr(text, "max_position_embeddings", None),
        sliding_window=window if getattr(text, "use_sliding_window", True) else None,
    )


def _parameters(artifact: Artifact, source: str) -> int:
    """Numbers in the weight files, read from their headers (8 bytes of length, then JSON)."""
    total = 0
    for entry in artifact.files:
        if not entry.path.endswith(".safetensors"):
            continue
        with (Path(artifact.source) / entry.path).open("rb") as file:
            try:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(length, entry.size)))
                shapes = [item["shape"] for name, item in header.items() if name[:2] != "__"]
            except (struct.error, ValueError, KeyError, AttributeError) as error:
                raise refuse(f"{source}: {entry.path} is not a safetensors file") from error
        total += sum(math.prod(shape) for shape in shapes)
    return total
