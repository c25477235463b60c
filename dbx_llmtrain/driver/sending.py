"""What a run has left in its folder, sent to MLflow later: the server was away, or the driver was
killed before it had sent everything."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from dbx_llmtrain import storage, tracking
from dbx_llmtrain.credentials import without_credentials
from dbx_llmtrain.driver import evaluating, lease, results, run_folder, running
from dbx_llmtrain.errors import CheckpointError, RegistryError
from dbx_llmtrain.events import EVENTS_FILE, Event, read_events
from dbx_llmtrain.outcomes import Logged
from dbx_llmtrain.records import RunPlan, TrackingPlan, TrainResult
from dbx_llmtrain.reports import Record
from dbx_llmtrain.tracking_guard import told
from dbx_llmtrain.tracking_run import PATIENCE_S, DriverRun, Status

_PATIENCE_S = 60.0
"""Without one value more that has been sent."""


@dataclass(frozen=True)
class _Left:
    """What the folder of a run has: ``result`` of a training run that is finished, ``evaluation``
    of an evaluation as it is stored."""

    folder: Path
    plan: RunPlan
    held: lease.Lease | None
    result: TrainResult | None
    evaluation: dict[str, object] | None
    first: Event | None
    last: Event | None


@dataclass(frozen=True)
class _Ending:
    """How a run ended, and when, in seconds since the epoch."""

    status: Status
    error: str = ""
    at: float | None = None


def log(run_dir: str | TrainResult, *, patience_s: float = _PATIENCE_S) -> Logged:
    """See ``api_results.log``. ``patience_s``: without a value that is sent."""
    left = _look(run_dir)
    ending = _ending(left)
    earlier = (left.held.tracking if left.held else None) or left.plan.tracking
    uri = tracking.chosen_store(left.folder.parent, earlier)
    try:
        run = _open(left, earlier, uri)
    except Exception as error:
        raise RegistryError(
            f"{left.folder} cannot be logged to MLflow at {without_credentials(uri)}: "
            f"{told(error)}. Nothing is lost: all of it stays in {EVENTS_FILE}; call this again "
            "when the server answers, or with another store in MLFLOW_TRACKING_URI"
        ) from error
    left = _keep(left, run)
    _send(left, run)
    whole, sent = run.wait(patience_s), -1
    while not whole and run.sent() > sent:
        sent = run.sent()
        whole = run.wait(patience_s)
    patience_s = min(patience_s, PATIENCE_S)
    ended = run.finish(ending.status, ending.error, at=ending.at, patience_s=patience_s)
    if not (whole and ended):
        raise RegistryError(
            f"{left.folder} was not logged whole to MLflow at {without_credentials(uri)}: "
            f"{run.sent():,} values were sent, and the warning before says what was not. Call this "
            "again: it sends what is missing"
        )
    found = run.plan()
    assert found is not None
    return Logged(
        run_dir=str(left.folder),
        run_id=found.run_id,
        tracking_uri=found.uri,
        status=ending.status,
        values=run.sent(),
        created=earlier is None or earlier.run_id != found.run_id,
        page=tracking.how_to_open(found),
    )


def _look(run_dir: str | TrainResult) -> _Left:
    """Raises ``CheckpointError`` for a folder that is not of a run, or of one that goes on."""
    given = run_dir.run_dir if isinstance(run_dir, TrainResult) else str(run_dir)
    folder = storage.local_path(given).absolute()
    plan, held = results.read_plan(folder), lease.read(folder)
    if held is not None and lease.is_alive(held):
        raise CheckpointError(
            f"{folder} is running ({held}): it logs to MLflow by itself, and what it cannot send "
            "can be sent when it has ended: call this again then"
        )
    if plan is None:
        raise CheckpointError(results.state(folder))
    evaluation = None
    if plan.purpose == "evaluate":
        evaluation = _read_evaluation(folder)
    first = last = None
    for last in read_events(folder / EVENTS_FILE):
        first = first or last
    return _Left(folder, plan, held, results.read(folder), evaluation, first, last)


def _read_evaluation(folder: Path) -> dict[str, object]:
    """Raises ``CheckpointError`` where it is not there. (An evaluation has no lease by which one
    could tell whether it goes on.)"""
    try:
        found = json.loads((folder / evaluating.RESULT).read_text(encoding="utf-8"))
        return dict(found)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} is of an evaluation that has not finished: there is no {evaluating.RESULT}"
        ) from error


def _ending(left: _Left) -> _Ending:
    """By its result, else by its lease, else (of ranks that were started by hand) by its events."""
    held, last = left.held, left.last
    at = last.time if last else None
    if left.result is not None or left.evaluation is not None:
        return _Ending("FINISHED", at=at)
    if held is None:
        if last is not None and last.kind == "finished":
            return _Ending("FINISHED", at=at)
        return _Ending("FAILED", "the run has ended without a result", at)
    if held.status == "running":
        return _Ending("FAILED", lease.gone(held), at or held.renewed)
    status: dict[str, Status] = {"finished": "FINISHED", "stopped": "KILLED"}
    return _Ending(status.get(held.status, "FAILED"), held.error, held.renewed)


def _open(left: _Left, earlier: TrackingPlan | None, uri: str) -> DriverRun:
    plan = left.plan
    tags = {"dbx_llmtrain.trial": "true"} if plan.trial else {}
    return tracking.start_run(
        plan.config,
        left.folder.name,
        left.folder.parent,
        earlier=earlier,
        tags=tags,
        began=left.first.time if left.first else plan.began,
        uri=uri,
    )


def _keep(left: _Left, run: DriverRun) -> _Left:
    """Write into the folder which MLflow run is its own, before anything is sent: a call that is
    interrupted must not begin another one the next time."""
    found = run.plan()
    assert found is not None
    now = replace(left, plan=run.attach(left.plan))
    if now.plan != left.plan:
        _write(left.folder / run_folder.PLAN, now.plan)
    if left.held is not None and left.held.tracking != found:
        _write(left.folder / lease.LEASE, left.held.model_copy(update={"tracking": found}))
    if left.result is not None and left.result.run_id != found.run_id:
        now = replace(now, result=left.result.model_copy(update={"run_id": found.run_id}))
        _write(left.folder / run_folder.RESULT, now.result)
    if left.evaluation is not None and left.evaluation.get("run_id") != found.run_id:
        changed = left.evaluation | {"run_id": found.run_id}
        storage.write_text(left.folder / evaluating.RESULT, json.dumps(changed, indent=1))
    return now


def _write(path: Path, record: Record | None) -> None:
    assert record is not None
    storage.write_text(path, record.model_dump_json(indent=1))


def _send(left: _Left, run: DriverRun) -> None:
    """All that ``train`` or ``evaluate`` would have sent."""
    run.log_start(left.plan)
    running.tell_origin(left.plan, run)
    if left.evaluation is not None:
        for key, value in evaluating.tags_of(str(left.evaluation.get("model"))).items():
            run.set_tag(key, value)
    run.log_events(left.folder / EVENTS_FILE)
    if left.result is not None:
        if left.result.restarts:
            run.set_tag(running.RESTARTS, "\n".join(left.result.restarts))
        run.log_result(left.result, at=left.last.time if left.last else None)
