"""Which rank is the cause, and what is said about it."""

from __future__ import annotations

import signal
from importlib.metadata import version
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


@pytest.mark.parametrize(
    ("spark", "cause"),
    [
        (
            "Stage failed because barrier task ResultTask(36, 1) finished unsuccessfully. "
            "ExecutorLostFailure (executor 1 exited)",
            "lost",
        ),
        ("[SPARK_JOB_CANCELLED] Job 3 cancelled as part of cancellation of all jobs", "stopped"),
    ],
)
def test_ranks_that_saved_as_a_signal_told_them_to(spark: str, cause: str) -> None:
    """What sends it is an executor or a machine that goes away, or a job that was cancelled."""
    said = "Stopped: ended after step 24 as it was asked to (SIGTERM); the newest is /r/c"
    ranks = [record(rank, 1.0, stopped=True, exit_code=143, error=said, step=24) for rank in (0, 1)]
    error = diagnosis.failure(dict(enumerate(ranks)), 2, RuntimeError(spark))
    assert (error.cause, error.step) == (cause, 24)
    assert error.rank == (1 if cause == "lost" else None)
    assert error.message.startswith("the run ended after step 24 as it was asked to (SIGTERM); the")
    assert error.message.endswith(spark)
    assert ("cluster.max_restarts has it go on" in error.advice) is (cause == "lost")


def test_a_rank_that_lost_its_peer_is_not_the_cause() -> None:
    error = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]"
    killed = record(1, 1.1, **ended(9))
    assert cause(record(0, 1.0, error=error), killed) == 1


def test_finished_ranks_are_not_asked() -> None:
    assert cause(record(0, status="finished", exit_code=0)) is None


def ended(number: int, **changes: Any) -> dict[str, Any]:
    """Of a process that a signal ended, without a word of its own."""
    name = signal.Signals(number).name
    return {"exit_code": -number, "error": f"the trainer was ended by signal {number} ({name})"} | (
        changes
    )


@pytest.mark.parametrize(
    ("changes", "said", "cause"),
    [
        (ended(9, cause="host_memory"), "memory was full", "host_memory"),
        (ended(9, cause="lost"), "counted no kill for lack of memory", "lost"),
        (ended(9), "memory was full (most likely", "host_memory"),
        (ended(7), "/dev/shm", "crash"),
        (ended(11), "native code crashed", "crash"),
        (ended(4), "native code crashed", "crash"),
        (ended(6), "native code gave up", "crash"),
        (ended(8), "native code gave up", "crash"),
        (ended(6, log_tail="Watchdog caught collective"), "did not come", "network"),
        (ended(6, log_tail="what():  std::bad_alloc"), "memory was full", "out_of_memory"),
        ({"error": "torch.OutOfMemoryError: CUDA out of memory"}, "micro_batch", "out_of_memory"),
        ({"error": "OSError: [Errno 28] No space left"}, "cluster.local_dir", "disk_full"),
        ({"error": "GatedRepoError: 401 Client Error"}, "HF_TOKEN", "credentials"),
        ({"error": "PermissionError: [Errno 13]"}, "WRITE VOLUME", "permission"),
        ({"error": "IndexError: index out of range in self"}, "model.tokenizer", "model_mismatch"),
        ({"error": "DataError: torn"}, "data.cache_dir", "data"),
        ({"error": "CheckpointError: torn"}, "checkpoint.resume", "data"),
        ({"error": "DistBackendError: NCCL error: ncclInternalError"}, "cluster.debug", "network"),
        ({"error": "RuntimeError: DefaultCPUAllocator"}, "memory was full", "out_of_memory"),
        ({"error": "RuntimeError: no checkpoint", "cause": "disk_full"}, "a disk", "disk_full"),
        ({"error": "ValueError: bad row", "log_tail": "Connection reset by peer"}, "", ""),
        (
            {
                "error": "the trainer ended with exit code 1 and left no report",
                "log_tail": "No space left on device",
            },
            "a disk is full",
            "disk_full",
        ),
    ],
)
def test_advice_and_cause(changes: dict[str, Any], said: str, cause: str) -> None:
    one = record(0, **changes)
    found = diagnosis.advice(one)
    assert said in found
    assert bool(found) == bool(said)
    assert diagnosis.failure({0: one}, 1, None).cause == cause


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("ModuleNotFoundError: No module named 'click.no_such'", f"has click {version('click')})"),
        (
            "ImportError: cannot import name 'X' from 'click.core' (/x/click/core.py)",
            f"(node-1; the driver has click {version('click')})",
        ),
        ("ModuleNotFoundError: No module named 'no_such_package'", "no package no_such_package"),
    ],
)
def test_a_missing_package_is_named_with_the_version_of_the_driver(error: str, said: str) -> None:
    found = diagnosis.failure({1: record(1, error=error)}, 2, None)
    assert found.cause == "import"
    assert "install it" in found.advice
    assert said in found.advice


TIMED_OUT = "RuntimeError: Timed out waiting 3000ms for recv operation to complete"


def test_who_did_not_come_to_a_collective_operation() -> None:
    said = "ended because the run was stopped"
    waiting = record(0, 1.0, error=TIMED_OUT, step=8)
    stuck = record(1, 2.0, error=said, stopped=True, step=7, phase="saving a checkpoint")
    beside = record(2, 2.0, error=said, stopped=True, step=8)
    found = diagnosis.failure({0: waiting, 1: stuck, 2: beside}, 3, None)
    assert (found.rank, found.cause) == (0, "network")
    assert "not there: rank 1 on node-1 (at step 7, saving a checkpoint)" in found.message
    assert "rank 2" not in found.message
    also = record(2, 1.5, error="RuntimeError: Connection closed by peer", step=7)
    found = diagnosis.failure({0: waiting, 1: stuck, 2: also}, 3, None)
    assert "rank 2" not in found.message, "it waited too"
    alike = [record(rank, 2.0, error=said, stopped=True, step=8) for rank in range(1, 12)]
    text = diagnosis.failure({0: waiting, **{one.rank: one for one in alike}}, 12, None).message
    assert "not heard of, there or not: rank 1 on node-1 (at step 8), rank 2" in text
    assert text.endswith("rank 8 on node-8 (at step 8) ... (11)")
    early = record(1, 2.0, error=said, stopped=True, phase="loading the model")
    found = diagnosis.failure({0: record(0, 1.0, error=TIMED_OUT), 1: early}, 2, None)
    assert "not there: rank 1 on node-1 (before the first step, loading the model)" in str(found)


def test_a_time_out_is_not_the_cause_where_another_rank_has_an_error_of_its_own() -> None:
    found = diagnosis.failure({0: record(0, 1.0, error=TIMED_OUT), 1: record(1, 2.0)}, 2, None)
    assert (found.rank, found.message) == (1, "ValueError: bad row (node node-1)")


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("ExecutorLostFailure (executor 1 exited caused by one of the running tasks)", "lost"),
        ("ExecutorLostFailure (executor 1 exited ...) exit status: 137", "lost"),  # who knows why
        ("Container killed by YARN for exceeding physical memory limits", "host_memory"),
        ("PythonException: ModuleNotFoundError: No module named 'pandas'", "import"),
        ("PythonException: OSError: [Errno 28] No space left on device", "disk_full"),
        ("java.net.ConnectException: Connection refused", "lost"),
    ],
)
def test_spark_may_know_what_ranks_without_a_record_failed_of(said: str, cause: str) -> None:
    assert diagnosis.failure({}, 2, RuntimeError(said)).cause == cause


def test_a_cancelled_job_is_no_loss_where_its_ranks_had_no_time_to_save() -> None:
    records = {
        rank: record(rank, error="ended because the run was stopped", stopped=True, step=4)
        for rank in (0, 1)
    }
    said = RuntimeError("Job 7 cancelled as part of cancellation of all jobs")
    found = diagnosis.failure(records, 2, said)
    assert found.cause == "stopped"
    assert str(found).startswith("the run ended after step 4, since its Spark job was cancelled")
    lost = RuntimeError("ExecutorLostFailure (executor 1 exited); stage cancelled")
    assert diagnosis.failure(records, 2, lost).cause == "lost"


def test_the_log_is_named(tmp_path: Path) -> None:
    found = diagnosis.failure({1: record(1)}, 1, None, tmp_path)
    assert found.log == str(tmp_path / "logs" / "rank-00001.log")
    assert f"The whole log of the rank: {found.log}" in str(found)


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
