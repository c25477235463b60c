"""Which frames of a traceback say where the fault is: those above it that are ours, torch's or
Python's own are on top of every failure and say nothing about it."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from traceback import TracebackException

import dbx_llmtrain

_OURS = str(Path(str(dbx_llmtrain.__file__)).parent)
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_ENGINES = re.compile(r"[/\\](site|dist)-packages[/\\](torch|deepspeed|cloudpickle)[/\\]")


def cut(report: TracebackException) -> None:
    """Drop the frames on top, of the exception and of those that it was raised from or during.

    What stays begins with the first frame of a user's or another library's code; where there is
    none, with the last one of ours.
    """
    for error in (report.__cause__, report.__context__, *(report.exceptions or ())):
        if error is not None:
            cut(error)
    files = [frame.filename for frame in report.stack]
    others = [at for at, file in enumerate(files) if not _is_inner(file)]
    ours = [at for at, file in enumerate(files) if file.startswith(_OURS)]
    del report.stack[: others[0] if others else ours[-1] if ours else 0]


def _is_inner(file: str) -> bool:
    """Whether a frame's file is ours, torch's or of Python's library."""
    if file.startswith((_OURS, "<frozen")) or _ENGINES.search(file):
        return True
    library = sysconfig.get_path("stdlib")
    return file.startswith(library) and not _INSTALLED.search(file)
