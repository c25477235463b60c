"""Where a rank's files lie on the node's own disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dbx_llmtrain import channel, storage
from dbx_llmtrain.custom_code import private_modules
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import node
from dbx_llmtrain.worker.handover import note_folder
from dbx_llmtrain.worker.staged import Held, hold


@dataclass(frozen=True)
class Folders:
    """On this node's own disk: the staged model and data, and this rank's temporary files.

    Copies that are ``held`` are not removed for as long as the rank lives.
    """

    model: Path
    data: Path
    scratch: Path
    held: tuple[Held, ...] = ()


def stage(plan: RunPlan, scratch: Path) -> Folders:
    """Copies of model and data on this node, held; made by the first rank that needs them, where
    the node joined later or was busy when the others got theirs. The driver hears of it."""
    artifacts = [plan.model.artifact.model_dump(), plan.data.artifact.model_dump()]
    events = (os.environ.get(channel.ADDRESS, ""), os.environ.get(channel.SECRET, ""))
    held = hold(artifacts, plan.local_dir, events if all(events) else None)
    return Folders(held[0].folder, held[1].folder, scratch, tuple(held))


@contextmanager
def scratch_folder(plan: RunPlan, rank: int) -> Iterator[Path]:
    """A folder for this rank's temporary files on the node's own disk, gone afterwards.

    What a killed attempt of the same run left behind is removed, too. Code that comes with the
    model is imported from below it.
    """
    run = hashlib.sha256(plan.run_dir.encode()).hexdigest()[:16]
    runs = node.local_dir(plan.local_dir) / "scratch" / run
    runs.mkdir(parents=True, exist_ok=True)
    for other in runs.iterdir():
        if other.name != plan.attempt:
            storage.remove(other)
    folder = runs / plan.attempt / str(rank)
    folder.mkdir(parents=True, exist_ok=True)
    note_folder(folder)
    try:
        with private_modules(folder, wanted=plan.config.model.trust_remote_code):
            yield folder
    finally:
        storage.remove(folder)
        with suppress(OSError):  # not empty: another rank is not done yet
            folder.parent.rmdir()
            runs.rmdir()
