from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain import storage
from dbx_llmtrain.sections import CheckpointConfig
from dbx_llmtrain.worker import keeping

INF = math.inf


def checkpoint(run_dir: Path, step: int, **metrics: float) -> Path:
    folder = storage.checkpoint_folder(run_dir, step)
    folder.mkdir(parents=True)
    (folder / "data").write_text(str(step))
    files = [entry.model_dump() for entry in storage.entries(folder)]
    storage.write_manifest(folder, {"files": files, "step": step, "metrics": metrics})
    return folder


def steps(run_dir: Path) -> list[int | None]:
    return sorted(storage.step_of(path) or 0 for path in (run_dir / "checkpoints").iterdir())


def policy(**fields: Any) -> CheckpointConfig:
    return CheckpointConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"keep_last": 1}, [60]),
        ({"keep_last": 2}, [50, 60]),
        ({"keep_last": 9}, [10, 20, 30, 40, 50, 60]),
        ({"keep_last": "all"}, [10, 20, 30, 40, 50, 60]),
        ({"keep_last": 1, "keep_best": 1}, [20, 60]),
        ({"keep_last": 1, "keep_best": 2}, [20, 40, 60]),
        ({"keep_last": 1, "keep_best": 1, "metric_mode": "max"}, [30, 60]),
        ({"keep_last": 1, "keep_best": 1, "metric": "accuracy"}, [10, 60]),
        ({"keep_last": 1, "keep_best": 3, "metric": "unheard_of"}, [60]),
    ],
)
def test_the_newest_and_the_best_stay(
    tmp_path: Path, fields: dict[str, Any], kept: list[int]
) -> None:
    losses = {10: 3.0, 20: 1.0, 30: 4.0, 40: 2.0, 50: math.nan, 60: 3.5}
    for step, loss in losses.items():
        more = {"accuracy": 1.0} if step == 10 else {}
        checkpoint(tmp_path, step, eval_loss=loss, **more)
    deleted = keeping.prune(tmp_path, policy(**fields))
    assert steps(tmp_path) == kept
    assert sorted(storage.step_of(path) or 0 for path in deleted) == sorted(set(losses) - set(kept))


@pytest.mark.parametrize("value", [math.nan, -INF, INF])
def test_what_is_no_number_is_never_best(tmp_path: Path, value: float) -> None:
    checkpoint(tmp_path, 1, eval_loss=value)
    checkpoint(tmp_path, 2, eval_loss=9.0)
    checkpoint(tmp_path, 3)
    keeping.prune(tmp_path, policy(keep_last=1, keep_best=1))
    assert steps(tmp_path) == [2, 3]


def test_those_that_were_judged_by_other_rows_are_not_among_the_best(tmp_path: Path) -> None:
    for step, rows in ((1, "old"), (2, "new"), (3, "new"), (4, "new")):
        folder = checkpoint(tmp_path, step, eval_loss=float(step))
        content: Any = storage.read_manifest(folder)
        storage.write_manifest(folder, content | {"state": {"held_out": {"eval": rows}}})
    keeping.prune(tmp_path, policy(keep_last=1, keep_best=1), protect=[folder])
    assert steps(tmp_path) == [2, 4]


def test_of_equal_ones_the_first_is_best(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint(tmp_path, step, eval_loss=1.0)
    keeping.prune(tmp_path, policy(keep_last=1, keep_best=1))
    assert steps(tmp_path) == [1, 3]


def test_c89_the_only_complete_checkpoint_stays(tmp_path: Path) -> None:
    only = checkpoint(tmp_path, 5)
    for step in (7, 9):
        torn = storage.checkpoint_folder(tmp_path, step)
        torn.mkdir()
        (torn / "__0_0.distcp").write_text("half")
    assert keeping.prune(tmp_path, policy(keep_last=1), protect=[]) == [
        storage.checkpoint_folder(tmp_path, step) for step in (9, 7)
    ]
    assert storage.checkpoints(tmp_path) == [only]
    assert steps(tmp_path) == [5]


def test_c89_a_damaged_later_one_does_not_push_out_what_was_just_written(tmp_path: Path) -> None:
    """A run went on from step 10, as step 20 was damaged, and has come to step 15."""
    checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 20, eval_loss=0.5)
    written = checkpoint(tmp_path, 15, eval_loss=1.5)
    keeping.prune(tmp_path, policy(keep_last=2, keep_best=0), protect=[written])
    assert steps(tmp_path) == [10, 15]
    keeping.prune(tmp_path, policy(keep_last=1), protect=[written])
    assert steps(tmp_path) == [15]


def test_what_is_protected_stays_whatever_it_is(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        checkpoint(tmp_path, step)
    writing = storage.checkpoint_folder(tmp_path, 5)
    writing.mkdir()
    first = storage.checkpoint_folder(tmp_path, 1)
    keeping.prune(tmp_path, policy(keep_last=1), protect=[writing, first])
    assert steps(tmp_path) == [1, 4, 5]


def test_a_folder_with_a_manifest_that_does_not_count_is_left_to_the_user(tmp_path: Path) -> None:
    broken = checkpoint(tmp_path, 1)
    (broken / "data").write_text("longer than it was")
    checkpoint(tmp_path, 2)
    assert keeping.prune(tmp_path, policy(keep_last=1)) == []
    assert steps(tmp_path) == [1, 2]


def test_nothing_is_done_where_there_is_nothing(tmp_path: Path) -> None:
    assert keeping.prune(tmp_path / "no", policy()) == []


def test_a_checkpoint_that_cannot_be_deleted_stays_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stuck, _ = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    manifest = (stuck / storage.MANIFEST).read_text()
    (stuck / storage.MANIFEST).unlink()
    (stuck / storage.MANIFEST).mkdir()  # cannot be unlinked
    (stuck / storage.MANIFEST / "x").touch()
    assert keeping.prune(tmp_path, policy(keep_last=1)) == []
    assert (stuck / "data").exists()
    (stuck / storage.MANIFEST / "x").unlink()
    (stuck / storage.MANIFEST).rmdir()
    (stuck / storage.MANIFEST).write_text(manifest)
    assert keeping.prune(tmp_path, policy(keep_last=1)) == [stuck]
    assert not stuck.exists()


@pytest.mark.parametrize(
    ("metric", "mode", "found"),
    [
        ("eval_loss", "auto", "min"),
        ("eval_news_loss", "auto", "min"),
        ("eval_perplexity", "auto", "min"),
        ("accuracy", "auto", "max"),
        ("lossless_ratio", "auto", "max"),
        ("accuracy", "min", "min"),
        ("eval_loss", "max", "max"),
    ],
)
def test_which_way_is_better(metric: str, mode: str, found: str) -> None:
    assert keeping.mode_of(metric, mode) == found


def test_better() -> None:
    assert keeping.better("min", 1.0, 2.0)
    assert not keeping.better("min", 2.0, 1.0)
    assert not keeping.better("min", 1.0, 1.0)
    assert keeping.better("max", 2.0, 1.0)
    assert not keeping.better("max", 1.0, 2.0)
    assert not keeping.better("min", 1.0, 1.05, min_delta=0.1)
    assert keeping.better("min", 1.0, 1.2, min_delta=0.1)
    assert keeping.better("max", 1.2, 1.0, min_delta=0.1)
    for nothing in (None, math.nan, INF):
        assert keeping.better("min", 1.0, nothing)
        assert keeping.better("max", 1.0, nothing)
    assert not keeping.better("min", math.nan, None)
    assert not keeping.better("max", INF, 1.0)


def test_what_makes_the_list() -> None:
    assert keeping.makes_the_list([], 5.0, 1, "min")
    assert not keeping.makes_the_list([], 5.0, 0, "min")
    assert not keeping.makes_the_list([], math.nan, 3, "min")
    assert keeping.makes_the_list([1.0, 3.0], 2.0, 2, "min")
    assert not keeping.makes_the_list([1.0, 2.0], 3.0, 2, "min")
    assert not keeping.makes_the_list([1.0, 2.0], 2.0, 2, "min")  # as good is not better
    assert keeping.makes_the_list([1.0, 2.0], 3.0, 1, "max")
    assert keeping.makes_the_list([1.0, math.nan], 3.0, 2, "min")
