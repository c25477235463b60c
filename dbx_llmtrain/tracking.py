"""The MLflow run. Only this module, ``tracking_store.py`` and ``tracking_sender.py`` import mlflow.

The driver opens the run and ends it, so that its status is true whatever becomes of the ranks. What
happens in between is logged by rank 0 itself where the store can be reached from a worker (http or
Databricks), else by the driver from rank 0's events: the same code, so the same names.

Nothing here raises: tracking never ends a training run. What goes wrong is told once per kind, as a
warning of this module's logger. A server that does not answer costs seconds: requests are retried
once, and after a failure the store is left alone for half a minute while metrics wait their turn.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shlex
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import TYPE_CHECKING, Literal

from dbx_llmtrain import storage
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.credentials import collect, redact, uri_credentials, without_credentials
from dbx_llmtrain.errors import was_stopped
from dbx_llmtrain.events import EVENTS_FILE, Event, read_events
from dbx_llmtrain.records import Audit, PreparedData, RunPlan, TrackingPlan, TrainResult
from dbx_llmtrain.tracking_guard import Guard, impatient, opening
from dbx_llmtrain.tracking_params import flat_params, flatten
from dbx_llmtrain.tracking_sender import PENDING, Sender
from dbx_llmtrain.tracking_store import (
    BATCH,
    ERROR_TAG,
    KEY_CHARS,
    PARAM_CHARS,
    Run,
    clip,
    context_tags,
    experiment_id,
    on_databricks,
    reachable_from_workers,
    reopen,
    store_uri,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

METRICS: dict[str, str] = {
    "loss": "mean loss of the trained tokens since the last report, over all ranks",
    "learning_rate": "learning rate of the step",
    "grad_norm": "global norm of the step's gradient before clipping",
    "tokens_per_second": "tokens (pads not counted) a second since the last report, over all ranks",
    "seconds_per_step": "wall time of a step, mean since the last report",
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

Status = Literal["FINISHED", "FAILED", "KILLED"]

_ROLES = {"train": "training", "eval": "evaluation", "test": "testing"}


@contextmanager
def driver_run(
    plan: RunPlan,
    earlier: TrackingPlan | None = None,
    *,
    others: tuple[type[BaseException], ...] = (),
) -> Iterator[DriverRun]:
    """The MLflow run of a planned training run, for as long as the block lasts: the ``earlier`` one
    of the same run folder, where there was one, else a new one.

    It ends FINISHED, KILLED when the user interrupts, else FAILED with the error as ``error.txt``;
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
        raise
    except BaseException as error:
        stopped = was_stopped(error)
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
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
    """Open the MLflow run of a training run, or warn and return ``None``.

    The store is the one the user chose (``MLFLOW_TRACKING_URI``, ``mlflow.set_tracking_uri``, or
    that of the active run), on Databricks the workspace's, else ``mlflow.db`` and ``mlartifacts``
    in ``default_store`` (``checkpoint.dir``). An active run becomes the parent and stays open. The
    ``earlier`` run is opened again, unless it has been deleted or is in another store: then there
    is a warning and a new run.
    """
    with Guard("opening the run", set()), impatient():
        import mlflow

        parent = mlflow.active_run()
        uri = store_uri(default_store, has_parent=parent is not None)
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
        run = run or client.create_run(experiment, tags=wanted, run_name=run_name)
        plan = TrackingPlan(
            uri=without_credentials(uri),
            experiment_id=run.info.experiment_id,
            run_id=run.info.run_id,
            by_rank=reachable_from_workers(uri),
        )
        return DriverRun(plan, uri=uri, secrets=secrets, known=known)
    return None


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


class DriverRun:
    """The driver's side of an MLflow run. No method raises. ``known`` are the parameters that a run
    has already which goes on: MLflow never changes one, so that another value becomes a tag
    ``changed.<name>``.
    """

    def __init__(
        self,
        plan: TrackingPlan | None,
        *,
        uri: str,
        secrets: Mapping[str, str],
        known: Mapping[str, str] | None = None,
    ) -> None:
        self._plan = plan
        self._secrets = dict(secrets)
        self._known = dict(known or {})
        self._goes_on = known is not None
        self._run = Run(uri, plan.run_id if plan else None)
        self._sender = Sender(self._run, self._secrets)
        self._keep_checkpoint = False

    def plan(self) -> TrackingPlan | None:
        """What a rank needs to know of this run, no credentials; ``None``: nothing is logged."""
        return self._plan

    def attach(self, plan: RunPlan) -> RunPlan:
        """The run's plan with this MLflow run in it."""
        return plan.model_copy(update={"tracking": self._plan})

    def log_start(self, plan: RunPlan) -> None:
        """All that is known before the launch: configuration, plan, data sources, audit; of a run
        that goes on also the metrics which an attempt that was killed could not log."""
        self._keep_checkpoint = plan.config.tracking.log_checkpoints
        done = storage.step_of(Path(plan.resume_from)) if plan.resume_from else None
        if self._goes_on and done:
            self._sender.fill(read_events(storage.local_path(plan.run_dir) / EVENTS_FILE), done)
        self.log_config(plan)
        self.log_inputs(plan.data)
        self.log_audit(plan.data.audit)

    def log_config(self, plan: RunPlan) -> None:
        """Parameters from the configuration and the plan; both whole as artifacts."""
        self._log_params(flat_params(plan))
        self._log_text("config.yaml", plan.config.to_yaml())
        self._log_text("plan.json", plan.model_dump_json(indent=1))

    def log_inputs(self, data: PreparedData) -> None:
        """The data sources, as the run's data set inputs."""

        def send(client: MlflowClient) -> None:
            from mlflow.entities import Dataset, DatasetInput, InputTag

            inputs = []
            for role, source in data.sources.items():
                text = redact(source, self._secrets)
                dataset = Dataset(
                    name=(text.rstrip("/").rsplit("/", 1)[-1] or text)[:500],
                    digest=f"{data.artifact.fingerprint[:24]}-{role}"[:36],
                    source_type="local",
                    source=json.dumps({"uri": text}),
                    profile=json.dumps({"format": data.format, **data.audit.model_dump()}),
                )
                context = InputTag("mlflow.data.context", _ROLES.get(role, role))
                inputs.append(DatasetInput(dataset, tags=[context]))
            client.log_inputs(self._run.run_id, datasets=inputs)

        self._run.attempt("logging the data inputs", send)

    def log_audit(self, audit: Audit) -> None:
        """What became of every row and token: parameters, and whole as ``audit.json``."""
        self._log_params(flatten("audit", audit.model_dump()))
        self._log_text("audit.json", audit.model_dump_json(indent=1))

    def log_event(self, event: Event) -> None:
        """Metrics and tags of an event; nothing where rank 0 logs them itself."""
        if self._plan and not self._plan.by_rank:
            self._sender.add(event)
            self._sender.flush()

    def log_result(self, result: TrainResult) -> None:
        """The final metrics, where the run's files are, and ``result.json``.

        With ``tracking.log_checkpoints`` also the last checkpoint's files.
        """
        self._sender.add_last(result.metrics, int(time.time() * 1000), result.steps)
        self._sender.add_tag("dbx_llmtrain.checkpoint", result.checkpoint)
        self._sender.add_tag("dbx_llmtrain.model_path", result.model_path)
        self._sender.flush()
        self._log_text("result.json", result.model_dump_json(indent=1))
        if self._keep_checkpoint and result.checkpoint:
            self.log_artifacts(Path(result.checkpoint), "checkpoint")

    def log_artifacts(self, path: Path, artifact_path: str | None = None) -> None:
        """Copy a file, or a folder with all that is in it, to the run's artifacts."""

        def send(client: MlflowClient) -> None:
            log = client.log_artifacts if path.is_dir() else client.log_artifact
            log(self._run.run_id, str(path), artifact_path)

        self._run.attempt("logging artifacts", send, timeout="120")

    def set_tag(self, key: str, value: str) -> None:
        """Set a tag of the run."""
        self._sender.add_tag(key, value)
        self._sender.flush()

    def finish(self, status: Status, error: str = "", details: str = "") -> bool:
        """End the run; whether the status is stored.

        The first line of ``error`` becomes a tag, ``details`` (or the whole error) ``error.txt``.
        A later call changes the status: a run whose end fails after all is FAILED.
        """
        self._sender.flush(always=True)
        outcome = self._run.attempt(
            f"setting the status {status} (the run may be shown as RUNNING)",
            lambda client: client.set_terminated(self._run.run_id, status=status),
            always=True,
        )
        if error and outcome == "done":
            self.set_tag(ERROR_TAG, error.strip().split("\n", 1)[0])
            self._log_text("error.txt", details or error)
        return outcome == "done"

    def _log_params(self, params: Mapping[str, str]) -> None:
        clean = {
            key[:KEY_CHARS]: redact(value, self._secrets)[:PARAM_CHARS]
            for key, value in params.items()
        }
        for key, value in clean.items():
            if self._known.get(key, value) != value:
                self._sender.add_tag(f"changed.{key}"[:KEY_CHARS], value)
        self._sender.flush()
        items = [(key, value) for key, value in clean.items() if key not in self._known]
        for start in range(0, len(items), BATCH):
            part = items[start : start + BATCH]
            self._run.attempt("logging parameters", partial(self._send, params=part))

    def _send(self, client: MlflowClient, params: list[tuple[str, str]]) -> None:
        from mlflow.entities import Param

        batch = [Param(key, value) for key, value in params]
        client.log_batch(self._run.run_id, params=batch, synchronous=True)

    def _log_text(self, name: str, text: str) -> None:
        self._run.attempt(
            f"logging {name}",
            lambda client: client.log_text(self._run.run_id, redact(text, self._secrets), name),
        )


class RankTracker:
    """Rank 0's side: events go through a bounded queue to a thread that logs them.

    Does nothing without a plan, or where the driver logs. No method raises or waits for the server,
    except ``close``, for at most its time-out.
    """

    def __init__(self, plan: TrackingPlan | None) -> None:
        self._queue: queue.Queue[Event] = queue.Queue(maxsize=PENDING)
        self._closing = threading.Event()
        self._warned: set[str] = set()
        self._thread: threading.Thread | None = None
        if plan is not None and plan.by_rank:
            self._sender = Sender(Run(plan.uri, plan.run_id), collect(os.environ))
            self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
            self._thread.start()

    def log(self, event: Event) -> None:
        """Hand an event over. When the queue is full it is lost, with one warning."""
        if self._thread is not None:
            with Guard("taking an event (too many wait)", self._warned):
                self._queue.put_nowait(event)

    def close(self, timeout: float = 30.0) -> bool:
        """Send what is left; whether all of it has been sent within ``timeout`` seconds."""
        if self._thread is None:
            return True
        self._closing.set()
        self._thread.join(timeout)
        sent = not self._thread.is_alive() and self._sender.empty()
        if not sent:
            logger.warning("MLflow: the last metrics could not be logged in %.0f s", timeout)
        return sent

    def _work(self) -> None:
        # Once a second is often enough to look at, and makes one request of many events.
        while not self._closing.wait(1.0):
            self._take()
            self._sender.flush()
        self._take()
        self._sender.flush(always=True)

    def _take(self) -> None:
        for _ in range(self._queue.qsize()):
            self._sender.add(self._queue.get_nowait())


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
