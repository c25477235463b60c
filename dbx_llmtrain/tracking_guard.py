"""Calls to MLflow end in a warning and within seconds, whatever it does: what goes around them."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import TracebackType

from dbx_llmtrain.credentials import collect, redact

logger = logging.getLogger(__name__)

TIMEOUT = "10"
# Used where the user has not set them. MLflow's own defaults are 7 retries of up to 120 s each, and
# a bar on the screen for every small file.
_IMPATIENCE = {
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",  # a server may ask for an hour
    "MLFLOW_DATABRICKS_ENDPOINT_HTTP_RETRY_TIMEOUT": "20",
}
_TIMEOUT_VARIABLE = "MLFLOW_HTTP_REQUEST_TIMEOUT"


class Guard:
    """A ``with`` block that no exception leaves: it becomes one warning per kind. ``advice`` is
    what can be done later on, in a clause."""

    def __init__(
        self, what: str, warned: set[str], *, where: str = "MLflow", advice: str = ""
    ) -> None:
        self._what = what
        self._warned = warned
        self._where = where
        self._advice = f"; {advice}" if advice else ""
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
        text = f"{self._where}: {self._what} failed: {told(error)}"
        level = logging.DEBUG if self._what in self._warned else logging.WARNING
        self._warned.add(self._what)
        logger.log(level, "%s. Training goes on%s.", text, self._advice)
        return True


def told(error: Exception) -> str:
    """An error in a line, without secrets."""
    cause = " ".join(redact(str(error), collect(os.environ)).split())[:500].rstrip(".")
    return f"{type(error).__name__}: {cause}"


class _Patience:
    """MLflow reads its patience from the environment, which all threads share. So what is set there
    stays until the last of those who need it has gone: a variable that vanishes while another
    thread copies the environment is a ``KeyError`` there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._ours: dict[str, str] = {}

    def enter(self, timeout: str) -> None:
        with self._lock:
            self._users += 1
            for name, value in {**_IMPATIENCE, _TIMEOUT_VARIABLE: timeout}.items():
                self._set(name, value)

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                self._set(_TIMEOUT_VARIABLE, TIMEOUT)
                return
            for name, value in self._ours.items():
                if os.environ.get(name) == value:
                    del os.environ[name]
            self._ours.clear()

    def _set(self, name: str, value: str) -> None:
        """Where the user has not set it, before or meanwhile."""
        if os.environ.get(name) in (None, self._ours.get(name)):
            os.environ[name] = self._ours[name] = value


_patience = _Patience()


@contextmanager
def impatient(timeout: str = TIMEOUT) -> Iterator[None]:
    """Few retries, short time-outs and no bars, where the user has not set them."""
    _patience.enter(timeout)
    try:
        yield
    finally:
        _patience.leave()


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
