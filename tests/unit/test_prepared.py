"""The prepared data set: what is written is what is read, and the index is right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dbx_llmtrain import storage
from dbx_llmtrain.text import prepared
from dbx_llmtrain.text.prepared import Example, Split, write_split
from tests import tiny


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    rows = tiny.examples()
    write_split(tmp_path, iter(rows), max_length=64, packing=True)
    split = Split(tmp_path)
    read = [document for i in range(len(split)) for document in split.documents(i)]
    assert [ids.tolist() for ids, _ in read] == [row.input_ids for row in rows]
    assert [marks.tolist() for _, marks in read] == [row.trained for row in rows]
    assert read[0][0].dtype == np.int32
    assert read[0][1].dtype == np.bool_
    assert [key for i in range(len(split)) for key in split.keys(i)] == [row.key for row in rows]


def test_the_index_counts_tokens_labels_and_documents(tmp_path: Path) -> None:
    stats = write_split(tmp_path, tiny.examples(), max_length=64, packing=True)
    split = Split(tmp_path)
    assert [split.rows(i).tolist() for i in range(len(split))] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert split.tokens.tolist() == [48, 59, 15]
    assert split.documents_count.tolist() == [3, 3, 2]
    labels = [sum(int(marks[1:].sum()) for _, marks in split.documents(i)) for i in range(3)]
    assert split.trained.tolist() == labels
    assert (stats.examples, stats.rows, stats.tokens, stats.trained) == (3, 8, 122, sum(labels))


def test_c14_the_first_token_of_a_row_is_never_counted(tmp_path: Path) -> None:
    rows = [Example(list(range(3, 10)), [True] * 7, f"r{i}") for i in range(5)]
    stats = write_split(tmp_path, rows, max_length=7, packing=False)
    split = Split(tmp_path)
    assert stats.trained == 5 * (7 - 1)
    assert split.trained.tolist() == [6] * 5
    assert not any(marks[0] for i in range(5) for _, marks in split.documents(i))


def test_without_packing_a_row_is_an_example(tmp_path: Path) -> None:
    write_split(tmp_path, tiny.examples(), max_length=64, packing=False)
    split = Split(tmp_path)
    assert len(split) == 8
    assert split.tokens.tolist() == [3, 40, 5, 30, 4, 25, 6, 9]
    assert split.row_length(1) == 40


def test_many_record_batches_read_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "_ROWS_PER_BATCH", 3)
    monkeypatch.setattr(prepared, "_PACKS_PER_BATCH", 2)
    rows = tiny.examples()
    write_split(tmp_path, rows, max_length=40, packing=True)
    split = Split(tmp_path)
    read = [ids.tolist() for i in range(len(split)) for ids, _ in split.documents(i)]
    assert read == [row.input_ids for row in rows]
    assert [split.row_length(i) for i in range(8)] == [3, 40, 5, 30, 4, 25, 6, 9]
    assert int(split.documents_count.sum()) == 8


def test_an_empty_split_can_be_written_and_read(tmp_path: Path) -> None:
    stats = write_split(tmp_path, [], max_length=8, packing=True)
    assert (stats.examples, len(Split(tmp_path))) == (0, 0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Example([], [], "x"), "row 0 .'x'. has 0 tokens: expected 1 to 4"),
        (Example([1] * 5, [True] * 5, "x"), "row 0 .'x'. has 5 tokens: expected 1 to 4"),
        (Example([1, 2], [True], "x"), "row 0 .'x'. has 2 tokens but 1 marks"),
    ],
)
def test_a_bad_row_is_refused_by_its_key(tmp_path: Path, row: Example, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_split(tmp_path, [row], max_length=4, packing=True)


def test_the_tiny_data_set_is_complete(tmp_path: Path) -> None:
    record = tiny.prepared(tmp_path / "data")
    assert storage.read_manifest(tmp_path / "data") is not None
    assert (record.train_examples, record.eval_rows) == (3, 7)
    assert {entry.path.split("/")[0] for entry in record.artifact.files} == {"train", "eval"}
