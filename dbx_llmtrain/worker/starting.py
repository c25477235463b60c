"""Where a run begins: at a checkpoint, or at the beginning."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dbx_llmtrain import resuming, storage
from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.worker import checkpoint
from dbx_llmtrain.worker.jobs import Job, Progress
from dbx_llmtrain.worker.world import World

_DAMAGED = "manifest.damaged.json"
"""What becomes of the manifest of a checkpoint that is found to be damaged: it counts no more."""


def resume(job: Job) -> tuple[Progress, tuple[str, ...]]:
    """Where the plan's checkpoint left off, or the beginning, and what the user should know of it;
    random states are set either way.

    Where the newest checkpoint of the run is damaged, the one before takes its place; one that was
    named by its path is never replaced. Raises ``CheckpointError`` for a checkpoint that does not
    fit this run.
    """
    plan, rank = job.plan, job.world.rank
    if plan.resume_from is None:
        seed(plan.config.train.seed, rank, 0)
        return Progress(), ()
    folder, notes = storage.local_path(plan.resume_from), []
    while True:
        # A checkpoint of another number of ranks has no random states for these.
        seed(plan.config.train.seed, rank, 1)
        try:
            progress, changed = _load(job, folder)
            break
        except CheckpointError as error:
            older = _older(job, folder) if error.damaged else None
            if older is None:
                raise
            notes.append(f"Warning: {error}; the run goes on from {older}")
            folder = older
    if progress.step > plan.total_steps:
        raise CheckpointError(
            f"{folder} is after step {progress.step}, but the run ends with step "
            f"{plan.total_steps}: raise train.max_steps or train.epochs"
        )
    if changed:
        notes.append(resuming.other_rows(changed, progress.step))
    return progress, tuple(notes)


def _load(job: Job, folder: Path) -> tuple[Progress, str]:
    """What a checkpoint has, without what is another run's; and how the rows by which this run is
    judged have changed since."""
    state = checkpoint.load(
        folder,
        model=job.model,
        optimizer=job.optimizer,
        world=job.world,
        identity=resuming.identity(job.plan),
    )
    changed = resuming.judged_by_other_rows(job.plan, {"state": state})
    state.pop("held_out", None)
    job.strategy.load_state(state.pop("strategy", {}))
    progress = Progress.from_state(state, folder)
    if foreign := resuming.is_of_another_run(job.plan, folder):
        progress.leave_times()
    if foreign or changed:
        progress.judge_anew()
    return progress, "" if foreign else changed


def _older(job: Job, folder: Path) -> Path | None:
    """The newest complete checkpoint before a damaged one, as rank 0 sees it; the damaged one does
    not count any more. ``None`` where another one must not be taken, or there is none."""

    named = storage.local_path(job.plan.config.checkpoint.resume)
    if folder.parent != place(job, 0).parent or named.resolve() == folder.resolve():
        return None

    def look() -> Path | None:
        found = storage.checkpoints(storage.local_path(job.plan.run_dir))
        step = storage.step_of(folder) or 0
        older = next((path for path in found if (storage.step_of(path) or 0) < step), None)
        manifest = folder / storage.MANIFEST
        if older is not None and manifest.exists():
            manifest.replace(folder / _DAMAGED)
        return older

    return by_rank_0(job.world, look)


def by_rank_0(world: World, action: Callable[[], Path | None]) -> Path | None:
    """What rank 0 makes of shared storage, on every rank."""
    what = "shared storage cannot be read"
    found = checkpoint.together(action if world.rank == 0 else _nothing, world, what)
    return found[0]


def _nothing() -> None:
    """What the other ranks do meanwhile."""


def seed(seed: int, rank: int, start: int) -> None:
    """Seed this rank's generators, differently on every rank: ranks must not drop out alike."""
    import numpy as np
    import torch

    drawn = int(np.random.SeedSequence([seed, rank, start]).generate_state(1)[0])
    random.seed(drawn)
    np.random.seed(drawn)
    torch.manual_seed(drawn)


def note_metrics(job: Job, progress: Progress) -> None:
    """Put the metrics of an evaluation that was made up for into the checkpoint that the run has
    gone on from: it is judged by them. Nothing is done to one of another run."""
    folder = place(job, progress.step)
    own = job.world.rank == 0 and progress.now.saved == folder
    manifest: dict[str, Any] | None = storage.read_manifest(folder) if own else None
    if manifest is None:
        return
    judged_by = {"held_out": resuming.held_out(job.plan)}
    changed = {"metrics": progress.metrics, "state": manifest["state"] | judged_by}
    try:
        storage.write_manifest(folder, manifest | changed)
    except OSError as error:
        job.reporter.warn(f"the metrics of {folder} cannot be written: {error}")


def place(job: Job, step: int) -> Path:
    """Where the checkpoint of a step of this run lies."""
    return storage.checkpoint_folder(storage.local_path(job.plan.run_dir), step)
