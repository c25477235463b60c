"""Where the threads of a rank are: read by Python, or by a watchdog where Python itself is stuck.

Standard library only: a rank's supervisor uses it, too.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

from dbx_llmtrain import storage

STUCK = "stacks.txt"
"""In a rank's own folder: what the watchdog has written of a rank whose interpreter hangs."""

BY_WATCHDOG = "by its watchdog: the interpreter hangs"
_WRITTEN_S = 0.5
"""So long after the last byte the watchdog has written everything."""
_PACKAGE = "dbx_llmtrain"
_LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {os.path.dirname(threading.__file__) + os.sep, "<frozen "}
)
_FRAME = re.compile(r'^\s*File "(?P<file>.*?)", line (?P<line>\d+),? in (?P<name>.*)$', re.M)
_MAIN = "main thread"


def stacks_path(run_dir: Path, rank: int) -> Path:
    """Where the stacks of a rank are put."""
    return run_dir / "logs" / f"rank-{rank:05d}.stacks.txt"


def head(attempt: str, rank: int, more: str) -> str:
    """The first line of such a file: of whom it is."""
    return f"rank {rank}, attempt {attempt}, {more}\n"


def stacks_text(main: int) -> str:
    """The Python stacks of all threads of this process, that of the thread ``main`` first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    parts = []
    for ident in sorted(frames, key=lambda one: one != main):
        name = _MAIN if ident == main else f"thread {names.get(ident, ident)}"
        if ident != threading.get_ident():
            parts.append(f"{name}:\n{''.join(traceback.format_stack(frames[ident]))}")
    return "\n".join(parts)


def place_of(ident: int) -> str:
    """Where a thread of this process is, in a line; empty where it has ended."""
    frame: FrameType | None = sys._current_frames().get(ident)
    found: list[tuple[str, int, str]] = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return _told(found)


def place_in(text: str) -> str:
    """The same of the main thread in a file of stacks, Python's or the watchdog's."""
    if f"{_MAIN}:\n" in text:
        block = text.split(f"{_MAIN}:\n", 1)[1].split("\n\n", 1)[0]
        frames = list(_FRAME.finditer(block))[::-1]
    else:  # the watchdog has the newest thread first, and the innermost frame
        frames = list(_FRAME.finditer(re.split(r"^Thread 0x.*$", text, flags=re.M)[-1]))
    return _told([(one["file"], int(one["line"]), one["name"]) for one in frames])


def main_stack(text: str) -> str:
    """The part of a file of stacks that is of the main thread."""
    if f"{_MAIN}:\n" in text:
        return text.split(f"{_MAIN}:\n", 1)[1].split("\n\n", 1)[0]
    return re.split(r"^Thread 0x.*$", text, flags=re.M)[-1].strip("\n")


def _told(frames: list[tuple[str, int, str]]) -> str:
    """The innermost frame of our own or the user's code, and what it has called. ``frames``: the
    innermost first."""
    if not frames:
        return ""
    own = next((frame for frame in frames if _is_own(frame[0])), frames[0])
    file, line, name = own
    short = file[file.rfind(f"{_PACKAGE}{os.sep}") :] if f"{_PACKAGE}{os.sep}" in file else file
    called = "" if own == frames[0] else f", in {frames[0][2]}"
    return f"{name} ({short}:{line}){called}"


def _is_own(file: str) -> bool:
    if f"{_PACKAGE}{os.sep}" in file:
        return True
    return not file.startswith(_LIBRARIES) and "site-packages" not in file


@contextmanager
def watchdog(home: Path | None, seconds: float) -> Iterator[Watchdog | None]:
    """Have C code write the stacks into ``home`` when ``Watchdog.feed`` was not called for so long:
    only an interpreter that hangs (in a call that never gives its lock back) does not call it.
    Without a folder there is none."""
    if home is None:
        yield None
        return
    with (home / STUCK).open("w", encoding="utf-8") as file:
        dog = Watchdog(file, seconds)
        dog.feed()
        try:
            yield dog
        finally:
            faulthandler.cancel_dump_traceback_later()


class Watchdog:
    """See ``watchdog``."""

    def __init__(self, file: TextIO, seconds: float) -> None:
        self._file = file
        self._seconds = seconds

    def feed(self) -> None:
        """All is well, and what was written before is of the past; begin to wait anew."""
        self._file.seek(0)
        self._file.truncate()
        faulthandler.dump_traceback_later(self._seconds, file=self._file)


def publish_stuck(folder: Path, run_dir: Path, attempt: str, rank: int) -> bool:
    """Bring what the watchdog has written to the run folder; whether there is something."""
    source = folder / STUCK
    with suppress(OSError):
        state = source.stat()
        if state.st_size and time.time() - state.st_mtime > _WRITTEN_S:
            text = source.read_text(encoding="utf-8", errors="replace")
            first = head(attempt, rank, BY_WATCHDOG)
            storage.write_text(stacks_path(run_dir, rank), first + text)
            return True
    return False
