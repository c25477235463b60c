"""Locks on files of a node, by which processes of one machine keep out of each other's way.

The kernel frees a lock when its holder ends, however it ends, and when the file is closed. Standard
library only, as ``node``.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_TICK_S = 0.02


@contextmanager
def file_lock(path: Path) -> Iterator[IO[str]]:
    """Hold the lock on a file, alone; wait for it if need be."""
    with _open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


@contextmanager
def try_lock(path: Path, *, wait_s: float = 0.0) -> Iterator[bool]:
    """Whether the lock could be had, alone and within ``wait_s`` seconds; then it is held."""
    until = time.monotonic() + wait_s
    with _open(path) as file:
        while not (got := _at_once(file)) and time.monotonic() < until:
            time.sleep(_TICK_S)
        yield got


def share(path: Path) -> IO[str]:
    """Hold the lock together with others who share it, until the file is closed."""
    file = _open(path)
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def _open(path: Path) -> IO[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a+", encoding="utf-8")


def _at_once(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
