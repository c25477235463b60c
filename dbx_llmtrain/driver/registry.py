"""A run's exported model in MLflow: logged to the run, and registered under a name.

What answers is ``served.py``, which travels with the model, whichever way it was logged: while the
weights fit in half of this machine's memory with MLflow's flavor for transformers beside it, above
that from disk, without being loaded.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shlex
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dbx_llmtrain import logs, storage
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.config_checks import MODEL_NAME
from dbx_llmtrain.credentials import collect, redact, without_credentials
from dbx_llmtrain.driver import exporting, results
from dbx_llmtrain.driver.model_package import TAG, Package, lineage, pack
from dbx_llmtrain.driver.registered import CATALOG, registry_uri, settings_kept
from dbx_llmtrain.driver.run_folder import RESULT
from dbx_llmtrain.errors import CheckpointError, ConfigError, LlmTrainError, Problem, RegistryError
from dbx_llmtrain.outcomes import KIND, RUN_DIR, RegisteredModel
from dbx_llmtrain.records import RunPlan, TrackingPlan, TrainResult
from dbx_llmtrain.tracking import open_run
from dbx_llmtrain.tracking_guard import impatient, opening

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

_NEEDED = ("mlflow", "numpy", "pandas", "torch", "transformers")
# Unity Catalog takes no longer ones.
_TAG_CHARS = 1000
_ARTIFACT = "model"


@dataclass(frozen=True)
class _Name:
    """What a model is registered as."""

    name: str
    alias: str | None

    @property
    def in_catalog(self) -> bool:
        return self.name.count(".") == 2


def check(cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` where the model of a run could not be logged or registered, as far as
    that shows before it."""
    tracking = cfg.tracking
    if _wanted(cfg) == "none":
        return
    path = "tracking.register_as" if tracking.register_as else "tracking.log_model"
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        message = f"needs {', '.join(missing)} on the driver: pip install mlflow torch transformers"
        raise ConfigError([Problem(path, message)])
    if tracking.register_as:
        import mlflow

        name = _name(tracking.register_as, None, path)
        found = registry_uri(mlflow.get_registry_uri(), in_catalog=name.in_catalog)
        _check_registry(name, found, path)


def log_trained(plan: RunPlan, result: TrainResult, *, limit: int | None = None) -> TrainResult:
    """Log and register the model of a finished run as its configuration says.

    The result, with what became of it. Never raises: what goes wrong is told as an error with what
    to do, and the result stays as it is. ``limit``: see ``register``.
    """
    if _wanted(plan.config) == "none":
        return result
    told = plan.config.tracking.register_as
    try:
        name = _name(told, None, "tracking.register_as") if told else None
        folder = _complete(_export(plan, result), Path(result.run_dir))
        with _told(f"logging the model of {result.run_dir}"), _quiet(), _tracked(plan) as plan:
            package = pack(folder, plan, result, limit=limit)
            logged, registered = _log(package, plan.tracking, name)
            changes = {"model_uri": logged, "registered": registered.uri if registered else None}
            return _keep(result, changes)
    except LlmTrainError as error:
        command = f"dbx-llmtrain register {result.run_dir} {told or 'NAME'}"
        logger.error(
            "%s. The run itself is finished and its result is complete; when the cause is gone: %s",
            str(error).rstrip("."),
            command.replace("@", " --alias "),
        )
        return result


def register(
    model: TrainResult | str | Path,
    name: str,
    *,
    alias: str | None = None,
    limit: int | None = None,
) -> RegisteredModel:
    """See ``api.register``. ``limit``: bytes of weights from which on the model is logged from
    disk; by default half of this machine's memory."""
    wanted = _name(name, alias, "name")
    folder, plan, result = _find(model)
    main = result if result is not None and folder == _export(plan, result) else None
    with _told(f"registering {folder} as {wanted.name}"), _quiet(), _tracked(plan) as plan:
        if main is not None and main.model_uri:
            tags = lineage(folder, plan, result)
            return _register_logged(main.model_uri, tags, plan.tracking, wanted)
        package = pack(folder, plan, result, limit=limit)
        logged, registered = _log(package, plan.tracking, wanted)
        if main is not None:
            _keep(main, {"model_uri": logged})
    assert registered is not None
    return registered


def _wanted(cfg: TrainConfig) -> str:
    """Which model is logged: ``final``, ``best`` or ``none``."""
    return cfg.tracking.log_model or ("final" if cfg.tracking.register_as else "none")


def _name(told: str, alias: str | None, path: str) -> _Name:
    """A name with ``@alias`` behind it, or the alias by itself. Raises ``ConfigError``."""
    whole = f"{told}@{alias}" if alias else told
    if not MODEL_NAME.fullmatch(whole):
        message = "expected a model's name, such as catalog.schema.model, and an alias of letters, "
        message += f"digits, _ and - (not a version such as v1, nor latest), found {whole[:80]!r}"
        raise ConfigError([Problem(path, message)])
    name, _, behind = whole.partition("@")
    return _Name(name, behind or None)


def _find(model: TrainResult | str | Path) -> tuple[Path, RunPlan, TrainResult | None]:
    """The export that was meant, the plan of its run, and its result where it is finished. Raises
    ``CheckpointError`` or ``ConfigError``."""
    if isinstance(model, TrainResult) or (storage.local_path(model) / exporting.PLAN).is_file():
        result = results.load(model if isinstance(model, TrainResult) else str(model))
        plan = exporting.read_plan(Path(result.run_dir))
        return _complete(_export(plan, result), Path(result.run_dir)), plan, result
    folder = storage.local_path(model).absolute()
    if storage.step_of(folder) is not None:
        raise CheckpointError(_export_first(folder))
    run_dir = _run_of(folder)
    return _complete(folder, run_dir), exporting.read_plan(run_dir), results.read(run_dir)


def _run_of(folder: Path) -> Path:
    """The run that an export is of, as its manifest says, or in whose folder it lies. Raises
    ``ConfigError`` for anything else."""
    told = (storage.read_manifest(folder) or {}).get(RUN_DIR)
    places = [folder.parent, *([storage.local_path(str(told))] if told else [])]
    for place in places:
        if (place / exporting.PLAN).is_file():
            return place
    message = (
        f"expected a TrainResult, a run folder, or an export of a run, found {folder}"
        if folder.exists()
        else f"there is no folder {folder}: expected a run folder, or an export of a run"
    )
    if told:
        message += f", which is of the run in {told}: there is no {exporting.PLAN} any more"
    elif folder.exists():
        message += ". Another model's folder is logged by mlflow.transformers itself"
    raise ConfigError([Problem("model", message)])


def _export_first(checkpoint: Path) -> str:
    """What to do with a checkpoint, which MLflow's flavors know nothing of."""
    if not (checkpoint.parents[1] / exporting.PLAN).is_file():
        return f"{checkpoint} is a checkpoint, and not in the folder of its run: register an export"
    made = shlex.quote(str(exporting.default_target(checkpoint)))
    return (
        f"{checkpoint} is a checkpoint, and a model is registered by its export: make that first "
        f"with dbx-llmtrain export {shlex.quote(str(checkpoint))}, then dbx-llmtrain register "
        f"{made} NAME"
    )


def _export(plan: RunPlan, result: TrainResult) -> Path:
    """The exported model that a run logs."""
    best = _wanted(plan.config) == "best"
    path = result.best_model_path if best else result.model_path
    return Path(path or Path(result.run_dir) / ("export-best" if best else "export"))


def _complete(folder: Path, run_dir: Path) -> Path:
    """An export of a run with all its files. Raises ``CheckpointError`` for anything else."""
    manifest = storage.read_manifest(folder)
    if manifest is None:
        raise CheckpointError(
            f"{folder} is no complete export: make one with dbx-llmtrain export {run_dir}"
        )
    if manifest.get(KIND) == "adapter":
        raise CheckpointError(
            f"{folder} is an adapter by itself: register the whole model, "
            f"{run_dir / 'export'}, in which it is merged"
        )
    return folder


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what MLflow and the libraries of models tell of their own work: what came of it is in
    the result. Unless one is debugging."""
    from mlflow.utils import logging_utils as library

    with logs.without_notes(), logs.without_bars():
        enabled = library.MLFLOW_LOGGING_STREAM.enabled
        library.MLFLOW_LOGGING_STREAM.enabled = enabled and logs.is_debugging()
        try:
            yield
        finally:
            library.MLFLOW_LOGGING_STREAM.enabled = enabled


@contextmanager
def _tracked(plan: RunPlan) -> Iterator[RunPlan]:
    """The plan with an MLflow run: a new one where the store could not be used while it trained."""
    if plan.tracking is not None:
        yield plan
        return
    run = open_run(plan.config, plan.run_name, Path(plan.run_dir).parent)
    if run is None:
        raise RegistryError("there is no MLflow store that can be used (the warning says why)")
    status: Literal["FINISHED", "FAILED"] = "FAILED"
    try:
        yield run.attach(plan)
        status = "FINISHED"
    finally:
        run.finish(status)


def _log(
    package: Package, run: TrackingPlan | None, name: _Name | None
) -> tuple[str, RegisteredModel | None]:
    """Log a model to its run, and register it in the same go: Unity Catalog would download again
    what has just been uploaded. Its address, and the version that was made."""
    from mlflow.models import Model

    assert run is not None
    with _store(run, name) as client:
        where: dict[str, Any] = {"artifact_path": _ARTIFACT}
        if hasattr(client, "create_logged_model"):  # MLflow 3; by itself it takes the experiment 0
            model = client.create_logged_model(
                run.experiment_id, name=_ARTIFACT, source_run_id=run.run_id, tags=package.lineage
            )
            where = {"artifact_path": None, "name": _ARTIFACT, "model_id": model.model_id}
        logger.info("MLflow: logging %s to run %s", package.folder, run.run_id)
        info = Model.log(
            flavor=package,
            run_id=run.run_id,
            registered_model_name=name.name if name else None,
            metadata=package.metadata,
            # Loads the model once more, and on a CPU one answer may take minutes.
            validate_serving_input=False,
            input_example=package.example,
            **where,
        )
        registered = None
        if name is not None:
            registered = _name_version(
                client, name, str(info.registered_model_version), package.lineage, package.flavor
            )
    return str(info.model_uri), registered


def _register_logged(
    uri: str, tags: Mapping[str, str], run: TrackingPlan | None, name: _Name
) -> RegisteredModel:
    """Register a model that is logged already."""
    import mlflow

    assert run is not None
    with _store(run, name) as client:
        version = mlflow.register_model(uri, name.name).version
        flavors = mlflow.models.get_model_info(uri).flavors
        flavor = "transformers" if "transformers" in flavors else "python_function"
        return _name_version(client, name, str(version), tags, flavor)


def _name_version(
    client: MlflowClient, name: _Name, version: str, tags: Mapping[str, str], flavor: str
) -> RegisteredModel:
    """Give a new version its alias and its tags. Tags alone end nothing: in Unity Catalog they need
    a privilege of their own."""
    from mlflow.exceptions import MlflowException

    with _told(f"{name.name} version {version} is there, but setting its alias {name.alias}"):
        if name.alias:
            client.set_registered_model_alias(name.name, name.alias, version)
    kept = {}
    try:
        for key, value in tags.items():
            client.set_model_version_tag(name.name, version, key, value[:_TAG_CHARS])
            kept[key] = value[:_TAG_CHARS]
    except MlflowException as error:
        logger.warning("%s version %s has not all its tags: %s", name.name, version, _cause(error))
    return RegisteredModel(
        name=name.name,
        version=version,
        uri=f"models:/{name.name}/{version}",
        run_id=tags.get(f"{TAG}run_id"),
        alias=name.alias,
        flavor=flavor,
        tags=kept,
        tracking_uri=without_credentials(str(client.tracking_uri)),
    )


@contextmanager
def _store(run: TrackingPlan, name: _Name | None) -> Iterator[MlflowClient]:
    """Let MLflow's own functions use the store of a run, and the registry in which ``name`` is, for
    as long as the block lasts."""
    import mlflow

    current = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else ""
    uri = current if without_credentials(current) == run.uri else run.uri
    with settings_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow's own, about its own types
        with opening(uri):
            mlflow.set_tracking_uri(uri)
            in_catalog = name is not None and name.in_catalog
            found = registry_uri(mlflow.get_registry_uri(), in_catalog=in_catalog)
            if name is not None:
                _check_registry(name, found, "name")
            mlflow.set_registry_uri(found)
            client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=found)
            with impatient():  # says in seconds which run of which store is gone
                client.get_run(run.run_id)
        yield client


def _check_registry(name: _Name, uri: str, path: str) -> None:
    if uri.partition(":")[0] == CATALOG and not name.in_catalog:
        message = f"expected catalog.schema.model for Unity Catalog, found {name.name!r}"
        raise ConfigError([Problem(path, message)])


def _keep(result: TrainResult, changes: Mapping[str, str | None]) -> TrainResult:
    """The result with what became of its model, also in the run folder."""
    changed = result.model_copy(update=dict(changes))
    storage.write_text(Path(result.run_dir) / RESULT, changed.model_dump_json(indent=1))
    return changed


@contextmanager
def _told(what: str) -> Iterator[None]:
    """What fails in the block is a ``RegistryError`` that says what was being done."""
    try:
        yield
    except LlmTrainError:
        raise
    except Exception as error:
        raise RegistryError(f"{what} failed: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    """An error in a line, without secrets."""
    secrets = collect(os.environ)
    return f"{type(error).__name__}: {' '.join(redact(str(error), secrets).split())[:600]}"
