"""The files of a Hugging Face model folder: which are needed, their hashes, what they say."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import struct
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from dbx_llmtrain import storage
from dbx_llmtrain.driver.model_code import code_problems, find_code
from dbx_llmtrain.errors import ConfigError, Problem
from dbx_llmtrain.records import Artifact, FileEntry

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
_OF_THE_MODEL = {"config.json", "generation_config.json"}
CODE_VOCABULARIES = ("*.tiktoken", "*.model", "tokenizer*", "vocab*")


def refuse(message: str, path: str = "model.source") -> ConfigError:
    """The error for a model that cannot be used."""
    return ConfigError([Problem(path, message)])


def needed_files(
    folder: Path,
    name: str,
    *,
    trusted: bool = False,
    objective: str = "sft",
    weights: bool = True,
    tokenizer: bool = True,
) -> list[Path]:
    """Every file of ``folder`` that training needs: config, safetensors, tokenizer, templates, and
    where ``trusted`` the model's own Python code.

    ``name`` is what the user calls the folder; without ``weights`` or ``tokenizer`` it may have
    none. Raises ``ConfigError`` with all that is missing.
    """
    if not (folder / "config.json").is_file() and (advice := _instead(folder)):
        raise refuse(f"{name} has no config.json{advice}")
    problems = small_problems(
        folder, name, trusted=trusted, objective=objective, tokenizer=tokenizer
    )
    tensors, faults = _weight_files(folder, name) if weights else ([], [])
    if problems or faults:
        raise ConfigError([*problems, *faults])
    return sorted([*small_files(folder, trusted=trusted), *tensors])


def small_files(folder: Path, *, trusted: bool) -> list[Path]:
    """The files that are needed beside the weights, as far as they are there."""
    small = [folder / file for file in (*OTHERS, *VOCABULARIES) if (folder / file).is_file()]
    small += (folder / MORE_TEMPLATES).glob("*.jinja")
    if trusted and (code := find_code(folder, "").files):
        # A tokenizer of its own has files of names of its own.
        small += [path for pattern in CODE_VOCABULARIES for path in folder.glob(pattern)]
        small += code
    return sorted(set(small))


def is_of_tokenizer(name: str) -> bool:
    """Whether a file of a model folder belongs to its tokenizer."""
    own = {*OTHERS, *VOCABULARIES} - _OF_THE_MODEL
    patterns = (*own, f"{MORE_TEMPLATES}/*", *CODE_VOCABULARIES)
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def tokenizer_files(folder: Path, *, trusted: bool) -> list[Path]:
    """The files of a tokenizer's folder that are needed, with its Python code where ``trusted``."""
    small = [path for path in folder.glob("*") if path.is_file()]
    small += (folder / MORE_TEMPLATES).glob("*.jinja")
    names = {*OTHERS, *VOCABULARIES} - _OF_THE_MODEL
    return sorted(
        path
        for path in small
        if path.name in names
        or path.parent != folder
        or (trusted and (path.suffix == ".py" or is_of_tokenizer(path.name)))
    )


def small_problems(
    folder: Path, name: str, *, trusted: bool, objective: str = "sft", tokenizer: bool = True
) -> list[Problem]:
    """What is missing in a folder beside its weights, and whether its code may run."""
    problems = []
    if not (folder / "config.json").is_file():
        problems.append(Problem("model.source", f"{name} has no config.json"))
    problems += [
        Problem("model.source", f"{name}: {file} is broken: {error}")
        for file in OTHERS
        if file.endswith(".json") and (error := _json_fault(folder / file))
    ]
    problems += code_problems(folder, name, trusted=trusted, objective=objective)
    names = [path.name for path in folder.iterdir() if path.is_file()]
    own = find_code(folder, name).files and any(
        Path(file).suffix in (".tiktoken", ".model") for file in names
    )
    if tokenizer and not own and not set(names) & {*VOCABULARIES}:
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
            return [folder / WEIGHTS], _torn([folder / WEIGHTS], name)
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
    paths = [folder / shard for shard in shards]
    return [index, *paths], _torn(paths, name)


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The tensors of a safetensors file (name -> dtype, shape, data_offsets) and the size that it
    has to have: 8 bytes of length, JSON, data. Raises ``ValueError`` for a file of another kind."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, path.stat().st_size)))
        tensors = {name: item for name, item in header.items() if name[:2] != "__"}
        ends = [int(item["data_offsets"][1]) for item in tensors.values()]
    except (struct.error, ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        raise ValueError(f"{path.name} is not a safetensors file, or not whole") from error
    return tensors, 8 + length + max(ends, default=0)


def _torn(paths: Iterable[Path], name: str) -> list[Problem]:
    """Weight files that are not whole. Their data is not read."""
    faults = []
    for path in paths:
        try:
            found, expected = path.stat().st_size, read_header(path)[1]
        except ValueError as error:
            faults.append(f"{name}: {error}")
            continue
        if found != expected:
            faults.append(
                f"{name}: {path.name} has {found:,} bytes, by its header it has to have "
                f"{expected:,}: it was cut off or is damaged, copy or download it again"
            )
    return [Problem("model.source", fault) for fault in faults]


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
