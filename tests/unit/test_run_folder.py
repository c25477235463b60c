"""Where a run writes and what it goes on from."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pytest

from dbx_llmtrain import storage
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver import run_folder
from dbx_llmtrain.errors import CheckpointError
from tests import sample

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5)


def config(**checkpoint: object) -> TrainConfig:
    return TrainConfig(
        model={"source": "m"}, data={"train": "d"}, checkpoint=checkpoint,
        tracking={"run_name": "mine"},
    )  # fmt: skip


def checkpoint(run: Path, step: int, *, whole: bool = True) -> Path:
    folder = storage.checkpoint_folder(run, step)
    folder.mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"abc")
    files = [entry.model_dump() for entry in storage.entries(folder)]
    storage.write_manifest(folder, {"files": files})
    if not whole:
        (folder / "a.bin").write_bytes(b"a")
    return folder


def test_names_are_new_for_every_call_unless_given() -> None:
    cfg = TrainConfig(model={"source": "m"}, data={"train": "d"})
    first, second = (run_folder.name_folder(cfg, "runs", now=NOW) for _ in range(2))
    assert first.name.startswith("run-20260102-030405-")
    assert first.name != second.name
    assert first.path == Path.cwd() / "runs" / first.name
    assert first.cache == Path.cwd() / "runs" / ".cache"


def test_a_job_names_its_run_and_a_trial_has_a_folder_beside_it() -> None:
    cfg = TrainConfig(model={"source": "m"}, data={"train": "d"})
    folder = run_folder.name_folder(cfg, "runs", now=NOW, job="job-7-run-8-train")
    assert folder.path == Path.cwd() / "runs" / "job-7-run-8-train"
    assert "retry or repair" in folder.why
    trial = run_folder.name_folder(cfg, "runs", now=NOW, job="job-7-run-8-train", trial=True)
    assert trial.path == folder.path.with_name("job-7-run-8-train-trial")
    given = run_folder.name_folder(config(), "runs", now=NOW, job="job-7-run-8-train")
    assert (given.name, given.why) == ("mine", "")
    timed = run_folder.name_folder(cfg, "runs", now=NOW)
    assert timed.why == f"of the time: give tracking.run_name={timed.name} to go on in it"
    assert str(timed) == f"{timed.name} in {Path.cwd()}/runs"


def test_volumes_are_reached_through_their_mount() -> None:
    folder = run_folder.name_folder(config(), "dbfs:/Volumes/a/b/c", now=NOW)
    assert folder.path == Path("/Volumes/a/b/c/mine")


def test_c113_a_retry_goes_on_from_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    folder = run_folder.name_folder(config(), str(tmp_path), now=NOW)
    assert run_folder.resume_point(config(), folder) is None
    checkpoint(folder.path, 2)
    newest = checkpoint(folder.path, 10)
    checkpoint(folder.path, 12, whole=False)
    (folder.path / "checkpoints" / "step-00000014").mkdir()
    assert run_folder.resume_point(config(), folder) == str(newest)


def test_a_fresh_start_among_old_checkpoints_is_refused(tmp_path: Path) -> None:
    folder = run_folder.name_folder(config(), str(tmp_path), now=NOW)
    assert run_folder.resume_point(config(resume="never"), folder) is None
    folder.path.mkdir()
    (folder.path / "result.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"resume is never, but .*/result\.json is from an"):
        run_folder.resume_point(config(resume="never"), folder)
    old = checkpoint(folder.path, 2)
    with pytest.raises(CheckpointError, match="resume is never") as caught:
        run_folder.resume_point(config(resume="never"), folder)
    assert str(old) in str(caught.value)


def test_c87_a_torn_checkpoint_is_skipped_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = run_folder.name_folder(config(), str(tmp_path), now=NOW)
    torn = checkpoint(folder.path, 12, whole=False)
    assert run_folder.resume_point(config(), folder) is None
    assert f"nothing goes on from it: {torn}; there is no complete one" in caplog.text
    caplog.clear()
    checkpoint(folder.path, 5, whole=False)  # older than the newest: of no account
    newest = checkpoint(folder.path, 10)
    assert run_folder.resume_point(config(), folder) == str(newest)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"not complete, so that nothing goes on from it: {torn}; the newest complete checkpoint is "
        f"{newest}"
    )


def test_a_run_goes_on_from_its_own_checkpoints_not_again_from_where_it_began(
    tmp_path: Path,
) -> None:
    """A retry needs no change of the configuration."""
    folder = run_folder.name_folder(config(), str(tmp_path / "runs"), now=NOW)
    other = checkpoint(tmp_path / "other", 50)
    cfg = config(resume=str(other))
    assert run_folder.resume_point(cfg, folder) == str(other)
    own = checkpoint(folder.path, 3)
    assert run_folder.resume_point(cfg, folder) == str(own)


def test_an_older_checkpoint_of_the_run_itself_is_refused(tmp_path: Path) -> None:
    folder = run_folder.name_folder(config(), str(tmp_path), now=NOW)
    old, new = checkpoint(folder.path, 2), checkpoint(folder.path, 4)
    assert run_folder.resume_point(config(resume=str(new)), folder) == str(new)
    with pytest.raises(CheckpointError, match="is not the newest checkpoint of this run") as caught:
        run_folder.resume_point(config(resume=str(old)), folder)
    assert "another tracking.run_name, remove the later ones" in str(caught.value)


def test_a_cache_that_nothing_was_put_into_goes_when_a_run_is_refused(tmp_path: Path) -> None:
    used, unused, own = (tmp_path / name / ".cache" for name in ("a", "b", "c"))
    own = own.with_name("of the user")
    for folder in (used, unused, own):
        (folder / "models" / ".hashes").mkdir(parents=True)
    (used / "models" / "x").write_text("x")
    for folder in (used, unused, own):
        with pytest.raises(ValueError, match="no"), run_folder.tidied(folder):
            raise ValueError("no")
    assert [path.exists() for path in (used, unused, own)] == [True, False, True]
    assert unused.parent.exists()
    assert [path.name for path in (used / "models").iterdir()] == ["x"]
    unused.mkdir()
    with run_folder.tidied(unused):
        pass
    assert unused.exists()


def test_a_named_checkpoint_has_to_be_complete(tmp_path: Path) -> None:
    folder = run_folder.name_folder(config(), str(tmp_path / "runs"), now=NOW)
    good = checkpoint(tmp_path / "other", 3)
    torn = checkpoint(tmp_path / "other", 4, whole=False)
    assert run_folder.resume_point(config(resume=str(good)), folder) == str(good)
    assert run_folder.resume_point(config(resume=str(tmp_path / "other")), folder) == str(good)
    for wrong in (torn, tmp_path, tmp_path / "none", good / "a.bin"):
        with pytest.raises(CheckpointError, match=r"checkpoint\.resume: .*not a complete checkp"):
            run_folder.resume_point(config(resume=str(wrong)), folder)


def test_a_folder_that_cannot_be_made_says_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoint\.dir.*cannot be made.*/Volumes/"):
        run_folder.make_folder(tmp_path / "file" / "runs")
    made = run_folder.make_folder(tmp_path / "a" / "b")
    cfg = TrainConfig(
        model={"source": "m"}, data={"train": "d", "cache_dir": str(tmp_path / "file" / "cache")}
    )
    folder = run_folder.name_folder(cfg, str(tmp_path), now=NOW)
    with pytest.raises(CheckpointError, match=r"^data\.cache_dir: .*/file/cache cannot be made"):
        run_folder.make_cache(cfg, folder)
    assert os.path.isdir(made)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_a_run_that_is_stopped_says_how_to_go_on(
    error: BaseException, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = sample.run_plan(run_dir=str(tmp_path / "mine"), run_name="mine")
    run = Path(plan.run_dir)
    with pytest.raises(type(error)), run_folder.told_when_stopped(plan):
        raise error
    assert capsys.readouterr().err == "mine has been stopped; no checkpoint has been written\n"
    newest = checkpoint(run, 10)
    checkpoint(run, 2)
    with pytest.raises(type(error)), run_folder.told_when_stopped(plan):
        raise error
    assert capsys.readouterr().err == (
        f"mine has been stopped; the newest checkpoint is {newest}: the same run goes on from "
        "there with tracking.run_name=mine\n"
    )
    with pytest.raises(ValueError, match="x"), run_folder.told_when_stopped(plan):
        raise ValueError("x")
    assert capsys.readouterr().err == ""


def test_the_room_for_checkpoints_counts_those_that_will_go(tmp_path: Path) -> None:
    free = run_folder.free_space(tmp_path / "new")
    assert free is not None
    assert free > 0
    step = checkpoint(tmp_path, 1)
    with (step / "large.bin").open("wb") as file:
        file.truncate(2**43)
    found = run_folder.free_space(tmp_path)
    assert found is not None
    assert found > 2**43


@pytest.mark.parametrize("trial", [False, True])
def test_a_run_that_goes_on_has_no_result_and_a_trial_begins_anew(
    tmp_path: Path, trial: bool
) -> None:
    plan = sample.run_plan(tmp_path / "mine", trial=trial)
    run = Path(plan.run_dir)
    assert run_folder.clear(plan, keep="lease.json") is plan
    assert not run.exists()
    checkpoint(run, 3)
    for name in ("result.json", "lease.json", "events.jsonl"):
        (run / name).write_text("{}")
    assert run_folder.clear(plan, keep="lease.json") is plan
    left = ["lease.json"] if trial else ["checkpoints", "events.jsonl", "lease.json"]
    assert sorted(path.name for path in run.iterdir()) == left
    run_folder.write_start(plan)
    assert {"config.yaml", "plan.json", "logs"} <= {path.name for path in run.iterdir()}
