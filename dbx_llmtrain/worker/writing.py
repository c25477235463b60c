"""A checkpoint's way to shared storage: local disk, one sequential copy a file, manifest last."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dbx_llmtrain import storage
from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.records import FileEntry
from dbx_llmtrain.worker.checkpoint import rng_file, together
from dbx_llmtrain.worker.snapshot import Planner, Snapshot, Writer
from dbx_llmtrain.worker.world import World

_OVERHEAD = 4096
"""Bytes that a tensor takes on disk besides its content, at most."""

_MB = 10**6


@dataclass(frozen=True)
class Contents:
    """What a checkpoint consists of: this rank's tensors and random states (JSON), and what the
    manifest says besides its files (JSON)."""

    snapshot: Snapshot
    random_states: str
    manifest: str


@dataclass(frozen=True)
class Room:
    """Bytes that a rank's part takes, and that are free; ``one_disk``: local files and shared
    storage are on the same one."""

    node: str
    needed: int
    local_free: int | None
    shared_free: int | None
    one_disk: bool


def measure(contents: Contents, node: str, scratch: Path, run_dir: Path) -> Room:
    """What this rank's part takes, and what there is."""
    tensors = contents.snapshot
    return Room(
        node=node,
        needed=tensors.bytes + len(contents.random_states) + _OVERHEAD * (2 + len(tensors.items)),
        local_free=storage.free_space(scratch),
        shared_free=storage.free_space(run_dir),
        one_disk=storage.device(scratch) == storage.device(run_dir),
    )


def check_room(rooms: Sequence[Room], folder: Path, run_dir: Path, scratch: Path) -> None:
    """``rooms`` of all ranks. Raises ``CheckpointError`` where a disk has not enough."""
    local: dict[str, int] = {}
    for room in rooms:
        local[room.node] = local.get(room.node, 0) + room.needed
    wanted = {f"{scratch} on {room.node}": (local[room.node], room.local_free) for room in rooms}
    first = rooms[0]
    shared = sum(local.values()) + (local[first.node] if first.one_disk else 0)
    wanted[str(run_dir)] = (shared, first.shared_free)
    lacking = [
        f"{needed / _MB:,.1f} MB are needed in {where}, {free / _MB:,.1f} MB are free"
        for where, (needed, free) in wanted.items()
        if free is not None and free < needed
    ]
    if lacking:
        raise CheckpointError(
            f"there is no room for the checkpoint {folder}: {'; '.join(lacking)}. Make room, or "
            "keep fewer (checkpoint.keep_last, checkpoint.keep_best)"
        )


def write(
    folder: Path,
    contents: Contents,
    *,
    world: World,
    group: dist.ProcessGroup,
    scratch: Path,
    given_up: threading.Event,
) -> int:
    """Write, publish and declare a checkpoint; returns the bytes of all its files. All ranks call
    it; what an attempt that was killed left in ``folder`` is gone before, no local file is left.

    Raises ``CheckpointError`` on every rank when any of them cannot write, on rank 0 when the
    manifest cannot be written (or was ``given_up``); the folder is gone then.
    """
    what = f"the checkpoint {folder} cannot be written"
    complete = False
    try:
        with _scratch_folder(scratch, folder, world, group) as local:

            def publish() -> tuple[FileEntry, ...]:
                dcp.save(
                    {},
                    storage_writer=Writer(local),
                    planner=Planner(contents.snapshot),
                    process_group=group,
                )
                rng = local / rng_file(world.rank)
                rng.write_text(contents.random_states, encoding="utf-8")
                return storage.publish_folder(local, folder)

            parts = together(publish, world, what, group)
        files = [entry for part in parts for entry in part]
        if world.rank == 0:
            declare(folder, files, contents.manifest, given_up)
            complete = True
    finally:
        if world.rank == 0 and not complete:
            storage.remove(folder)
    return sum(entry.size for entry in files)


def declare(
    folder: Path,
    files: Sequence[FileEntry],
    manifest: str,
    given_up: threading.Event,
    *,
    patience_s: float = 60.0,
) -> None:
    """Write the manifest when every file is there: what other machines wrote may take a moment to
    be seen on this one. Raises ``CheckpointError``."""
    deadline = time.monotonic() + patience_s
    while missing := [entry.path for entry in files if not _is_there(folder, entry)]:
        if time.monotonic() > deadline or given_up.wait(0.2):
            break
    if missing or given_up.is_set():
        why = "the run ends" if given_up.is_set() else f"{', '.join(missing)} did not arrive"
        raise CheckpointError(f"the checkpoint {folder} cannot be completed: {why}")
    content: Mapping[str, Any] = json.loads(manifest)
    try:
        storage.write_manifest(
            folder, {"files": [entry.model_dump() for entry in files], **content}
        )
    except OSError as error:
        message = f"the checkpoint {folder} cannot be completed: {type(error).__name__}: {error}"
        raise CheckpointError(message) from error


def _is_there(folder: Path, entry: FileEntry) -> bool:
    path = folder / entry.path
    return path.is_file() and path.stat().st_size == entry.size


@contextmanager
def _scratch_folder(
    parent: Path, target: Path, world: World, group: dist.ProcessGroup
) -> Iterator[Path]:
    """A folder on local disk for one rank's files, gone afterwards in any case; ``target`` is
    cleared before."""
    created: list[Path] = []

    def create() -> None:
        if world.rank == 0:
            storage.remove(target)
        parent.mkdir(parents=True, exist_ok=True)
        created.append(Path(tempfile.mkdtemp(prefix=f"checkpoint-{world.rank}-", dir=parent)))

    try:
        together(create, world, f"no temporary folder in {parent}", group)
        yield created[0]
    finally:
        for path in created:
            storage.remove(path)
