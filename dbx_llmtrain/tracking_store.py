"""Calls to MLflow that cannot fail: they end in one warning per kind, and within seconds.

The half of ``tracking.py`` that knows MLflow's ways: where the store is, how patient to be with it,
what to do when it does not answer. What is sent there is ``tracking_sender.py``'s.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from dbx_llmtrain.credentials import without_credentials
from dbx_llmtrain.records import TrackingPlan
from dbx_llmtrain.tracking_guard import TIMEOUT, Guard, impatient

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

Outcome = Literal["done", "down", "refused"]

# MLflow's limits, on the safe side of every version and of Databricks.
KEY_CHARS, PARAM_CHARS, TAG_CHARS, BATCH = 250, 6000, 5000, 100
ERROR_TAG = "dbx_llmtrain.error"
_COOL_OFF, _LONGEST_COOL_OFF = 2.0, 60.0
"""Seconds that a store is left alone after a call that it did not answer; doubled each time."""
_TRANSIENT = {
    "INTERNAL_ERROR",
    "TEMPORARILY_UNAVAILABLE",
    "REQUEST_LIMIT_EXCEEDED",
    "RESOURCE_EXHAUSTED",
    "ABORTED",
    "DEADLINE_EXCEEDED",
    "CANCELLED",
}
# Faults of what was given, not of the store.
_OURS = (FileNotFoundError, NotADirectoryError, PermissionError, ImportError, TypeError, ValueError)


class Run:
    """One MLflow run behind a wall: calls that fail are told once and leave the store alone."""

    def __init__(
        self, uri: str, run_id: str | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.run_id = run_id
        self._uri = uri
        self._clock = clock
        self._down_until = -1.0
        self._cool_off = _COOL_OFF
        self._longest = _LONGEST_COOL_OFF
        self._warned: set[str] = set()

    def attempt(
        self,
        what: str,
        call: Callable[[MlflowClient], object],
        *,
        always: bool = False,
        timeout: str = TIMEOUT,
    ) -> Outcome:
        """``down``: not now, the store does not answer; ``refused``: it answered and won't do it.

        ``always``: try it also while the store is left alone.
        """
        if self.run_id is None:
            return "refused"
        if self.resting() and not always:
            return "down"
        guard = Guard(what, self._warned)
        with guard, impatient(timeout):
            import mlflow

            # Without a registry it would ask Spark for one, whose JVM may have been ended.
            call(mlflow.MlflowClient(tracking_uri=self._uri, registry_uri=self._uri))
        if guard.error is None:
            self._cool_off = _COOL_OFF
            return "done"
        code = getattr(guard.error, "error_code", "INTERNAL_ERROR")
        if code not in _TRANSIENT or isinstance(guard.error, _OURS):
            return "refused"
        self._down_until = self._clock() + self._cool_off
        self._cool_off = min(2 * self._cool_off, self._longest)
        return "down"

    def resting(self) -> bool:
        """Whether the store did not answer and is left alone for a while."""
        return self._clock() < self._down_until

    def wake(self, longest_cool_off: float = _LONGEST_COOL_OFF) -> None:
        """Try the store again now, and from now on at least so often."""
        self._longest = longest_cool_off
        self._down_until, self._cool_off = -1.0, min(_COOL_OFF, longest_cool_off)


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


def reopen(
    client: MlflowClient, uri: str, earlier: TrackingPlan | None, tags: Mapping[str, str]
) -> Any:
    """The earlier run of a run folder, RUNNING again and with these tags; ``None`` after a warning
    where it cannot be continued. Raises when the store does not answer."""
    from mlflow.exceptions import MlflowException

    if earlier is None:
        return None
    why = ""
    if without_credentials(uri) != earlier.uri:
        why = f"is in another store ({earlier.uri})"
    else:
        try:
            run = client.get_run(earlier.run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            why = "does not exist any more"
        else:
            why = "" if run.info.lifecycle_stage == "active" else "has been deleted"
    if why:
        logger.warning("MLflow: run %s of this folder %s: a new one begins", earlier.run_id, why)
        return None
    client.update_run(earlier.run_id, status="RUNNING")
    for key, value in tags.items():
        client.set_tag(earlier.run_id, key, value)
    if ERROR_TAG in run.data.tags:
        client.delete_tag(earlier.run_id, ERROR_TAG)
    return run


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
