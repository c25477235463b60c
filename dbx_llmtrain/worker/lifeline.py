"""What a rank lives by: the processes that it was started by, and the driver's.

A rank whose launcher, Spark task or driver is gone trains for nobody, and keeps GPUs from whoever
comes next. Its supervisor's own parent may outlive them by half a minute, and on a cluster the
driver's Python process may end without Spark noticing it. Standard library and our pure modules
only.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from dbx_llmtrain import channel

LEVELS = 3
"""Above a supervisor: torch's launcher, its wrapper, and the Spark task (locally the driver). What
is above these is none of ours: a shell may be closed while its driver goes on."""
_LOOK_S = 2.0
_REFUSED_S = 6.0
"""A driver that was reached and has refused for so long is gone. One that cannot be reached
(a cut line, a firewall) is not taken for it."""


class Lifeline:
    """Looks after the processes above ``parent``, and where ``secrets`` have the address of the
    driver's channel, from ``watch`` on whether somebody still listens there."""

    def __init__(self, parent: int, secrets: Mapping[str, str]) -> None:
        self._above = dict(_above(parent))
        self._address = secrets.get(channel.ADDRESS, "")
        self._driver_gone = threading.Event()

    def watch(self) -> None:
        """Begin to look for the driver, in a thread."""
        if self._address:
            threading.Thread(target=self._look, name="look-for-driver", daemon=True).start()

    def is_cut(self) -> bool:
        """Whether one of them is gone."""
        gone = any(since is None or _is_gone(pid, since) for pid, since in self._above.items())
        return gone or self._driver_gone.is_set()

    def _look(self) -> None:
        place = channel.split_address(self._address)
        heard: float | None = None
        while True:
            answer = _answers(place)
            if answer:
                heard = time.monotonic()
            elif answer is None and heard is not None:
                heard = time.monotonic()  # nobody says that it is gone
            if heard is not None and time.monotonic() - heard > _REFUSED_S:
                self._driver_gone.set()
                return
            time.sleep(_LOOK_S)


def _answers(place: tuple[str, int]) -> bool | None:
    """Whether somebody listens at an address; ``None`` where that cannot be told."""
    try:
        socket.create_connection(place, timeout=_LOOK_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


def _above(parent: int) -> Iterator[tuple[int, str | None]]:
    """The processes above, by number, and when each began: numbers are used again."""
    pid = parent
    for _ in range(LEVELS):
        if pid <= 1:
            return
        try:
            fields = _fields(pid)
        except OSError:
            return  # what nobody can look at is not looked after
        yield pid, fields[_BEGAN] if fields else None
        pid = int(fields[_PARENT]) if fields else 0


def _is_gone(pid: int, since: str) -> bool:
    try:
        fields = _fields(pid)
    except OSError:
        return False  # too many open files, say: nobody knows at the moment
    return not fields or fields[_STATE] in "ZX" or fields[_BEGAN] != since


_STATE, _PARENT, _BEGAN = 0, 1, 19
"""Of ``/proc/PID/stat``, behind the name in brackets."""


def _fields(pid: int) -> list[str]:
    try:
        text = Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()
