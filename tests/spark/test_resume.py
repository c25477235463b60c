"""Whole runs that are killed: the next call goes on, and ends with the weights of a run that was
never interrupted."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dbx_llmtrain as llm
from dbx_llmtrain import storage
from dbx_llmtrain.driver import lease
from tests import tiny
from tests.spark.helpers import processes_with, wait_until

pytestmark = pytest.mark.timeout(600)

FAULTS = Path(__file__).parent / "programs" / "faults"
STEPS = 8
DRIVER = """
import os, sys
from pyspark.sql import SparkSession
import dbx_llmtrain as llm

os.environ["DRIVER"] = str(os.getpid())  # the ranks inherit it
cfg = llm.TrainConfig.from_yaml(sys.argv[1])
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
llm.train(cfg, spark=spark)
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    tiny.model_folder(folder / "model")
    rows = [{"text": f"the cat sat on mat {i} " + "and sat " * (i % 5)} for i in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


@pytest.fixture
def config(inputs: Path, tmp_path: Path) -> Callable[..., llm.TrainConfig]:
    """A run of 8 steps on two ranks of this machine, with dropout, that saves every two steps."""

    def make(name: str, *, steps: int = STEPS, **env: str) -> llm.TrainConfig:
        variables = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(FAULTS), "MARK": str(tmp_path)}
        return llm.TrainConfig(
            model={"source": str(inputs / "model"), "config": {"attention_dropout": 0.1}},
            data={"train": str(inputs / "rows.jsonl"), "eval": 0.1, "max_length": 64,
                  "packing": False},
            parallel={"kind": "ddp"},
            train={"max_steps": steps, "global_batch_size": 4, "learning_rate": 1e-2},
            checkpoint={"dir": str(tmp_path / "runs"), "every": 2},
            tracking={"run_name": name},
            cluster={"use_gpu": False, "local_mode": True, "processes": 2,
                     "local_dir": str(tmp_path / "local"), "env": variables | env},
        )  # fmt: skip

    return make


def weights(result: llm.TrainResult) -> dict[str, str]:
    """Hashes of the exported weights' files, and of the checkpoint's weights."""
    assert result.model_path is not None
    files = sorted(Path(result.model_path).glob("*.safetensors"))
    assert files
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def mlflow_run(run: Path) -> Any:
    from mlflow import MlflowClient

    held = lease.read(run)
    assert held is not None
    assert held.tracking is not None
    return MlflowClient(held.tracking.uri).get_run(held.tracking.run_id)


def resumed_from(run: Path) -> list[int | None]:
    """The step that each attempt went on from."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    paths = [one["data"]["resumed_from"] for one in events if one["kind"] == "started"]
    return [storage.step_of(Path(path)) if path else None for path in paths]


@pytest.mark.slow
def test_c83_a_run_that_is_killed_three_times_ends_as_if_it_had_not_been(
    spark: Any, config: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    whole = llm.train(config("whole"), spark=spark)
    run = tmp_path / "runs" / "torn"

    def manifest(step: int) -> str:
        return str(storage.checkpoint_folder(run, step) / storage.MANIFEST)

    # A rank, and then all of them, with a checkpoint behind each.
    for ranks, faulty_step, after in (("1", "4", 2), ("0,1", "3", 4)):
        faults = {"FAULT": "kill", "FAULT_RANK": ranks, "FAULT_STEP": faulty_step}
        with pytest.raises(llm.TrainingFailed, match=r"rank [01]"):
            llm.train(config("torn", **faults, FAULT_AFTER=manifest(after)), spark=spark)
        assert mlflow_run(run).info.status == "FAILED"
    first_id = mlflow_run(run).info.run_id

    kill_the_driver(spark, config, run, manifest(6), tmp_path)
    assert mlflow_run(run).info.status == "RUNNING", "nobody has told MLflow"
    with pytest.raises(llm.CheckpointError, match="its driver is gone without a word"):
        llm.load(str(run))

    caplog.clear()
    result = llm.train(config("torn"), spark=spark)
    assert "the driver is gone: torn, by " in caplog.text
    assert resumed_from(run) == [None, 2, 4, 6]
    assert result.steps == STEPS
    assert weights(result) == weights(whole), "bitwise"
    for name in ("initial_eval_loss", "eval_loss", "train_loss"):
        assert result.metrics[name] == whole.metrics[name]
    found = mlflow_run(run)
    assert (found.info.run_id, found.info.status) == (first_id, "FINISHED")
    assert result.run_id == first_id
    assert "dbx_llmtrain.error" not in found.data.tags
    check_it_is_finished(spark, config, result, capfd)


def test_a_killed_rank_is_followed_by_another_attempt(
    spark: Any, config: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """From the last checkpoint, by the same call."""
    run = tmp_path / "runs" / "again"
    saved = storage.checkpoint_folder(run, 2) / storage.MANIFEST
    faults = {"FAULT": "kill", "FAULT_RANK": "1", "FAULT_STEP": "3", "FAULT_AFTER": str(saved)}
    cfg = config("again", steps=4, FAULT_ONCE=str(tmp_path / "once"), **faults)
    cfg = cfg.override("cluster.max_restarts=1", "checkpoint.export=false")
    result = llm.train(cfg, spark=spark)
    assert resumed_from(run) == [None, 2]
    assert result.steps == 4
    (told,) = result.restarts
    assert re.match(r"(lost|host_memory): rank 1 on \S+ after step 2: the trainer was ended", told)
    assert told.endswith("; started again from step 2 with 2 ranks")
    assert told in capfd.readouterr().out
    found = mlflow_run(run)
    assert (found.info.status, found.data.tags["dbx_llmtrain.restarts"]) == ("FINISHED", told)
    assert found.data.tags["dbx_llmtrain.resumed_from"] == str(saved.parent)
    assert llm.load(str(run)).restarts == (told,)
    assert not processes_with(f"MARK={tmp_path}")


def kill_the_driver(spark: Any, config: Any, run: Path, checkpoint: str, tmp_path: Path) -> None:
    """Run it in a process of its own, which a rank kills; meanwhile the folder is in use."""
    go = tmp_path / "go"
    cfg = config(
        "torn",
        FAULT="kill-driver",
        FAULT_RANK="0",
        FAULT_STEP="3",
        FAULT_AFTER=f"{checkpoint}:{go}",
    )
    (tmp_path / "config.yaml").write_text(cfg.to_yaml())
    environ = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
    environ["PYTHONPATH"] = str(Path(llm.__file__).parents[1])
    with (tmp_path / "said").open("w") as said:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path / "config.yaml")],
            stdout=said, stderr=said, cwd=tmp_path, env=environ,
        )  # fmt: skip
    try:
        wait_until(lambda: Path(checkpoint).exists() or driver.poll() is not None, 240)
        assert driver.poll() is None, (tmp_path / "said").read_text()
        before = time.monotonic()
        with pytest.raises(llm.CheckpointError, match=rf"{re.escape(str(run))} is in use: torn, b"):
            llm.train(config("torn"), spark=spark)
        assert time.monotonic() - before < 60
        with pytest.raises(llm.CheckpointError, match="is not finished: it is running"):
            llm.load(str(run))
        go.touch()
        assert driver.wait(60) == -signal.SIGKILL
    finally:
        driver.kill()
        driver.wait()
    wait_until(lambda: not processes_with(f"MARK={tmp_path}"), 60)


def check_it_is_finished(spark: Any, config: Any, result: llm.TrainResult, capfd: Any) -> None:
    capfd.readouterr()
    again = llm.train(config("torn"), spark=spark)
    assert again == result == llm.load(result.run_dir)
    said, _ = capfd.readouterr()
    assert "torn is finished: this is its stored result, nothing is trained." in said
    assert "training: step" not in said
    before = {path: path.read_bytes() for path in Path(result.run_dir).glob("*.*")}
    with pytest.raises(llm.CheckpointError, match="it is after step 8, the run ends with step 7"):
        llm.train(config("torn", steps=7), spark=spark)
    assert {path: path.read_bytes() for path in Path(result.run_dir).glob("*.*")} == before


@pytest.mark.slow
def test_the_checkpoint_that_was_taken_in_place_of_a_damaged_one_is_named_everywhere(
    spark: Any, config: Any, tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    llm.train(config("hurt", steps=4), spark=spark)
    run = tmp_path / "runs" / "hurt"
    older, newest = (storage.checkpoint_folder(run, step) for step in (2, 4))
    file = min(newest.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    llm.train(config("hurt", steps=6), spark=spark)
    assert resumed_from(run) == [None, 2]
    plan = json.loads((run / "plan.json").read_text())
    assert plan["resume_from"] == str(older)
    found = mlflow_run(run)
    assert found.data.tags["dbx_llmtrain.resumed_from"] == str(older)
    client = MlflowClient(plan["tracking"]["uri"])
    logged = client.download_artifacts(found.info.run_id, "plan.json", str(tmp_path))
    assert json.loads(Path(logged).read_text())["resume_from"] == str(older)
    assert str(newest) not in "".join(path.read_text() for path in run.glob("*.json"))


def test_sigterm_to_a_script_of_ones_own_leaves_a_checkpoint(config: Any, tmp_path: Path) -> None:
    """As a job cluster sends it. By itself it would end the driver on the spot."""
    run = tmp_path / "runs" / "ended"
    (tmp_path / "config.yaml").write_text(config("ended", steps=100_000).to_yaml())
    environ = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
    environ["PYTHONPATH"] = str(Path(llm.__file__).parents[1])
    with (tmp_path / "said").open("w") as said:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path / "config.yaml")],
            stdout=said, stderr=said, cwd=tmp_path, env=environ,
        )  # fmt: skip
    try:
        wait_until(lambda: bool(storage.latest_checkpoint(run)) or driver.poll() is not None, 240)
        assert driver.poll() is None, (tmp_path / "said").read_text()
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(120) == 143
    finally:
        driver.kill()
        driver.wait()
    newest = storage.latest_checkpoint(run)
    text = (tmp_path / "said").read_text()
    assert f"ended has been stopped; the newest checkpoint is {newest}" in text
    assert mlflow_run(run).info.status == "KILLED"
    held = lease.read(run)
    assert held is not None
    assert held.status == "stopped"
    assert not processes_with(f"MARK={tmp_path}")


@pytest.mark.slow
def test_a_rehearsal_shows_that_all_of_it_works(
    spark: Any, config: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    (runs / "real").mkdir(parents=True)
    (runs / "real" / "mine").write_text("x")
    (runs / "real-trial" / "checkpoints").mkdir(parents=True)
    (runs / "real-trial" / "old").write_text("x")
    result = llm.train(config("real", steps=500), trial=True, spark=spark)
    said, _ = capfd.readouterr()
    assert [path.name for path in (runs / "real").iterdir()] == ["mine"]
    assert result.run_dir == str(runs / "real-trial")
    assert not (runs / "real-trial" / "old").exists()
    assert resumed_from(runs / "real-trial") == [None, 1]
    assert (result.steps, result.stop_reason) == (2, "")
    assert {"initial_eval_loss", "eval_loss"} <= set(result.metrics)
    assert weights(result)
    found = mlflow_run(runs / "real-trial")
    assert found.data.tags["dbx_llmtrain.trial"] == "true"
    assert (found.info.run_name, found.info.status) == ("real-trial", "FINISHED")
    events = [
        json.loads(line) for line in (runs / "real-trial" / "events.jsonl").read_text().splitlines()
    ]
    steps = [one["metrics"] for one in events if one["kind"] == "step"]
    assert [one["rows_seen"] for one in steps] == [4, 8]
    rows = result.audit.tokens / result.audit.train_rows
    assert steps[1]["tokens_seen"] > 8 * rows, "the longest ones"
    assert "Rehearsal of real: all of it works" in said
    for part in ("start until the first step", "step 1", "step 2", "checkpoint", "export"):
        assert re.search(rf"^{part} +[\d.]+ (s|min)", said, re.MULTILINE), part
    assert re.search(r"^The whole run of 500 steps takes about [\d.]+ (s|min) by these", said, re.M)
