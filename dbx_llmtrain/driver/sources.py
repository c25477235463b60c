"""The model, from wherever it is, as one Hugging Face folder.

``model.source`` is a folder, a ``.gguf`` file, a hub id, or ``package:NAME/FILE``: a file or folder
inside an installed Python package.
"""

from __future__ import annotations

import importlib.util
import re
from functools import partial
from pathlib import Path

from dbx_llmtrain import addresses, storage
from dbx_llmtrain.driver import gguf, hub
from dbx_llmtrain.driver.model_config import describe
from dbx_llmtrain.driver.model_files import (
    fingerprint,
    hashed,
    needed_files,
    publish,
    refuse,
)
from dbx_llmtrain.records import Artifact, FileEntry, ModelInfo
from dbx_llmtrain.sections import ModelConfig

PACKAGE = "package:"
_GGUF_RECIPE = "gguf 2"  # part of the fingerprint: change it when the conversion changes
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_SHARED_ROOTS = ("/Volumes/", "/dbfs/", "/Workspace/")


def resolve_model(
    config: ModelConfig,
    cache_dir: Path,
    *,
    work_dir: Path | None = None,
    objective: str = "sft",
    weights: bool = True,
) -> ModelInfo:
    """Find the model, bring it into the form of a folder that every node sees, and read from its
    files what the plan needs. Files that training does not need are left out.

    ``cache_dir`` is on storage that every node sees; ``work_dir`` is a folder on the driver's own
    disk for downloads and conversions (default: the temporary folder). The model must be one that
    can be trained for ``objective``. Without ``weights`` those of a hub model are not downloaded
    and those of a folder not asked for: enough to prepare data. Raises ``ConfigError`` with the
    path ``model.source`` or ``model.revision``.
    """
    source, trusted = config.source, config.trust_remote_code
    known = partial(describe, trusted=trusted, attention=config.attention, objective=objective)
    path = _find(config)
    if path is None:
        artifact, commit = hub.fetch(
            source,
            config.revision,
            cache_dir,
            work_dir,
            trusted=trusted,
            objective=objective,
            weights=weights,
        )
        return known(artifact, source, commit)
    if path.is_dir():
        artifact = _folder(path, source, cache_dir, config, objective=objective, weights=weights)
        return known(artifact, source, None)
    name = fingerprint(hashed(path.parent, [path], cache_dir), _GGUF_RECIPE)
    made = publish(cache_dir, name, work_dir, lambda target: gguf.convert(path, target))
    return known(made, source, None)


def look(config: ModelConfig, *, objective: str = "sft", weights: bool = True) -> ModelInfo | None:
    """What can be said of a model folder at once, without its hashes; ``None`` of any other model.

    Raises ``ConfigError`` for a model that is not there or cannot be trained, as ``resolve_model``
    does. A model of the hub is not asked for, and no code of a model's own is run.
    """
    source, path = config.source, _find(config)
    if path is None or not path.is_dir():
        return None
    trusted = config.trust_remote_code
    files = needed_files(path, source, trusted=trusted, objective=objective, weights=weights)
    if trusted:
        return None
    entries = tuple(
        FileEntry(path=file.relative_to(path).as_posix(), size=file.stat().st_size, sha256="")
        for file in files
    )
    artifact = Artifact(kind="models", source=str(path), fingerprint="", files=entries)
    return describe(artifact, source, None, attention=config.attention, objective=objective)


def _find(config: ModelConfig) -> Path | None:
    """The folder or ``.gguf`` file of a model, ``None`` for one of the hub. Raises ``ConfigError``
    for anything else."""
    source = config.source
    if why := addresses.refusal(source, ", or a hub id"):
        raise refuse(why)
    path = _package_path(source) if source.startswith(PACKAGE) else storage.local_path(source)
    if not path.exists() and _HUB_ID.fullmatch(source):
        return None
    if config.revision is not None:
        raise refuse(f"only a hub model has revisions, {source} has none", "model.revision")
    if not path.exists():
        raise refuse(f"no folder, .gguf file or hub model {source} (looked for {path.absolute()})")
    if path.is_file() and path.suffix.lower() != ".gguf":
        raise refuse(f"{source} is a file: expected a folder, a .gguf file or a hub id")
    return path


def _folder(
    path: Path,
    source: str,
    cache_dir: Path,
    config: ModelConfig,
    *,
    objective: str,
    weights: bool,
) -> Artifact:
    """A folder as it is, or its copy in the cache where only the driver sees it."""
    path = path.absolute()  # workers run in another folder than the driver
    needed = needed_files(
        path, source, trusted=config.trust_remote_code, objective=objective, weights=weights
    )
    entries = hashed(path, needed, cache_dir)
    name = fingerprint(entries)
    if not only_on_driver(path, cache_dir):
        return Artifact(kind="models", source=str(path), fingerprint=name, files=entries)
    target = cache_dir / "models" / name
    if storage.read_manifest(target) is None:
        for entry in entries:
            storage.copy_file(path / entry.path, target / entry.path)
        storage.write_manifest(target, {"files": [entry.model_dump() for entry in entries]})
    return Artifact(kind="models", source=str(target), fingerprint=name, files=entries)


def only_on_driver(path: Path, cache_dir: Path) -> bool:
    """Whether ``path`` is on the driver's disk while the run uses the cluster's shared storage."""

    def shared(place: Path) -> bool:
        return str(place.absolute()).startswith(_SHARED_ROOTS)

    return shared(cache_dir) and not shared(path)


def _package_path(source: str) -> Path:
    """The path of ``package:NAME/FILE``; the package is located, not imported."""
    package, _, inside = source.removeprefix(PACKAGE).partition("/")
    try:
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders or not inside:
        problem = "no such package is installed" if inside else "expected package:NAME/FILE"
        raise refuse(f"{source}: {problem}")
    return Path(folders[0]).absolute() / inside
