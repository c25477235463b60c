"""Tells the driver, over the channel, how far the copies that a node makes are."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dbx_llmtrain.channel import Client

_EVERY_S = 1.0


@dataclass(frozen=True)
class Copy:
    """A folder that is being made: as ``partial``, then renamed to ``target``. ``size``: bytes."""

    target: Path
    partial: Path
    size: int

    def done(self) -> int:
        """Bytes that are on the disk."""
        if self.target.is_dir():
            return self.size
        try:
            found = sum(path.stat().st_size for path in self.partial.rglob("*") if path.is_file())
        except OSError:  # renamed meanwhile
            return self.size if self.target.is_dir() else 0
        return min(found, self.size)


@contextmanager
def told(copies: Sequence[Copy], node: str, events: tuple[str, str] | None) -> Iterator[None]:
    """Tell the driver about the copies once a second for as long as the block lasts.

    ``events`` are address and key of its server. Without them, or without copies, nothing is done.
    """
    if not copies or events is None:
        yield
        return
    client = Client(*events)
    over = threading.Event()

    def tell() -> None:
        done, total = sum(copy.done() for copy in copies), sum(copy.size for copy in copies)
        client.send({"copied": {"node": node, "done": done, "total": total}})

    def run() -> None:
        tell()
        while not over.wait(_EVERY_S):
            tell()

    thread = threading.Thread(target=run, name="dbx-llmtrain-copies", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        tell()
        client.close(2.0)
