"""Follow a run from the driver: read its events as they reach the run folder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from dbx_llmtrain.events import EVENTS_FILE, Event, read_events
from dbx_llmtrain.records import RunPlan

_POLL_SECONDS = 2.0


@contextmanager
def follow(plan: RunPlan, handle: Callable[[Event], None]) -> Iterator[None]:
    """Call ``handle`` with every event of this attempt, in order, each once.

    A thread reads the event file every two seconds; what is left is read when the block ends, by
    success or failure. ``handle`` must not raise: it runs beside the training.
    """
    path = Path(plan.run_dir) / EVENTS_FILE
    done = threading.Event()
    seen = 0

    def drain() -> None:
        nonlocal seen
        for event in islice(read_events(path, attempt=plan.attempt), seen, None):
            seen += 1
            handle(event)

    def poll() -> None:
        while not done.wait(_POLL_SECONDS):
            drain()

    thread = threading.Thread(target=poll, name="dbx-llmtrain-events", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        drain()
