"""The model, from wherever it is, as one Hugging Face folder.

``model.source`` is a folder, a ``.gguf`` file, a hub id, ``models:/NAME@ALIAS`` or
``models:/NAME/VERSION`` in MLflow's registry, or ``package:NAME/FILE``: a file or folder inside an
installed Python package.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from dbx_llmtrain import addresses, storage
from dbx_llmtrain.driver import adapters, composed, gguf, hub, registered
from dbx_llmtrain.driver.model_changes import blamed
from dbx_llmtrain.driver.model_config import describe
from dbx_llmtrain.driver.model_files import (
    VOCABULARIES,
    fingerprint,
    hashed,
    needed_files,
    publish,
    refuse,
    tokenizer_files,
)
from dbx_llmtrain.errors import ConfigError, Problem
from dbx_llmtrain.model_sections import ModelConfig
from dbx_llmtrain.records import Artifact, FileEntry, ModelInfo

PACKAGE = "package:"
_TOKENIZER = "model.tokenizer"
_GGUF_RECIPE = "gguf 2"  # part of the fingerprint: change it when the conversion changes
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_SHARED_ROOTS = ("/Volumes/", "/dbfs/", "/Workspace/")


def resolve_model(
    config: ModelConfig,
    cache_dir: Path,
    *,
    work_dir: Path | None = None,
    objective: str = "sft",
    weights: bool = True,
    runs: Path | None = None,
) -> ModelInfo:
    """Find the model, bring it into the form of a folder that every node sees, and read from its
    files what the plan needs. Files that training does not need are left out. Where the
    configuration changes or defines the model, or has another tokenizer, the folder is composed.

    ``cache_dir`` is on storage that every node sees; ``work_dir`` is a folder on the driver's own
    disk for downloads and conversions (default: the temporary folder). The model must be one that
    can be trained for ``objective``. Without ``weights`` those of a hub model are not downloaded
    and those of a folder not asked for: enough to prepare data. ``runs`` is the folder of runs,
    which may have an MLflow store. Raises ``ConfigError`` with the
    path ``model.source`` or ``model.revision``.
    """
    name, trusted = config.source or "model.config", config.trust_remote_code

    def known(artifact: Artifact, name: str, commit: str | None) -> ModelInfo:
        attention = config.attention
        found = describe(
            artifact, name, commit, trusted=trusted, attention=attention, objective=objective
        )
        adapters.check_model(config, Path(artifact.source), objective=objective)
        return found

    weights = weights and config.init == "pretrained"
    if weights and config.source and composed.is_wanted(config) and find_model(config) is None:
        # What is wrong shows before the weights are downloaded.
        resolve_model(
            config, cache_dir, work_dir=work_dir, objective=objective, weights=False, runs=runs
        )
    base, commit = None, None
    if config.source:
        base, commit = _resolve(
            config, cache_dir, work_dir, runs, objective=objective, weights=weights
        )
    if not composed.is_wanted(config):
        assert base is not None
        return known(base, name, commit)
    words = _tokenizer(config, cache_dir, work_dir)
    if base is None and words is None:
        raise refuse("missing: a model that model.config defines has none", _TOKENIZER)
    parts = composed.Parts(config, name, objective, base, words)
    made = composed.compose(parts, cache_dir, work_dir)
    with blamed(config.config, config.source):
        return known(made, name, commit)


def _resolve(
    config: ModelConfig,
    cache_dir: Path,
    work_dir: Path | None,
    runs: Path | None,
    *,
    objective: str,
    weights: bool,
) -> tuple[Artifact, str | None]:
    """The model of ``model.source`` as a folder, and where it is of the hub its commit, of MLflow's
    registry its version."""
    path = find_model(config)
    words = composed.own_tokenizer(config)
    tokenizer = words is None or words.source is None
    if path is None:
        asked: dict[str, Any] = {
            "trusted": config.trust_remote_code,
            "objective": objective,
            "weights": weights,
            "tokenizer": tokenizer,
        }
        if registered.is_registered(config.source):
            return registered.fetch(config.source, cache_dir, work_dir, runs=runs, **asked)
        return hub.fetch(config.source, config.revision, cache_dir, work_dir, **asked)
    if path.is_dir():
        found = _folder(
            path, cache_dir, config, objective=objective, weights=weights, tokenizer=tokenizer
        )
        return found, None
    name = fingerprint(hashed(path.parent, [path], cache_dir), _GGUF_RECIPE)
    return publish(cache_dir, name, work_dir, lambda target: gguf.convert(path, target)), None


def _tokenizer(config: ModelConfig, cache_dir: Path, work_dir: Path | None) -> Path | None:
    """The folder of ``model.tokenizer``, on storage that every node sees or in the cache."""
    settings = composed.own_tokenizer(config)
    if settings is None or settings.source is None:
        return None
    path = find_tokenizer(config)
    if path is not None:
        return path
    try:
        path = hub.fetch_tokenizer(
            settings.source,
            settings.revision,
            cache_dir,
            work_dir,
            trusted=config.trust_remote_code,
        )
    except ConfigError as error:
        problems = [Problem(_TOKENIZER, problem.message) for problem in error.problems]
        raise ConfigError(problems) from None
    return _with_tokenizer(path, config, settings.source)


def find_tokenizer(config: ModelConfig) -> Path | None:
    """The folder of ``model.tokenizer``, ``None`` for one of the hub or where there is none. Raises
    ``ConfigError`` for one that is not there or holds no tokenizer."""
    settings = composed.own_tokenizer(config)
    if settings is None or settings.source is None:
        return None
    source = settings.source
    if not source.strip():
        raise refuse("is empty: expected a hub id or a folder", _TOKENIZER)
    if why := addresses.refusal(source, ", or a hub id"):
        raise refuse(why, _TOKENIZER)
    try:
        path = _package_path(source) if source.startswith(PACKAGE) else storage.local_path(source)
    except ConfigError as error:
        raise refuse(error.problems[0].message, _TOKENIZER) from None
    if not path.exists() and HUB_ID.fullmatch(source) and path.suffix.lower() != ".gguf":
        return None
    if settings.revision is not None:
        raise refuse(f"only a hub tokenizer has revisions, {source} has none", _TOKENIZER)
    if not path.exists():
        looked = path.absolute()
        raise refuse(f"no folder or hub tokenizer {source} (looked for {looked})", _TOKENIZER)
    return _with_tokenizer(path, config, source)


def _with_tokenizer(path: Path, config: ModelConfig, source: str) -> Path:
    """The absolute path of a folder that has a tokenizer."""
    if path.is_file():
        instead = (
            ": the tokenizer of a .gguf file is used with its model (model.source); save it once "
            "with AutoTokenizer.from_pretrained(FOLDER, gguf_file=FILE).save_pretrained(NEW) and "
            "give NEW"
            if path.suffix.lower() == ".gguf"
            else ""
        )
        raise refuse(f"{source} is a file, expected a hub id or a folder{instead}", _TOKENIZER)
    names = {file.name for file in tokenizer_files(path, trusted=config.trust_remote_code)}
    if not names.intersection(VOCABULARIES) and not config.trust_remote_code:
        expected = ", ".join(VOCABULARIES)
        raise refuse(f"{source} has no tokenizer: expected one of {expected}", _TOKENIZER)
    if not names:
        raise refuse(f"{source} has no tokenizer", _TOKENIZER)
    return path.absolute()


def look(config: ModelConfig, *, objective: str = "sft", weights: bool = True) -> ModelInfo | None:
    """What can be said of a model folder at once, without its hashes; ``None`` of any other model.

    Raises ``ConfigError`` for a model that is not there or cannot be trained, as ``resolve_model``
    does. A model of the hub is not asked for, and no code of a model's own is run.
    """
    if not config.source:
        return None
    source, path = config.source, find_model(config)
    if path is None or not path.is_dir():
        return None
    trusted = config.trust_remote_code
    words = composed.own_tokenizer(config)
    files = needed_files(
        path,
        source,
        trusted=trusted,
        objective=objective,
        weights=weights and config.init == "pretrained",
        tokenizer=words is None or words.source is None,
    )
    if trusted or composed.is_wanted(config):
        return None
    entries = tuple(
        FileEntry(path=file.relative_to(path).as_posix(), size=file.stat().st_size, sha256="")
        for file in files
    )
    artifact = Artifact(kind="models", source=str(path), fingerprint="", files=entries)
    found = describe(artifact, source, None, attention=config.attention, objective=objective)
    adapters.check_model(config, path, objective=objective)
    return found


def is_here(config: ModelConfig) -> bool:
    """Whether the model's configuration is on this machine, so that nothing is downloaded for it.
    Raises ``ConfigError`` as ``find_model`` does."""
    return not config.source or find_model(config) is not None


def find_model(config: ModelConfig) -> Path | None:
    """The folder or ``.gguf`` file of a model, ``None`` for one of the hub or of MLflow's registry.
    Raises ``ConfigError`` for anything else."""
    source = config.source
    if registered.is_registered(source):
        return None
    if why := addresses.refusal(source, ", or a hub id"):
        raise refuse(why)
    path = _package_path(source) if source.startswith(PACKAGE) else storage.local_path(source)
    if not path.exists() and HUB_ID.fullmatch(source):
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
    cache_dir: Path,
    config: ModelConfig,
    *,
    objective: str,
    weights: bool,
    tokenizer: bool,
) -> Artifact:
    """A folder as it is, or its copy in the cache where only the driver sees it."""
    path = path.absolute()  # workers run in another folder than the driver
    needed = needed_files(
        path,
        config.source,
        trusted=config.trust_remote_code,
        objective=objective,
        weights=weights,
        tokenizer=tokenizer,
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
