"""One task: where its rows go, how often they count, what it leaves behind."""

from __future__ import annotations

import gc
import hashlib
import os
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain import storage
from dbx_llmtrain.driver import fingerprints
from dbx_llmtrain.driver.sources import resolve_model
from dbx_llmtrain.model_sections import ModelConfig
from dbx_llmtrain.records import ModelInfo
from dbx_llmtrain.text.encode import Rules
from dbx_llmtrain.text.readers import Piece
from dbx_llmtrain.worker import part
from tests import tiny

KEYS = [hashlib.sha256(str(i).encode()).hexdigest()[:32] for i in range(4000)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    folder = tiny.model_folder(tmp_path_factory.mktemp("model"))
    return resolve_model(ModelConfig(source=str(folder)), folder / "cache")


def rules(**changes: Any) -> Rules:
    values: dict[str, Any] = {
        "format": "text", "columns": {}, "objective": "sft", "train_on": None, "max_length": 32,
        "overflow": "truncate",
    }  # fmt: skip
    return Rules(**(values | changes))


def job(folder: Path, model: ModelInfo, **source: Any) -> part.Job:
    values = {"role": "train", "rules": asdict(rules())} | source
    return part.Job(
        folder=str(folder / "shared"),
        tokenizer=fingerprints.tokenizer(model).model_dump(mode="json"),
        sources=(part.Source(**values),),
        local_dir=str(folder / "local"),
    )


def run(what: part.Job, lines: str, folder: Path) -> part.Tally:
    file = folder / "rows.jsonl"
    file.write_text(lines)
    task = part.Task(0, 0, (Piece(str(file)),))
    return part.Tally(**part.files_task(asdict(what), asdict(task), lambda count: None))


def test_weights_take_rows_by_their_content() -> None:
    for weight in (0.25, 1.5, 3.0, 0.999, 1e-3):
        total = sum(part.copies_of(key, weight) for key in KEYS)
        assert total == pytest.approx(weight * len(KEYS), rel=0.05, abs=12)
    assert {part.copies_of(key, 2) for key in KEYS} == {2}
    half = {key for key in KEYS if part.copies_of(key, 0.5)}
    assert half <= {key for key in KEYS if part.copies_of(key, 0.6)}


def test_shares_are_independent_of_weights() -> None:
    source = part.Source("train", {}, eval_share=0.2, test_share=0.1)
    splits = [part.split_of(key, source) for key in KEYS]
    for name, share in (("eval", 0.2), ("test", 0.1), ("train", 0.7)):
        assert splits.count(name) / len(KEYS) == pytest.approx(share, abs=0.03)
    taken = [split for key, split in zip(KEYS, splits, strict=True) if part.copies_of(key, 0.5)]
    assert taken.count("eval") / len(taken) == pytest.approx(0.2, abs=0.03)
    assert part.split_of(KEYS[0], part.Source("eval-a", {}, eval_share=1.0)) == "eval-a"


def test_c93_rows_of_a_weighted_source_are_all_counted(tmp_path: Path, model: ModelInfo) -> None:
    lines = "".join(f'{{"text": "cat {i}"}}\n' for i in range(200)) + '{"text": ""}\n'
    for weight in (0.5, 1.0, 2.5):
        tally = run(job(tmp_path, model, weight=weight, eval_share=0.25), lines, tmp_path)
        assert not tally.error
        assert tally.read == 201
        assert tally.counted == sum(tally.rows.values()) + sum(tally.dropped.values())
        expected = {"empty text"} | ({part.NOT_SAMPLED} if weight < 1 else set())
        assert set(tally.dropped) == expected
        assert sum(tally.lengths.values()) == tally.rows["train"]
        if weight == 2.5:
            assert tally.rows["train"] > 300 > 200 > tally.rows["eval"]


def test_a_part_has_its_own_name_and_the_node_nothing_left(
    tmp_path: Path, model: ModelInfo
) -> None:
    what = job(tmp_path, model)
    first, second = (run(what, '{"text": "the cat"}\n', tmp_path) for _ in range(2))
    assert first.part != second.part
    for tally in (first, second):
        for entry in tally.files:
            path = tmp_path / "shared" / entry["path"]
            assert (path.stat().st_size, storage.hash_file(path)) == (
                entry["size"], entry["sha256"],
            )  # fmt: skip
    assert list((tmp_path / "local" / "parts").iterdir()) == []


def test_what_a_killed_task_left_goes_after_a_day(tmp_path: Path, model: ModelInfo) -> None:
    parts = tmp_path / "local" / "parts"
    for name in ("old", "new"):
        (parts / name).mkdir(parents=True)
        (parts / name / "rows").write_text("x")
    day_ago = time.time() - 90_000
    os.utime(parts / "old", (day_ago, day_ago))
    run(job(tmp_path, model), '{"text": "the cat"}\n', tmp_path)
    assert [path.name for path in parts.iterdir()] == ["new"]


def test_a_task_with_faults_or_without_examples_publishes_nothing(
    tmp_path: Path, model: ModelInfo
) -> None:
    tally = run(job(tmp_path, model), '{"text": "a"}\n{"text": 1}\nx\n', tmp_path)
    assert (tally.faulty, tally.stopped, tally.files) == (2, False, [])
    assert [order for order, _ in tally.faults] == [1, 2]
    assert "line 2: column 'text'" in tally.faults[0][1]
    tally = run(job(tmp_path, model), '{"text": ""}\n', tmp_path)
    assert (tally.faults, tally.files, tally.dropped) == ([], [], {"empty text": 1})
    assert not (tmp_path / "shared").exists()


def test_settings_that_cannot_be_are_the_answer_not_a_crash(
    tmp_path: Path, model: ModelInfo
) -> None:
    wrong = asdict(rules(train_on="completion"))
    tally = run(job(tmp_path, model, rules=wrong), '{"text": "a"}\n', tmp_path)
    assert "data.train_on: rows of the format text have no answers" in tally.error


def test_the_collector_is_as_before_when_a_task_has_ended(tmp_path: Path, model: ModelInfo) -> None:
    frozen: list[int] = []
    lines = '{"text": "the cat"}\n' * 300

    def look(count: int) -> None:
        frozen.append(gc.get_freeze_count())
        if len(frozen) == 3:
            raise KeyboardInterrupt

    file = tmp_path / "rows.jsonl"
    file.write_text(lines)
    task = asdict(part.Task(0, 0, (Piece(str(file)),)))
    for _ in range(2):
        with suppress(KeyboardInterrupt):
            part.files_task(asdict(job(tmp_path, model)), task, look)
        assert gc.get_freeze_count() == 0
    assert len(frozen) == 3
    assert min(frozen) > 0
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        assert run(job(tmp_path, model), lines, tmp_path).read == 300
        assert gc.get_freeze_count() >= before - 1000 > 0, "what somebody else froze stays so"
    finally:
        gc.unfreeze()
