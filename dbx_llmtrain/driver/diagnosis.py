"""From the ranks' records to the one cause: which rank failed first, and what to do about it. Pure,
apart from reading the records."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from dbx_llmtrain.errors import TrainingFailed
from dbx_llmtrain.outcomes import RankRecord
from dbx_llmtrain.worker import supervisor
from dbx_llmtrain.worker.failures import CONFIGURATION
from dbx_llmtrain.worker.requests import Stopped

_FOLLOWERS = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket (closed|timeout)|recvvalue failed"
    r"|failed to recv|nccl communicator was aborted|remote process exited|disterror"
    r"|distbackenderror|distnetworkerror|peer closed|watchdog caught collective",
    re.IGNORECASE,
)
"""What a rank says when another one is gone. It is not the cause while there is another error."""

_STOPPED = f"{Stopped.__name__}: "

_ADVICE: tuple[tuple[str, str], ...] = (
    (
        r"OutOfMemoryError|CUDA out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        "the GPU's memory was full: lower train.micro_batch_size (the result stays the same) or "
        "data.max_length, or spread the model over more GPUs with parallel.kind=fsdp",
    ),
    (
        r"MemoryError|Cannot allocate memory|DefaultCPUAllocator",
        "the machine's memory was full: use machines with more memory or fewer ranks on each",
    ),
    (
        r"No space left on device|Errno 28|Disk quota exceeded",
        "a disk is full: free space on it, or set cluster.local_dir to a bigger one",
    ),
    (
        r"ModuleNotFoundError|No module named|cannot import name",
        "a package is missing or of another version on that node: install it as a library of the "
        "cluster or with %pip, which reaches every node, and run again",
    ),
    (
        r"401|403 (Client|Forbidden)|GatedRepo|Unauthorized|PERMISSION_DENIED|invalid.{0,20}token",
        "the credentials are missing or were refused: set HF_TOKEN or DATABRICKS_HOST and "
        "DATABRICKS_TOKEN in the driver's environment, from where the ranks get them",
    ),
    (
        r"Watchdog caught collective|[Tt]imed out waiting|NCCL timeout|wait timeout",
        "a rank did not come to a collective operation in time: compare the logs of all ranks in "
        "the run folder; the one that stopped earliest is the cause",
    ),
    (
        r"ncclInternalError|ncclSystemError|ncclUnhandledCudaError|NCCL error",
        "NCCL could not connect the GPUs: set NCCL_DEBUG=INFO in cluster.env and look at the log; "
        "NCCL_SOCKET_IFNAME chooses the network interface",
    ),
)
_SIGNAL_ADVICE = {
    9: "the process was killed from outside, most likely by the kernel because the machine's "
    "memory was full: use machines with more memory or fewer ranks on each, or lower "
    "data.max_length",
    7: "a memory-mapped file or the shared memory (/dev/shm) ran out of space",
    11: "native code crashed: the stack is at the end of the log; compare the versions of torch, "
    "CUDA and the driver that probe() shows",
}


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
    return record.stopped, bool(_FOLLOWERS.search(record.error)), record.time


def _cause(records: Mapping[int, RankRecord], first: RankRecord) -> str:
    """What the run failed of. It is the configuration only where no rank failed of anything else;
    those that were stopped, or lost the others, only followed."""
    own = {
        record.cause
        for record in records.values()
        if record.status == "failed" and not _order(record)[0] and not _order(record)[1]
    }
    return "" if first.cause == CONFIGURATION and own != {CONFIGURATION} else first.cause


def advice(record: RankRecord) -> str:
    """What to do about the failure of this rank; empty where the cause is not a known one."""
    if record.cause == CONFIGURATION:
        return "change the configuration as said above, and run again"
    if record.exit_code is not None and -record.exit_code in _SIGNAL_ADVICE:
        return _SIGNAL_ADVICE[-record.exit_code]
    last = record.traceback.rstrip().rsplit("\n", 1)[-1]
    for text in (f"{record.error}\n{last}", record.log_tail):
        for pattern, what in _ADVICE:
            if re.search(pattern, text):
                return what
    return ""


def failure(
    records: Mapping[int, RankRecord], world_size: int, launcher_error: BaseException | None
) -> TrainingFailed:
    """The exception for a launch that did not finish on every rank."""
    missing = [rank for rank in range(world_size) if rank not in records]
    unknown = _missing_text(missing)
    said = launcher_text(launcher_error) if launcher_error else ""
    first = first_failure(records)
    if first is not None and not missing and first.error.startswith(_STOPPED):
        return _asked(first)
    lonely = first is not None and bool(_FOLLOWERS.search(first.error)) and bool(missing)
    if first is None or first.stopped or lonely:
        # Nobody failed by itself: a node or an executor was lost, or nothing was started.
        peers = (
            f"rank {first.rank} on {first.node}, the first to end, says: {first.error}"
            if first
            else ""
        )
        if first is None and not missing:
            unknown = "rank 0 finished without a result"
        return TrainingFailed(
            "; ".join(filter(None, [unknown or "no rank failed by itself", peers, said])),
            rank=missing[0] if missing else None,
            step=first.step if first else None,
            advice="a machine or an executor was lost, or its processes were never started: look "
            "at Spark's log of the executors (out of memory, spot machine taken back, node "
            "removed), and run again; training goes on from the last checkpoint",
        )
    where = f" (node {first.node})" if first.node != first.host else ""
    return TrainingFailed(
        first.error + where + (f"; {unknown}" if unknown else ""),
        rank=first.rank,
        host=first.host,
        gpu=first.gpu,
        step=first.step,
        exit_code=first.exit_code,
        traceback=first.traceback,
        log_tail=first.log_tail,
        advice=advice(first),
        cause=_cause(records, first),
    )


def _asked(first: RankRecord) -> TrainingFailed:
    """Nothing failed: the ranks ended since they were asked to, and there is no result."""
    return TrainingFailed(
        f"the run {first.error.removeprefix(_STOPPED)}",
        step=first.step,
        exit_code=first.exit_code,
        advice="run again with the same tracking.run_name: training goes on from that checkpoint",
        cause=TrainingFailed.STOPPED,
    )


def _missing_text(ranks: list[int]) -> str:
    if not ranks:
        return ""
    shown = ", ".join(map(str, ranks[:8])) + (f" ... ({len(ranks)})" if len(ranks) > 8 else "")
    return f"no record of how rank{'s' if len(ranks) > 1 else ''} {shown} ended"


def launcher_text(error: BaseException) -> str:
    """What Spark says, without the stacks of its own threads."""
    lines = [line.strip() for line in str(error).splitlines()]
    useful = [
        line for line in lines if line and not re.match(r"at |\.\.\. \d+ more|File \"|\^", line)
    ]
    text = " ".join(useful)[:1000]
    return f"Spark says: {type(error).__name__}: {text}"
