"""Launches with real ranks, in both modes: success, every way to fail, and what is left."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain.driver import launch, supervise
from dbx_llmtrain.errors import TrainingFailed
from dbx_llmtrain.outcomes import RankResult
from dbx_llmtrain.records import RunPlan
from tests.spark.helpers import MARK, make_plan, processes_with, trainers

MODES = pytest.mark.parametrize("local_mode", [True, False], ids=["driver", "executors"])
# The one that the other says least about is in every run of the tests.
DRIVER = pytest.mark.parametrize(
    "local_mode",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["driver", "executors"],
)
EXECUTORS = pytest.mark.parametrize(
    "local_mode",
    [pytest.param(True, marks=pytest.mark.slow), False],
    ids=["driver", "executors"],
)
SECRETS = {"TEST_SECRET": "s3cret-value"}


def start(spark: Any, plan: RunPlan, **options: Any) -> RankResult:
    return launch.launch(spark, plan, SECRETS, module="rank_program", **options)


def failure(spark: Any, plan: RunPlan, within_s: float) -> TrainingFailed:
    started = time.monotonic()
    with pytest.raises(TrainingFailed) as caught:
        start(spark, plan)
    assert time.monotonic() - started < within_s
    assert not trainers(plan), "no trainer is left"
    return caught.value


@MODES
def test_every_rank_finishes(spark: Any, tmp_path: Path, local_mode: bool) -> None:
    given = {"GIVEN_BY_CONFIG": "yes", "TRITON_CACHE_DIR": "/given"}
    plan = make_plan(tmp_path, action="environment", local_mode=local_mode, use_gpu=True, env=given)
    result = start(spark, plan)
    assert result.steps == 3
    shown = [json.loads((tmp_path / f"shown-{rank}.json").read_text()) for rank in (0, 1)]
    for one in shown:
        assert ".zip/dbx_llmtrain/__init__.py" in one["code"], "the trainer runs shipped code"
        assert one["secret"] == "s3cret-value"
        assert one["omp"] is None
        assert one["attempt"] == plan.attempt
        assert one["given"] == "yes"
        caches = tmp_path / "local" / "caches"
        assert one["caches"] == {
            "HF_HOME": os.environ.get("HF_HOME", str(caches / "huggingface")),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "torchinductor"),
            "TRITON_CACHE_DIR": "/given",
            "TORCH_EXTENSIONS_DIR": str(caches / "torch_extensions"),
        }
    if local_mode:
        assert sorted(one["local_rank"] for one in shown) == ["0", "1"]
        assert {one["visible"] for one in shown} <= {"0,1", "1,0"}
    else:
        assert [one["visible"] for one in shown] == ["0", "0"]
    assert RunPlan.model_validate_json((tmp_path / "plan.json").read_text()) == plan
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [
        path for path in files if b"s3cret" in path.read_bytes() and "shown" not in path.name
    ]
    assert not left_arguments(), "the launcher's file with the secrets is gone"
    assert not left_folders(tmp_path)


def left_arguments(secret: str = "s3cret-value") -> list[Path]:
    """Files with pickled secrets in the launcher's folders, executors' and driver's."""
    import tempfile

    found = []
    for path in Path(tempfile.gettempdir()).glob("tmp*/*"):
        try:
            if secret.encode() in path.read_bytes():
                found.append(path)
        except OSError:
            continue
    return found


def left_folders(run_dir: Path) -> list[Path]:
    """The launcher's folders, torch's and Spark's, that are still there."""
    noted = [json.loads(path.read_text()) for path in run_dir.glob("launcher-*.json")]
    assert noted
    assert all(len(folders) == 2 for folders in noted), noted
    return [Path(folder) for folders in noted for folder in folders if Path(folder).exists()]


@MODES
def test_a_rank_that_raises(
    spark: Any, tmp_path: Path, local_mode: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(tmp_path, action="raise", local_mode=local_mode)
    error = failure(spark, plan, within_s=90.0)
    printed = "".join(capfd.readouterr())
    assert "[rank 1] ValueError: row 17 has no text" in printed
    for words in ("ChildFailedError", "torch/distributed", "Sending process", "error_file"):
        assert words not in printed, "torch's launcher says nothing of its own"
    record = json.loads((tmp_path / "logs" / "rank-00001.json").read_text())
    assert time.time() - record["time"] < 30.0, "the exception comes soon after the fault"
    assert (error.rank, error.host, error.step, error.exit_code) == (1, os.uname().nodename, 7, 1)
    assert "ValueError: row 17 has no text" in str(error)
    assert "rank_program.py" in error.traceback
    assert f"rank 1, on {os.uname().nodename}, at step 7" in str(error)
    assert not left_arguments()
    assert not left_folders(tmp_path)


def test_a_rank_that_is_killed(spark: Any, tmp_path: Path) -> None:
    error = failure(spark, make_plan(tmp_path, action="killed"), within_s=60.0)
    assert (error.rank, error.exit_code) == (1, -9)
    assert "SIGKILL" in str(error)
    assert error.cause in ("lost", "host_memory"), "as far as the kernel counts kills here"
    assert "was killed from outside" in error.advice


@DRIVER
def test_a_lack_of_memory_is_followed_by_smaller_pieces(
    spark: Any, tmp_path: Path, local_mode: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 takes 2 examples at once, the plan says 4."""
    plan = make_plan(tmp_path, action="out_of_memory", local_mode=local_mode)
    sizes = {"global_batch_size": 16, "micro_batch_size": 4, "accumulation": 2, "total_steps": 9}
    plan = plan.model_copy(update=sizes)
    outcome = supervise.run(plan, lambda smaller: start(spark, smaller))
    assert outcome.result.metrics == {"micro_batch": 2.0, "accumulation": 4.0}
    (text,) = outcome.restarts
    assert text.startswith(f"rank 1 on {os.uname().nodename} ran out of memory after step 0 with")
    assert text in capsys.readouterr().out
    written = RunPlan.model_validate_json((tmp_path / "plan.json").read_text())
    assert written == outcome.plan
    assert written.attempt != plan.attempt
    assert not trainers(plan)


def test_a_lack_of_memory_that_stays_fails_with_what_would_help(spark: Any, tmp_path: Path) -> None:
    plan = make_plan(
        tmp_path, action="out_of_memory", local_mode=True, env={"EXAMPLES_THAT_FIT": "0"}
    )
    sizes = {"global_batch_size": 4, "micro_batch_size": 2, "accumulation": 1, "total_steps": 9}
    with pytest.raises(TrainingFailed) as caught:
        supervise.run(plan.model_copy(update=sizes), lambda smaller: start(spark, smaller))
    error = caught.value
    assert (error.rank, error.step, error.cause) == (1, 0, "out_of_memory")
    assert "CUDA out of memory" in error.message
    assert "1 restart(s) with less at once did not help" in error.advice
    assert "model.gradient_checkpointing=full" in error.advice


def test_one_failing_rank_is_never_success_in_local_mode(spark: Any, tmp_path: Path) -> None:
    plan = make_plan(tmp_path, action="raise_late", local_mode=True)
    error = failure(spark, plan, within_s=40.0)
    assert error.rank == 1
    assert "row 17" in error.message


def test_a_rank_0_without_a_result_is_never_success(spark: Any, tmp_path: Path) -> None:
    plan = make_plan(tmp_path, action="no_result", local_mode=True)
    assert "without a result" in str(failure(spark, plan, within_s=40.0))


def test_records_of_another_attempt_do_not_count(spark: Any, tmp_path: Path) -> None:
    plan = make_plan(tmp_path, local_mode=True)
    start(spark, plan)
    again = make_plan(tmp_path, action="exit", local_mode=True)
    error = failure(spark, again, within_s=40.0)
    assert error.exit_code == 3
    assert "about to leave" in error.log_tail


def test_a_package_that_is_missing(spark: Any, tmp_path: Path) -> None:
    plan = make_plan(tmp_path, action="import_error", local_mode=True)
    error = failure(spark, plan, within_s=40.0)
    assert "no_such_package_anywhere" in error.message
    assert "install it" in error.advice


def test_any_output_reaches_the_driver(
    spark: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    start(spark, make_plan(tmp_path, action="bytes"))
    printed = capfd.readouterr().err
    for rank in (0, 1):
        assert f"[rank {rank}] caf\N{REPLACEMENT CHARACTER} is not UTF-8" in printed
        assert f"[rank {rank}] progress 50/50" in printed
        log = (tmp_path / "logs" / f"rank-{rank:05d}.log").read_text(encoding="utf-8")
        assert log.endswith("end of output\n")


@EXECUTORS
def test_an_interrupt_ends_every_rank(spark: Any, tmp_path: Path, local_mode: bool) -> None:
    plan = make_plan(tmp_path, action="stubborn", local_mode=local_mode)

    def interrupt_when_both_run() -> None:
        # Each stubborn rank is two processes.
        if len(trainers(plan)) >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(spark, plan, on_poll=interrupt_when_both_run)
    assert not trainers(plan)
    assert not left_arguments()
    assert not left_folders(tmp_path)
    assert spark.range(2).count() == 2, "the session can be used again"


def interrupt_once_both_run(plan: RunPlan) -> Any:
    def interrupt() -> None:
        if len(trainers(plan)) >= 2:
            raise KeyboardInterrupt

    return interrupt


def records(run_dir: Path) -> list[dict[str, Any]]:
    paths = [run_dir / "logs" / f"rank-{rank:05d}.json" for rank in (0, 1)]
    return [json.loads(path.read_text()) for path in paths]


@EXECUTORS
def test_an_interrupt_lets_the_ranks_save_and_end_by_themselves(
    spark: Any, tmp_path: Path, local_mode: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of them takes the request, as it does where steps are taken; an old one does not count.
    Nobody is waited for in vain."""
    (tmp_path / "CANCEL").touch()
    env = {"SECONDS": "9"}  # longer than is waited for one that does not take it
    plan = make_plan(tmp_path, action="takes_requests", local_mode=local_mode, env=env)
    with pytest.raises(KeyboardInterrupt):
        start(spark, plan, on_poll=interrupt_once_both_run(plan))
    assert not trainers(plan)
    assert [(one["exit_code"], one["stopped"]) for one in records(tmp_path)] == [(143, True)] * 2
    assert not (tmp_path / "CANCEL").exists()
    said = "stopping 2 rank(s), please wait ... (they write a checkpoint; interrupt again to end "
    assert said in capsys.readouterr().err


def test_a_second_interrupt_ends_the_ranks_at_once(spark: Any, tmp_path: Path) -> None:
    env = {"SECONDS": "100"}
    plan = make_plan(tmp_path, action="takes_requests", local_mode=True, env=env)

    def interrupt_again() -> None:
        while not (tmp_path / "taken").exists():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    again = threading.Thread(target=interrupt_again, daemon=True)
    again.start()
    with pytest.raises(KeyboardInterrupt):
        start(spark, plan, on_poll=interrupt_once_both_run(plan))
    again.join(1.0)
    assert not trainers(plan)
    assert [one["stopped"] for one in records(tmp_path)] == [True, True]
    assert [one["exit_code"] for one in records(tmp_path)] == [-signal.SIGTERM] * 2


@pytest.mark.slow
def test_two_launches_at_once(spark: Any, tmp_path: Path) -> None:
    results: list[RankResult] = []

    def one(name: str) -> None:
        plan = make_plan(tmp_path / name, ranks=1, local_mode=True)
        results.append(start(spark, plan))

    threads = [threading.Thread(target=one, args=(name,)) for name in ("a", "b")]
    one("main")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3


@pytest.mark.slow
def test_ranks_meet(spark: Any, tmp_path: Path) -> None:
    result = start(spark, make_plan(tmp_path, action="all_reduce", use_gpu=True))
    assert result.metrics == {"total": 3.0}


def test_a_dead_driver_leaves_no_trainer(tmp_path: Path) -> None:
    """The driver's process is killed in local mode: nothing can be cancelled any more."""
    import subprocess
    import sys

    plan = make_plan(tmp_path, action="wait", local_mode=True)
    script = tmp_path / "driver.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from pyspark.sql import SparkSession\n"
        "from dbx_llmtrain.driver import cluster, launch\n"
        "from dbx_llmtrain.records import RunPlan\n"
        "spark = (SparkSession.builder.master('local[1]').config('spark.ui.enabled', 'false')\n"
        "    .config('spark.driver.host', '127.0.0.1').getOrCreate())\n"
        "report = cluster.probe()\n"
        "assert report.local and report.slots == 1 and len(report.nodes) == 1, report\n"
        "plan = RunPlan.model_validate_json(Path(sys.argv[1]).read_text())\n"
        "launch.launch(spark, plan, {'TEST_SECRET': 's3cret-value'}, module='rank_program')\n"
    )
    (tmp_path / "given.json").write_text(plan.model_dump_json())
    environ = dict(os.environ) | {"PYTHONPATH": str(Path(__file__).parents[2])}
    driver = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "given.json")], env=environ
    )
    try:
        deadline = time.monotonic() + 90
        while len(trainers(plan)) < 2:
            assert time.monotonic() < deadline
            assert driver.poll() is None, "the driver ended by itself"
            time.sleep(0.2)
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
        deadline = time.monotonic() + 15
        while processes_with(f"{MARK}={plan.config.cluster.env[MARK]}"):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        while left_arguments() or left_folders(tmp_path):
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        driver.kill()
        driver.wait()
