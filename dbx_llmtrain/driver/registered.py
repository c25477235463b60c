"""A model of MLflow's registry: downloaded once, on the driver, at one version.

The registry is Unity Catalog's on Databricks, else that of the tracking server. What is downloaded
is made a Hugging Face folder: of the files that MLflow keeps, the model and its tokenizer.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from dbx_llmtrain import addresses, logs, storage
from dbx_llmtrain.credentials import collect, redact, without_credentials
from dbx_llmtrain.driver.model_config import load_config
from dbx_llmtrain.driver.model_files import (
    INDEX,
    VOCABULARIES,
    WEIGHTS,
    digest,
    needed_files,
    publish,
    refuse,
    small_problems,
)
from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.layout import BESIDE
from dbx_llmtrain.records import Artifact
from dbx_llmtrain.tracking_guard import impatient, opening
from dbx_llmtrain.tracking_store import default_uri, on_databricks, store_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient

CATALOG = "databricks-uc"
_VARIABLES = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")  # MLflow sets them beside the setting
_CONFIG = "config.json"
_ADAPTER = "adapter_config.json"
_NO_SUCH = ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND", "INVALID_PARAMETER_VALUE")
_HEAVY = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")


@dataclass(frozen=True)
class Version:
    """One version of a registered model. ``key`` names its content: a number by itself is given
    again where a registry is made anew."""

    name: str
    number: str
    key: str

    @property
    def uri(self) -> str:
        """``models:/NAME/VERSION``."""
        return f"{addresses.REGISTRY}{self.name}/{self.number}"


def is_registered(source: str) -> bool:
    """Whether ``model.source`` is a model of the registry."""
    return source.startswith(addresses.REGISTRY)


def fetch(
    source: str,
    cache_dir: Path,
    work_dir: Path | None,
    *,
    runs: Path | None = None,
    trusted: bool = False,
    objective: str = "sft",
    weights: bool = True,
    tokenizer: bool = True,
) -> tuple[Artifact, str]:
    """The model folder of ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION``, and the number of its
    version; with its Python code where that is ``trusted``.

    A version that is in ``cache_dir`` is not downloaded again. Without ``weights`` only the other
    files are, unless the whole model is there already; without ``tokenizer`` it may have none.
    ``runs`` is the folder of runs, whose store is taken where MLflow has not been told of another.
    Raises ``ConfigError`` where the registry cannot be reached or has no such model.
    """
    known: dict[str, Any] = {"trusted": trusted, "objective": objective, "tokenizer": tokenizer}
    code = ["code"] if trusted else []
    with _registry(source, runs) as client:
        version = _resolve(client, source)
        whole = digest("registered", version.key, *code)
        small = not weights and storage.read_manifest(cache_dir / "models" / whole) is None

        def download(target: Path) -> None:
            _download_small(version.uri, source, target)
            if problems := small_problems(target, source, **known):
                raise ConfigError(problems)
            load_config(target, source, trusted=trusted, objective=objective)
            if not small:
                storage.remove(target)
                _download(version.uri, source, target)
            needed = {*needed_files(target, source, weights=not small, **known)}
            for path in storage.list_files(target):
                if path not in needed:
                    path.unlink()

        key = digest("registered without weights", version.key, *code) if small else whole
        return publish(cache_dir, key, work_dir, download), version.number


def fetch_config(source: str, target: Path, runs: Path | None = None) -> None:
    """Download everything but the weights of a registered model to ``target``. Raises
    ``ConfigError`` as ``fetch`` does."""
    with _registry(source, runs) as client:
        _download_small(_resolve(client, source).uri, source, target)


def check_there(source: str, runs: Path | None = None) -> None:
    """Raise ``ConfigError``, as ``fetch`` does, where the registry has no such version."""
    with _registry(source, runs) as client:
        _resolve(client, source)


def registry_uri(found: str, *, in_catalog: bool) -> str:
    """The registry of a name: MLflow 2 takes a workspace's own where Unity Catalog is meant."""
    kind, colon, profile = found.partition(":")
    return f"{CATALOG}{colon}{profile}" if in_catalog and kind == "databricks" else found


@contextmanager
def settings_kept() -> Iterator[None]:
    """Put the user's settings of MLflow back at the end. They are read where MLflow has them: its
    functions tell what follows from them, and setting that would fix it."""
    import mlflow
    from mlflow.tracking._model_registry import utils as registry
    from mlflow.tracking._tracking_service import utils as service

    before = service._tracking_uri, registry._registry_uri
    variables = {each: os.environ.get(each) for each in _VARIABLES}
    try:
        yield
    finally:
        mlflow.set_tracking_uri(before[0])
        mlflow.set_registry_uri(before[1])
        for each, value in variables.items():
            os.environ.pop(each, None)
            if value is not None:
                os.environ[each] = value


@contextmanager
def _registry(source: str, runs: Path | None) -> Iterator[MlflowClient]:
    """The registry of a model; MLflow's own functions use it for as long as the block lasts. What
    it raises becomes a ``ConfigError``."""
    import mlflow

    parts = addresses.registered(source)
    if parts is None:
        raise refuse(f"expected models:/NAME@ALIAS or models:/NAME/VERSION, found {source}")
    store = _store(source, runs or Path(BESIDE))
    uri = store
    with settings_kept(), logs.without_notes(), logs.without_bars():
        try:
            with opening(store):
                mlflow.set_tracking_uri(store)
                in_catalog = parts[0].count(".") == 2
                uri = registry_uri(mlflow.get_registry_uri(), in_catalog=in_catalog)
                if uri.partition(":")[0] == CATALOG and not in_catalog:
                    raise refuse(
                        f"{source}: expected models:/catalog.schema.model for Unity Catalog"
                    )
                mlflow.set_registry_uri(uri)
                client = mlflow.MlflowClient(tracking_uri=store, registry_uri=uri)
            yield client
        except ConfigError:
            raise
        except Exception as error:
            # MLflow raises its own errors, its stores' and those of the file system.
            raise _explain(source, uri, error) from error


def _store(source: str, runs: Path) -> str:
    """The tracking store: the user's, the workspace's, or that of the runs' folder."""
    import mlflow

    has_parent = mlflow.active_run() is not None
    told = has_parent or mlflow.is_tracking_uri_set() or on_databricks(os.environ)
    if not told and not (runs / "mlflow.db").is_file():
        raise refuse(
            f"{source}: MLflow has not been told of a tracking server, and the folder of runs has "
            f"no store of its own ({default_uri(runs)}): set MLFLOW_TRACKING_URI to the server in "
            "whose registry the model is"
        )
    return store_uri(runs, has_parent=has_parent)


def _resolve(client: MlflowClient, source: str) -> Version:
    """The version that a name and an alias or number stand for."""
    parts = addresses.registered(source)
    assert parts is not None
    name, alias, number = parts
    with impatient():
        found = (
            client.get_model_version_by_alias(name, alias)
            if alias
            else client.get_model_version(name, str(number))
        )
    made = [found.creation_timestamp, found.source, found.run_id]
    key = digest(name, str(found.version), *map(str, made))
    return Version(name, str(found.version), key)


def _explain(source: str, uri: str, error: Exception) -> ConfigError:
    secrets = collect(os.environ)
    cause = redact((str(error).strip() or "no reason given").splitlines()[0], secrets)[:400]
    missing = getattr(error, "error_code", "") in _NO_SUCH
    advice = (
        "check the name, and its version or alias"
        if missing
        else "check that the driver can reach it and may read the model there"
    )
    return refuse(
        f"{source}: the registry {without_credentials(uri)} did not give it "
        f"({type(error).__name__}: {cause}): {advice}"
    )


def _download(uri: str, source: str, target: Path) -> None:
    """The whole model as a Hugging Face folder."""
    from mlflow.artifacts import download_artifacts

    kept = target.with_name(f"{target.name}-downloaded")
    kept.mkdir()
    try:
        download_artifacts(artifact_uri=uri, dst_path=str(kept))
        files = [path.relative_to(kept).as_posix() for path in storage.list_files(kept)]
        _flatten(kept, find_parts(files, source), target)
    finally:
        storage.remove(kept)


def _download_small(uri: str, source: str, target: Path) -> None:
    """The same without files of weights."""
    from mlflow.artifacts import download_artifacts

    files = list(_listed(uri))
    parts = find_parts(files, source)
    kept = target.with_name(f"{target.name}-downloaded")
    kept.mkdir()
    try:
        for file in files:
            inside = any(PurePosixPath(file).is_relative_to(part) for part in parts)
            if inside and not file.endswith(_HEAVY):
                download_artifacts(artifact_uri=f"{uri}/{file}", dst_path=str(kept))
        _flatten(kept, parts, target)
    finally:
        storage.remove(kept)


def _listed(uri: str, folder: str = "") -> Iterator[str]:
    """Every file of a model, by its path in it."""
    from mlflow.artifacts import list_artifacts

    for item in list_artifacts(artifact_uri=f"{uri}/{folder}" if folder else uri):
        if item.is_dir:
            yield from _listed(uri, item.path)
        else:
            yield item.path


def find_parts(files: Sequence[str], source: str) -> list[str]:
    """The folders of a logged model that have the model and, where that is another one, its
    tokenizer. Raises ``ConfigError`` where there is no such model, or more than one."""
    folders: dict[str, set[str]] = {}
    for file in map(PurePosixPath, files):
        folders.setdefault(str(file.parent), set()).add(file.name)
    models = [name for name, names in folders.items() if _CONFIG in names]
    whole = [name for name in models if folders[name] & {WEIGHTS, INDEX}]
    if len(whole or models) != 1:
        raise refuse(f"{source} {_why_none(files, whole or models)}")
    (model,) = whole or models
    if folders[model].intersection(VOCABULARIES):
        return [model]
    words = [name for name, names in folders.items() if names.intersection(VOCABULARIES)]
    return [model, *sorted(words, key=lambda name: "tokenizer" not in name)[:1]]


def _why_none(files: Sequence[str], models: Sequence[str]) -> str:
    if models:
        return f"has several models ({', '.join(sorted(models))}): expected one"
    if any(PurePosixPath(file).name == _ADAPTER for file in files):
        return "has only an adapter: merge it into its base model, and register that"
    return (
        f"is no Hugging Face model: it has no {_CONFIG}. One that mlflow.transformers has logged "
        "without its weights gets them by mlflow.transformers.persist_pretrained_model"
    )


def _flatten(kept: Path, parts: Sequence[str], target: Path) -> None:
    """The files of the folders ``parts``, the first one's before the others', in one folder."""
    target.mkdir(exist_ok=True)
    for part in parts:
        for path in (kept / part).iterdir():
            if not (target / path.name).exists():
                shutil.move(path, target / path.name)
