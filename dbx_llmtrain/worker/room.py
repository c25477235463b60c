"""What lies on a node's own disk: copies of models and data, who uses them, and room for more.

Two locks guard a copy: ``making`` is held by whoever makes, looks at or removes it, ``using`` is
shared by all who use it. Who takes ``using`` holds ``making`` meanwhile, so nobody waits for it.
Standard library and our pure modules only, as ``node``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbx_llmtrain import storage
from dbx_llmtrain.worker import locks

MARKER = ".staged"
"""Marker of a finished copy, in its folder. Its time is when the copy was last used."""
LEDGER = ".ledger"
"""In the folder of a copy that is being made: what it will take, and which files are finished."""
SPARE_BYTES = 16 * 1024 * 1024
"""Left free on the disk after a copy, for logs and the like."""
_KINDS = ("models", "tokenizers", "data")
_PARTIAL = ".partial"
GLANCE_S = 0.2
"""Others hold ``making`` for a moment where they only look."""


@dataclass(frozen=True)
class Spot:
    """Where a copy lies, or will: ``<root>/<kind>/<fingerprint>``."""

    root: Path
    kind: str
    fingerprint: str

    @property
    def name(self) -> str:
        """``kind/fingerprint``."""
        return f"{self.kind}/{self.fingerprint}"

    @property
    def folder(self) -> Path:
        """The finished copy."""
        return self.root / self.kind / self.fingerprint

    @property
    def partial(self) -> Path:
        """The copy while it is made."""
        return self.root / self.kind / f".{self.fingerprint}{_PARTIAL}"

    @property
    def making(self) -> Path:
        """The lock of whoever makes, looks at or removes the copy."""
        return self.root / "locks" / f"{self.kind}-{self.fingerprint}"

    @property
    def using(self) -> Path:
        """The lock of those who use it."""
        return self.root / "locks" / f"{self.kind}-{self.fingerprint}.used"

    def size(self) -> int:
        """Bytes that it has on the disk."""
        return _bytes(self.folder) + _bytes(self.partial)

    def last_used(self) -> float:
        """When that was, in seconds since the epoch; of an unfinished one when it was worked on."""
        times = [0.0]
        for path in (self.folder / MARKER, self.partial / LEDGER):
            with suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times)

    def remove(self) -> None:
        """Delete the copy; whoever is killed meanwhile leaves none that looks finished."""
        (self.folder / MARKER).unlink(missing_ok=True)
        storage.remove(self.folder)
        storage.remove(self.partial)


@contextmanager
def alone(spot: Spot, *, wait_s: float = 0.0) -> Iterator[bool]:
    """Whether nobody makes or uses the copy, which then nobody can for as long as the block
    lasts."""
    with locks.try_lock(spot.making, wait_s=wait_s) as made:
        if not made:
            yield False
            return
        with locks.try_lock(spot.using) as unused:
            yield unused


def spots(root: Path) -> list[Spot]:
    """Every copy below the local folder of a node, finished or not."""
    found = {}
    for kind in _KINDS:
        with suppress(OSError):
            for path in (root / kind).iterdir():
                name = path.name
                if name.startswith(".") and name.endswith(_PARTIAL):
                    name = name[1 : -len(_PARTIAL)]
                if path.is_dir() and not name.startswith("."):
                    found[kind, name] = Spot(root, kind, name)
    return list(found.values())


def report(root: Path) -> list[dict[str, Any]]:
    """The copies of a node: the fields of a ``records.NodeCopy`` each."""
    listed = []
    for spot in spots(root):
        with alone(spot) as unused:
            listed.append({"name": spot.name, "size": spot.size(), "in_use": not unused})
    return listed


def make_room(mine: Spot, needed: int) -> str:
    """Remove copies that nobody uses, the least recently used first, until ``needed`` bytes are
    free for the copy ``mine`` beside what others have begun to copy. Why that cannot be; then
    nothing is removed. Call it under ``room_lock``."""
    others = [spot for spot in spots(mine.root) if spot != mine]
    unused, begun = [], 0
    for spot in others:
        with alone(spot, wait_s=GLANCE_S) as free:
            if free:
                unused.append(spot)
            elif spot.partial.is_dir():
                begun += _left(spot)
    wanted = needed + begun + SPARE_BYTES
    free_now = shutil.disk_usage(mine.root).free
    old = sum(spot.size() for spot in unused)
    if free_now + old < wanted:
        unneeded = f" and {old:,} in copies that nobody uses" if old else ""
        beside = f" beside {begun:,} for other copies that are being made" if begun else ""
        return f"{free_now:,} bytes free{unneeded}, {needed:,} are needed{beside}"
    _remove(unused, mine.root, wanted)
    return ""


def room_lock(root: Path) -> Path:
    """The lock of whoever looks for room, so that two do not count on the same."""
    return root / "locks" / "room"


def _remove(unused: Sequence[Spot], root: Path, wanted: int) -> None:
    for spot in sorted(unused, key=Spot.last_used):
        if shutil.disk_usage(root).free >= wanted:
            return
        with alone(spot, wait_s=GLANCE_S) as free:
            if free:
                spot.remove()


def _left(spot: Spot) -> int:
    """Bytes that a copy which is being made still has to write."""
    try:
        with (spot.partial / LEDGER).open(encoding="utf-8") as ledger:
            total = int(json.loads(ledger.readline())["size"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return max(0, total - _bytes(spot.partial))


def _bytes(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # another process may rename or remove it
                total += os.stat(os.path.join(path, name)).st_size
    return total
