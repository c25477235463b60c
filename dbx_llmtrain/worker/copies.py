"""Copies of files on a node's own disk, and how far they are, told to the driver.

A file that is finished is noted in a ledger beside the others, so that a copy which was killed goes
on where it was. Standard library and our pure modules only, as ``node``.
"""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbx_llmtrain import storage
from dbx_llmtrain.channel import Client
from dbx_llmtrain.worker.room import LEDGER, MARKER

Entry = Mapping[str, Any]
"""The fields of a ``records.FileEntry``."""

_EVERY_S = 1.0
_AT_ONCE = 8
_FULL = (errno.ENOSPC, errno.EDQUOT)
_MAY_PASS = (errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.EAGAIN, errno.ENOTCONN)
_BOOT = Path("/proc/sys/kernel/random/boot_id")


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


@dataclass(frozen=True)
class Fault:
    """Why a file could not be copied. ``passing``: it may go well the next time, so what is
    finished is worth keeping."""

    cause: str
    passing: bool = False


class _StopError(Exception):
    """Another file could not be copied."""


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


def mark(folder: Path) -> None:
    """Say that a copy is finished, and since when this machine runs."""
    (folder / MARKER).write_text(json.dumps({"boot": boot_id()}), encoding="utf-8")


def boot_id() -> str:
    """What names the time since this machine was started; empty where nothing does. Files that were
    written in it are whole, on disk or in memory: nothing else need be waited for."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def finished(files: Sequence[Entry], partial: Path) -> list[Entry]:
    """The files that a killed copy has finished, by its ledger. What else is there is removed."""
    wanted = {_key(entry) for entry in files}
    found = [entry for entry in _read_ledger(partial) if _key(entry) in wanted]
    found = [entry for entry in found if _size(partial / entry["path"]) == entry["size"]]
    if not found:
        storage.remove(partial)
        return []
    keep = {partial / LEDGER, *(partial / entry["path"] for entry in found)}
    for path in storage.list_files(partial):
        if path not in keep:
            path.unlink()
    return found


def begin(files: Sequence[Entry], done: Sequence[Entry], partial: Path) -> list[Entry]:
    """Make the folder of a copy and its ledger; the files that are still to be copied. ``done`` are
    ``finished``."""
    head = {"boot": boot_id(), "size": sum(entry["size"] for entry in files)}
    lines = [json.dumps(item) for item in (head, *map(dict, done))]
    partial.mkdir(parents=True, exist_ok=True)
    # Not flushed to the disk, which would wait for all that is copied: see ``boot_id``.
    (partial / LEDGER).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    known = {_key(entry) for entry in done}
    return [entry for entry in files if _key(entry) not in known]


def copy_files(source: Path, files: Sequence[Entry], partial: Path) -> Fault | None:
    """Copy the files, several at a time and the largest first. The first fault ends all; what was
    finished before is in the ledger."""
    stop, writing = threading.Event(), threading.Lock()

    def check() -> None:
        if stop.is_set():
            raise _StopError

    def copy(entry: Entry) -> Fault | None:
        with suppress(_StopError):
            check()
            fault = _copy_one(source, partial, entry, check)
            if fault is None:
                with writing, (partial / LEDGER).open("a", encoding="utf-8") as ledger:
                    ledger.write(f"{json.dumps(dict(entry))}\n")
            return fault
        return None

    ordered = sorted(files, key=lambda entry: -int(entry["size"]))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        copies = [pool.submit(copy, entry) for entry in ordered]
        try:
            faults = (done.result() for done in as_completed(copies))
            return next((fault for fault in faults if fault is not None), None)
        finally:
            stop.set()


def _copy_one(source: Path, partial: Path, entry: Entry, check: Any) -> Fault | None:
    """Copy a file; a file with an ``origin`` is there, and not in ``source``."""
    origin, copy = source / (entry.get("origin") or entry["path"]), partial / entry["path"]
    try:
        digest = storage.copy_file(origin, copy, sync=False, check=check)
        size = copy.stat().st_size
    except FileNotFoundError:
        return Fault(f"{origin} is missing: expected {entry['size']:,} bytes")
    except OSError as error:
        full = ": free some space or set cluster.local_dir" if error.errno in _FULL else ""
        passing = error.errno in _MAY_PASS
        return Fault(f"{origin} cannot be copied to {copy} ({error}){full}", passing)
    if (size, digest) != (entry["size"], entry["sha256"]):
        return Fault(
            f"{origin} is not the file that was registered: expected {entry['size']:,} bytes with "
            f"SHA-256 {entry['sha256']}, found {size:,} bytes with {digest}; it was changed "
            "meanwhile or is damaged: start again from its source"
        )
    return None


def whole(folder: Path, files: Sequence[Entry]) -> bool:
    """Whether every file has its hash: of copies that a machine had before it was started again,
    which may have lost what was not on the disk yet."""

    def right(entry: Entry) -> bool:
        try:
            return storage.hash_file(folder / entry["path"]) == str(entry["sha256"])
        except OSError:
            return False

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return all(pool.map(right, files))


def _read_ledger(partial: Path) -> list[Entry]:
    """The finished files; none where the machine was started again since."""
    try:
        lines = (partial / LEDGER).read_text(encoding="utf-8").splitlines()
        head = json.loads(lines[0])
    except (OSError, ValueError, IndexError):
        return []
    if not boot_id() or head.get("boot") != boot_id():
        return []
    found = []
    for line in lines[1:]:
        with suppress(ValueError):  # the last line may be torn
            found.append(json.loads(line))
    return found


def _key(entry: Entry) -> tuple[str, int, str]:
    return entry["path"], entry["size"], entry["sha256"]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
