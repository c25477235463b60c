"""Calls to MLflow that cannot fail: they end in one warning per kind, and within seconds.

The half of ``tracking.py`` that knows MLflow's ways: where the store is, how patient to be with it,
what to do when it does not answer.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from dbx_llmtrain.credentials import collect, redact
from dbx_llmtrain.events import Event

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

Outcome = Literal["done", "down", "refused"]

# MLflow's limits, on the safe side of every version and of Databricks.
KEY_CHARS, PARAM_CHARS, TAG_CHARS, BATCH, ENTITIES = 250, 6000, 5000, 100, 1000
PENDING = 20_000
_COOL_OFF = 30.0
# Used where the user has not set them. MLflow's own defaults are 7 retries of up to 120 s each.
_IMPATIENCE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DATABRICKS_ENDPOINT_HTTP_RETRY_TIMEOUT": "20",
}
_TRANSIENT = {
    "INTERNAL_ERROR",
    "TEMPORARILY_UNAVAILABLE",
    "REQUEST_LIMIT_EXCEEDED",
    "ABORTED",
    "DEADLINE_EXCEEDED",
    "CANCELLED",
}
# Faults of what was given, not of the store.
_OURS = (FileNotFoundError, NotADirectoryError, PermissionError, ImportError, TypeError, ValueError)
_lock = threading.RLock()


class Guard:
    """A ``with`` block that no exception leaves: it becomes one warning per kind."""

    def __init__(self, what: str, warned: set[str], *, where: str = "MLflow") -> None:
        self._what = what
        self._warned = warned
        self._where = where
        self.error: BaseException | None = None

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        self.error = error
        cause = " ".join(redact(str(error), collect(os.environ)).split())[:500]
        text = f"{self._where}: {self._what} failed: {type(error).__name__}: {cause}"
        level = logging.DEBUG if self._what in self._warned else logging.WARNING
        self._warned.add(self._what)
        logger.log(level, "%s. Training goes on.", text)
        return True


@contextmanager
def impatient(timeout: str = _IMPATIENCE["MLFLOW_HTTP_REQUEST_TIMEOUT"]) -> Iterator[None]:
    """Few retries and short time-outs, where the user has not set them; one caller at a time."""
    wanted = {**_IMPATIENCE, "MLFLOW_HTTP_REQUEST_TIMEOUT": timeout}
    with _lock:
        added = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                os.environ.pop(name, None)


@contextmanager
def opening(uri: str) -> Iterator[None]:
    """Around the first use of a store.

    A SQLite file that cannot be written costs MLflow 2 more than a minute of retries, so it is
    tried first. A new one costs sixty lines of log about its tables, and MLflow 2 replaces the
    handlers of the root logger on the way: they are put back.
    """
    before, level, handlers = (
        logging.root.manager.disable,
        logging.root.level,
        logging.root.handlers,
    )
    kept = list(handlers)
    if uri.startswith("sqlite:///"):
        with closing(sqlite3.connect(uri.removeprefix("sqlite:///"), timeout=5)) as database:
            database.execute("BEGIN IMMEDIATE")
        logging.disable(max(before, logging.INFO))
    try:
        yield
    finally:
        logging.disable(before)
        logging.root.setLevel(level)
        logging.root.handlers[:] = kept


class Run:
    """One MLflow run behind a wall: calls that fail are told once and leave the store alone."""

    def __init__(
        self, uri: str, run_id: str | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.run_id = run_id
        self._uri = uri
        self._clock = clock
        self._down_until = -1.0
        self._warned: set[str] = set()

    def attempt(
        self,
        what: str,
        call: Callable[[MlflowClient], object],
        *,
        always: bool = False,
        timeout: str = _IMPATIENCE["MLFLOW_HTTP_REQUEST_TIMEOUT"],
    ) -> Outcome:
        """``down``: not now, the store does not answer; ``refused``: it answered and won't do it.

        ``always``: try it also while the store is left alone.
        """
        guard = Guard(what, self._warned)
        if self.run_id is None:
            return "refused"
        if self.resting() and not always:
            with guard:
                raise TimeoutError("skipped, because the store did not answer a moment ago")
            return "down"
        with guard, impatient(timeout):
            import mlflow

            # Without a registry it would ask Spark for one, whose JVM may have been ended.
            call(mlflow.MlflowClient(tracking_uri=self._uri, registry_uri=self._uri))
        if guard.error is None:
            return "done"
        code = getattr(guard.error, "error_code", "INTERNAL_ERROR")
        if code not in _TRANSIENT or isinstance(guard.error, _OURS):
            return "refused"
        self._down_until = self._clock() + _COOL_OFF
        return "down"

    def resting(self) -> bool:
        """Whether the store did not answer and is left alone for a while."""
        return self._clock() < self._down_until


class Sender:
    """Metrics and tags on their way to a run. They wait while the store is down."""

    def __init__(self, run: Run, secrets: Mapping[str, str]) -> None:
        self._run = run
        self._secrets = secrets
        self._metrics: deque[tuple[str, float, int, int]] = deque(maxlen=PENDING)
        self._tags: dict[str, str] = {}
        self._lost = 0

    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._metrics and not self._tags

    def add(self, event: Event) -> None:
        """Take an event's metrics, and the path of a checkpoint or an export as a tag."""
        for name, value in event.metrics.items():
            self.add_metric(name, value, int(event.time * 1000), event.step)
        if event.kind == "checkpoint":
            self.add_tag("dbx_llmtrain.checkpoint", event.data.get("path"))
        if event.kind == "export":
            self.add_tag("dbx_llmtrain.model_path", event.data.get("path"))

    def add_metric(self, name: str, value: float, time_ms: int, step: int) -> None:
        """Take one metric; the oldest one that waits makes room when there are too many."""
        with _lock:
            self._lost += len(self._metrics) == PENDING
            if self._lost == 1:
                logger.warning("MLflow: too many metrics wait, the oldest are lost")
            self._metrics.append((name, value, time_ms, step))

    def add_tag(self, key: str, value: object) -> None:
        """Take one tag; ``None`` is no tag."""
        if value is not None:
            self._tags[key] = clip(redact(str(value), self._secrets))

    def flush(self, *, always: bool = False) -> bool:
        """Send what waits; whether all of it went out. ``always``: also during the cool-off."""
        with _lock:
            while not self.empty():
                if self._run.resting() and not always:
                    return False
                metrics = list(self._metrics)[: ENTITIES - BATCH]
                tags = list(self._tags.items())[:BATCH]
                outcome = self._run.attempt(
                    "logging metrics",
                    partial(self._send, metrics=metrics, tags=tags),
                    always=always,
                )
                if outcome == "down":
                    return False
                for _ in metrics:
                    self._metrics.popleft()
                for key, _ in tags:
                    del self._tags[key]
            return True

    def _send(
        self,
        client: MlflowClient,
        metrics: list[tuple[str, float, int, int]],
        tags: list[tuple[str, str]],
    ) -> None:
        from mlflow.entities import Metric, RunTag

        client.log_batch(
            self._run.run_id,
            metrics=[Metric(*item) for item in metrics],
            tags=[RunTag(*item) for item in tags],
            synchronous=True,
        )


def clip(text: str) -> str:
    """``text`` as long as a tag may be."""
    return text[:TAG_CHARS]


def on_databricks(environ: Mapping[str, str]) -> bool:
    """Whether this process runs on a Databricks cluster."""
    return bool(environ.get("DATABRICKS_RUNTIME_VERSION"))


def reachable_from_workers(uri: str) -> bool:
    """Whether rank 0 can log there itself: not into a file of the driver's machine."""
    return urlsplit(uri).scheme in ("http", "https") or _is_workspace(uri)


def default_uri(folder: Path) -> str:
    """The store outside Databricks when the user chose none."""
    return f"sqlite:///{folder.absolute()}/mlflow.db"


def store_uri(folder: Path, *, has_parent: bool) -> str:
    """The user's store, the workspace's, or the default one in ``folder``, which is then made."""
    import mlflow

    if mlflow.is_tracking_uri_set() or has_parent:
        return str(mlflow.get_tracking_uri())
    if on_databricks(os.environ):
        return "databricks"
    if importlib.util.find_spec("sqlalchemy") is None:
        raise ModuleNotFoundError(
            "the default store is a SQLite file, which mlflow-skinny alone cannot write: "
            "pip install mlflow, or set MLFLOW_TRACKING_URI"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return default_uri(folder)


def experiment_id(client: MlflowClient, name: str | None, parent: Any, folder: Path) -> str:
    """By the configuration, the active run, MLflow's environment, the notebook, or our own name."""
    uri = str(client.tracking_uri)
    if name is None and parent is not None:
        return str(parent.info.experiment_id)
    # mlflow.set_experiment sets the id, of another store when the store is our default.
    chosen = os.environ.get("MLFLOW_EXPERIMENT_ID")
    if name is None and chosen and uri != default_uri(folder):
        return chosen
    name = name or os.environ.get("MLFLOW_EXPERIMENT_NAME")
    if name is None and _is_workspace(uri):
        from mlflow.tracking.default_experiment.registry import get_experiment_id

        found = get_experiment_id()
        if found and found != "0":
            return str(found)
        # A job has no notebook; a workspace wants an absolute name.
        name = "/Shared/dbx_llmtrain"
    return _find_or_create(client, name or "dbx_llmtrain", folder)


def _is_workspace(uri: str) -> bool:
    return uri.partition(":")[0] == "databricks"


def _find_or_create(client: MlflowClient, name: str, folder: Path) -> str:
    found = client.get_experiment_by_name(name)
    if found is None:
        location = None
        if client.tracking_uri == default_uri(folder):
            location = (folder.absolute() / "mlartifacts").as_uri()
        with suppress(Exception):
            return str(client.create_experiment(name, artifact_location=location))
        # Another run may have created it in between; otherwise this tells why it cannot be.
        found = client.get_experiment_by_name(name)
    if found is None:
        return str(client.create_experiment(name, artifact_location=location))
    return str(found.experiment_id)


def context_tags() -> dict[str, str]:
    """User, source and commit, as MLflow's own runs have them."""
    from mlflow.tracking.context.registry import resolve_tags

    tags: dict[str, str] = resolve_tags()
    return tags
