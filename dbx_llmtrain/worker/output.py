"""What a rank prints: bytes in, whole lines out, to its log and live to the driver.

The way to the driver leads through processes that decode strictly and end the training at the first
byte that is not UTF-8, cut lines at 4,000 characters and may block. So only valid UTF-8 of short
lines is passed on, by a thread that drops lines rather than let the training wait.
"""

from __future__ import annotations

import os
import queue
import re
import select
import sys
import threading
import time
from collections.abc import Callable

LOG_ONLY = "\x02"
"""A line that begins with it is for the rank's log alone."""
LOG_ONLY_VARIABLE = "DBX_LLMTRAIN_LOG_ONLY"
"""Set for a rank whose driver shows progress: what it would show twice is marked ``LOG_ONLY``."""

LINE_LIMIT = 3900
"""Characters of a line that is passed on; the rest follows as further lines."""
_END = re.compile(rb"\r\n|\n|\r")
_BUFFER_LIMIT = 64 * 1024
_READ = 64 * 1024
_QUEUE = 5000


class LineSplitter:
    """Cuts a stream of bytes at line ends and shows progress bars at most once in ``every`` s.

    What ends with a carriage return overwrites itself on a terminal; of such lines the newest is
    kept back and shown when it is due. ``now`` is in seconds, from any start.
    """

    def __init__(self, *, every: float = 1.0) -> None:
        self._every = every
        self._rest = b""
        self._echoed = b""
        self._progress = b""
        self._shown = float("-inf")

    def feed(self, data: bytes, now: float) -> list[str]:
        """The lines that these bytes complete."""
        lines: list[str] = []
        data = self._rest + data
        # A last "\r" may be the first half of "\r\n".
        held = b"\r" if data.endswith(b"\r") else b""
        data = data.removesuffix(held) if held else data
        start = 0
        for match in _END.finditer(data):
            segment = data[start : match.start()]
            start = match.end()
            lines += self._transient(segment) if match[0] == b"\r" else self._line(segment)
        self._rest = data[start:] + held
        if len(self._rest) > _BUFFER_LIMIT:
            cut = _whole_characters(self._rest)
            lines += _texts(self._rest[:cut])
            self._rest = self._rest[cut:]
        return lines + self._due(now)

    def idle(self, now: float) -> list[str]:
        """What to show when nothing has come for a while: also a line that is not complete."""
        rest = self._rest.removesuffix(b"\r")
        if rest.strip() and rest != self._echoed:
            self._echoed, self._progress, self._shown = rest, b"", now
            return _texts(rest)
        return self._due(now)

    def close(self) -> list[str]:
        """What is left at the end of the stream."""
        rest, self._rest = self._rest.removesuffix(b"\r"), b""
        return self._line(rest) if rest or self._progress else []

    def _transient(self, segment: bytes) -> list[str]:
        if segment.strip():
            self._progress = segment
        return []

    def _line(self, segment: bytes) -> list[str]:
        if not segment.strip() and self._progress:
            segment = self._progress  # a bar that was ended by a bare newline
        self._progress = b""
        echoed, self._echoed = self._echoed, b""
        return [] if segment and segment == echoed else _texts(segment)

    def _due(self, now: float) -> list[str]:
        if not self._progress or now - self._shown < self._every:
            return []
        segment, self._progress, self._shown = self._progress, b"", now
        return _texts(segment)


def _whole_characters(data: bytes) -> int:
    """Length without a UTF-8 character that is cut short at the end."""
    for back in range(1, 4):
        if data[-back] & 0xC0 == 0xC0:
            return len(data) - back
        if data[-back] & 0xC0 != 0x80:
            break
    return len(data)


def _texts(segment: bytes) -> list[str]:
    text = segment.decode("utf-8", errors="replace").rstrip()
    return [text[i : i + LINE_LIMIT] for i in range(0, len(text), LINE_LIMIT)] or [""]


class Forwarder:
    """Writes lines to a file descriptor from a thread, each with a prefix; never blocks, never
    raises. When the other side does not keep up, lines are dropped and counted."""

    def __init__(self, prefix: str, descriptor: int = 1) -> None:
        self._prefix = prefix
        self._descriptor = descriptor
        self._lines: queue.Queue[str | None] = queue.Queue(_QUEUE)
        self._dropped = 0
        # The processes on the way print with this encoding and die of what it cannot hold.
        self._encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        self._thread = threading.Thread(target=self._run, name="forward-output", daemon=True)
        self._thread.start()

    def send(self, line: str) -> None:
        """Queue one line."""
        try:
            if self._dropped:
                self._lines.put_nowait(f"... {self._dropped} lines are in this rank's log only")
                self._dropped = 0
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued, within the time."""
        try:
            self._lines.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            text = f"{self._prefix}{line}".encode(self._encoding, "backslashreplace")
            data = text.decode(self._encoding).encode() + b"\n"
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:
                return  # nobody reads any more


def pump(descriptor: int, take: Callable[[str], None]) -> None:
    """Read a pipe to its end and give ``take`` each line."""
    splitter = LineSplitter()
    while True:
        ready, _, _ = select.select([descriptor], [], [], 1.0)
        if not ready:
            lines = splitter.idle(time.monotonic())
        elif data := os.read(descriptor, _READ):
            lines = splitter.feed(data, time.monotonic())
        else:
            break
        for line in lines:
            take(line)
    for line in splitter.close():
        take(line)
