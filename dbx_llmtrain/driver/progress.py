"""How preparing, staging and training are shown while they last: a bar, lines, or nothing.

It is shown on standard error, in a notebook as one block of its own. Nothing here raises: what goes
wrong ends the showing and nothing else.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from dbx_llmtrain.display_live import duration, slow_notes
from dbx_llmtrain.driver.html_view import HtmlView
from dbx_llmtrain.driver.progress_views import BarView, LinesView, Task, View
from dbx_llmtrain.events import Event
from dbx_llmtrain.live_state import RankRow, RunState
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import node

Mode = Literal["auto", "bar", "lines", "none"]

_NAMES_SHOWN = 4
_ROWS_EVERY = 0.2


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, Jupyter's or one of Databricks."""
    shell = _shell()
    if shell is None or type(shell).__name__ == "TerminalInteractiveShell":
        return False
    # Databricks has shells of its own, not all of them with a kernel.
    return has_kernel() or "DATABRICKS_RUNTIME_VERSION" in os.environ


def has_kernel() -> bool:
    """Whether what is shown can be replaced later."""
    return getattr(_shell(), "kernel", None) is not None


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def is_interactive() -> bool:
    """Whether the value of a last expression is shown by itself: notebook, IPython, ``python``."""
    return in_notebook() or hasattr(sys, "ps1")


def choose(mode: Mode) -> Literal["bar", "lines", "none"]:
    """What ``auto`` stands for here: a bar in a notebook or terminal, else lines."""
    if mode != "auto":
        return mode
    return "bar" if in_notebook() or sys.stderr.isatty() else "lines"


@contextmanager
def showing(mode: Mode, *, clock: Callable[[], float] = time.monotonic) -> Iterator[Progress]:
    """What shows progress for as long as the block lasts. ``mode`` is ``tracking.progress``."""
    views: dict[str, Callable[[], View]] = {
        "bar": lambda: HtmlView() if has_kernel() else BarView(),
        "lines": lambda: LinesView(clock),
    }
    chosen = choose(mode)
    progress = Progress(views[chosen]() if chosen in views else None)
    try:
        yield progress
    finally:
        progress.close()


class Progress:
    """One thing at a time is shown. For any thread; no method raises."""

    def __init__(self, view: View | None) -> None:
        self._view = view
        self._lock = threading.RLock()
        self._task: Task | None = None

    @contextmanager
    def rows(self, name: str = "preparing") -> Iterator[Callable[[int], None]]:
        """What takes the number of rows read so far. Nothing is shown before its first call."""
        due, read = 0.0, 0

        def count(rows: int) -> None:
            nonlocal due, read
            read, now = rows, time.monotonic()
            if now >= due:
                due = now + _ROWS_EVERY
                self.show(Task(name, unit="rows", done=rows))

        with self._ending(name):
            try:
                yield count
            finally:
                if read:
                    self.show(Task(name, unit="rows", done=read))

    @contextmanager
    def copies(self, name: str = "staging") -> Iterator[Callable[[str, int, int], None]]:
        """What takes a node's name, the bytes it has copied and all that it has to copy."""
        nodes: dict[str, tuple[int, int]] = {}

        def count(node_name: str, done: int, total: int) -> None:
            nodes[node_name] = (done, total)
            done, total = (sum(column) for column in zip(*nodes.values(), strict=True))
            self.show(Task(name, "bytes", done, total, note=_node_shares(nodes)))

        with self._ending(name):
            yield count

    @contextmanager
    def training(
        self,
        plan: RunPlan,
        state: RunState | None = None,
        ranks: Callable[[], Sequence[RankRow]] = tuple,
    ) -> Iterator[Training]:
        """What takes the events of a run, of which ``state`` is known already, and shows it with
        its ``ranks``."""
        training = Training(self, plan, state or RunState(plan), ranks)
        with self._ending(training.name):
            yield training

    @contextmanager
    def _ending(self, name: str) -> Iterator[None]:
        """The task of this name is over with the block, or has failed with it."""
        failed = True
        try:
            yield
            failed = False
        finally:
            self.end(name, failed=failed)

    def show(self, task: Task) -> None:
        """Show a task as it is now; another one that was shown ends."""
        with self._lock, node.Capture() as capture:
            if self._view is None:
                return
            if self._task is not None and self._task.name != task.name:
                self.end(self._task.name)
            begun, self._task = self._task is not None, task
            if begun:
                self._view.update(task)
            else:
                self._view.begin(task)
        if capture.error:
            self._view = None

    def end(self, name: str, *, failed: bool = False) -> None:
        """The task of this name is over."""
        with self._lock, node.Capture() as capture:
            if self._view is not None and self._task is not None and self._task.name == name:
                task, self._task = self._task, None
                self._view.end(replace(task, failed=failed))
        if capture.error:
            self._view = None

    def close(self) -> None:
        """Whatever is shown is over."""
        with self._lock, node.Capture():
            if self._task is not None:
                self.end(self._task.name)
            if self._view is not None:
                self._view.close()
            self._view = None


def _node_shares(nodes: dict[str, tuple[int, int]]) -> str:
    """How far each node is; of many the slowest."""
    shares = {name: done / max(1, total) for name, (done, total) in nodes.items()}
    if len(shares) <= _NAMES_SHOWN:
        return ", ".join(f"{name} {share:.0%}" for name, share in sorted(shares.items()))
    slowest = min(shares, key=lambda name: shares[name])
    finished = sum(share >= 1 for share in shares.values())
    return f"{finished} of {len(shares)} nodes, {slowest} {shares[slowest]:.0%}"


class Training:
    """Turns the events of rank 0 into what is shown. No method raises."""

    def __init__(
        self,
        progress: Progress,
        plan: RunPlan,
        state: RunState,
        ranks: Callable[[], Sequence[RankRow]],
    ) -> None:
        self._progress = progress
        self.name = "training" if plan.purpose == "train" else "evaluation"
        self.state = state
        self._ranks = ranks
        self._show()

    def show_ranks(self, ranks: Callable[[], Sequence[RankRow]]) -> None:
        """Show where every rank is, too."""
        self._ranks = ranks

    def event(self, event: Event) -> None:
        """Take an event of the log."""
        with node.Capture():
            self.state.take(event)
            self._show()

    def heard(self, event: Event) -> None:
        """Take a message of where a rank is: rank 0's steps between those that are reported."""
        with node.Capture():
            if self.state.heard(event):
                self._show()

    def tick(self) -> None:
        """Show it again: time goes on also where nothing happens."""
        with node.Capture():
            self._show()

    def _show(self) -> None:
        state = self.state
        left = self._time_left() if state.phase == "training" else ""
        slow = slow_notes(state.metrics) if state.phase == "training" else []
        note = ", ".join(filter(None, (_speed(state.metrics), *slow, left)))
        unit = "steps" if state.total else "rows"
        self._progress.show(
            Task(
                self.name,
                unit,
                state.step,
                state.total,
                note=note,
                phase=state.phase,
                live=lambda: state.snapshot(time.time(), self._ranks()),
            )
        )

    def _time_left(self) -> str:
        left, estimated = self.state.seconds_left()
        if left is None:
            return ""
        told = duration(left)
        return f"about {told} left by the plan's estimate" if estimated else f"{told} left"


def _speed(metrics: dict[str, float]) -> str:
    parts = []
    loss, tokens = metrics.get("loss", math.nan), metrics.get("tokens_per_second", 0.0)
    if not math.isnan(loss):
        parts.append(f"loss {loss:.4g}")
    if tokens:
        parts.append(f"{tokens:,.0f} tokens/s")
    return ", ".join(parts)
