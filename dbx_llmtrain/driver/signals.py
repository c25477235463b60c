"""Being told to end: a scheduler that cancels a job sends SIGTERM to the driver."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM
"""What a shell says of a program that SIGTERM ended: 143."""


@contextmanager
def terminated() -> Iterator[None]:
    """Within the block the first SIGTERM raises ``SystemExit(143)``, as Ctrl-C raises.

    By itself the signal ends Python on the spot: ranks would go on and the MLflow run would stay
    RUNNING. A second one does not disturb the clean-up. Does nothing outside the main thread, where
    Python sets no handlers, or where the handler is not Python's and could not be put back.
    """
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    told = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if not told:
            told = True
            raise SystemExit(EXIT_CODE)

    signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
