"""The model, from wherever it is, as one Hugging Face folder.

``model.source`` is a folder, a ``.gguf`` file, a hub id, or ``package:NAME/FILE``: a file or folder
inside an installed Python package.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from dbx_llmtrain import storage
from dbx_llmtrain.driver import gguf, hub
from dbx_llmtrain.driver.model_files import (
    describe,
    fingerprint,
    hashed,
    needed_files,
    publish,
    refuse,
)
from dbx_llmtrain.driver.rows import read_rows, source_config, source_files
from dbx_llmtrain.errors import DataError
from dbx_llmtrain.records import Artifact, ModelInfo
from dbx_llmtrain.sections import DataConfig, ModelConfig

__all__ = ["check_files", "read_rows", "resolve_model", "source_config", "source_files"]

PACKAGE = "package:"
_GGUF_RECIPE = "gguf 1"  # part of the fingerprint: change it when the conversion changes
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_SHARED_ROOTS = ("/Volumes/", "/dbfs/", "/Workspace/")


def check_files(data: DataConfig) -> None:
    """Raise ``DataError`` for data files that are not there: asked before a model is downloaded."""
    faults = []
    for source in (data.train, data.eval):
        if isinstance(source, float | None):
            continue
        try:
            source_files(source)
        except DataError as error:
            faults.append(str(error))
    if faults:
        raise DataError("\n".join(faults))


def resolve_model(
    config: ModelConfig, cache_dir: Path, *, work_dir: Path | None = None
) -> ModelInfo:
    """Find the model, bring it into the form of a folder that every node sees, and read from its
    files what the plan needs. Files that training does not need are left out.

    ``cache_dir`` is on storage that every node sees; ``work_dir`` is a folder on the driver's own
    disk for downloads and conversions (default: the temporary folder). Raises ``ConfigError`` with
    the path ``model.source`` or ``model.revision``.
    """
    source, trusted, attention = config.source, config.trust_remote_code, config.attention
    path = _package_path(source) if source.startswith(PACKAGE) else storage.local_path(source)
    if not path.exists() and _HUB_ID.fullmatch(source):
        artifact, commit = hub.fetch(source, config.revision, cache_dir, work_dir, trusted=trusted)
        return describe(artifact, source, commit, trusted=trusted, attention=attention)
    if config.revision is not None:
        raise refuse(f"only a hub model has revisions, {source} has none", "model.revision")
    if path.is_dir():
        artifact = _folder(path, source, cache_dir, trusted=trusted)
        return describe(artifact, source, None, trusted=trusted, attention=attention)
    if not path.is_file():
        raise refuse(f"no folder, .gguf file or hub model {source} (looked for {path.absolute()})")
    if path.suffix.lower() != ".gguf":
        raise refuse(f"{source} is a file: expected a folder, a .gguf file or a hub id")
    name = fingerprint(hashed(path.parent, [path], cache_dir), _GGUF_RECIPE)
    made = publish(cache_dir, name, work_dir, lambda target: gguf.convert(path, target))
    return describe(made, source, None, attention=attention)


def _folder(path: Path, source: str, cache_dir: Path, *, trusted: bool) -> Artifact:
    """A folder as it is, or its copy in the cache where only the driver sees it."""
    entries = hashed(path, needed_files(path, source, trusted=trusted), cache_dir)
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
    return Path(folders[0]) / inside
