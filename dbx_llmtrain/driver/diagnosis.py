"""From the ranks' records to the one cause: which rank failed first, and what to do about it. Pure,
apart from reading the records and the versions of the driver's packages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from dbx_llmtrain.errors import Cause, TrainingFailed
from dbx_llmtrain.outcomes import RankRecord
from dbx_llmtrain.worker import failures, supervisor
from dbx_llmtrain.worker.failures import CONFIGURATION, Known
from dbx_llmtrain.worker.requests import Stopped, Wish

_STOPPED = f"{Stopped.__name__}: "
_TASK = re.compile(r"barrier task ResultTask\(\d+, (\d+)\) finished unsuccessfully")
"""The task that Spark has lost; its number is the rank's, with one GPU (or none) a task."""
_BY_SIGNAL = f"({Wish.SIGTERM})"
_SILENT = "the trainer "
"""How a supervisor's own words begin, where the process left none."""
_CANCELLED = re.compile(r"\bcancell?ed\b(?! because SparkContext was shut down)", re.IGNORECASE)
_OF_SPARK: tuple[Cause, ...] = ("import", "disk_full", "permission")
"""What Spark's words may tell of ranks that were never started."""
_PACKAGE = re.compile(r"No module named '([\w.]+)'|cannot import name '\w+' from '([\w.]+)'")
_SHOWN = 8


def read_records(run_dir: Path, attempt: str, world_size: int) -> dict[int, RankRecord]:
    """The records of this attempt that are there, by rank."""
    found = {}
    for rank in range(world_size):
        try:
            text = supervisor.record_path(run_dir, rank).read_text(encoding="utf-8")
            record = RankRecord.model_validate_json(text)
        except (OSError, ValueError):
            continue
        if record.attempt == attempt:
            found[rank] = record
    return found


def first_failure(records: Mapping[int, RankRecord]) -> RankRecord | None:
    """The record of the rank that failed first by itself.

    A rank that was stopped comes last, and one that lost its connection to another before that:
    when a process dies its peers notice within milliseconds, often before its own supervisor.
    """
    failed = [record for record in records.values() if record.status == "failed"]
    return min(failed, key=_order, default=None)


def _order(record: RankRecord) -> tuple[bool, bool, float]:
    return record.stopped, _follows(record), record.time


def _follows(record: RankRecord) -> bool:
    """Whether a rank's words are those of one that waited for another, or lost it."""
    known = known_failure(record)
    return known is not None and known.follows


def known_failure(record: RankRecord) -> Known | None:
    """The entry of the table that a rank's failure is; ``None`` for one that is not known."""
    if record.cause == CONFIGURATION:
        return failures.OTHERS[0]
    if record.error.startswith(_SILENT):
        return _of_ending(record)
    last = record.traceback.rstrip().rsplit("\n", 1)[-1]
    known = failures.known_text(record.error) or failures.known_text(last)
    if record.cause and (known is None or known.cause != record.cause):
        known = next((one for one in failures.KNOWN if one.cause == record.cause), None)
    return known


def _of_ending(record: RankRecord) -> Known | None:
    """Of a process that left no report: by what it printed last, and by what ended it."""
    number = -(record.exit_code or 0)
    endings = [one for one in failures.ENDINGS if number in one.signals]
    if number == 9:
        return next((one for one in endings if one.cause == record.cause), endings[0])
    said = failures.known_text(record.log_tail)
    return said or next(iter(endings), None)


def _cause(records: Mapping[int, RankRecord], first: RankRecord) -> Cause:
    """What the run failed of. It is the configuration only where no rank failed of anything else;
    those that were stopped, or lost the others, only followed."""
    if first.cause == CONFIGURATION:
        failed = [one for one in records.values() if one.status == "failed"]
        own = {one.cause for one in failed if not one.stopped and not _follows(one)}
        return "" if own != {CONFIGURATION} else CONFIGURATION
    known = known_failure(first)
    return known.cause if known else first.cause


def advice(record: RankRecord) -> str:
    """What to do about the failure of this rank; empty where the cause is not a known one."""
    known = known_failure(record)
    if known is None:
        return ""
    if known.cause == "import":
        return f"{known.advice}{_driver_has(record)}"
    return known.advice


def _driver_has(record: RankRecord) -> str:
    """Which version of the package in question the driver has."""
    found = _PACKAGE.search(record.error)
    if found is None:
        return ""
    package = (found[1] or found[2]).partition(".")[0]
    try:
        return f" ({record.node}; the driver has {package} {metadata.version(package)})"
    except (metadata.PackageNotFoundError, FileNotFoundError, TypeError):
        return f" ({record.node}; the driver has no package {package} either)"


def failure(
    records: Mapping[int, RankRecord],
    world_size: int,
    launcher_error: BaseException | None,
    run_dir: Path | None = None,
) -> TrainingFailed:
    """The exception for a launch that did not finish on every rank."""
    missing = [rank for rank in range(world_size) if rank not in records]
    first = first_failure(records)
    if first is not None and not missing and first.error.startswith(_STOPPED):
        return _asked(records, first, launcher_text(launcher_error) if launcher_error else "")
    if first is None or first.stopped or (_follows(first) and missing):
        return _lost(records, missing, first, launcher_error)
    unknown, where = _missing_text(missing), ""
    if first.node != first.host:
        where = f" (node {first.node})"
    parts = [f"{first.error}{where}", _absent(records, first), unknown]
    return TrainingFailed(
        "; ".join(filter(None, parts)),
        rank=first.rank,
        host=first.host,
        gpu=first.gpu,
        step=first.step,
        exit_code=first.exit_code,
        traceback=first.traceback,
        log_tail=first.log_tail,
        advice=advice(first),
        cause=_cause(records, first),
        log=str(supervisor.record_path(run_dir, first.rank).with_suffix(".log")) if run_dir else "",
    )


def _lost(
    records: Mapping[int, RankRecord],
    missing: list[int],
    first: RankRecord | None,
    error: BaseException | None,
) -> TrainingFailed:
    """Nobody failed by itself: a node or an executor was lost, or nothing was started."""
    said = launcher_text(error) if error else ""
    unknown = _missing_text(missing)
    peers = ""
    if first is not None:
        peers = f"rank {first.rank} on {first.node}, the first to end, says: {first.error}"
    elif not missing:
        unknown = "rank 0 finished without a result"
    parts = [unknown or "no rank failed by itself", peers, said]
    step = max((one.step for one in records.values() if one.step is not None), default=None)
    if _CANCELLED.search(said) and "ExecutorLostFailure" not in said:
        return TrainingFailed(
            f"the run ended after step {step or 0}, since its Spark job was cancelled",
            step=step,
            advice="run again with the same tracking.run_name: training goes on from its newest "
            "checkpoint",
            cause=TrainingFailed.STOPPED,
        )
    known = failures.WITHOUT_A_WORD
    by_spark = failures.known_text(said) if first is None else None
    if by_spark is not None and by_spark.cause in _OF_SPARK:
        known = by_spark
    elif failures.EXECUTOR_MEMORY.says(said):
        known = failures.EXECUTOR_MEMORY
    return TrainingFailed(
        "; ".join(filter(None, parts)),
        rank=missing[0] if missing else None,
        step=step,
        advice=known.advice,
        cause=known.cause,
    )


def _asked(records: Mapping[int, RankRecord], first: RankRecord, said: str) -> TrainingFailed:
    """No rank failed: they ended since they were asked to, and there is no result. A signal is what
    is sent to processes of a machine or an executor that is taken away: then it was lost, unless
    somebody has cancelled the Spark job."""
    told = f"the run {first.error.removeprefix(_STOPPED)}"
    again = "run again with the same tracking.run_name: training goes on from that checkpoint"
    signalled = _BY_SIGNAL in first.error
    lost = signalled and not _CANCELLED.search(said)
    task = _TASK.search(said) if lost else None
    gone = records.get(int(task[1])) if task else None
    if lost:
        again += "; cluster.max_restarts has it go on by itself"
    return TrainingFailed(
        "; ".join(filter(None, [told, said if signalled else ""])),
        rank=gone.rank if gone else None,
        host=gone.host if gone else None,
        step=first.step,
        exit_code=first.exit_code,
        advice=again,
        cause=failures.LOST if lost else TrainingFailed.STOPPED,
    )


def _absent(records: Mapping[int, RankRecord], first: RankRecord) -> str:
    """Where a rank waited in vain: who did not come, and how far those are."""
    if not _follows(first):
        return ""
    others = [one for one in records.values() if one.rank != first.rank and not _follows(one)]
    behind = [one for one in others if (one.step or 0) < (first.step or 0)]
    shown = sorted(behind or others, key=lambda one: (one.step or 0, one.rank))
    if not shown:
        return ""
    told = ", ".join(map(_place, shown[:_SHOWN]))
    told += f" ... ({len(shown)})" if len(shown) > _SHOWN else ""
    if behind or len(shown) == 1:
        return f"not there: {told}"
    return f"not heard of, there or not: {told}"


def _place(record: RankRecord) -> str:
    step = f"at step {record.step}" if record.step is not None else "before the first step"
    return f"rank {record.rank} on {record.node} ({', '.join(filter(None, [step, record.phase]))})"


def _missing_text(ranks: list[int]) -> str:
    if not ranks:
        return ""
    more = f" ... ({len(ranks)})" if len(ranks) > _SHOWN else ""
    shown = ", ".join(map(str, ranks[:_SHOWN])) + more
    return f"no record of how rank{'s' if len(ranks) > 1 else ''} {shown} ended"


def launcher_text(error: BaseException) -> str:
    """What Spark says, without the stacks of its own threads."""
    lines = [line.strip() for line in str(error).splitlines()]
    useful = [
        line for line in lines if line and not re.match(r"at |\.\.\. \d+ more|File \"|\^", line)
    ]
    text = " ".join(useful)[:1000]
    return f"Spark says: {type(error).__name__}: {text}"
