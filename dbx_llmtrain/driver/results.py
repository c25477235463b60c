"""The result of a run, in its folder: written, found again, and told where there is none."""

from __future__ import annotations

import logging
from pathlib import Path

import click

from dbx_llmtrain import resuming, storage
from dbx_llmtrain.driver import lease, run_folder
from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.outcomes import RankResult
from dbx_llmtrain.records import RunPlan, TrackingPlan, TrainResult

logger = logging.getLogger(__name__)


def write(plan: RunPlan, outcome: RankResult, restarts: tuple[str, ...] = ()) -> TrainResult:
    """Make the user's result of rank 0's, and keep it as ``result.json``. ``restarts``: the
    attempts that were given up before, in words."""
    result = TrainResult(
        run_id=plan.tracking.run_id if plan.tracking else None,
        run_dir=plan.run_dir,
        run_name=plan.run_name,
        checkpoint=outcome.checkpoint,
        model_path=outcome.model_path,
        best_checkpoint=outcome.best_checkpoint,
        best_model_path=outcome.best_model_path,
        steps=outcome.steps,
        stop_reason=outcome.stop_reason,
        restarts=restarts,
        audit=plan.data.audit,
        metrics=outcome.metrics,
    )
    path = Path(plan.run_dir) / run_folder.RESULT
    storage.write_text(path, result.model_dump_json(indent=1))
    return result


def read(run_dir: Path) -> TrainResult | None:
    """The result of a finished run, if its folder has one that can be read."""
    try:
        text = (run_dir / run_folder.RESULT).read_text(encoding="utf-8")
        return TrainResult.model_validate_json(text)
    except (OSError, ValueError):
        return None


def read_plan(run_dir: Path) -> RunPlan | None:
    """The plan of the last attempt at a run, if its folder has one that can be read."""
    try:
        text = (run_dir / run_folder.PLAN).read_text(encoding="utf-8")
        return RunPlan.model_validate_json(text)
    except (OSError, ValueError):
        return None


def earlier_tracking(held: lease.Held, plan: RunPlan) -> TrackingPlan | None:
    """The MLflow run of this folder, if it had one before this call. A trial begins a new one."""
    if plan.trial:
        return None
    if held.before is not None and held.before.tracking is not None:
        return held.before.tracking
    before = read_plan(Path(plan.run_dir))
    return before.tracking if before else None


def finished(plan: RunPlan) -> TrainResult | None:
    """The result of a run that is finished and of which nothing more is asked, which is told;
    ``None`` where there is something to train.

    A run that ended before its last step (``train.max_time``, early stopping, a request) counts as
    finished until it has more steps, time or patience than it had. Raises ``CheckpointError`` where
    the finished run is another one.
    """
    run_dir = Path(plan.run_dir)
    result, before = read(run_dir), read_plan(run_dir)
    if plan.trial or result is None or before is None:
        return None
    changed = resuming.differences(resuming.identity(before), resuming.identity(plan))
    if changed:
        raise CheckpointError(
            f"{run_dir} has another run, which is finished: {'; '.join(changed)}. Give this one "
            "another tracking.run_name, or undo the change"
        )
    early = result.steps < plan.total_steps
    if early and (not result.stop_reason or resuming.asks_more(before, plan)):
        return None
    why = f" (it ended early: {result.stop_reason})" if early else ""
    told = [
        f"{plan.run_name} is finished{why}: this is its stored result, nothing is trained. To go "
        "on, raise train.epochs or train.max_steps"
        + (", or what ended it" if early else "")
        + "; to train again, give another tracking.run_name."
    ]
    if settings := resuming.changed_settings(before, plan):
        told.append(f"Not used, since they were changed afterwards: {'; '.join(settings)}.")
    judged = {"state": {"held_out": resuming.held_out(before)}}
    if rows := resuming.judged_by_other_rows(plan, judged):
        told.append(f"Its metrics are of the held-out rows of then ({rows}); llm.evaluate(cfg, "
                    "result) has those of now.")  # fmt: skip
    click.echo(" ".join(told))
    _warn_of_torn(result)
    return result


def load(run_dir: str | TrainResult) -> TrainResult:
    """The result of a finished run, from its folder (``/Volumes/...``, ``dbfs:/...``).

    Its paths are those of the folder as it is named here. Raises ``CheckpointError`` for a run that
    is not finished, with what is known of it.
    """
    given = run_dir.run_dir if isinstance(run_dir, TrainResult) else str(run_dir)
    folder = storage.local_path(given).absolute()
    found = read(folder)
    if found is not None:
        moved = _moved(found, folder)
        _warn_of_torn(moved)
        return moved
    raise CheckpointError(state(folder))


def _warn_of_torn(result: TrainResult) -> None:
    """Say where a checkpoint of a result is not what it was."""
    for path in dict.fromkeys((result.checkpoint, result.best_checkpoint)):
        if path is not None and storage.read_manifest(storage.local_path(path)) is None:
            newest = storage.latest_checkpoint(Path(result.run_dir))
            logger.warning(
                "%s of this result is no longer a complete checkpoint; %s",
                path,
                f"the newest one is {newest}" if newest else "the run has none",
            )


def _moved(result: TrainResult, folder: Path) -> TrainResult:
    """A result whose folder has another name now, or is seen by another one here."""
    before = result.run_dir
    if before == str(folder):
        return result

    def there(path: str | None) -> str | None:
        inside = path is not None and Path(path).is_relative_to(before)
        return str(folder / Path(path).relative_to(before)) if path and inside else path

    names = ("checkpoint", "model_path", "best_checkpoint", "best_model_path")
    paths = {name: there(getattr(result, name)) for name in names}
    return result.model_copy(update={"run_dir": str(folder), **paths})


def state(folder: Path) -> str:
    """What a folder without a result is."""
    plan, held = read_plan(folder), lease.read(folder)
    if plan is None and held is None:
        what = "has no plan.json" if folder.is_dir() else "there is no such folder"
        return (
            f"{folder} is not the folder of a run: {what}. Expected checkpoint.dir/<run name>, "
            "which train prints"
        )
    name = plan.run_name if plan else folder.name
    newest = storage.latest_checkpoint(folder)
    left = f"its newest checkpoint is {newest}" if newest else "it has no complete checkpoint"
    go_on = f"the same call of train with tracking.run_name={name} goes on"
    if held is not None and lease.is_alive(held):
        return f"{folder} is not finished: it is running ({held}); {left}"
    ended = "its driver is gone without a word"
    if held is not None and held.status != "running":
        ended = f"it was {held.status} on {lease.told_time(held.renewed)}"
        ended += f" ({held.error})" if held.error else ""
    return f"{folder} is not finished: {ended}; {left}; {go_on}"
