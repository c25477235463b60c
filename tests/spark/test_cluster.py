"""Reaching the nodes of a real cluster: once each, all of them, and what goes wrong."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain.driver import cluster, staging
from dbx_llmtrain.errors import StagingError
from dbx_llmtrain.worker import node
from tests.spark import spark_env
from tests.spark.helpers import artifact, wait_until


def test_a_function_runs_once_on_a_node(spark: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    found = cluster.run_on_nodes(spark, "node_program:append", (str(trace), "x"))
    assert trace.read_text() == "x", "two executors are one node"
    assert list(found) == [node.node_id()]
    outcome = found[node.node_id()]
    assert outcome.status == "ok"
    assert isinstance(outcome.value, int)
    assert "127.0.0.1" in outcome.addresses


def test_an_exception_is_the_outcome_of_its_node(spark: Any) -> None:
    outcome = cluster.run_on_nodes(spark, "node_program:fail", ("no such disk",))[node.node_id()]
    assert outcome.status == "failed"
    assert outcome.error == "ValueError: no such disk"
    assert "node_program.py" in outcome.traceback
    outcome = cluster.run_on_nodes(spark, "no_such_module:fail")[node.node_id()]
    assert "ModuleNotFoundError" in outcome.error


def test_workers_run_the_drivers_code(spark: Any) -> None:
    value = cluster.run_on_nodes(spark, "node_program:where")[node.node_id()].value
    assert ".zip/dbx_llmtrain/__init__.py" in value["code"]


def test_a_busy_cluster_is_waited_for(spark: Any) -> None:
    def occupy() -> None:
        sc = spark.sparkContext
        sc.parallelize(range(2), 2).foreach(lambda _: time.sleep(6))

    busy = threading.Thread(target=occupy)
    busy.start()
    time.sleep(2.0)
    found = cluster.run_on_nodes(spark, "node_program:where", timeout_s=60)
    assert found[node.node_id()].status == "ok"
    busy.join()


def test_a_host_that_does_not_answer_is_named(spark: Any) -> None:
    started = time.monotonic()
    found = cluster.run_on_nodes(spark, "node_program:sleep", (60,), timeout_s=6)
    assert time.monotonic() - started < 30
    assert list(found) == ["127.0.0.1"]
    assert found["127.0.0.1"].status == "missing"
    assert "no answer within 6 s" in found["127.0.0.1"].error
    # What was cancelled does not stand in the way of the next job.
    assert cluster.run_on_nodes(spark, "node_program:where")[node.node_id()].status == "ok"


def test_nothing_runs_on_when_the_cell_is_interrupted(spark: Any) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    # Not SIGINT: pyspark itself cancels every job on it.
    before = signal.signal(signal.SIGUSR1, interrupt)
    alarm = threading.Timer(4.0, os.kill, (os.getpid(), signal.SIGUSR1))
    alarm.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            cluster.run_on_nodes(spark, "node_program:sleep", (60,), timeout_s=60)
    finally:
        alarm.cancel()
        signal.signal(signal.SIGUSR1, before)
    tracker = spark.sparkContext.statusTracker()
    wait_until(lambda: not tracker.getActiveJobsIds(), timeout_s=20)


def test_probe(spark: Any, fake_gpus: Callable[[str], None], tmp_path: Path) -> None:
    fake_gpus(spark_env.gpu_lines(["GPU-1", "GPU-2"]))
    report = cluster.probe(spark, local_dir=str(tmp_path))
    assert not report.local
    assert report.executors == ("127.0.0.1", "127.0.0.1")
    assert report.slots == 2
    assert report.task_gpus == "1"
    assert report.missing == ()
    assert [gpu.uuid for gpu in report.nodes[0].gpus] == ["GPU-1", "GPU-2"]
    assert report.nodes[0].local_dir == str(tmp_path)
    assert report.nodes[0].packages["pyspark"] == report.spark_version
    assert report.driver.node == node.node_id()


def test_probe_with_a_broken_nvidia_smi(spark: Any, fake_gpus: Callable[[str], None]) -> None:
    fake_gpus("Unable to determine the device handle\n")
    assert "Unable to determine" in cluster.probe().nodes[0].problem


def test_a_node_that_fails_to_report_is_in_the_report(spark: Any, tmp_path: Path) -> None:
    outcome = cluster.run_on_nodes(spark, "node_program:fail", ("x",))[node.node_id()]
    report = cluster._report(outcome)
    assert (report.problem, report.cpus) == ("ValueError: x", 0)


def test_staging_is_one_copy_and_reused(spark: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "weights.bin").write_bytes(b"w" * 1000)
    model = artifact(source)
    local = str(tmp_path / "local")
    found = staging.stage_artifacts(spark, [model], local_mode=False, local_dir=local)
    target = Path(found[node.node_id()][model.fingerprint])
    assert target == tmp_path / "local" / "models" / model.fingerprint
    before = (target / "weights.bin").stat().st_ino
    shutil.rmtree(source)
    again = staging.stage_artifacts(spark, [model], local_mode=False, local_dir=local)
    assert again == found
    assert (target / "weights.bin").stat().st_ino == before
    # The driver is the same machine here, so its own staging finds the same copy.
    assert staging.stage_artifacts(spark, [model], local_mode=True, local_dir=local) == found


def test_staging_of_a_changed_file_names_node_and_file(spark: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "weights.bin").write_bytes(b"w" * 1000)
    model = artifact(source)
    (source / "weights.bin").write_bytes(b"v" * 1000)
    with pytest.raises(StagingError) as caught:
        staging.stage_artifacts(spark, [model], local_mode=False, local_dir=str(tmp_path / "l"))
    cause = caught.value.nodes[node.node_id()]
    assert "weights.bin is not the file that was registered" in cause
    assert "Traceback" not in cause
    with pytest.raises(StagingError, match="weights"):
        staging.stage_artifacts(spark, [model], local_mode=True, local_dir=str(tmp_path / "l"))


def test_session(spark: Any) -> None:
    assert cluster.session() is not None
    assert cluster.session(spark) is spark


def test_settings_of_the_session_count(spark: Any) -> None:
    key = "pytorch.spark.distributor.ignoreSsl"
    assert key not in cluster.conf(spark)
    spark.conf.set(key, "true")
    try:
        assert cluster.conf(spark)[key] == "true"
    finally:
        spark.conf.unset(key)
    assert cluster.conf(spark)["spark.task.resource.gpu.amount"] == "1"
