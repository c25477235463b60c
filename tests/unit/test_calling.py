"""What ``launch`` sends, what it refuses, and what it gives back."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

import dbx_llmtrain as llm
from dbx_llmtrain.calls import CallPlan
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver import calling
from dbx_llmtrain.driver.run_folder import RunFolder
from dbx_llmtrain.driver.survey import Survey
from dbx_llmtrain.errors import CheckpointError, ConfigError
from dbx_llmtrain.layout import Layout
from dbx_llmtrain.outcomes import RankResult
from dbx_llmtrain.worker import call
from tests import sample


def mine(number: int, *, more: int = 0) -> int:
    return number + more


def planned(tmp_path: Path, **given: Any) -> CallPlan:
    folder = RunFolder("mine", tmp_path / "mine", tmp_path / ".cache", "a1")
    folder.path.mkdir(exist_ok=True)
    case = Survey(sample.cluster(), Layout(2, True, False, ()), folder, 0.0)
    cfg = calling.settle(None, "mine", str(tmp_path), {"env": {"A": "b"}})
    content = calling.pickled(mine, (1,), {"more": 2})
    return calling.make_plan(cfg, case, content, (), **given)


def test_the_function_goes_and_its_value_comes(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert CallPlan.model_validate_json(plan.model_dump_json()) == plan
    function, args, kwargs = call.load(plan)
    entry = call.keep(function(*args, **kwargs), plan)
    result = RankResult(steps=0, metrics={}, checkpoint=None, model_path=None, value=entry)
    assert calling.value(plan, result) == 3
    assert calling.value(plan, result.model_copy(update={"value": None})) is None


def test_files_with_another_hash_are_never_unpickled(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    entry = call.keep(1, plan)
    trap = b"cos\nsystem\n(S'touch " + str(tmp_path / "trapped").encode() + b"'\ntR."
    for name in (call.VALUE, calling.FILE):
        (tmp_path / "mine" / name).write_bytes(trap)
    result = RankResult(steps=0, metrics={}, checkpoint=None, model_path=None, value=entry)
    with pytest.raises(CheckpointError, match="is not what rank 0 has written"):
        calling.value(plan, result)
    with pytest.raises(CheckpointError, match="is not the one that was sent"):
        call.load(plan)
    assert not (tmp_path / "trapped").exists()
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(b"the trap could have been sprung: this is no pickle")


def test_values_that_cannot_come_back(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    with pytest.raises(ConfigError, match=r"expected a value that can be pickled.* found lock"):
        call.keep(threading.Lock(), plan)
    with pytest.raises(ConfigError, match="of at most 64 MiB from the function, found one of 65"):
        call.keep(bytes(65 << 20), plan)


def test_the_folder_of_a_training_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").touch()
    with pytest.raises(CheckpointError, match="is a training run's folder: give another run_name"):
        planned(tmp_path)


def test_what_cannot_be_sent_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="launch: expected a function, found str"):
        llm.launch("mine")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="launch: the function cannot be sent to the ranks"):
        llm.launch(lambda: lock)
    missing = str(tmp_path / "a"), str(tmp_path / "b")
    with pytest.raises(ConfigError) as caught:
        llm.launch(mine, 1, stage=missing)
    assert [problem.path for problem in caught.value.problems] == [
        "launch.stage.0",
        "launch.stage.1",
    ]
    with pytest.raises(ConfigError, match=r"cluster\.processes"):
        llm.launch(mine, 1, processes=0)


def test_what_is_given_wins_over_the_configuration() -> None:
    given = TrainConfig(
        model={"source": "m"},
        data={"train": "d"},
        train={"max_steps": 3},
        cluster={"processes": 4, "env": {"A": "1"}},
        tracking={"run_name": "training", "log_level": "debug"},
        checkpoint={"dir": "/runs", "keep_last": 1},
    )
    cfg = calling.settle(given, None, None, {"processes": 2, "use_gpu": None})
    assert (cfg.cluster.processes, cfg.cluster.env, cfg.cluster.use_gpu) == (2, {"A": "1"}, "auto")
    assert (cfg.checkpoint.dir, cfg.tracking.log_level) == ("/runs", "debug")
    assert str(cfg.tracking.run_name).startswith("launch-"), "a training run's folder is its own"
    assert calling.settle(None, "mine", None, {}).tracking.run_name == "mine"


def test_one_path_and_equal_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text("same")
    one, other, file = calling.find(
        [str(tmp_path / "a"), str(tmp_path / "b"), f"{tmp_path}/a/x.txt"]
    )
    assert one.artifact.fingerprint == other.artifact.fingerprint == file.artifact.fingerprint
    assert (one.name, file.name) == ("", "x.txt")
    assert len(calling.find(str(tmp_path / "a"))) == 1
