"""Copies of the model and the data on this node's own disk: made once, used by all, kept in use.

Who has a copy holds a lock on it until it lets go or ends, and no copy in use is ever removed.
Standard library and our pure modules only, as ``node``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dbx_llmtrain import storage
from dbx_llmtrain.errors import StagingError
from dbx_llmtrain.worker import copies, locks, node, room
from dbx_llmtrain.worker.room import MARKER, Spot


@dataclass(frozen=True)
class Held:
    """A finished copy that nobody removes until it is let go or this process has ended."""

    folder: Path
    lock: IO[str]

    def release(self) -> None:
        """Let it go."""
        self.lock.close()


def stage(artifact: dict[str, Any], setting: str | None = None) -> Path:
    """Copy an artifact's folder to this node's disk once, and return where it is; it is not held.

    ``artifact`` has the fields of ``records.Artifact``; ``setting`` is ``cluster.local_dir``.
    Raises ``StagingError``.
    """
    with using([artifact], setting) as (folder,):
        return folder


def stage_all(
    artifacts: Sequence[dict[str, Any]],
    setting: str | None = None,
    events: tuple[str, str] | None = None,
) -> dict[str, str]:
    """``stage`` each of them; the folders by fingerprint. ``events``: see ``hold``."""
    with using(artifacts, setting, events) as folders:
        found = zip(artifacts, folders, strict=True)
        return {artifact["fingerprint"]: str(folder) for artifact, folder in found}


@contextmanager
def using(
    artifacts: Sequence[dict[str, Any]],
    setting: str | None = None,
    events: tuple[str, str] | None = None,
) -> Iterator[list[Path]]:
    """The folders of the artifacts, held for as long as the block lasts. See ``hold``."""
    held = hold(artifacts, setting, events)
    try:
        yield [each.folder for each in held]
    finally:
        for each in held:
            each.release()


def hold(
    artifacts: Sequence[dict[str, Any]],
    setting: str | None = None,
    events: tuple[str, str] | None = None,
) -> list[Held]:
    """The artifacts' copies on this node, made where they are not there yet, and held.

    A copy is ``<local dir>/<kind>/<fingerprint>``: made in a temporary folder under a lock of this
    node, checked (size and SHA-256 of every file) and renamed into place; a finished copy whose
    sizes are right is used again. Where the disk needs room, copies that nobody uses are removed.

    ``events`` are address and key of the driver's ``channel.Server``, which then hears of copies.
    Raises ``StagingError``; then none is held.
    """
    root = node.local_dir(setting)
    spots = [Spot(root, artifact["kind"], artifact["fingerprint"]) for artifact in artifacts]
    with ExitStack() as undo:
        # What is there is in use before room is made for the rest.
        found = [_find(*each, undo) for each in zip(spots, artifacts, strict=True)]
        listed = list(zip(spots, artifacts, found, strict=True))
        missing = [(spot, artifact) for spot, artifact, held in listed if held is None]
        with copies.told([_copy(*each) for each in missing], node.node_id(), events):
            whole = [held or _make(spot, artifact, undo) for spot, artifact, held in listed]
        undo.pop_all()
        return whole


def _copy(spot: Spot, artifact: dict[str, Any]) -> copies.Copy:
    size = sum(entry["size"] for entry in artifact["files"])
    return copies.Copy(spot.folder, spot.partial, size)


def _find(spot: Spot, artifact: dict[str, Any], undo: ExitStack) -> Held | None:
    """The copy, where it is finished. Does not wait for one that is being made."""
    with locks.try_lock(spot.making, wait_s=room.GLANCE_S) as free:
        return _take(spot, undo) if free and _is_complete(spot, artifact["files"]) else None


def _make(spot: Spot, artifact: dict[str, Any], undo: ExitStack) -> Held:
    """The copy, made unless another process was first."""
    with locks.file_lock(spot.making):
        if not _is_complete(spot, artifact["files"]):
            _remove_damaged(spot)
            _copy_files(spot, artifact)
            copies.mark(spot.partial)
            (spot.partial / room.LEDGER).unlink()
            spot.partial.replace(spot.folder)
        return _take(spot, undo)


def _take(spot: Spot, undo: ExitStack) -> Held:
    """A finished copy, from now on in use. Under its lock ``making``."""
    held = Held(spot.folder, locks.share(spot.using))
    undo.callback(held.release)
    os.utime(spot.folder / MARKER)
    return held


def _is_complete(spot: Spot, files: Sequence[dict[str, Any]]) -> bool:
    try:
        boot = json.loads((spot.folder / MARKER).read_text(encoding="utf-8"))["boot"]
        sizes = [(spot.folder / entry["path"]).stat().st_size for entry in files]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if sizes != [entry["size"] for entry in files]:
        return False
    if boot and boot == copies.boot_id():
        return True
    if not copies.whole(spot.folder, files):
        return False
    copies.mark(spot.folder)
    return True


def _remove_damaged(spot: Spot) -> None:
    """Remove a finished copy whose files are not right, or that was not wholly removed."""
    if not spot.folder.exists():
        return
    with locks.try_lock(spot.using) as unused:
        if not unused:
            raise _fault(
                f"{spot.folder} is damaged (a file is missing or has another size) and in use by "
                "another run: wait for its end, or set cluster.local_dir to another folder"
            )
        (spot.folder / MARKER).unlink(missing_ok=True)
        storage.remove(spot.folder)


def _copy_files(spot: Spot, artifact: dict[str, Any]) -> None:
    """Every file of the artifact to the folder of the unfinished copy. Where that fails for good
    nothing is left of it."""
    source = storage.local_path(artifact["source"])
    if not source.is_dir():
        raise _fault(f"{source} is no folder here: it has to be on storage that every node sees")
    with locks.file_lock(room.room_lock(spot.root)):
        done = copies.finished(artifact["files"], spot.partial)
        needed = sum(e["size"] for e in artifact["files"]) - sum(e["size"] for e in done)
        if short := room.make_room(spot, needed):
            storage.remove(spot.partial)
            raise _fault(
                f"{spot.root} has {short} for {artifact['source']}: delete what else lies on that "
                "disk, use a bigger one, or set cluster.local_dir"
            )
        try:
            left = copies.begin(artifact["files"], done, spot.partial)
        except OSError as error:
            storage.remove(spot.partial)
            cause = f"{spot.partial} cannot be made ({error}): set cluster.local_dir"
            raise _fault(cause) from error
    fault = copies.copy_files(source, left, spot.partial)
    if fault is not None:
        if not fault.passing:
            storage.remove(spot.partial)
        raise _fault(fault.cause)


def _fault(cause: str) -> StagingError:
    return StagingError("files", {node.node_id(): cause})
