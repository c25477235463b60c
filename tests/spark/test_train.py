"""``train(cfg)`` as a user calls it: real executors, real ranks, a real MLflow store."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import dbx_llmtrain as llm
from dbx_llmtrain.channel import Server
from dbx_llmtrain.driver import monitor
from dbx_llmtrain.driver.monitor import LiveState, RankState
from tests import tiny
from tests.event_files import scalars
from tests.spark.helpers import processes_with

FAULTS = Path(__file__).parent / "programs" / "faults"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer, 40 chats to train on and 9 to hold out."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny.model_folder(folder / "model")
    for name, count in (("train", 40), ("eval", 9)):
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"what is {name} {i}?"},
                    {"role": "assistant", "content": "the answer is " + "forty two " * (i % 4 + 1)},
                ]
            }
            for i in range(count)
        ]
        text = "\n".join(json.dumps(row) for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


def config(inputs: Path, folder: Path, **sections: dict[str, Any]) -> llm.TrainConfig:
    base: dict[str, dict[str, Any]] = {
        "model": {"source": str(inputs / "model")},
        "data": {
            "train": str(inputs / "train.jsonl"),
            "eval": str(inputs / "eval.jsonl"),
            "max_length": 96,
        },
        "train": {"max_steps": 4, "global_batch_size": 4, "learning_rate": 1e-2},
        "checkpoint": {"dir": str(folder / "runs")},
        "tracking": {"run_name": "first"},
        "cluster": {
            "use_gpu": False,
            "local_dir": str(folder / "local"),
            "env": {"GLOO_SOCKET_IFNAME": "lo"},
        },
    }
    for name, fields in sections.items():
        base[name] = base.get(name, {}) | fields
    return llm.TrainConfig(**base)


def mlflow_run(result_dir: Path, run_id: str | None = None) -> Any:
    """The run that ``plan.json`` names, from the store of the run folder."""
    from mlflow import MlflowClient

    plan = json.loads((result_dir / "plan.json").read_text())
    return MlflowClient(plan["tracking"]["uri"]).get_run(run_id or plan["tracking"]["run_id"])


def test_train_on_two_executors(
    spark: Any,
    inputs: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks: dict[int, RankState] = {}
    keep_last_states(monkeypatch, ranks)
    tracked = {"tensorboard": True, "system_metrics": True}
    cfg = config(inputs, tmp_path, checkpoint={"every": 2}, tracking=tracked)
    before = set(threading.enumerate())
    result = llm.train(cfg, spark=spark)

    ours = [one.name for one in set(threading.enumerate()) - before if "dbx" in one.name]
    assert not ours, "no thread of ours is left"
    check_output(*capfd.readouterr(), folder=Path(result.run_dir))
    states = {rank: (state.step, state.phase) for rank, state in ranks.items()}
    assert states == {0: (4, "finished"), 1: (4, "finished")}, "rank 1 speaks by the channel alone"
    assert result.steps == 4
    assert result.restarts == ()
    needed = {
        "initial_eval_loss", "eval_loss", "train_loss", "tokens_per_second", "peak_memory_bytes",
        "seconds_to_first_step",
    }  # fmt: skip
    assert needed <= set(result.metrics)
    assert result.metrics["eval_loss"] < result.metrics["initial_eval_loss"]
    assert (result.audit.train_rows, result.audit.eval_rows) == (40, 9)
    folder = Path(result.run_dir)
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "plan.json", "events.jsonl", "result.json", "logs"} <= names
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000004",
    ]
    assert [path.name for path in sorted((folder / "logs").glob("*.log"))] == [
        "rank-00000.log",
        "rank-00001.log",
    ]
    plan = json.loads((folder / "plan.json").read_text())
    assert (plan["strategy"], plan["world_size"], plan["local_mode"]) == ("ddp", 2, False)
    check_export(result)
    check_tracking(folder, result)
    check_tensorboard(folder)


def keep_last_states(patch: pytest.MonkeyPatch, ranks: dict[int, RankState]) -> None:
    """Fill ``ranks`` with what the driver knew of each rank at the end."""
    follow = monitor.follow

    @contextmanager
    def keep(*args: Any, **options: Any) -> Iterator[LiveState]:
        with follow(*args, **options) as live:
            yield live
        ranks.update(live.ranks())

    patch.setattr(monitor, "follow", keep)


def check_output(printed: str, shown: str, folder: Path) -> None:
    """Progress in lines; what it says is not said again by the ranks, but it is in the log."""
    for line in (
        r"preparing: 49 rows, done in [\d.]+ s",
        r"staging: .* of .*, \S+ 100%, done in [\d.]+ s",
        r"loading the model",
        r"training: step 0 of 4",
        r"evaluating",
        r"writing a checkpoint",
        r"training: step 4 of 4, loss [\d.]+, [\d,]+ tokens/s, done in [\d.]+ s",
    ):
        assert re.search(f"^{line}$", shown, re.MULTILINE), (line, shown)
    assert not re.search(r"step \d/4", printed + shown)
    assert "[rank 0] step 4: held-out loss" in printed + shown
    assert printed.count("Result of first") == 1
    assert printed.count(f"\ntensorboard --logdir {folder}/tensorboard\n") == 1
    log = (folder / "logs" / "rank-00000.log").read_text()
    assert [line[:8] for line in log.splitlines() if "tokens/s" in line] == [
        f"step {step}/4" for step in (1, 2, 3, 4)
    ]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in files if b"EVENTS_SECRET" in path.read_bytes()]


def check_tensorboard(folder: Path) -> None:
    """Every number of the events, at its step and time."""
    found = {
        (tag.partition("/")[2], step, time)
        for tag, points in scalars(folder / "tensorboard").items()
        for step, _, time in points
    }
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    sent = {(name, item["step"], item["time"]) for item in events for name in item["metrics"]}
    assert found == sent
    assert {step for name, step, _ in found if name == "loss"} == {1, 2, 3, 4}


def check_export(result: llm.TrainResult) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(result.model_path)
    tokenizer = AutoTokenizer.from_pretrained(result.model_path)
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer)
    assert tokenizer.chat_template == tiny.CHATML


def check_tracking(folder: Path, result: llm.TrainResult) -> None:
    run = mlflow_run(folder)
    assert run.info.run_id == result.run_id
    assert run.info.status == "FINISHED"
    assert run.data.params["train.learning_rate"] == "0.01"
    wanted = {"loss", "learning_rate", "grad_norm", "tokens_per_second", "rows_seen", "eval_loss"}
    assert wanted <= set(run.data.metrics)
    assert math.isclose(run.data.metrics["eval_loss"], result.metrics["eval_loss"], rel_tol=1e-9)
    assert {item.dataset.name for item in run.inputs.dataset_inputs}
    assert result.checkpoint in run.data.tags.values()
    assert logged_steps(folder) == [1, 2, 3, 4]
    used = {name for name in run.data.metrics if name.startswith("system/")}
    assert {name.split("/")[1] for name in used} == {socket.gethostname()}
    assert {"cpu_percent", "memory_used_bytes"} <= {name.split("/")[2] for name in used}


def logged_steps(folder: Path) -> list[int]:
    """Steps whose loss the MLflow run has, in the order in which they were logged."""
    from mlflow import MlflowClient

    tracking = json.loads((folder / "plan.json").read_text())["tracking"]
    history = MlflowClient(tracking["uri"]).get_metric_history(tracking["run_id"], "loss")
    return [metric.step for metric in history]


@pytest.mark.slow
def test_a_second_call_goes_on_from_the_newest_checkpoint(
    spark: Any, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = llm.train(config(inputs, tmp_path, train={"max_steps": 2}), spark=spark)
    # A folder without a manifest is what a killed writer leaves: it does not count.
    (Path(first.run_dir) / "checkpoints" / "step-00000003").mkdir()
    with monkeypatch.context() as patch:
        lose_the_channel(patch)
        second = llm.train(config(inputs, tmp_path), spark=spark)
    assert logged_steps(Path(second.run_dir)) == [1, 2, 3, 4], "what no rank could send is there"
    assert (second.run_dir, second.run_id) == (first.run_dir, first.run_id)
    assert second.steps == 4
    plan = json.loads((Path(second.run_dir) / "plan.json").read_text())
    assert plan["resume_from"] == first.checkpoint
    events = [
        json.loads(line)
        for line in (Path(second.run_dir) / "events.jsonl").read_text().splitlines()
    ]
    steps = [event["step"] for event in events if event["kind"] == "step"]
    assert steps == [1, 2, 3, 4]
    check_other_rows_are_refused(spark, config(inputs, tmp_path, train={"seed": 9}), second)


def lose_the_channel(patch: pytest.MonkeyPatch) -> None:
    """The driver's server is gone before the first rank starts."""
    variables = monitor.rank_variables

    def close(server: Server) -> dict[str, str]:
        server.close()
        return variables(server)

    patch.setattr(monitor, "rank_variables", close)


def check_other_rows_are_refused(
    spark: Any, cfg: llm.TrainConfig, finished: llm.TrainResult
) -> None:
    """On the driver, before anything of the finished run is overwritten."""
    kept = {path: path.read_bytes() for path in Path(finished.run_dir).glob("*.*")}
    with pytest.raises(llm.CheckpointError, match=r"train\.seed: 0 then, 9 now"):
        llm.train(cfg, spark=spark)
    assert {path: path.read_bytes() for path in Path(finished.run_dir).glob("*.*")} == kept


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_a_rank_that_breaks_ends_the_run_as_failed(
    spark: Any, inputs: Path, tmp_path: Path, fault: str
) -> None:
    env = {
        "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(FAULTS), "FAULT": fault, "FAULT_RANK": "1",
        "FAULT_STEP": "3", "MARK": str(tmp_path),
    }  # fmt: skip
    cfg = config(inputs, tmp_path, train={"max_steps": 400}, cluster={"env": env})
    with pytest.raises(llm.TrainingFailed) as caught:
        llm.train(cfg, spark=spark)
    noticed = time.time()

    error = caught.value
    assert (error.rank, error.host, error.step) == (1, os.uname().nodename, 2)
    text = "ValueError: row 17 of the table is broken" if fault == "raise" else "SIGKILL"
    assert text in str(error)
    assert "rank 1" in str(error)
    folder = tmp_path / "runs" / "first"
    record = json.loads((folder / "logs" / "rank-00001.json").read_text())
    assert noticed - record["time"] < 30.0
    assert not processes_with(f"MARK={tmp_path}"), "no trainer is left"
    run = mlflow_run(folder)
    assert run.info.status == "FAILED"
    assert not (folder / "result.json").exists()


def test_train_in_local_mode_inside_an_active_mlflow_run(
    spark: Any, inputs: Path, tmp_path: Path
) -> None:
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mine.db")
    try:
        with mlflow.start_run() as parent:
            cfg = config(
                inputs, tmp_path, cluster={"local_mode": True, "processes": 2},
                parallel={"kind": "ddp"},
            )  # fmt: skip
            result = llm.train(cfg, spark=spark)
            assert mlflow.active_run().info.run_id == parent.info.run_id
            child = mlflow_run(Path(result.run_dir))
            assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
            assert child.info.status == "FINISHED"
        assert mlflow.get_run(parent.info.run_id).info.status == "FINISHED"
    finally:
        mlflow.set_tracking_uri(None)


@pytest.mark.slow
def test_a_dead_tracking_server_costs_a_warning(
    spark: Any, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    cfg = config(inputs, tmp_path, cluster={"local_mode": True, "processes": 1})
    result = llm.train(cfg, spark=spark)
    assert result.run_id is None
    assert result.steps == 4
    assert "127.0.0.1" in caplog.text
    assert f"`dbx-llmtrain log {result.run_dir}`" in caplog.text
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    logged = llm.log(result)
    assert llm.load(result.run_dir).run_id == logged.run_id
    assert logged_steps(Path(result.run_dir)) == [1, 2, 3, 4]
    assert mlflow_run(Path(result.run_dir)).info.status == "FINISHED"


def test_bad_layout_is_refused_before_anything_is_started(
    spark: Any, inputs: Path, tmp_path: Path
) -> None:
    cfg = config(inputs, tmp_path, cluster={"processes": 7})
    started = time.monotonic()
    with pytest.raises(llm.ClusterError, match="7 ranks need 7 task slots at once") as caught:
        llm.train(cfg, spark=spark)
    assert time.monotonic() - started < 60
    assert [finding.check for finding in caught.value.findings] == ["task slots"]
    assert not (tmp_path / "runs").exists()
