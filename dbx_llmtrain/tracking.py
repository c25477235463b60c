"""The MLflow run. Only this module and its neighbours ``tracking_...`` import mlflow.

The driver opens the run and ends it, so that its status is true whatever becomes of the ranks. What
happens in between is logged by rank 0 itself where the store can be reached from a worker (http or
Databricks), else by the driver from rank 0's events: the same code, so the same names.

Nothing here raises: tracking never ends a training run. What goes wrong is told once per kind, as a
warning of this module's logger. Nobody waits for a server but ``open_run``, for seconds, and the
end, for a patience that is given: a thread does the rest, and tries again what was not answered.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import format_exception

from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.credentials import collect, redact, uri_credentials, without_credentials
from dbx_llmtrain.errors import TrainingFailed, was_stopped
from dbx_llmtrain.records import RunPlan, TrackingPlan
from dbx_llmtrain.tracking_guard import Guard, impatient, opening
from dbx_llmtrain.tracking_rank import how_to_send
from dbx_llmtrain.tracking_run import SHORT_PATIENCE_S, milliseconds
from dbx_llmtrain.tracking_run import DriverRun as DriverRun
from dbx_llmtrain.tracking_store import (
    ERROR_TAG,
    KEY_CHARS,
    clip,
    context_tags,
    experiment_id,
    on_databricks,
    reachable_from_workers,
    reopen,
    store_uri,
)

logger = logging.getLogger(__name__)

METRICS: dict[str, str] = {
    "loss": "mean loss of the trained tokens since the last report, over all ranks",
    "learning_rate": "learning rate of the step",
    "grad_norm": "global norm of the step's gradient before clipping",
    "tokens_per_second": "tokens (pads not counted) a second since the last report, over all ranks",
    "seconds_per_step": "wall time of a step, mean since the last report",
    "data_wait_seconds": "longest wait of a rank for data in a step, mean since the last report",
    "slowest_rank": "the rank that takes longest until it shares its gradient",
    "slowest_rank_seconds": "how long that takes, with its wait for data",
    "median_rank_seconds": "the same of the rank in the middle",
    "rows_seen": "rows of the data trained on so far",
    "tokens_seen": "tokens (pads not counted) trained on so far",
    "trained_tokens_seen": "tokens with a label so far",
    "skipped_steps": "steps without an update so far (gradient not finite, or nothing to train)",
    "memory_bytes": "peak memory of rank 0's device (of its process on CPU) so far",
    "eval_loss": "mean loss of the held-out rows' trained tokens",
    "eval_perplexity": "exp(eval_loss)",
    "test_loss": "mean loss of the test rows' trained tokens, once, after the last step",
    "test_perplexity": "exp(test_loss)",
}
"""Names of the metrics of events and of the MLflow run. Step = optimizer steps done. Held-out sets
with a name have ``eval_<name>_loss`` and ``eval_<name>_perplexity`` as well, a user's own metrics
their own names, and those of the best model begin with ``best_``.

Each has one value at a step. At the end the metrics of the result are logged at the last step, so
that the last value of ``tokens_per_second`` and ``eval_loss`` is that of the whole run.
"""


@contextmanager
def driver_run(
    plan: RunPlan,
    earlier: TrackingPlan | None = None,
    *,
    others: tuple[type[BaseException], ...] = (),
) -> Iterator[DriverRun]:
    """The MLflow run of a planned training run, for as long as the block lasts: the ``earlier`` one
    of the same run folder, where there was one, else a new one.

    It ends FINISHED, KILLED when the user interrupts, else FAILED with the error as ``error.txt``
    (and what is told of a rank that failed, as ``failure.txt``);
    after one of the ``others`` it is not this call's any more and is left alone. Without a usable
    store the block gets a run that logs nothing.
    """
    tags = {"dbx_llmtrain.trial": "true"} if plan.trial else {}
    parent = Path(plan.run_dir).parent
    run = open_run(plan.config, plan.run_name, parent, earlier=earlier, tags=tags)
    run = run or DriverRun(None, uri="", secrets={})
    try:
        yield run
    except others:
        run.wait(SHORT_PATIENCE_S)
        raise
    except BaseException as error:
        stopped = was_stopped(error)
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        if isinstance(error, TrainingFailed):
            run.log_text("failure.txt", str(error))
        run.finish("KILLED" if stopped else "FAILED", text, "".join(format_exception(error)))
        raise
    run.finish("FINISHED")


def open_run(
    cfg: TrainConfig,
    run_name: str,
    default_store: Path,
    *,
    earlier: TrackingPlan | None = None,
    tags: Mapping[str, str] | None = None,
) -> DriverRun | None:
    """``start_run``, or a warning and ``None``."""
    advice = how_to_send(str(default_store / run_name))
    with Guard("opening the run", set(), advice=advice):
        return start_run(cfg, run_name, default_store, earlier=earlier, tags=tags)
    return None


def start_run(
    cfg: TrainConfig,
    run_name: str,
    default_store: Path,
    *,
    earlier: TrackingPlan | None = None,
    tags: Mapping[str, str] | None = None,
    began: float | None = None,
    uri: str | None = None,
) -> DriverRun:
    """Open the MLflow run of a training run, which ``began`` now or then; ``uri``: there.

    The store is the one the user chose (``MLFLOW_TRACKING_URI``, ``mlflow.set_tracking_uri``, or
    that of the active run), on Databricks the workspace's, else ``mlflow.db`` and ``mlartifacts``
    in ``default_store`` (``checkpoint.dir``). An active run becomes the parent and stays open. The
    ``earlier`` run is opened again, unless it has been deleted or is in another store: then there
    is a warning and a new run. Raises what MLflow does where the store cannot be used.
    """
    with impatient():
        import mlflow

        parent = mlflow.active_run()
        uri = uri or store_uri(default_store, has_parent=parent is not None)
        secrets = {**worker_secrets(os.environ), **uri_credentials(uri)}
        with opening(uri):
            client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
            experiment = experiment_id(client, cfg.tracking.experiment, parent, default_store)
        wanted = {**context_tags(), **cfg.tracking.tags, **(tags or {})}
        wanted["dbx_llmtrain.run_dir"] = str(default_store / run_name)
        if parent is not None:
            wanted["mlflow.parentRunId"] = parent.info.run_id
        wanted = {key[:KEY_CHARS]: clip(redact(text, secrets)) for key, text in wanted.items()}
        run = reopen(client, uri, earlier, wanted)
        known = run.data.params if run is not None else None
        run = run or client.create_run(
            experiment, tags=wanted, run_name=run_name, start_time=milliseconds(began)
        )
        plan = TrackingPlan(
            uri=without_credentials(uri),
            experiment_id=run.info.experiment_id,
            run_id=run.info.run_id,
            by_rank=reachable_from_workers(uri),
        )
        found = DriverRun(
            plan, uri=uri, secrets=secrets, known=known, run_dir=str(default_store / run_name)
        )
        found.began = run.info.start_time / 1000
        return found


def chosen_store(default_store: Path, earlier: TrackingPlan | None) -> str:
    """Where a run that is over is logged: the store that the user has chosen, else that of the
    ``earlier`` run of its folder, else the one that ``start_run`` takes. Raises where that one
    needs a package."""
    import mlflow

    parent = mlflow.active_run() is not None
    if earlier is not None and not parent and not mlflow.is_tracking_uri_set():
        return earlier.uri
    return store_uri(default_store, has_parent=parent)


def end_dead(earlier: TrackingPlan, default_store: Path, why: str) -> None:
    """Set the run of a driver that is gone to FAILED, where it is still RUNNING and its store is
    the one in use. Warns instead of raising."""
    with Guard("ending the run of a driver that is gone", set()), impatient():
        import mlflow

        uri = store_uri(default_store, has_parent=mlflow.active_run() is not None)
        if without_credentials(uri) != earlier.uri:
            return
        with opening(uri):
            client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
            status = client.get_run(earlier.run_id).info.status
        if status == "RUNNING":
            client.set_terminated(earlier.run_id, status="FAILED")
            client.set_tag(earlier.run_id, ERROR_TAG, why)


def worker_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The credentials that a rank needs, from the driver's environment.

    On Databricks the notebook's, which MLflow knows and no variable holds, unless the environment
    has some: two kinds at once are refused by Databricks.
    """
    found: dict[str, str] = {}
    own = any(environ.get(f"DATABRICKS_{x}") for x in ("TOKEN", "CLIENT_SECRET", "PASSWORD"))
    if on_databricks(environ) and not own:
        with Guard("finding the notebook's credentials", set()):
            from mlflow.utils.databricks_utils import get_databricks_env_vars

            found = dict(get_databricks_env_vars("databricks"))
            found.pop("MLFLOW_TRACKING_URI", None)
    return found | collect(environ)


def how_to_open(plan: TrackingPlan) -> str:
    """The address of the run's page, or the command that serves it."""
    page = f"/#/experiments/{plan.experiment_id}/runs/{plan.run_id}"
    if plan.uri.startswith(("http://", "https://")):
        return plan.uri.rstrip("/") + page
    if plan.by_rank:
        return f"the experiment's page in the workspace, run {plan.run_id}"
    return f"mlflow ui --backend-store-uri {shlex.quote(plan.uri)}   # then http://127.0.0.1:5000{page}"
