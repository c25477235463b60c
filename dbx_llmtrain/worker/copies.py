"""Copies of files on a node's own disk, and how far they are, told to the driver.

Standard library and our pure modules only, as ``node``.
"""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbx_llmtrain import storage
from dbx_llmtrain.channel import Client
from dbx_llmtrain.errors import StagingError

_EVERY_S = 1.0
_COPIES_AT_ONCE = 4
_SPARE_BYTES = 16 * 1024 * 1024
"""Left free on the disk after a copy, for logs and the like."""


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


def copy_files(artifact: dict[str, Any], partial: Path, node: str) -> None:
    """Every file of the artifact (the fields of a ``records.Artifact``) to the folder ``partial``
    of this ``node``, several at a time. The first fault, in their order, is raised as
    ``StagingError``."""
    source = storage.local_path(artifact["source"])
    if not source.is_dir():
        raise _fault(
            node, f"{source} is no folder here: it has to be on storage that every node sees"
        )
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise _fault(node, f"{partial} cannot be made ({error}): set cluster.local_dir") from error
    _check_space(artifact, partial, node)
    with ThreadPoolExecutor(_COPIES_AT_ONCE) as pool:
        copies = [pool.submit(_copy_one, source, partial, entry) for entry in artifact["files"]]
        try:
            for copy in copies:
                if cause := copy.result():
                    raise _fault(node, cause)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _check_space(artifact: dict[str, Any], partial: Path, node: str) -> None:
    needed = sum(entry["size"] for entry in artifact["files"])
    free = shutil.disk_usage(partial).free
    if free < needed + _SPARE_BYTES:
        root = partial.parent.parent
        raise _fault(
            node,
            f"{root} has {free:,} bytes free, {needed:,} are needed for {artifact['source']}: "
            f"delete old copies in {root}, use a bigger disk, or set cluster.local_dir",
        )


def _copy_one(source: Path, partial: Path, entry: dict[str, Any]) -> str:
    """Copy a file; why that failed, empty where it did not. A file with an ``origin`` is there, and
    not in ``source``."""
    origin, copy = source / (entry.get("origin") or entry["path"]), partial / entry["path"]
    try:
        digest = storage.copy_file(origin, copy)
        size = copy.stat().st_size
    except FileNotFoundError:
        return f"{origin} is missing: expected {entry['size']:,} bytes"
    except OSError as error:
        full = ": free some space or set cluster.local_dir" if error.errno == errno.ENOSPC else ""
        return f"{origin} cannot be copied to {copy} ({error}){full}"
    if (size, digest) != (entry["size"], entry["sha256"]):
        return (
            f"{origin} is not the file that was registered: expected {entry['size']:,} bytes with "
            f"SHA-256 {entry['sha256']}, found {size:,} bytes with {digest}; it was changed "
            "meanwhile or is damaged: start again from its source"
        )
    return ""


def _fault(node: str, cause: str) -> StagingError:
    return StagingError("files", {node: cause})
