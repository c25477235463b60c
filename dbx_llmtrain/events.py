"""What a rank tells the driver while it runs, as JSON lines in ``events.jsonl``.

Kinds: ``phase`` (what it is about to do), ``started``, ``step``, ``eval``, ``samples``,
``checkpoint``, ``export``, ``failed``, ``finished``. Rank 0 numbers its events within an attempt;
they are the log. What is not numbered (``alive`` and what other ranks say) only tells where a rank
is, over the channel, and is no part of the log.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from dbx_llmtrain.reports import Record
from dbx_llmtrain.storage import GrowingFile

EVENTS_FILE = "events.jsonl"

Kind = Literal[
    "phase",
    "alive",
    "started",
    "step",
    "eval",
    "samples",
    "checkpoint",
    "export",
    "adapter",
    "best_export",
    "failed",
    "finished",
]


class Event(Record):
    """One thing that happened. ``time`` is seconds since the epoch, ``step`` optimizer steps done,
    ``metrics`` numbers by their MLflow names, ``data`` anything else that is JSON. ``n`` counts the
    events of the attempt's log from 1; 0: not of the log."""

    attempt: str
    rank: int
    kind: Kind
    time: float
    step: int
    n: int = 0
    metrics: dict[str, float] = Field(default_factory=dict)
    data: dict[str, Any] = Field(default_factory=dict)


class EventLog:
    """Rank 0's events: appended locally, republished to the run folder every few seconds."""

    def __init__(self, local: Path, shared: Path, attempt: str, rank: int) -> None:
        self._file = GrowingFile(local, shared, every=5.0)
        self._attempt = attempt
        self._rank = rank
        self._count = 0

    def emit(
        self, kind: Kind, step: int, metrics: dict[str, float] | None = None, **data: Any
    ) -> Event:
        """Append one event and return it."""
        self._count += 1
        event = Event(
            attempt=self._attempt,
            rank=self._rank,
            kind=kind,
            time=time.time(),
            step=step,
            n=self._count,
            metrics=metrics or {},
            data=data,
        )
        self._file.write(event.model_dump_json().encode() + b"\n")
        return event

    def publish(self) -> None:
        """Bring what there is to the run folder now."""
        self._file.publish()

    def close(self) -> None:
        """Publish what is left."""
        self._file.close()


def read_events(path: Path, *, attempt: str | None = None) -> Iterator[Event]:
    """The whole lines of an event file, in order; a line that is cut short ends the reading."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        if not line.endswith("\n"):
            return
        try:
            event = Event.model_validate(json.loads(line))
        except ValueError:
            return
        if attempt is None or event.attempt == attempt:
            yield event
