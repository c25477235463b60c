"""How long each rank works by itself in a step, and how long it waits for data: who is slow.

The ranks take every step together, so its time is the same on all of them. What differs is the time
from its beginning until a rank shares its gradient: all forward passes, and all backward passes but
the last one. (Where weights are sharded the ranks wait for each other in those, too, and only the
wait for data tells one from another.) The times travel with the sums of the step, without a
collective of their own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from dbx_llmtrain.worker.world import World

Times = tuple[tuple[float, ...], tuple[float, ...]]
"""Of every rank: seconds of its own work, seconds without data."""

MOST_LISTED = 64
"""Ranks whose times are listed one by one in an event."""


class Lap:
    """This rank's times in one step after the other.

    On a GPU work is timed by the device, and read when the host has waited for it anyway: what is
    told in a step is of the step before.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._waited = self._own = self._began = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if world.device != "cpu":
            self._events = (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
            )
        self._ended = False

    def begin(self, *, waited: float) -> None:
        """A step's data are there, after ``waited`` seconds."""
        if self._events is None:
            self._began = time.perf_counter()
        else:
            if self._ended and self._events[1].query():
                self._own = self._events[0].elapsed_time(self._events[1]) / 1000
            self._events[0].record()
        self._waited = waited
        self._ended = False

    def end(self) -> None:
        """This rank's own work in the step is done."""
        self._ended = True
        if self._events is None:
            self._own = time.perf_counter() - self._began
        else:
            self._events[1].record()

    def as_numbers(self) -> Tensor:
        """To sum over the ranks: (2 * ranks,) fp64, each rank's times in its own places. Nothing is
        copied to the device: that would wait for it."""
        size, rank = self._world.size, self._world.rank
        numbers = torch.zeros(2 * size, dtype=torch.float64, device=self._world.device)
        numbers[rank].fill_(self._own)
        numbers[size + rank].fill_(self._waited)
        return numbers


def as_times(sums: Sequence[float]) -> Times:
    """The times of every rank."""
    half = len(sums) // 2
    return tuple(sums[:half]), tuple(sums[half:])


@dataclass
class Laps:
    """The ranks' times, summed over several steps."""

    steps: int = 0
    own: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)

    def add(self, own: Sequence[float], waited: Sequence[float]) -> None:
        """Count a step in; one without trained tokens has no times."""
        if own:
            self.steps += 1
            before = self.own or [0.0] * len(own)
            self.own = [a + b for a, b in zip(before, own, strict=True)]
            before = self.waited or [0.0] * len(waited)
            self.waited = [a + b for a, b in zip(before, waited, strict=True)]

    def metrics(self) -> dict[str, float]:
        """Seconds a step: the longest wait for data of a rank; of several ranks the slowest one's
        work, and that of the one in the middle."""
        if not self.steps:
            return {}
        found = {"data_wait_seconds": max(self.waited) / self.steps}
        if len(self.own) > 1:
            # A wait for data makes a rank late as its own work does.
            late = [a + b for a, b in zip(self.own, self.waited, strict=True)]
            slowest = max(range(len(late)), key=lambda rank: late[rank])
            found |= {
                "slowest_rank": float(slowest),
                "slowest_rank_seconds": late[slowest] / self.steps,
                "median_rank_seconds": median(late) / self.steps,
            }
        return found

    def by_rank(self) -> dict[str, Any]:
        """The same of every rank, where they are not too many."""
        if not self.steps or len(self.own) > MOST_LISTED:
            return {}
        return {
            "rank_seconds": [round(total / self.steps, 4) for total in self.own],
            "rank_data_seconds": [round(total / self.steps, 4) for total in self.waited],
        }
