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
from dbx_llmtrain.custom_code import load_from, private_modules
from dbx_llmtrain.driver.model_code import code_problems, find_code
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
CODE_VOCABULARIES = ("*.tiktoken", "*.model", "tokenizer*", "vocab*")


def refuse(message: str, path: str = "model.source") -> ConfigError:
    """The error for a model that cannot be used."""
    return ConfigError([Problem(path, message)])


def needed_files(folder: Path, name: str, *, trusted: bool = False) -> list[Path]:
    """Every file of ``folder`` that training needs: config, safetensors, tokenizer, templates, and
    where ``trusted`` the model's own Python code.

    ``name`` is what the user calls the folder. Raises ``ConfigError`` with all that is missing.
    """
    if not (folder / "config.json").is_file() and (advice := _instead(folder)):
        raise refuse(f"{name} has no config.json{advice}")
    problems = small_problems(folder, name, trusted=trusted)
    weights, faults = _weight_files(folder, name)
    if problems or faults:
        raise ConfigError([*problems, *faults])
    return sorted([*small_files(folder, trusted=trusted), *weights])


def small_files(folder: Path, *, trusted: bool) -> list[Path]:
    """The files that are needed beside the weights, as far as they are there."""
    small = [folder / file for file in (*OTHERS, *VOCABULARIES) if (folder / file).is_file()]
    small += (folder / MORE_TEMPLATES).glob("*.jinja")
    if trusted and (code := find_code(folder, "").files):
        # A tokenizer of its own has files of names of its own.
        small += [path for pattern in CODE_VOCABULARIES for path in folder.glob(pattern)]
        small += code
    return sorted(set(small))


def small_problems(folder: Path, name: str, *, trusted: bool) -> list[Problem]:
    """What is missing in a folder beside its weights, and whether its code may run."""
    problems = []
    if not (folder / "config.json").is_file():
        problems.append(Problem("model.source", f"{name} has no config.json"))
    problems += [
        Problem("model.source", f"{name}: {file} is broken: {error}")
        for file in OTHERS
        if file.endswith(".json") and (error := _json_fault(folder / file))
    ]
    problems += code_problems(folder, name, trusted=trusted)
    names = [path.name for path in folder.iterdir() if path.is_file()]
    own = find_code(folder, name).files and any(
        Path(file).suffix in (".tiktoken", ".model") for file in names
    )
    if not own and not set(names) & {*VOCABULARIES}:
        expected = ", ".join(VOCABULARIES)
        problems.append(
            Problem("model.source", f"{name} has no tokenizer: expected one of {expected}")
        )
    return problems


def _json_fault(path: Path) -> str:
    """Why a file, if it is there, holds no JSON object; empty when it does."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        return str(error)
    return (
        "" if isinstance(content, dict) else f"expected an object, found {type(content).__name__}"
    )


def _weight_files(folder: Path, name: str) -> tuple[list[Path], list[Problem]]:
    """The safetensors files with their index, and what is wrong with them."""

    def fault(text: str) -> tuple[list[Path], list[Problem]]:
        return [], [Problem("model.source", text)]

    index = folder / INDEX
    if not index.is_file():
        if (folder / WEIGHTS).is_file():
            return [folder / WEIGHTS], []
        old = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
        advice = (
            f", only {old[0]}, an older format: convert it once with "
            "AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW) and save the tokenizer "
            "there too"
            if old
            else f" (nor {INDEX})"
        )
        return fault(f"{name} has no {WEIGHTS}{advice}")
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        return fault(f"{name}: {INDEX} is broken: {error!r}")
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        return fault(f"{name} has no {', '.join(missing)}, which its {INDEX} names")
    return [index, *(folder / shard for shard in shards)], []


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


def describe(
    artifact: Artifact,
    name: str,
    revision: str | None,
    *,
    trusted: bool = False,
    attention: str = "auto",
) -> ModelInfo:
    """What the plan needs to know of a model that the user calls ``name``.

    Raises ``ConfigError`` for one that cannot be trained, or not with this ``attention``.
    """
    config = load_config(Path(artifact.source), name, trusted=trusted, attention=attention)
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    return ModelInfo(
        artifact=artifact,
        source=name,
        revision=revision,
        model_type=config.model_type,
        parameters=_parameters(artifact, name),
        vocab_size=text.vocab_size,
        max_positions=getattr(text, "max_position_embeddings", None),
        sliding_window=window if getattr(text, "use_sliding_window", True) else None,
    )


def load_config(folder: Path, name: str, *, trusted: bool, attention: str = "auto") -> Any:
    """The model's configuration; where ``trusted``, its own code is imported too.

    Raises ``ConfigError`` for a model that cannot be trained, or not with this ``attention``, and
    for code that cannot be imported.
    """
    from transformers import AutoConfig

    trusted = trusted and bool(find_code(folder, name).files)
    with private_modules(None, wanted=trusted):
        arguments = load_from(folder, trusted=trusted)
        try:
            config = AutoConfig.from_pretrained(**arguments)
            model = _model_class(config, arguments)
        except Exception as error:
            # A model's own code may raise anything.
            if trusted:
                kind = type(error).__name__
                raise refuse(f"{name}: its code cannot be imported: {kind}: {error}") from error
            raise refuse(f"{name}: transformers cannot read its config.json: {error}") from error
    if model is None:
        raise refuse(f"{name} is of type {config.model_type}: expected a causal language model")
    if getattr(config, "quantization_config", None):
        raise refuse(f"{name} has quantised weights: expected bf16, fp16 or fp32 weights")
    if not isinstance(getattr(config.get_text_config(), "vocab_size", None), int):
        raise refuse(f"{name}: its configuration has no vocab_size, the rows of its embedding")
    if attention == "sdpa" and not getattr(model, "_supports_sdpa", False):
        raise refuse(
            f"{name} ({config.model_type}) has no sdpa attention: use auto or eager",
            "model.attention",
        )
    return config


def _model_class(config: Any, arguments: dict[str, Any]) -> Any:
    """The class that ``AutoModelForCausalLM`` will use, ``None`` where there is none. The model's
    own is imported: a package that it lacks shows here."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    own = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if own is not None and arguments["trust_remote_code"]:
        return get_class_from_dynamic_module(
            own, arguments["pretrained_model_name_or_path"], local_files_only=True
        )
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


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
