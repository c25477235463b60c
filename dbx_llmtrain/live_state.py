"""Where a run is, from its events and its ranks' heartbeats: what the live view and ``watch`` show.

Pure, and of bounded size, however long the run is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from pydantic import Field

from dbx_llmtrain.events import Event
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.reports import Record

RANKS_FILE = "ranks.json"
"""In the run folder: where every rank is, by the driver."""
ENDS = ("finished", "failed")
"""Phases in which nothing goes on."""
TRAINING = "loss"
POINTS = 300
"""Points of a curve, at least half of it once there were so many."""
MOST_CURVES = 6
LATE_S, SILENT_S = 20.0, 60.0
"""Seconds without a heartbeat after which a rank is late, or silent."""


class RankRow(Record):
    """A rank when it was last heard of. Times are seconds since the epoch on the driver's clock;
    ``at`` is where its main thread was, ``host`` its machine."""

    rank: int
    step: int
    phase: str
    heard: float
    host: str = ""
    at: str = ""


class RankTable(Record):
    """Every rank of an attempt that has been heard of, as of ``time``."""

    attempt: str
    time: float
    ranks: tuple[RankRow, ...]


class Snapshot(Record):
    """A run at the time ``now``, seconds since the epoch.

    ``ended`` says how it ended, empty while it runs. ``seconds_left`` is ``estimated`` by the plan
    before steps are measured. ``mfu`` is the share of the GPUs' stated speed that does useful work,
    ``None`` where that speed is not known. ``saved_step`` is the last checkpoint's, complete at
    ``saved_at``.
    """

    run_name: str
    now: float
    phase: str = ""
    step: int = 0
    total: int | None = None
    seconds_left: float | None = None
    estimated: bool = False
    metrics: dict[str, float] = Field(default_factory=dict)
    mfu: float | None = None
    curves: dict[str, tuple[tuple[int, float], ...]] = Field(default_factory=dict)
    world_size: int = 1
    ranks: tuple[RankRow, ...] = ()
    saved_step: int | None = None
    saved_at: float | None = None
    ended: str = ""

    def __repr__(self) -> str:
        from dbx_llmtrain.display_live import live_text

        return live_text(self)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        from dbx_llmtrain.display_live import live_html

        return live_html(self)


class Thinned:
    """Points of a curve in their order: all of them while they are few, then every second, every
    fourth and so on, and always the last."""

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []
        self._last: tuple[int, float] | None = None
        self._every = 1
        self._count = 0

    def add(self, step: int, value: float) -> None:
        """Take a point; another value of the same step takes its place."""
        if self._last is not None and self._last[0] == step:
            if self._points and self._points[-1][0] == step:
                self._points[-1] = (step, value)
        elif self._take():
            self._points.append((step, value))
        self._last = (step, value)
        if len(self._points) >= POINTS:
            self._points = self._points[::2]
            self._every *= 2

    def _take(self) -> bool:
        self._count += 1
        return (self._count - 1) % self._every == 0

    def until(self, step: int) -> None:
        """Forget what comes after a step: it is done again."""
        self._points = [point for point in self._points if point[0] <= step]
        if self._last is not None and self._last[0] > step:
            self._last = self._points[-1] if self._points else None

    def points(self) -> tuple[tuple[int, float], ...]:
        """What is kept."""
        last = [self._last] if self._last and self._points[-1:] != [self._last] else []
        return (*self._points, *last)


class RunState:
    """Takes the events of a run, attempt after attempt, and tells where it is."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self.total = plan.total_steps or None
        self.phase = "starting"
        resumed = re.search(r"step-(\d+)/?$", plan.resume_from or "")
        self.step = int(resumed[1]) if resumed else 0
        self.metrics: dict[str, float] = {}
        foreseen = plan.time.seconds if plan.time else None
        self._foreseen = foreseen / max(1, plan.total_steps) if foreseen is not None else None
        self._began: tuple[float, int] | None = None
        self._now = 0.0
        self._curves: dict[str, Thinned] = {}
        self._saved: tuple[int, float] | None = None
        self._error = ""

    def take(self, event: Event) -> None:
        """Take an event of the log."""
        self._now = event.time
        if event.kind == "phase":
            self.phase = str(event.data.get("phase", ""))
        elif event.kind == "started":
            self._start(event)
        elif event.kind in ("step", "eval"):
            self._measure(event)
        elif event.kind == "checkpoint":
            self._saved = (event.step, event.time)
        elif event.kind in ENDS:
            self.phase = event.kind
            self._error = str(event.data.get("error", ""))
        self.step = max(self.step, event.step)

    def heard(self, event: Event) -> bool:
        """Take a message of where rank 0 is, between its events; whether that is news."""
        if event.rank or event.kind not in ("step", "alive") or event.step <= self.step:
            return False
        self.step, self._now = event.step, event.time
        return True

    def _start(self, event: Event) -> None:
        self._began = (event.time, event.step)
        self.step = event.step  # an earlier one where the newest checkpoint is damaged
        self._error = ""
        for curve in self._curves.values():
            curve.until(event.step)

    def _measure(self, event: Event) -> None:
        self.metrics |= event.metrics
        for name, value in event.metrics.items():
            drawn = name.endswith("loss") and not name.startswith("best_")
            known = name in self._curves or len(self._curves) < MOST_CURVES
            if drawn and known and math.isfinite(value):
                self._curves.setdefault(name, Thinned()).add(event.step, value)

    def seconds_left(self) -> tuple[float | None, bool]:
        """Seconds until the last step, and whether that is the plan's estimate: from the time that
        the steps of this attempt took, evaluations and all; before there are any the plan's."""
        steps = (self.total or 0) - self.step
        if self._began is None or self.step <= self._began[1]:
            return (None if self._foreseen is None else self._foreseen * steps), True
        per_step = (self._now - self._began[0]) / (self.step - self._began[1])
        return per_step * steps, False

    def mfu(self) -> float | None:
        """Useful operations a second by those that the GPUs could do."""
        time = self._plan.time
        speed = self.metrics.get("tokens_per_second")
        if time is None or not time.flops_per_second or not time.flops_per_token or not speed:
            return None
        return speed * time.flops_per_token / (time.flops_per_second * self._plan.world_size)

    def snapshot(self, now: float, ranks: Iterable[RankRow] = (), ended: str = "") -> Snapshot:
        """Everything, as of ``now``."""
        left, estimated = self.seconds_left()
        if self.phase == "failed" and not ended:
            ended = f"failed: {self._error}"
        elif self.phase == "finished" and not ended:
            ended = "finished"
        return Snapshot(
            run_name=self._plan.run_name,
            now=now,
            phase=self.phase,
            step=self.step,
            total=self.total,
            seconds_left=left if self.phase == "training" else None,
            estimated=estimated,
            metrics=dict(self.metrics),
            mfu=self.mfu(),
            curves={name: curve.points() for name, curve in self._curves.items()},
            world_size=self._plan.world_size,
            ranks=tuple(sorted(ranks, key=lambda row: row.rank)),
            saved_step=self._saved[0] if self._saved else None,
            saved_at=self._saved[1] if self._saved else None,
            ended=ended,
        )
