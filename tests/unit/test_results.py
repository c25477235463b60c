"""The result of a run, found again in its folder, and what is said where there is none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import dbx_llmtrain as llm
from dbx_llmtrain import storage
from dbx_llmtrain.driver import lease, results, run_folder
from dbx_llmtrain.driver.run_folder import RunFolder
from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.outcomes import RankResult
from dbx_llmtrain.records import RunPlan, TrackingPlan, TrainResult
from tests import sample

TRAIN: dict[str, Any] = {"max_steps": 3, "eval_every": 1}


def plan(folder: Path, steps: int = 3, **train: Any) -> RunPlan:
    cfg = sample.config(train=TRAIN | {"max_steps": steps} | train)
    return sample.run_plan(folder / "first", config=cfg, total_steps=steps)


def outcome(folder: Path, steps: int = 3, stop_reason: str = "") -> RankResult:
    return RankResult(
        steps=steps,
        metrics={"eval_loss": 1.5},
        checkpoint=str(folder / "first" / "checkpoints" / f"step-{steps:08d}"),
        model_path=str(folder / "first" / "export"),
        best_checkpoint=str(folder / "first" / "checkpoints" / "step-00000001"),
        best_model_path=str(folder / "first" / "export-best"),
        stop_reason=stop_reason,
    )


def ran(before: RunPlan, folder: Path, stop_reason: str = "", steps: int = 3) -> TrainResult:
    """A run of this plan has ended."""
    run_folder.write_start(before)
    return results.write(before, outcome(folder, steps, stop_reason), ("again",))


def test_the_result_is_written_and_found_again(tmp_path: Path) -> None:
    assert results.read(tmp_path / "first") is None
    written = ran(plan(tmp_path), tmp_path, "STOP")
    assert results.read(tmp_path / "first") == written
    assert (written.stop_reason, written.restarts) == ("STOP", ("again",))
    assert written.best_model_path == str(tmp_path / "first" / "export-best")
    assert llm.load(str(tmp_path / "first")) == written


def test_a_finished_run_returns_its_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = plan(tmp_path)
    assert results.finished(before) is None, "nothing has run"
    written = ran(before, tmp_path)
    assert results.finished(before) == written
    said = capsys.readouterr().out
    assert said.startswith("first is finished: this is its stored result, nothing is trained. To")
    assert "raise train.epochs or train.max_steps; to train again, give another" in said
    assert results.finished(before.model_copy(update={"trial": True})) is None


def test_a_checkpoint_that_is_torn_by_now_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = plan(tmp_path)
    written = ran(before, tmp_path)
    places = [Path(str(path)) for path in (written.best_checkpoint, written.checkpoint)]
    for place in places:
        storage.write_text(place / "a", "a")
        storage.write_manifest(place, {"files": [e.model_dump() for e in storage.entries(place)]})
    assert llm.load(str(tmp_path / "first")) == results.finished(before) == written
    assert not caplog.messages
    (places[1] / storage.MANIFEST).unlink()
    assert llm.load(written.run_dir) == results.finished(before) == written
    told = (
        f"{places[1]} of this result is no longer a complete checkpoint; the newest one is "
        f"{places[0]}"
    )
    assert caplog.messages == [told, told], "once each time"


def test_settings_that_came_too_late_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = ran(plan(tmp_path), tmp_path)
    assert results.finished(plan(tmp_path, learning_rate=0.5)) == written
    assert (
        "Not used, since they were changed afterwards: train.learning_rate: not set then, 0.5 now."
        in (capsys.readouterr().out)
    )


def test_more_steps_go_on(tmp_path: Path) -> None:
    ran(plan(tmp_path), tmp_path)
    assert results.finished(plan(tmp_path, steps=4)) is None


LONG = {"max_time": "00:10:00:00"}


@pytest.mark.parametrize(
    ("before", "now", "goes_on"),
    [
        (LONG, LONG, False),
        (LONG, {"max_time": "00:09:59:59"}, False),
        (LONG, {"max_time": "01:00:00:00"}, True),
        (LONG, {}, True),
        ({}, LONG, False),
        ({"early_stopping": 2}, {"early_stopping": 2}, False),
        ({"early_stopping": 2}, {"early_stopping": 1}, False),
        ({"early_stopping": 2}, {"early_stopping": {"patience": 3}}, True),
        ({"early_stopping": 2}, {}, True),
        ({}, {"early_stopping": 2}, False),
        (
            {"early_stopping": {"patience": 2, "min_delta": 0.1}},
            {"early_stopping": {"patience": 2, "min_delta": 0.01}},
            True,
        ),
        ({}, {"learning_rate": 0.5}, False),
        ({}, {"max_steps": 4}, True),
    ],
)
def test_a_run_that_ended_early_is_finished_until_more_is_asked(
    tmp_path: Path, before: dict[str, Any], now: dict[str, Any], goes_on: bool
) -> None:
    written = ran(plan(tmp_path, **before), tmp_path, "some reason", steps=2)
    steps = now.get("max_steps", 3)
    found = results.finished(plan(tmp_path, **(now | {"steps": steps, "max_steps": steps})))
    assert found == (None if goes_on else written)


def test_c86_a_finished_run_of_other_data_is_no_result(tmp_path: Path) -> None:
    before = plan(tmp_path)
    ran(before, tmp_path)
    other = before.data.splits["train"].model_copy(update={"rows": 91, "digest": "other"})
    data = before.data.model_copy(update={"splits": before.data.splits | {"train": other}})
    with pytest.raises(
        CheckpointError, match=r"has another run, which is finished: data\.train: 90 rows then, 91"
    ):
        results.finished(before.model_copy(update={"data": data}))


def test_the_earlier_mlflow_run_is_of_the_lease_or_the_plan(tmp_path: Path) -> None:
    run = TrackingPlan(uri="sqlite:///x", experiment_id="1", run_id="r1", by_rank=False)
    before = plan(tmp_path)
    place = RunFolder("first", tmp_path / "first", tmp_path, "now")
    with lease.held(place) as held:
        assert results.earlier_tracking(held, before) is None
        run_folder.write_start(before.model_copy(update={"tracking": run}))
        assert results.earlier_tracking(held, before) == run
        assert results.earlier_tracking(held, before.model_copy(update={"trial": True})) is None
        held.begin()
        held.track(run.model_copy(update={"run_id": "r2"}))
    with lease.held(place) as held:
        found = results.earlier_tracking(held, before)
        assert found is not None
        assert found.run_id == "r2"


def test_a_folder_that_was_moved_gives_paths_that_are_there(tmp_path: Path) -> None:
    ran(plan(tmp_path), tmp_path)
    shutil.move(tmp_path / "first", tmp_path / "second")
    found = llm.load(tmp_path / "second")  # type: ignore[arg-type]
    assert found.run_dir == str(tmp_path / "second")
    assert found.model_path == str(tmp_path / "second" / "export")
    assert found.best_checkpoint == str(tmp_path / "second" / "checkpoints" / "step-00000001")


def test_volumes_are_read_through_their_mount() -> None:
    with pytest.raises(CheckpointError, match=r"^/Volumes/a/b/c/first is not the folder of a run"):
        llm.load("dbfs:/Volumes/a/b/c/first")


@pytest.mark.parametrize("there", [True, False])
def test_what_is_no_run_is_said(tmp_path: Path, there: bool) -> None:
    folder = tmp_path / "none"
    if there:
        folder.mkdir()
    with pytest.raises(CheckpointError, match="is not the folder of a run") as caught:
        llm.load(str(folder))
    assert ("has no plan.json" if there else "there is no such folder") in str(caught.value)
    assert "Expected checkpoint.dir/<run name>" in str(caught.value)


def checkpoint(run: Path, step: int) -> Path:
    folder = storage.checkpoint_folder(run, step)
    folder.mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"abc")
    files = [entry.model_dump() for entry in storage.entries(folder)]
    storage.write_manifest(folder, {"files": files})
    return folder


def test_a_run_that_is_not_finished_says_where_it_is(tmp_path: Path) -> None:
    run = tmp_path / "first"

    def state() -> str:
        with pytest.raises(CheckpointError) as caught:
            llm.load(str(run))
        return str(caught.value)

    def fail() -> None:
        with lease.held(RunFolder("first", run, run, "now")) as held:
            held.begin()
            run_folder.write_start(plan(tmp_path))
            running = state()
            assert running.startswith(f"{run} is not finished: it is running (first, by ")
            assert running.endswith("; it has no complete checkpoint")
            raise ValueError("rank 3 is broken")

    with pytest.raises(ValueError, match="rank 3"):
        fail()
    newest = checkpoint(run, 7)
    failed = state()
    assert f"{run} is not finished: it was failed on 20" in failed
    assert f"(ValueError: rank 3 is broken); its newest checkpoint is {newest}; the same " in failed
    assert failed.endswith("call of train with tracking.run_name=first goes on")
    (run / lease.LEASE).unlink()
    assert "its driver is gone without a word; its newest" in state()
