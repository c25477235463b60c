"""What a rank leaves for the process that started it: its step, its result, why it failed."""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from dbx_llmtrain import storage
from dbx_llmtrain.credentials import redact
from dbx_llmtrain.outcomes import RankResult
from dbx_llmtrain.worker import failures, frames, node, requests
from dbx_llmtrain.worker.output import LOG_ONLY

RANK_DIR = "DBX_LLMTRAIN_RANK_DIR"
"""Names the folder in which a rank leaves ``step``, ``phase``, ``result.json``, ``failure.json``
and, when it was told to end and saves before, ``saving``.

Its owner removes it, also after a rank that was killed, so what a rank writes meanwhile is there.
"""
FAILURE = "failure.json"


def rank_dir() -> Path | None:
    """The folder that the supervisor of this rank has named, if there is one."""
    folder = os.environ.get(RANK_DIR)
    return Path(folder) if folder else None


def note_folder(folder: Path) -> None:
    """Have the supervisor remove a folder of temporary files, also after this rank was killed."""
    if home := rank_dir():
        home.mkdir(parents=True, exist_ok=True)
        with (home / requests.FOLDERS).open("a", encoding="utf-8") as file:
            file.write(f"{folder}\n")


class Handover:
    """Files for the process that started this one, where it named a folder for them."""

    def __init__(self) -> None:
        self._folder = rank_dir()
        self._step: int | None = None

    def step(self, step: int) -> None:
        """The last step that was finished."""
        self._step = step
        self._write("step", str(step))

    def phase(self, name: str) -> None:
        """What this rank is about to do."""
        self._write("phase", name)

    def result(self, result: RankResult) -> None:
        """What came of the run."""
        self._write("result.json", result.model_dump_json())

    def failure(self, error: BaseException) -> None:
        """Why this rank failed; without a step where it never came to the first one."""
        stopped = isinstance(error, requests.Stopped)
        self._write(FAILURE, json.dumps(describe(error) | {"step": self._step, "stopped": stopped}))

    def _write(self, name: str, text: str) -> None:
        if self._folder:
            storage.write_text(self._folder / name, text)


def describe(error: BaseException) -> dict[str, Any]:
    """``error`` in one line, what it comes of where that is known, and its traceback from where
    other code than ours and torch's begins, without this process's secrets."""
    report = traceback.TracebackException.from_exception(error)
    frames.cut(report)
    return {
        "error": redact(failures.told(error) + _here(error), os.environ),
        "cause": failures.cause_of_error(error),
        "traceback": redact("".join(report.format()), os.environ),
    }


def _here(error: BaseException) -> str:
    """Which version of the package that could not be imported (from) this node has."""
    if not isinstance(error, ImportError) or not error.name:
        return ""
    package = error.name.partition(".")[0]
    try:
        found = metadata.version(package)
    except (metadata.PackageNotFoundError, FileNotFoundError, TypeError):
        return ""
    return f" (this node has {package} {found})" if found else ""


@contextlib.contextmanager
def handed_over() -> Iterator[None]:
    """For what a rank does before it reports: a failure is handed over to its supervisor. One that
    is handed over already, with its step, stays."""
    try:
        yield
    except BaseException as error:
        home = rank_dir()
        if home and not (home / FAILURE).exists():
            Handover().failure(error)
        raise


def exit_code(run: Callable[[], int]) -> int:
    """``run`` for a process. The traceback of a failure is for the log alone where there is one:
    the driver tells the one that counts."""
    with node.Capture() as ended:
        return run()
    assert ended.error is not None
    say_failure(ended.error)
    return requests.STOPPED_CODE if isinstance(ended.error, requests.Stopped) else 1


def say_failure(error: BaseException) -> None:
    """Print ``error`` in its own words, after its whole traceback, which is for the log alone where
    this rank's supervisor keeps one."""
    for_log("".join(traceback.format_exception(error)).splitlines())
    if rank_dir():
        click.echo(failures.told(error), err=True)


def for_log(lines: Iterable[str]) -> None:
    """Print lines for the rank's log alone, where its supervisor keeps one."""
    mark = LOG_ONLY if rank_dir() else ""
    for line in lines:
        click.echo(f"{mark}{line}", err=True)
