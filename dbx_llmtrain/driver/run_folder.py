"""The run folder on shared storage: its name, what a run in it goes on from, its first files."""

from __future__ import annotations

import datetime
import logging
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from dbx_llmtrain import resuming, storage
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.records import RunPlan

logger = logging.getLogger(__name__)

CACHE = ".cache"
RESULT = "result.json"
PLAN = "plan.json"
TRIAL = "-trial"


@dataclass(frozen=True)
class RunFolder:
    """Where one run writes. ``attempt`` is new for every call, the rest may be found again.
    ``why`` says what the name is made of where nobody has given it."""

    name: str
    path: Path
    cache: Path
    attempt: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.name} in {self.path.parent}"


def name_folder(
    cfg: TrainConfig,
    parent: str,
    *,
    now: datetime.datetime,
    job: str | None = None,
    trial: bool = False,
) -> RunFolder:
    """Where a run writes below ``parent`` (``checkpoint.dir``); nothing is made yet.

    The name is ``tracking.run_name``, else that of the ``job``, else made of the time. A trial has
    a folder beside the run's.
    """
    attempt = uuid.uuid4().hex
    name, why = cfg.tracking.run_name, ""
    if name is None and job is not None:
        name, why = job, "of the job, its run and task: a retry or repair goes on in it"
    elif name is None:
        name = f"run-{now:%Y%m%d-%H%M%S}-{attempt[:4]}"
        why = f"of the time: give tracking.run_name={name} to go on in it"
    name += TRIAL if trial else ""
    shared = storage.local_path(parent).absolute()
    cache = storage.local_path(cfg.data.cache_dir).absolute() if cfg.data.cache_dir else None
    return RunFolder(name, shared / name, cache or shared / CACHE, attempt, why)


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

    A run that has begun goes on from its own newest one, also where ``checkpoint.resume`` names one
    of another run: that is where it began. Raises ``CheckpointError`` when a checkpoint that was
    named is not a complete one, and where the folder's own would be mixed up with those to come.
    """
    wanted = cfg.checkpoint.resume
    own = storage.latest_checkpoint(folder.path)
    if wanted == "never":
        old = own or next((path for path in [folder.path / RESULT] if path.exists()), None)
        if old is not None:
            raise CheckpointError(
                f"checkpoint.resume is never, but {old} is from an earlier run of this name: give "
                "another tracking.run_name, remove that folder, or set checkpoint.resume=auto"
            )
        return None
    _tell_torn(folder, own)
    if wanted == "auto":
        return str(own) if own else None
    named = named_checkpoint(wanted)
    if own is None:
        return str(named)
    if named.parent.resolve() != own.parent.resolve():
        logger.info("%s has gone on from %s before: it goes on from %s", folder.name, named, own)
        return str(own)
    if named.resolve() != own.resolve():
        raise CheckpointError(
            f"checkpoint.resume: {named} is not the newest checkpoint of this run, which is {own}, "
            "and those to come would be mixed up with the later ones: give another "
            "tracking.run_name, remove the later ones, or set checkpoint.resume=auto"
        )
    return str(own)


def _tell_torn(folder: RunFolder, own: Path | None) -> None:
    """Warn of checkpoints that would be newer and are not complete."""
    newest = storage.step_of(own) or 0 if own else -1
    torn = [path for path in storage.torn(folder.path) if (storage.step_of(path) or 0) > newest]
    if torn:
        logger.warning(
            "not complete, so that nothing goes on from it: %s; %s",
            ", ".join(map(str, torn)),
            f"the newest complete checkpoint is {own}" if own else "there is no complete one",
        )


def named_checkpoint(wanted: str) -> Path:
    """The folder of a checkpoint that was given by its path, or by that of its run: the newest.
    Raises ``CheckpointError`` where there is no complete one."""
    path = storage.local_path(wanted).absolute()
    if storage.read_manifest(path) is not None and storage.step_of(path) is not None:
        return path
    newest = storage.latest_checkpoint(path)
    if newest is not None:
        return newest
    raise CheckpointError(
        f"checkpoint.resume: {path} is not a complete checkpoint: expected a run folder, or in it "
        f"checkpoints/step-NNNNNNNN with a {storage.MANIFEST} and every file that it names"
    )


def check_resume(plan: RunPlan) -> RunPlan:
    """The plan, with what there is to say of the checkpoint that it goes on from: asked before
    anything is written.

    Raises ``CheckpointError`` that names what has changed since.
    """
    if plan.resume_from is None:
        return plan
    manifest = storage.read_manifest(Path(plan.resume_from)) or {}
    resuming.check_resume(plan, manifest, plan.resume_from)
    return _with_origin(plan, manifest, plan.resume_from)


def take_other(plan: RunPlan, folder: str) -> RunPlan:
    """The plan of a run that has gone on from another checkpoint than was planned, as that one was
    damaged; kept in the run folder."""
    manifest = storage.read_manifest(Path(folder)) or {}
    changed = _with_origin(plan.model_copy(update={"resume_from": folder}), manifest, folder)
    storage.write_text(Path(plan.run_dir) / PLAN, changed.model_dump_json(indent=1))
    return changed


def _with_origin(plan: RunPlan, manifest: Mapping[str, Any], folder: str) -> RunPlan:
    told = resuming.starting_point(plan, manifest, folder)
    others = (one for one in plan.decisions if one.name not in resuming.STARTING_POINT)
    return plan.model_copy(update={"decisions": (*others, *told)})


def free_space(folder: Path) -> int | None:
    """Bytes that the checkpoints of a run may take: what is free, and what its earlier ones have;
    ``None`` where the storage does not say."""
    free = storage.free_space(folder)
    if free is None:
        return None
    return free + sum(path.stat().st_size for path in storage.list_files(folder / "checkpoints"))


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


def clear(plan: RunPlan, *, keep: str) -> RunPlan:
    """The plan itself, when its folder is ready for it: the result of a run that goes on is taken
    away, since it has none until it ends again; of an earlier trial nothing stays but ``keep``."""
    folder = Path(plan.run_dir)
    for path in sorted(folder.iterdir()) if folder.exists() else ():
        if path.name != keep and (plan.trial or path.name == RESULT):
            storage.remove(path) if path.is_dir() else path.unlink()
    return plan


def write_start(plan: RunPlan) -> None:
    """Put ``config.yaml`` and ``plan.json`` into the run folder."""
    folder = Path(plan.run_dir)
    make_folder(folder / "logs")
    storage.write_text(folder / "config.yaml", plan.config.to_yaml())
    storage.write_text(folder / PLAN, plan.model_dump_json(indent=1))
