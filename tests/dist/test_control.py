"""When a run saves, evaluates and ends: one rank in this process, asked at certain steps."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dbx_llmtrain import resuming, storage
from dbx_llmtrain.errors import CheckpointError, ConfigError
from dbx_llmtrain.outcomes import RankResult
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker.main import run
from dbx_llmtrain.worker.requests import Stopped
from tests import tiny
from tests.dist import plans
from tests.dist.forwards import asked_for, terminated, watched
from tests.dist.launch import TIMEOUT
from tests.dist.test_main import events, resume, same_threads, tensors

__all__ = ["same_threads"]
pytestmark = pytest.mark.dist

FORWARDS = (3, 3, 2)
"""Of the three steps of an epoch of 8 rows, 3 a step, one at a time."""


def make(folder: Path, name: str = "run", *settings: str, **changes: Any) -> RunPlan:
    """8 steps of a model with dropout; ``settings`` as ``key.path=value``."""
    model = plans.model_folder(folder / "model", attention_dropout=0.1)
    plan = plans.plan(folder, name, model=model, **changes)
    return plan.model_copy(update={"config": plan.config.override(*settings)})


def in_step(step: int) -> int:
    """The number of a forward pass in the middle of a step."""
    return sum(FORWARDS[number % 3] for number in range(step - 1)) + 2


def run_asked(plan: RunPlan, step: int, what: str | Callable[[], None]) -> RankResult:
    """Run a plan that is asked for something in the middle of a step."""
    run_dir = Path(plan.run_dir)
    run_dir.mkdir(exist_ok=True)
    action = asked_for(run_dir, what) if isinstance(what, str) else what
    with watched({in_step(step): action}):
        return run(plan)


def saved(plan: RunPlan) -> list[int | None]:
    """Steps of the complete checkpoints, oldest first."""
    return [storage.step_of(path) for path in reversed(storage.checkpoints(Path(plan.run_dir)))]


def evaluated(plan: RunPlan) -> list[int]:
    return [event.step for event in events(plan, "eval")]


def steps(plan: RunPlan) -> list[int]:
    return [event.step for event in events(plan, "step")]


def at(plan: RunPlan, step: int) -> Path:
    return storage.checkpoint_folder(Path(plan.run_dir), step)


def same_state(one: Path, other: Path, scratch: Path) -> bool:
    """Whether two checkpoints hold the same tensors and random states, bitwise."""
    first, second = (tensors(path, scratch / f"{i}.pt") for i, path in enumerate((one, other)))
    randoms = [(path / "rng-00000.json").read_bytes() for path in (one, other)]
    return (
        first.keys() == second.keys()
        and all(torch.equal(first[name], second[name]) for name in first)
        and randoms[0] == randoms[1]
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunPlan:
    """A run of 8 steps that nobody disturbs."""
    plan = make(tmp_path_factory.mktemp("whole"), export=False, train={"eval_every": 3})
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cpus)})  # as for every test: see same_threads
    run(plan)
    os.sched_setaffinity(0, cpus)
    return plan


# Requests -------------------------------------------------------------------------------------


def test_a_checkpoint_is_written_when_a_file_asks_for_one(tmp_path: Path) -> None:
    plan = make(tmp_path, export=False)
    result = run_asked(plan, 3, "CHECKPOINT")
    assert saved(plan) == [3, 8]
    assert (result.steps, result.stop_reason) == (8, "")
    assert not (Path(plan.run_dir) / "CHECKPOINT").exists()


def test_stop_ends_a_run_as_its_last_step_does(tmp_path: Path) -> None:
    plan = make(tmp_path, train={"log_every": 5})
    result = run_asked(plan, 4, "STOP")
    assert (result.steps, result.stop_reason) == (4, "STOP")
    assert steps(plan) == [4], "the last step is reported in any case"
    assert evaluated(plan) == [0, 4]
    assert result.checkpoint == str(at(plan, 4))
    assert result.model_path == str(Path(plan.run_dir) / "export")
    assert events(plan)[-1].kind == "finished"
    weights = load_file(Path(str(result.model_path)) / "model.safetensors")
    stored = tensors(at(plan, 4), tmp_path / "stored")
    assert all(torch.equal(stored[f"model.{name}"], weights[name]) for name in weights)


@pytest.mark.parametrize("how", ["CANCEL", terminated], ids=["CANCEL", "SIGTERM"])
def test_a_run_that_is_told_to_end_saves_and_goes_on_as_if_nothing_had_been(
    tmp_path: Path, whole: RunPlan, how: str | Callable[[], None]
) -> None:
    """In the middle of a step, of an epoch, and with an evaluation due at that step."""
    before = signal.getsignal(signal.SIGTERM)
    plan = make(tmp_path, export=False, train={"eval_every": 3})
    name = how if isinstance(how, str) else "SIGTERM"
    with pytest.raises(Stopped, match=rf"after step 3 as it was asked to \({name}\); the newest "):
        run_asked(plan, 3, how)
    assert signal.getsignal(signal.SIGTERM) == before
    assert saved(plan) == [3]
    assert evaluated(plan) == [0], "there is no time for one"
    assert [event.kind for event in events(plan)][-1] == "failed"
    again = resume(plan, 3)
    with watched() as rows:
        result = run(again)
    assert evaluated(again) == [3, 6, 8], "what was due is made up for"
    assert steps(again) == [4, 5, 6, 7, 8]
    assert len(rows) == 3 + 3 + 2 + 3 + 3
    assert same_state(at(plan, 8), at(whole, 8), tmp_path)
    expected = {event.step: event.metrics["loss"] for event in events(whole, "step")}
    assert {e.step: e.metrics["loss"] for e in events(again, "step")}.items() <= expected.items()
    assert result.stop_reason == ""


KILLED = """
import sys
from pathlib import Path
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker.main import run
from tests.dist import forwards

plan = RunPlan.model_validate_json(sys.argv[1])
with forwards.watched({int(sys.argv[2]): forwards.killed_after(Path(plan.run_dir), 4)}):
    run(plan)
"""


def test_c83_a_run_of_one_rank_that_was_killed_goes_on_as_if_nothing_had_been(
    tmp_path: Path, whole: RunPlan
) -> None:
    plan = make(tmp_path, export=False, every=4, train={"eval_every": 3})
    done = subprocess.run(
        [sys.executable, "-c", KILLED, plan.model_dump_json(), str(in_step(6))],
        cwd=Path(__file__).parents[2], timeout=TIMEOUT, check=False, capture_output=True,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    again = resume(plan, 4)
    run(again)
    assert steps(again) == [5, 6, 7, 8]
    assert same_state(at(plan, 8), at(whole, 8), tmp_path)


def test_a_request_that_comes_too_late_is_not_left_for_the_next_run(tmp_path: Path) -> None:
    plan = make(tmp_path, export=False, train={"max_steps": 1})
    Path(plan.run_dir).mkdir()
    (Path(plan.run_dir) / "STOP").touch()
    assert run(plan).steps == 1
    assert not (Path(plan.run_dir) / "STOP").exists()


def test_a_signal_after_the_last_step_leaves_the_checkpoint_and_no_result(tmp_path: Path) -> None:
    """It comes during the last step, which carries it to all ranks: nothing more is begun."""
    plan = make(tmp_path)
    with pytest.raises(Stopped, match=r"after step 8 as it was asked to \(SIGTERM\)"):
        run_asked(plan, 8, terminated)
    assert saved(plan) == [8]
    assert evaluated(plan) == [0]
    assert not (Path(plan.run_dir) / "export").exists()


def test_a_planned_stop_is_a_result_without_an_export(tmp_path: Path, whole: RunPlan) -> None:
    plan = make(tmp_path, train={"eval_every": 3}, export=False, stop_after=2)
    result = run(plan)
    assert (result.steps, result.stop_reason, result.model_path) == (2, "trial", None)
    assert result.checkpoint == str(at(plan, 2))
    assert evaluated(plan) == [0]
    assert run(resume(plan, 2, stop_after=None)).stop_reason == ""
    assert same_state(at(plan, 8), at(whole, 8), tmp_path)


# Clocks and epochs ----------------------------------------------------------------------------


def test_checkpoints_and_evaluations_after_each_epoch(tmp_path: Path) -> None:
    settings = ("checkpoint.keep_last=all",)
    plan = make(tmp_path, "run", *settings, every="epoch", export=False,
                train={"eval_every": "epoch"})  # fmt: skip
    run(plan)
    assert saved(plan) == [3, 6, 8]
    assert evaluated(plan) == [0, 3, 6, 8]


@pytest.mark.parametrize(("minutes", "expected"), [(1e-9, [*range(1, 9)]), (60, [8])])
def test_checkpoints_after_so_many_minutes(
    tmp_path: Path, minutes: float, expected: list[int]
) -> None:
    settings = (f"checkpoint.every_minutes={minutes:.9f}", "checkpoint.keep_last=all")
    plan = make(tmp_path, "run", *settings, export=False)
    run(plan)
    assert saved(plan) == expected


def test_max_time_ends_a_run_in_time_for_all_that_follows(tmp_path: Path) -> None:
    """Two minutes, of which all but 15 s had gone before the ranks began; a twentieth is kept."""
    allowed, gone = 120, 105
    began = time.time() - gone
    plan = make(tmp_path, "run", "train.max_time=00:00:02:00", began=began,
                train={"max_steps": 100_000, "log_every": 100})  # fmt: skip
    result = run(plan)
    assert time.time() < began + allowed
    assert time.time() > began + allowed - 14
    assert result.stop_reason == "train.max_time"
    assert 3 < result.steps < 100_000
    assert evaluated(plan) == [0, result.steps]
    assert saved(plan) == [result.steps]
    assert Path(str(result.model_path)).is_dir()
    assert events(plan)[-1].kind == "finished"


def test_a_run_whose_time_is_over_before_it_begins_takes_one_step(tmp_path: Path) -> None:
    plan = make(tmp_path, "run", "train.max_time=00:00:00:01", began=time.time() - 60)
    assert run(plan).steps == 1


# The best, and enough -------------------------------------------------------------------------

NEVER_BETTER = ("checkpoint.metric_mode=max",)
"""The loss falls, so that the first evaluation stays the best one."""
EVERY_STEP = {"eval_every": 1}


def test_early_stopping_ends_a_run_that_gets_no_better(tmp_path: Path) -> None:
    plan = make(tmp_path, "run", *NEVER_BETTER, "train.early_stopping=2", train=EVERY_STEP)
    result = run(plan)
    assert result.steps == 3
    assert result.stop_reason.startswith("train.early_stopping: eval_loss has not become better ")
    assert result.stop_reason.endswith(" in 2 evaluations in a row")
    assert evaluated(plan) == [0, 1, 2, 3], "no weights are evaluated twice"
    assert saved(plan) == [3]
    assert Path(str(result.model_path)).is_dir()
    again = resume(plan, 3)
    assert run(again).stop_reason == result.stop_reason
    assert steps(again) == [], "it was over"


def test_early_stopping_counts_across_a_resume(tmp_path: Path) -> None:
    settings = (*NEVER_BETTER, "train.early_stopping={patience: 3}")
    plan = make(tmp_path, "run", *settings, train=EVERY_STEP, export=False, stop_after=3)
    run(plan)
    result = run(resume(plan, 3, stop_after=None))
    assert result.steps == 4
    assert "in 3 evaluations" in result.stop_reason


def test_min_delta_is_what_counts_as_better(tmp_path: Path) -> None:
    delta = "train.early_stopping={patience: 1, min_delta: 100}"
    plan = make(tmp_path, "run", delta, train=EVERY_STEP, export=False)
    assert run(plan).steps == 2
    few = {"eval_every": 1, "max_steps": 4}
    plan = make(tmp_path, "other", "train.early_stopping=1", train=few, export=False)
    assert run(plan).steps == 4, "the loss falls at each of these"


def test_the_best_checkpoint_stays_is_tested_and_exported(tmp_path: Path) -> None:
    settings = (*NEVER_BETTER, "checkpoint.keep_best=1", "checkpoint.keep_last=1")
    plan = make(tmp_path, "run", *settings, train=EVERY_STEP)
    result = run(plan)
    assert saved(plan) == [1, 8]
    assert result.best_checkpoint == str(at(plan, 1))
    assert result.checkpoint == str(at(plan, 8))
    losses = {e.step: e.metrics["eval_loss"] for e in events(plan, "eval") if e.step < 8}
    assert result.metrics["best_eval_loss"] == pytest.approx(losses[1], abs=1e-6)
    assert result.metrics["eval_loss"] < losses[1]
    for folder, step in ((result.best_model_path, 1), (result.model_path, 8)):
        weights = load_file(Path(str(folder)) / "model.safetensors")
        stored = tensors(at(plan, step), tmp_path / f"stored-{step}")
        assert all(torch.equal(stored[f"model.{name}"], weights[name]) for name in weights)
    assert Path(str(result.best_model_path)).name == "export-best"


def test_where_the_last_is_the_best_there_is_one_export(tmp_path: Path) -> None:
    settings = ("checkpoint.keep_best=2", "checkpoint.keep_last=1")
    plan = make(tmp_path, "run", *settings, train={"eval_every": 3})
    result = run(plan)
    assert saved(plan) == [6, 8], "each was among the best two when it was written"
    assert result.best_checkpoint == result.checkpoint
    assert result.best_model_path == result.model_path
    assert not (Path(plan.run_dir) / "export-best").exists()


def test_the_list_of_the_best_goes_on_after_a_resume(tmp_path: Path) -> None:
    settings = (*NEVER_BETTER, "checkpoint.keep_best=2", "checkpoint.keep_last=1")
    plan = make(tmp_path, "run", *settings, train=EVERY_STEP, export=False, stop_after=4)
    run(plan)
    assert saved(plan) == [1, 2, 4]
    result = run(resume(plan, 4, stop_after=None))
    assert saved(plan) == [1, 2, 8]
    assert result.best_checkpoint == str(at(plan, 1))


def test_an_evaluation_that_was_made_up_for_counts_for_the_checkpoint_it_was_due_at(
    tmp_path: Path,
) -> None:
    settings = (*NEVER_BETTER, "checkpoint.keep_best=1", "checkpoint.keep_last=1")
    plan = make(tmp_path, "run", *settings, train={"eval_every": 2}, export=False)
    with pytest.raises(Stopped):
        run_asked(plan, 2, "CANCEL")
    result = run(resume(plan, 2))
    assert saved(plan) == [2, 8]
    assert result.best_checkpoint == str(at(plan, 2))
    assert storage.verify(at(plan, 2)) == []


def test_a_run_that_is_judged_by_other_rows_is_judged_anew(tmp_path: Path) -> None:
    """Its best so far was by rows that are held out no more: what follows is not compared with it,
    and it is deleted as any other."""
    settings = (*NEVER_BETTER, "checkpoint.keep_best=1", "checkpoint.keep_last=1")
    plan = make(tmp_path, "run", *settings, train=EVERY_STEP, export=False, stop_after=4)
    run(plan)
    assert saved(plan) == [1, 4]
    other = make(tmp_path, "other", held_out=tiny.examples([9, 7, 5]))
    again = resume(plan, 4, stop_after=None, data=other.data)
    assert resuming.identity(again) == resuming.identity(plan)
    result = run(again)
    (started,) = events(again, "started")
    (note,) = (note for note in started.data["notes"] if "held-out" in note)
    assert note.startswith("held-out rows changed since step 4 (data.eval: ")
    assert evaluated(again) == [4, 5, 6, 7, 8, 8], "before anything, and at last the best one"
    assert saved(again) == [4, 8]
    assert result.best_checkpoint == str(at(plan, 4)), "the first by these rows"
    assert result.metrics["best_eval_loss"] == events(again, "eval")[0].metrics["eval_loss"]
    assert "initial_eval_loss" not in result.metrics, "that was of other rows"
    manifest: Any = storage.read_manifest(at(plan, 4))
    assert manifest["state"]["held_out"] == resuming.held_out(again)
    assert manifest["metrics"]["eval_loss"] == result.metrics["best_eval_loss"]


OF_THE_STEPS = {"train_loss", "tokens_per_second", "seconds_to_first_step", "skipped_steps"}


def test_where_another_run_has_taken_all_steps_the_model_is_evaluated_and_exported(
    tmp_path: Path,
) -> None:
    """Its best checkpoint and its times are left to it."""
    settings = (*NEVER_BETTER, "checkpoint.keep_best=1", "checkpoint.keep_last=1")
    first = make(tmp_path, "first", *settings, train=EVERY_STEP, export=False)
    theirs = run(first)
    assert theirs.best_checkpoint == str(at(first, 1))
    assert set(theirs.metrics) >= OF_THE_STEPS
    shutil.rmtree(at(first, 1))
    second = make(tmp_path, "second", *settings, train=EVERY_STEP, resume_from=str(at(first, 8)))
    ours = run(second)
    assert steps(second) == []
    assert evaluated(second) == [8]
    assert not OF_THE_STEPS & set(ours.metrics)
    assert "initial_eval_loss" not in ours.metrics
    assert ours.metrics["eval_loss"] == theirs.metrics["eval_loss"]
    assert ours.checkpoint == ours.best_checkpoint == str(at(second, 8))
    assert ours.model_path == ours.best_model_path == str(Path(second.run_dir) / "export")
    again = run(resume(second, 8))  # (it was killed before it had its result)
    assert set(again.metrics) == set(ours.metrics)


def test_times_are_of_the_steps_that_this_run_has_taken(tmp_path: Path) -> None:
    first = make(tmp_path, "first", export=False, stop_after=6)
    run(first)
    path = at(first, 6) / storage.MANIFEST
    content = json.loads(path.read_text())
    content["state"]["seen"]["seconds"] = 1e6
    content["state"]["seconds_to_first_step"] = 1e6
    content.pop("sha256")
    path.write_text(json.dumps(content))
    slow = run(resume(first, 6, stop_after=None)).metrics
    assert slow["tokens_per_second"] < 1, "its own times count"
    second = make(tmp_path, "second", export=False, resume_from=str(at(first, 6)))
    metrics = run(second).metrics
    assert metrics["tokens_per_second"] > 1
    assert metrics["seconds_to_first_step"] < 1e6
    assert events(second, "step")[-1].metrics["rows_seen"] == 22, "of all steps"


def test_a_best_checkpoint_that_is_damaged_costs_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (*NEVER_BETTER, "checkpoint.keep_best=1")
    plan = make(tmp_path, "run", *settings, train=EVERY_STEP, stop_after=4)
    run(plan)
    damage(at(plan, 1))
    result = run(resume(plan, 4, stop_after=None))
    assert result.best_checkpoint is None
    assert result.best_model_path is None
    assert Path(str(result.model_path)).is_dir()
    assert "no best model: the weights of the checkpoint" in capsys.readouterr().out


def test_a_metric_that_no_evaluation_has_is_refused_before_the_first_step(tmp_path: Path) -> None:
    settings = ("checkpoint.keep_best=1", "checkpoint.metric=bleu")
    plan = make(tmp_path, "run", *settings, train=EVERY_STEP)
    with pytest.raises(ConfigError) as caught:
        run(plan)
    assert [problem.path for problem in caught.value.problems] == ["checkpoint.metric"]
    assert "found 'bleu'; they have eval_loss, eval_perplexity" in str(caught.value)
    assert steps(plan) == []


# What goes wrong ------------------------------------------------------------------------------


def damage(folder: Path) -> None:
    """Flip a bit of a file; its size stays."""
    path = sorted(folder.glob("*.distcp"))[0]
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def test_the_checkpoint_before_a_damaged_one_is_used(
    tmp_path: Path, whole: RunPlan, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make(tmp_path, export=False, every=2, stop_after=6, train={"eval_every": 3})
    run(plan)
    assert saved(plan) == [4, 6]
    damage(at(plan, 6))
    again = resume(plan, 6, stop_after=None)
    capsys.readouterr()
    run(again)
    (started,) = events(again, "started")
    assert (started.step, started.data["resumed_from"]) == (4, str(at(plan, 4)))
    printed = capsys.readouterr().out
    assert f"Warning: the checkpoint {at(plan, 6)} cannot be used: rank 0: " in printed
    assert f"is damaged: its hash is not the manifest's; the run goes on from {at(plan, 4)}" in (
        printed
    )
    assert steps(again) == [5, 6, 7, 8]
    assert same_state(at(plan, 8), at(whole, 8), tmp_path)


def test_a_damaged_checkpoint_that_was_named_or_is_the_only_one_is_not_replaced(
    tmp_path: Path,
) -> None:
    plan = make(tmp_path, export=False, every=2, stop_after=4)
    run(plan)
    damage(at(plan, 4))
    config = plan.config.override(f"checkpoint.resume={at(plan, 4)}")
    with pytest.raises(CheckpointError, match=r"step-00000004 cannot be used: .* is damaged"):
        run(resume(plan, 4, stop_after=None, config=config))
    shutil.rmtree(at(plan, 2))
    with pytest.raises(CheckpointError, match=r"step-00000004 cannot be used: .* is damaged"):
        run(resume(plan, 4, stop_after=None))
    assert (at(plan, 4) / storage.MANIFEST).exists()


def test_checkpoints_that_cannot_be_written_do_not_end_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make(tmp_path, every=3)
    Path(plan.run_dir, "checkpoints").mkdir(parents=True)
    at(plan, 8).write_text("a file where the folder should be")
    result = run(plan)
    assert result.checkpoint == str(at(plan, 6)), "the newest that is complete"
    assert Path(str(result.model_path)).is_dir()
    assert "step 8: no checkpoint: " in capsys.readouterr().out


def test_a_run_of_which_nothing_could_be_kept_has_failed(tmp_path: Path) -> None:
    plan = make(tmp_path, export=False, every=3)
    Path(plan.run_dir).mkdir()
    Path(plan.run_dir, "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="NotADirectoryError"):
        run(plan)
    assert steps(plan) == [*range(1, 9)], "it could have been mended meanwhile"
