"""Which rank is the cause, and what is said about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain.driver import diagnosis
from dbx_llmtrain.errors import TrainingFailed, was_stopped
from dbx_llmtrain.outcomes import RankRecord
from dbx_llmtrain.worker import supervisor


def record(rank: int, time: float = 0.0, **changes: Any) -> RankRecord:
    values: dict[str, Any] = {
        "attempt": "a", "rank": rank, "node": f"node-{rank}", "host": f"host-{rank}",
        "status": "failed", "time": time, "exit_code": 1, "error": "ValueError: bad row",
    }  # fmt: skip
    return RankRecord(**values | changes)


def cause(*records: RankRecord) -> int | None:
    first = diagnosis.first_failure({one.rank: one for one in records})
    return first.rank if first else None


def test_the_first_failure_by_time_is_the_cause() -> None:
    assert cause(record(0, 2.0), record(1, 1.0), record(2, 3.0)) == 1


def test_a_rank_that_was_stopped_is_not_the_cause() -> None:
    stopped = record(0, 1.0, stopped=True, exit_code=-15, error="ended because ...")
    assert cause(stopped, record(1, 2.0)) == 1


def test_a_run_that_was_asked_to_end_has_not_failed() -> None:
    said = "Stopped: ended after step 24 as it was asked to (CANCEL); the newest checkpoint is /r/c"
    ranks = [record(rank, 1.0, stopped=True, exit_code=1, error=said, step=24) for rank in (0, 1)]
    error = diagnosis.failure(dict(enumerate(ranks)), 2, RuntimeError("barrier stage failed"))
    assert error.cause == TrainingFailed.STOPPED
    assert error.step == 24
    assert was_stopped(error)
    assert not was_stopped(TrainingFailed("a rank failed"))
    assert str(error) == (
        "the run ended after step 24 as it was asked to (CANCEL); the newest checkpoint is /r/c\n\n"
        "What to do: run again with the same tracking.run_name: training goes on from that "
        "checkpoint"
    )
    lost = diagnosis.failure({0: ranks[0]}, 2, None)
    assert "a machine or an executor was lost" in str(lost), "the other rank has left no record"


def test_a_rank_that_lost_its_peer_is_not_the_cause() -> None:
    error = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]"
    killed = record(1, 1.1, exit_code=-9, error="the trainer was ended by signal 9 (SIGKILL)")
    assert cause(record(0, 1.0, error=error), killed) == 1


def test_finished_ranks_are_not_asked() -> None:
    assert cause(record(0, status="finished", exit_code=0)) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"exit_code": -9}, "memory was full"),
        ({"exit_code": -11}, "native code crashed"),
        ({"exit_code": -7}, "/dev/shm"),
        ({"error": "torch.OutOfMemoryError: CUDA out of memory. Tried"}, "train.micro_batch_size"),
        ({"error": "OSError: [Errno 28] No space left on device"}, "cluster.local_dir"),
        ({"error": "ModuleNotFoundError: No module named 'peft'"}, "install it"),
        ({"error": "GatedRepoError: 401 Client Error"}, "HF_TOKEN"),
        ({"error": "DistBackendError: NCCL error: ncclInternalError"}, "NCCL_DEBUG=INFO"),
        ({"error": "RuntimeError: x", "log_tail": "Watchdog caught collective"}, "did not come"),
        ({"error": "RuntimeError: DefaultCPUAllocator: can't allocate"}, "memory was full"),
        ({"error": "ValueError: bad row"}, ""),
    ],
)
def test_advice(changes: dict[str, Any], said: str) -> None:
    found = diagnosis.advice(record(1, **changes))
    assert said in found
    assert bool(found) == bool(said)


def test_the_exception_has_everything_of_its_rank() -> None:
    first = record(
        1, gpu="GPU-7", step=12, traceback="Traceback ...\nValueError: bad row", log_tail="x"
    )
    error = diagnosis.failure({0: record(0, 5.0), 1: first}, 4, None)
    assert (error.rank, error.host, error.gpu, error.step) == (1, "host-1", "GPU-7", 12)
    assert "node-1" in str(error)
    assert "no record of how ranks 2, 3 ended" in str(error)


def test_a_rank_without_a_record_is_the_cause_of_lost_connections() -> None:
    lost = record(0, error="RuntimeError: Connection reset by peer")
    error = diagnosis.failure({0: lost}, 2, RuntimeError("ExecutorLostFailure (executor 1)"))
    assert error.rank == 1
    assert "no record of how rank 1 ended" in str(error)
    assert "ExecutorLostFailure (executor 1)" in str(error)
    assert "Connection reset by peer" in str(error)


def test_without_records_spark_is_asked() -> None:
    java = "An error occurred.\n: Job aborted\n\tat org.apache.Some(x.scala:1)\n... 3 more\nReason"
    error = diagnosis.failure({}, 2, RuntimeError(java))
    assert "no record of how ranks 0, 1 ended" in str(error)
    assert "Job aborted Reason" in str(error)
    assert "x.scala" not in str(error)


def test_many_missing_ranks_are_counted() -> None:
    assert "0, 1, 2, 3, 4, 5, 6, 7 ... (12)" in str(diagnosis.failure({}, 12, None))


def test_finished_without_a_result() -> None:
    done = {0: record(0, status="finished", exit_code=0)}
    assert "rank 0 finished without a result" in str(diagnosis.failure(done, 1, None))


def test_records_of_another_attempt_or_half_a_record_do_not_count(tmp_path: Path) -> None:
    for rank, text in enumerate(
        [record(0).model_dump_json(), record(1, attempt="b").model_dump_json(), '{"attempt": "a"']
    ):
        path = supervisor.record_path(tmp_path, rank)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert list(diagnosis.read_records(tmp_path, "a", 4)) == [0]


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        ({"cause": "configuration"}, "configuration"),
        ({"stopped": True, "error": "ended because the run was stopped"}, "configuration"),
        ({"error": "RuntimeError: Connection closed by peer [127.0.0.1]"}, "configuration"),
        ({"error": "ValueError: bad row"}, ""),
    ],
)
def test_the_configuration_is_the_cause_where_no_rank_failed_of_anything_else(
    other: dict[str, Any], cause: str
) -> None:
    error = "ConfigError: 1 problem in the configuration:\n  - model.lora: no layer"
    report: dict[str, Any] = {"error": error, "traceback": "Traceback ...", "log_tail": "lines"}
    records = {0: record(0, cause="configuration", **report), 1: record(1, 1.0, **other)}
    failed = diagnosis.failure(records, 2, None)
    assert failed.cause == cause
    assert failed.traceback == "Traceback ..."
    assert ("Traceback" in str(failed)) is not bool(cause)
    assert str(failed).endswith("What to do: change the configuration as said above, and run again")
