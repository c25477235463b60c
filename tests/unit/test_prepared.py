"""The prepared data set: what is written is what is read, and the index is right."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dbx_llmtrain import storage
from dbx_llmtrain.text import prepared
from dbx_llmtrain.text.prepared import (
    Example,
    PackRules,
    PartWriter,
    Split,
    SplitStats,
    write_packs,
    write_split,
)
from tests import tiny

Row = tuple[Example, int, str]  # an example, its row's place in the source, its split


RULES = [
    PackRules(48, "best_fit"),
    PackRules(48, "none"),
    PackRules(32, "concat"),
    PackRules(16, "best_fit", split_long=True),
    PackRules(16, "none", split_long=True),
    PackRules(48, "best_fit", in_order=True),
    PackRules(16, "concat", in_order=True),
]


def key_of(row: Example) -> str:
    return hashlib.sha256(f"{row.input_ids}{row.trained}".encode()).hexdigest()[:32]


def write_parts(folder: Path, parts: Sequence[Sequence[Row]], *, copies: int = 1) -> list[Path]:
    """Each list of rows as a part; the index files."""
    for number, rows in enumerate(parts):
        name = f"part-{number:05d}.arrow"
        with PartWriter(folder / "data/rows" / name, folder / "index" / name) as part:
            for row, order, split in rows:
                part.write(row, key=key_of(row), order=order, split=split, copies=copies)
    return sorted((folder / "index").glob("*.arrow"))


def contents(split: Split) -> list[list[tuple[list[int], list[bool]]]]:
    """Every example's documents."""
    return [
        [(ids.tolist(), marks.tolist()) for ids, marks in split.documents(i)]
        for i in range(len(split))
    ]


def accounts(stats: SplitStats, split: Split) -> None:
    """Nothing is lost without being counted, and the counts are those of what can be read."""
    assert stats.tokens_in == stats.tokens + stats.tokens_cut + stats.tokens_dropped
    read = [document for example in contents(split) for document in example]
    assert stats.tokens == sum(len(ids) for ids, _ in read) == int(split.tokens.sum())
    assert stats.trained == sum(sum(marks) for _, marks in read) == int(split.trained.sum())
    assert stats.documents == len(read) == int(split.documents_count.sum())
    assert stats.examples == len(split)
    assert not any(marks[0] for _, marks in read)
    for number, example in enumerate(contents(split)):
        assert split.trained[number] == sum(sum(marks) for _, marks in example)
        assert split.tokens[number] == sum(len(ids) for ids, _ in example)


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    rows = tiny.examples()
    write_split(tmp_path, iter(rows), max_length=64, packing=True)
    split = Split(tmp_path)
    read = [document for i in range(len(split)) for document in split.documents(i)]
    assert [ids.tolist() for ids, _ in read] == [row.input_ids for row in rows]
    assert [marks.tolist() for _, marks in read] == [row.trained for row in rows]
    assert read[0][0].dtype == np.int32
    assert read[0][1].dtype == np.bool_
    keys = [key for i in range(len(split)) for key in split.keys(i)]
    assert len(set(keys)) == 8
    assert {len(bytes.fromhex(key)) for key in keys} == {16}


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
    rows = [Example(list(range(3, 10)), [True] * 7) for i in range(5)]
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
    assert split.length(1) == 40


def test_many_record_batches_read_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "_ROWS_PER_BATCH", 3)
    rows = tiny.examples()
    write_split(tmp_path, rows, max_length=40, packing=True)
    split = Split(tmp_path)
    read = [ids.tolist() for i in range(len(split)) for ids, _ in split.documents(i)]
    assert read == [row.input_ids for row in rows]
    assert [split.length(i) for i in range(8)] == [3, 40, 5, 30, 4, 25, 6, 9]
    assert int(split.documents_count.sum()) == 8


def test_an_empty_split_can_be_written_and_read(tmp_path: Path) -> None:
    stats = write_split(tmp_path, [], max_length=8, packing=True)
    assert (stats.examples, len(Split(tmp_path))) == (0, 0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Example([], []), "row '0a' has 0 tokens and 0 marks of what is trained: expected at"),
        (Example([1, 2], [True]), "row '0a' has 2 tokens and 1 marks of what is trained"),
    ],
)
def test_a_row_with_other_marks_than_tokens_is_refused(
    tmp_path: Path, row: Example, message: str
) -> None:
    with (
        PartWriter(tmp_path / "rows.arrow", tmp_path / "index.arrow") as part,
        pytest.raises(ValueError, match=message),
    ):
        part.write(row, key="0a", order=0, split="train")


def test_a_row_that_is_too_long_is_refused_with_its_split(tmp_path: Path) -> None:
    message = "split 'train', in packing order: row 1 has 5 tokens: expected at most 4"
    rows = [Example([1] * 2, [True] * 2), Example([1] * 5, [True] * 5)]
    with pytest.raises(ValueError, match=message):
        write_split(tmp_path, rows, max_length=4, packing=True)


def test_two_index_files_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"two index files have one name: a\.arrow, a\.arrow"):
        write_packs(tmp_path, [tmp_path / "1/a.arrow", tmp_path / "2/a.arrow"], "train", RULES[0])


def test_a_missing_part_is_noticed(tmp_path: Path) -> None:
    rows = [(row, number, "train") for number, row in enumerate(tiny.examples())]
    index = write_parts(tmp_path, [rows[:4], rows[4:]])
    write_packs(tmp_path / "data", index, "train", RULES[0])
    (tmp_path / "data/rows/part-00001.arrow").unlink()
    with pytest.raises(ValueError, match=r"has 4 rows in 1 part.s., but split train has row 7"):
        Split(tmp_path / "data", "train")


def test_a_writer_that_fails_closes_its_files(tmp_path: Path) -> None:
    def fail() -> None:
        with PartWriter(tmp_path / "rows.arrow", tmp_path / "index.arrow") as part:
            part.write(Example([1, 2], [True, True]), key="0a" * 16, order=0, split="train")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert prepared.count_rows(tmp_path / "rows.arrow") == 0


def test_the_tiny_data_set_is_complete(tmp_path: Path) -> None:
    record = tiny.prepared(tmp_path / "data")
    assert storage.read_manifest(tmp_path / "data") is not None
    assert (record.train_examples, record.eval_rows) == (3, 7)
    assert {entry.path.split("/")[0] for entry in record.artifact.files} == {
        "rows",
        "train",
        "eval",
    }


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_c28_the_same_rows_give_the_same_examples_whatever_the_parts(
    tmp_path: Path, rules: PackRules, copies: int
) -> None:
    """Spread over 1, 2 and 5 parts, shuffled, some rows twice: token for token the same."""
    draw = random.Random(5)
    lengths = [draw.randrange(1, 48) for _ in range(120)]
    rows = tiny.examples(lengths, seed=3)
    rows += rows[:10]
    source: list[Row] = [
        (row, number, "eval-b" if number % 7 == 0 else "train") for number, row in enumerate(rows)
    ]
    found = []
    for count in (1, 2, 5):
        draw.shuffle(source)
        folder = tmp_path / str(count)
        index = write_parts(folder, [source[i::count] for i in range(count)], copies=copies)
        for split in ("train", "eval-b"):
            stats = write_packs(folder / "data", index[::-1], split, rules)
            opened = Split(folder / "data", split)
            accounts(stats, opened)
            assert stats.rows + stats.rows_dropped == copies * sum(s == split for _, _, s in source)
            found.append((split, stats, contents(opened)))
    assert found[:2] == found[2:4] == found[4:]
    assert len(found[0][2]) > 10


def test_c28_tokens_in_are_tokens_packed_cut_and_dropped(tmp_path: Path) -> None:
    """100 rows of 1 to 45 tokens, at most 16 a piece; by default nothing that fits is lost."""
    rows = tiny.examples([1 + 7 * i % 45 for i in range(100)])
    long = [row for row in rows if len(row.input_ids) > 16]
    stats = write_split(tmp_path / "a", rows, max_length=16, packing=True, split_long=True)
    accounts(stats, Split(tmp_path / "a"))
    assert stats.tokens_in == sum(len(row.input_ids) for row in rows)
    assert stats.rows_split == len(long)
    # A piece of a prompt alone teaches nothing.
    lost = [
        16 for row in long for i in range(0, len(row.trained), 16) if not any(row.trained[i:][1:16])
    ]
    assert 0 < len(lost) == stats.documents_dropped
    assert stats.rows == 100
    fitting = [row for row in rows if len(row.input_ids) <= 16]
    stats = write_split(tmp_path / "b", fitting, max_length=16, packing=True)
    assert (stats.tokens_dropped, stats.documents_dropped, stats.rows_dropped) == (0, 0, 0)
    assert stats.rows == len(fitting)
    truncated = [Example(row.input_ids[:8], row.trained[:8], cut=3) for row in long]
    stats = write_split(tmp_path / "c", truncated, max_length=16, packing=True)
    assert (stats.tokens_in, stats.tokens, stats.tokens_cut) == (
        11 * len(long),
        8 * len(long),
        3 * len(long),
    )


def test_c27_a_piece_s_first_token_is_no_label_and_is_not_counted(tmp_path: Path) -> None:
    row = Example(list(range(10, 30)), [True] * 20, ends=(8, 19))
    stats = write_split(tmp_path, [row], max_length=8, packing="concat")
    split = Split(tmp_path)
    assert [sum(marks) for example in contents(split) for _, marks in example] == [7, 7, 3]
    assert [ids for example in contents(split) for ids, _ in example] == [
        list(range(10, 18)),
        list(range(18, 26)),
        list(range(26, 30)),
    ]
    # The end token at place 8 begins the second piece.
    assert (stats.trained, stats.ends, stats.documents, stats.rows) == (17, 1, 3, 1)
    assert [split.source(number)[1] for number in range(3)] == [0, 8, 16]


def test_examples_of_one_row_keep_their_order_in_the_source_s(tmp_path: Path) -> None:
    rows = [Example([number] * 4, [True] * 4) for number in range(6)]
    name = "part.arrow"
    with PartWriter(tmp_path / "rows" / name, tmp_path / "index" / name) as part:
        for number in (3, 4, 5, 0, 1, 2):
            part.write(rows[number], key=f"{number // 3:032x}", order=number // 3, split="train")
    rules = PackRules(8, "none", in_order=True)
    write_packs(tmp_path, [tmp_path / "index" / name], "train", rules)
    assert [ids[0] for ((ids, _),) in contents(Split(tmp_path))] == [0, 1, 2, 3, 4, 5]


def test_copies_of_a_row_are_apart(tmp_path: Path) -> None:
    rows = [(row, number, "train") for number, row in enumerate(tiny.examples([9] * 40))]
    index = write_parts(tmp_path, [rows], copies=2)
    stats = write_packs(tmp_path / "data", index, "train", PackRules(16, "none"))
    keys = [key for i in range(80) for key in Split(tmp_path / "data").keys(i)]
    assert stats.rows == 80
    assert set(map(keys.count, keys)) == {2}
    assert len(set(keys[:40])) > 20  # not the first copies and then the second
    assert sum(a == b for a, b in pairwise(keys)) < 5
    write_packs(tmp_path / "data", index, "train", PackRules(16, "none", in_order=True))
    keys = [key for i in range(80) for key in Split(tmp_path / "data").keys(i)]
    assert keys[:40] == keys[40:] == [key_of(row) for row, _, _ in rows]
