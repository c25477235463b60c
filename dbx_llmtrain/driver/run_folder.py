"""The run folder on shared storage: its name, its first files and its result."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from dbx_llmtrain import planning, storage
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.records import RankResult, RunPlan, TrainResult

CACHE = ".cache"


@dataclass(frozen=True)
class RunFolder:
    """Where one run writes. ``attempt`` is new for every call, the rest may be found again."""

    name: str
    path: Path
    cache: Path
    attempt: str


def name_folder(cfg: TrainConfig, parent: str, *, now: datetime.datetime) -> RunFolder:
    """Where a run writes below ``parent`` (``checkpoint.dir``); nothing is made yet."""
    attempt = uuid.uuid4().hex
    name = cfg.tracking.run_name or f"run-{now:%Y%m%d-%H%M%S}-{attempt[:4]}"
    shared = storage.local_path(parent).absolute()
    cache = storage.local_path(cfg.data.cache_dir).absolute() if cfg.data.cache_dir else None
    return RunFolder(name, shared / name, cache or shared / CACHE, attempt)


def make_cache(cfg: TrainConfig, folder: RunFolder) -> Path:
    """Make the folder of prepared data. Raises ``CheckpointError`` that names its field."""
    return make_folder(folder.cache, _cache_field(cfg))


def _cache_field(cfg: TrainConfig) -> str:
    return "data.cache_dir" if cfg.data.cache_dir else "checkpoint.dir"


def make_folder(path: Path, field: str = "checkpoint.dir") -> Path:
    """Make a folder on shared storage. Raises ``CheckpointError`` when that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_made(path, field, error) from error
    return path


def _not_made(path: Path, field: str, why: object) -> CheckpointError:
    return CheckpointError(
        f"{field}: {path} cannot be made ({why}): give a folder that this user may write, such as "
        "one below /Volumes/catalog/schema/volume"
    )


def check_places(cfg: TrainConfig) -> None:
    """Raise ``CheckpointError`` for a folder that cannot be made since a file is in its way, and
    for a checkpoint that is none: asked before anything is started, nothing is made."""
    given = {"checkpoint.dir": cfg.checkpoint.dir, "data.cache_dir": cfg.data.cache_dir}
    for field, value in given.items():
        path = storage.local_path(value).absolute() if value else None
        above = next((p for p in (path, *path.parents) if p.exists()), None) if path else None
        if path and above and not above.is_dir():
            raise _not_made(path, field, f"{above} is a file")
    if cfg.checkpoint.resume not in ("auto", "never"):
        named_checkpoint(cfg.checkpoint.resume)


@contextmanager
def tidied(cache: Path) -> Iterator[None]:
    """When the block fails, a ``.cache`` (ours, in ``checkpoint.dir``) goes if nothing is in it."""
    try:
        yield
    except BaseException:
        if cache.name == CACHE:
            storage.remove_empty(cache)
        raise


def resume_point(cfg: TrainConfig, folder: RunFolder) -> str | None:
    """The checkpoint to go on from, by ``checkpoint.resume``; ``None`` for a fresh start.

    Raises ``CheckpointError`` when a checkpoint that was named is not a complete one, and for a
    fresh start in a folder that has checkpoints: a later resume would take the wrong ones.
    """
    wanted = cfg.checkpoint.resume
    if wanted == "never":
        old = storage.latest_checkpoint(folder.path)
        if old is not None:
            raise CheckpointError(
                f"checkpoint.resume is never, but {old} is from an earlier run of this name: give "
                "another tracking.run_name, remove that folder, or set checkpoint.resume=auto"
            )
        return None
    if wanted == "auto":
        found = storage.latest_checkpoint(folder.path)
        return str(found) if found else None
    return str(named_checkpoint(wanted))


def named_checkpoint(wanted: str) -> Path:
    """The folder of a checkpoint that was given by its path. Raises ``CheckpointError`` where it is
    not a complete one."""
    path = storage.local_path(wanted).absolute()
    if storage.read_manifest(path) is None:
        raise CheckpointError(
            f"checkpoint.resume: {path} is not a complete checkpoint: expected a folder "
            f"step-NNNNNNNN with a {storage.MANIFEST} and every file that it names"
        )
    return path


def check_resume(plan: RunPlan) -> RunPlan:
    """The plan itself, if it can go on from its checkpoint: asked before anything is written.

    Raises ``CheckpointError`` that names what has changed since.
    """
    if plan.resume_from is not None:
        manifest = storage.read_manifest(Path(plan.resume_from)) or {}
        planning.check_resume(plan, manifest, plan.resume_from)
    return plan


@contextmanager
def told_when_stopped(plan: RunPlan) -> Iterator[None]:
    """Say on standard error what a run that is stopped from outside has left, and how to go on."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        newest = storage.latest_checkpoint(Path(plan.run_dir))
        left = (
            f"the newest checkpoint is {newest}: the same run goes on from there with "
            f"tracking.run_name={plan.run_name}"
            if newest
            else "no checkpoint has been written"
        )
        click.echo(f"{plan.run_name} has been stopped; {left}", err=True)
        raise


def write_start(plan: RunPlan) -> None:
    """Put ``config.yaml`` and ``plan.json`` into the run folder."""
    folder = Path(plan.run_dir)
    make_folder(folder / "logs")
    storage.write_text(folder / "config.yaml", plan.config.to_yaml())
    storage.write_text(folder / "plan.json", plan.model_dump_json(indent=1))


def write_result(plan: RunPlan, outcome: RankResult) -> TrainResult:
    """Make the user's result of rank 0's, and keep it as ``result.json``."""
    result = TrainResult(
        run_id=plan.tracking.run_id if plan.tracking else None,
        run_dir=plan.run_dir,
        run_name=plan.run_name,
        checkpoint=outcome.checkpoint,
        model_path=outcome.model_path,
        steps=outcome.steps,
        audit=plan.data.audit,
        metrics=outcome.metrics,
    )
    storage.write_text(Path(plan.run_dir) / "result.json", result.model_dump_json(indent=1))
    return result
