"""Being told to end: a scheduler that cancels a job sends SIGTERM to the driver, a terminal that is
closed SIGHUP."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGHUP)


def exit_code(number: int) -> int:
    """What a shell says of a program that a signal ended: 143 for SIGTERM."""
    return 128 + number


@contextmanager
def terminated(*, by_default: bool = False) -> Iterator[None]:
    """Within the block the first SIGTERM or SIGHUP raises ``SystemExit`` (143, 129), as Ctrl-C
    raises ``KeyboardInterrupt``.

    By itself the signal ends Python on the spot: ranks would go on and the MLflow run would stay
    RUNNING. A second one does not disturb the clean-up, and what fails in it does not change the
    exit code: the signal may have ended the JVM too. A signal that is ignored stays so (nohup).
    Does nothing outside the main thread, where Python sets no handlers, or where the handler is not
    Python's and could not be put back. ``by_default``: somebody else's handler is left alone, too.
    """
    told: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if told:
            return
        told.append(number)
        if number == signal.SIGHUP:
            _leave_terminal()
        raise SystemExit(exit_code(number))

    handlers = {number: signal.getsignal(number) for number in _ENDING}
    mine = threading.current_thread() is threading.main_thread()
    before = {
        number: handler
        for number, handler in handlers.items()
        if mine
        and handler not in (None, signal.SIG_IGN)
        and not (by_default and handler != signal.SIG_DFL)
    }
    for number in before:
        signal.signal(number, on_signal)
    try:
        yield
    except BaseException:
        if told:
            raise SystemExit(exit_code(told[0])) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_terminal() -> None:
    """Write to nowhere from now on: a terminal that is gone fails every message, and the clean-up
    with it. Files and pipes stay."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(number).st_mode):
                os.dup2(nowhere, number)
    os.close(nowhere)
