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
    "MLFLOW_DATABRICKS_ENDPOINT_HTTP_RETRY_TIMEOUT": "20",
}
lock = threading.RLock()
"""Held while a call changes the environment."""


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
def impatient(timeout: str = TIMEOUT) -> Iterator[None]:
    """Few retries, short time-outs and no bars, where the user has not set them. One caller at a
    time."""
    wanted = {**_IMPATIENCE, "MLFLOW_HTTP_REQUEST_TIMEOUT": timeout}
    with lock:
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
