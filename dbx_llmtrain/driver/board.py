"""``ranks.json`` in the run folder: where every rank is, for whoever watches from elsewhere. And
the heartbeats of ranks that are not heard, from their files."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dbx_llmtrain import storage
from dbx_llmtrain.driver.monitor import LiveState
from dbx_llmtrain.events import Event
from dbx_llmtrain.live_state import RANKS_FILE, RankRow, RankTable
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import node
from dbx_llmtrain.worker.watch import BEATS

_EVERY_S = 10.0
_LEAVE_S = 2.0


def rows(live: LiveState) -> tuple[RankRow, ...]:
    """Where every rank is that has been heard of; its times by this machine's clock."""
    away = time.time() - time.monotonic()
    return tuple(
        RankRow(
            rank=rank,
            step=max(0, one.step),
            phase=one.phase,
            heard=round(one.heard + away, 3),
            host=one.host,
            at=one.at,
        )
        for rank, one in sorted(live.ranks().items())
    )


@contextmanager
def kept(plan: RunPlan, live: LiveState) -> Iterator[None]:
    """Keep ``ranks.json`` for as long as the block lasts, in a thread: storage may be slow. What
    cannot be read or written is left out."""
    over = threading.Event()
    thread = threading.Thread(
        target=contextvars.copy_context().run,
        args=(_keep, plan, live, over),
        name="dbx-llmtrain-ranks",
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_LEAVE_S)


def _keep(plan: RunPlan, live: LiveState, over: threading.Event) -> None:
    run_dir = storage.local_path(plan.run_dir)
    seen: dict[Path, float] = {}
    every = min(_EVERY_S, plan.config.cluster.stall_timeout / 4)
    going = True
    while going:
        going = not over.wait(every)
        with node.Capture():
            _hear(plan, live, run_dir, seen)
        with node.Capture():
            table = RankTable(attempt=plan.attempt, time=time.time(), ranks=rows(live))
            storage.write_text(run_dir / RANKS_FILE, table.model_dump_json())


def _hear(plan: RunPlan, live: LiveState, run_dir: Path, seen: dict[Path, float]) -> None:
    """Read the heartbeats that are files: of ranks that have no channel."""
    for path in (run_dir / "logs").glob(BEATS):
        with node.Capture():
            event = Event.model_validate_json(path.read_text(encoding="utf-8"))
            if event.attempt == plan.attempt and event.time > seen.get(path, 0.0):
                seen[path] = event.time
                live.update(event, time.monotonic())
