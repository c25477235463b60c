"""What asks a run to save or to end: a signal to any rank, clocks, files of the run folder.

What one rank is asked for travels with the sums of its next step, so that all ranks act on it
together. Standard library and pure modules only: a rank's supervisor reads this, too.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from dbx_llmtrain import storage
from dbx_llmtrain.errors import LlmTrainError
from dbx_llmtrain.milestones import seconds_of

if TYPE_CHECKING:
    from dbx_llmtrain.records import RunPlan

logger = logging.getLogger(__name__)

SAVING = "saving"
"""In a rank's folder: it was told to end, and will save before it does."""

FOLDERS = "folders"
"""In a rank's folder: its other folders, each a line, which nobody needs after its end."""

STOPPED_CODE = 128 + signal.SIGTERM
"""Exit code of a rank that has ended because it was asked to."""

STACKS = "STACKS"
"""A file in the run folder: ranks that do not move write their stacks when it is there."""

_POLL_S = 0.5
_LEAVE_S = 2.0
_MARGIN_S = 60.0
"""Seconds that are left over at the end of ``train.max_time``, at most."""


class Wish(StrEnum):
    """What a run may be asked for. The first three are the names of files in the run folder."""

    CHECKPOINT = "CHECKPOINT"
    """Save after this step."""
    STOP = "STOP"
    """End after this step as if it were the last one."""
    CANCEL = "CANCEL"
    """Save after this step and end, with no result."""
    SIGTERM = "SIGTERM"
    """The same, asked by a signal."""
    MINUTES = "checkpoint.every_minutes"
    """It is time for a checkpoint."""
    TIME = "train.max_time"
    """It is time to end as if this step were the last one."""


FILES = (Wish.CHECKPOINT, Wish.STOP, Wish.CANCEL)
LEAVE = frozenset({Wish.CANCEL, Wish.SIGTERM})
STOP = frozenset({Wish.STOP, Wish.TIME})
SAVE = frozenset({Wish.CHECKPOINT, Wish.MINUTES})


class Stopped(LlmTrainError):
    """This rank ends because the run was asked to; it has not failed, and there is no result."""


@contextmanager
def listening(
    plan: RunPlan, rank: int, *, home: Path | None = None, clock: Callable[[], float] = time.time
) -> Iterator[Requests]:
    """The wishes of this rank for as long as the block lasts.

    SIGTERM is noted and does not end the process, which its supervisor learns by a file in ``home``
    (also while a long operation keeps the interpreter from acting on it). Rank 0 looks for files in
    the run folder about twice a second, in a thread: a slow volume does not slow a step. What is
    left of them at the end is removed: the next run was not asked.
    """
    requests = Requests(plan, rank, clock=clock)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    run_dir = storage.local_path(plan.run_dir) if rank == 0 else None
    thread = threading.Thread(
        target=_listen, args=(requests, reader, run_dir, home), name="requests", daemon=True
    )
    thread.start()
    try:
        with _signalled(requests, writer):
            yield requests
    finally:
        os.close(writer)
        thread.join(_LEAVE_S)
        if run_dir:
            clear(run_dir)


class Requests:
    """What this rank has been asked for and has not been done. Any thread may add to it."""

    def __init__(self, plan: RunPlan, rank: int, *, clock: Callable[[], float]) -> None:
        checkpoint, train = plan.config.checkpoint, plan.config.train
        self._asked: set[Wish] = set()
        self._lock = threading.Lock()
        self._minutes = checkpoint.every_minutes if rank == 0 else None
        self._saved = time.monotonic()
        self._end: float | None = None
        self._reserve = 0.0
        if rank == 0 and train.max_time is not None:
            allowed = seconds_of(train.max_time)
            gone = clock() - plan.began if plan.began is not None else 0.0
            self._end = time.monotonic() + allowed - gone
            self._margin = min(_MARGIN_S, allowed / 20)

    def add(self, wish: Wish) -> None:
        """Ask for something."""
        with self._lock:
            self._asked.add(wish)

    def wanted(self) -> frozenset[Wish]:
        """Everything that is to be done after the step that ends now."""
        now = time.monotonic()
        with self._lock:
            found = set(self._asked)
        if self._minutes is not None and now - self._saved >= self._minutes * 60:
            found.add(Wish.MINUTES)
        if self._end is not None and now + self._reserve + self._margin >= self._end:
            found.add(Wish.TIME)
        return frozenset(found)

    def saved(self) -> None:
        """A checkpoint has been made: the next one is due in ``checkpoint.every_minutes``."""
        self._saved = time.monotonic()
        with self._lock:
            self._asked.discard(Wish.CHECKPOINT)

    def keep(self, seconds: float) -> None:
        """Have ``train.max_time`` leave so much time for another step and all that comes at the
        end; a margin is added."""
        self._reserve = seconds


def ask(run_dir: Path, wish: Wish) -> None:
    """Put a request into the run folder. Raises ``OSError``."""
    storage.write_text(run_dir / wish.value, "")


def clear(run_dir: Path) -> None:
    """Take back every request that nobody has taken."""
    for name in (*FILES, STACKS):
        with suppress(OSError):
            (run_dir / name).unlink()


def _listen(requests: Requests, reader: int, run_dir: Path | None, home: Path | None) -> None:
    """Runs in a thread until the other end of ``reader`` is closed."""
    try:
        while True:
            ready, _, _ = select.select([reader], [], [], _POLL_S if run_dir else None)
            told = os.read(reader, 64) if ready else None
            if told == b"":
                return
            if told and signal.SIGTERM in told:
                requests.add(Wish.SIGTERM)
                _tell_supervisor(home)
            if run_dir:
                _take_files(requests, run_dir)
    finally:
        os.close(reader)


def _tell_supervisor(home: Path | None) -> None:
    if home:
        with suppress(OSError):
            (home / SAVING).touch()


def _take_files(requests: Requests, run_dir: Path) -> None:
    """A request counts when its file is removed: whoever asked sees that it has been taken."""
    try:
        names = os.listdir(run_dir)
        for wish in FILES:
            if wish.value in names:
                (run_dir / wish.value).unlink()
                requests.add(wish)
    except OSError as error:
        logger.debug("no request can be taken from %s: %s", run_dir, error)


@contextmanager
def _signalled(requests: Requests, writer: int) -> Iterator[None]:
    """Note SIGTERM. Does nothing outside the main thread, where Python sets no handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        requests.add(Wish.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    # Written to at once, also while the interpreter waits in a collective or for the GPU.
    pipe = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        signal.set_wakeup_fd(pipe)
