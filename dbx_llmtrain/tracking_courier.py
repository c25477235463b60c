"""The thread that brings everything to an MLflow run, so that nobody else waits for the server."""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dbx_llmtrain.tracking_guard import Guard, impatient
from dbx_llmtrain.tracking_sender import PENDING, Sender
from dbx_llmtrain.tracking_store import Run

if TYPE_CHECKING:
    from mlflow import MlflowClient

_TICK_S = 1.0
"""Often enough to look at what has come, and makes one request of many events."""
_HURRY_S = 0.1
_IDLE_S = 5.0
"""After so long without work the thread ends; the next work begins another one."""
_TRIES = 8
"""Of one call, where the store does not answer: with the pauses between them some minutes."""
_CALLS = 500
_LAST_PART = 3
"""Of the patience at the end, this part is kept for the last call."""
_PAUSES = 10
"""In which patience is spent, at least, on a store that refuses connections."""


@dataclass(eq=False)
class Call:
    """One request to MLflow. ``name`` is what it brings, in words; ``is_file``: it goes to the
    store of artifacts, which may be down by itself."""

    name: str
    what: str
    do: Callable[[MlflowClient], object]
    is_file: bool = False
    tries: int = 0


class Courier:
    """Takes work for one run and does it in a thread of its own: what ``feed`` brings goes to the
    sender, a ``call`` is made, and made again while the store does not answer.

    Both return at once. What waits is bounded; what had no room, was refused or is left when
    patience ends is counted in ``left_out``. Only ``settle`` waits, for a time that is given.
    """

    def __init__(self, run: Run, sender: Sender) -> None:
        self._run = run
        self._sender = sender
        self._inbox: queue.Queue[Callable[[], None]] = queue.Queue(maxsize=PENDING)
        self._calls: list[Call] = []
        self._given_up: dict[str, None] = {}
        self._dropped = 0
        self._warned: set[str] = set()
        self._left_alone = self._final = False
        self._last: Call | None = None
        self._deadline: float | None = None
        self._patience = 0.0
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def feed(self, take: Callable[[], None]) -> None:
        """Let the thread call ``take``, which gives something to the sender."""
        if self._run.run_id is None:
            return
        try:
            self._inbox.put_nowait(take)
        except queue.Full:
            self._dropped += 1
        self._begin()

    def call(self, call: Call) -> None:
        """Let the thread make a call."""
        if self._run.run_id is None:
            return
        if len(self._calls) < _CALLS:
            self._calls.append(call)
        else:
            self._give_up(call)
        self._begin()

    def settle(self, patience_s: float, *, final: bool = False, last: Call | None = None) -> bool:
        """Wait until all of it is done, so many seconds at most; whether that is so. The store is
        tried at once, however long it has not answered.

        ``final``: nothing else comes, so that nothing is held back. The call ``last`` is made when
        all else is done, or when a third of the time is left.
        """
        if self._run.run_id is None:
            return True
        with self._lock:
            self._patience, self._last, self._final = patience_s, last, final
            self._deadline = time.monotonic() + patience_s
        self._run.wake(longest_cool_off=patience_s / _PAUSES)
        thread = self._begin()
        thread.join(patience_s)
        with self._lock:
            self._deadline = None
            self._left_alone, self._final = final, False
        self._run.wake()
        if self._last is not None:
            self._give_up(self._last)
            self._last = None
        return not thread.is_alive() and self._is_idle() and self.left_out() == (0, ())

    def left_out(self) -> tuple[int, tuple[str, ...]]:
        """Values that have not gone out, and the names of calls that were not made."""
        names = [*self._given_up, *(call.name for call in list(self._calls))]
        values = self._sender.left_out() + self._dropped + self._inbox.qsize()
        return values, tuple(dict.fromkeys(names))

    def _begin(self) -> threading.Thread:
        """See to it that the thread is there, and awake where somebody waits for it."""
        with self._lock:
            self._left_alone = False
            if self._thread is None:
                self._thread = threading.Thread(
                    target=contextvars.copy_context().run,
                    args=(self._work,),
                    name="dbx-llmtrain-mlflow",
                    daemon=True,
                )
                self._thread.start()
            if self._deadline is not None:
                self._wake.set()
            return self._thread

    def _work(self) -> None:
        quiet_since = time.monotonic()
        with impatient():
            while True:
                self._wake.wait(_TICK_S if self._deadline is None else _HURRY_S)
                self._wake.clear()
                if not self._is_idle():
                    quiet_since = time.monotonic()
                self._deliver()
                if self._is_over(quiet_since):
                    return

    def _deliver(self) -> None:
        """One round. Metrics come first: a call that does not go through, as where the store of
        artifacts is down, must not keep them back."""
        for _ in range(self._inbox.qsize()):
            with Guard("taking an event", self._warned):
                self._inbox.get_nowait()()
        if self._final:
            self._sender.release()
        if self._last is not None and self._time_left() <= self._patience / _LAST_PART:
            self._make_last()
        self._sender.flush()
        for call in sorted(self._calls, key=lambda call: (call.is_file, call.tries)):
            if self._run.resting() or self._time_left() <= 0:
                return
            self._make(call)
        if self._last is not None and self._sender.empty() and not self._calls:
            self._make_last()

    def _make(self, call: Call) -> None:
        outcome = self._run.attempt(call.what, call.do)
        call.tries += 1
        if outcome == "done":
            self._calls.remove(call)
        elif outcome == "refused" or call.tries >= _TRIES:
            self._calls.remove(call)
            self._give_up(call)

    def _make_last(self) -> None:
        call = self._last
        if call is not None and not self._run.resting():
            outcome = self._run.attempt(call.what, call.do)
            if outcome == "done":
                self._last = None
            elif outcome == "refused":
                self._last = None
                self._give_up(call)

    def _give_up(self, call: Call) -> None:
        self._given_up[call.name] = None

    def _time_left(self) -> float:
        deadline = self._deadline
        return float("inf") if deadline is None else deadline - time.monotonic()

    def _is_idle(self) -> bool:
        return (
            self._inbox.empty() and not self._calls and self._last is None and self._sender.empty()
        )

    def _is_over(self, quiet_since: float) -> bool:
        """Whether the thread ends: when all is done or patience has ended, where somebody waits for
        it; else after a while without work."""
        with self._lock:
            if self._left_alone:
                over = True
            elif self._deadline is not None:
                over = self._is_idle() or self._time_left() <= 0
            else:
                over = self._is_idle() and time.monotonic() - quiet_since >= _IDLE_S
            if over:
                self._thread = None
            return over
