"""Where a rank's files lie on the node's own disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dbx_llmtrain import storage
from dbx_llmtrain.custom_code import private_modules
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import node


@dataclass(frozen=True)
class Folders:
    """On this node's own disk: the staged model and data, and this rank's temporary files."""

    model: Path
    data: Path
    scratch: Path


def stage(plan: RunPlan, scratch: Path) -> Folders:
    """Copies of model and data on this node, made by the first rank that needs them."""
    model, data = (
        node.stage(artifact.model_dump(), plan.local_dir)
        for artifact in (plan.model.artifact, plan.data.artifact)
    )
    return Folders(model, data, scratch)


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
    try:
        with private_modules(folder, wanted=plan.config.model.trust_remote_code):
            yield folder
    finally:
        storage.remove(folder)
        with suppress(OSError):  # not empty: another rank is not done yet
            folder.parent.rmdir()
            runs.rmdir()
