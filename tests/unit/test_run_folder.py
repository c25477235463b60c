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
    old = checkpoint(folder.path, 2)
    with pytest.raises(CheckpointError, match="resume is never") as caught:
        run_folder.resume_point(config(resume="never"), folder)
    assert str(old) in str(caught.value)


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
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        run_folder.resume_point(config(resume=str(torn)), folder)


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
