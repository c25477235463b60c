"""What tasks report, added up; faults in the order of the sources, however the tasks end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain.driver import counts
from dbx_llmtrain.driver.inputs import Input
from dbx_llmtrain.driver.tables import Table
from dbx_llmtrain.errors import DataError
from dbx_llmtrain.text.prepared import SplitStats
from dbx_llmtrain.worker.part import Tally

TRAIN = Input("train", "a.jsonl", [], files=(Path("a.jsonl"),))


def tally(number: int = 0, source: int = 0, **values: Any) -> Tally:
    return Tally(number, source, **({"rows": {"train": 5}, "counted": 5} | values))


def test_faults_are_told_in_the_order_of_the_source() -> None:
    late = tally(1, faults=[(7 + i, f"line {7 + i}") for i in range(8)], faulty=8)
    early = tally(0, faults=[(2, "line 2"), (5, "line 5"), (6, "line 6")], faulty=3)
    with pytest.raises(DataError) as caught:
        counts.check([late, early], [TRAIN], ["train"])
    lines = str(caught.value).splitlines()
    assert lines[0] == "11 rows cannot be used:"
    assert lines[1:-1] == [f"  - line {i}" for i in (2, *range(5, 14))]
    assert lines[-1].startswith("Correct them, or leave them out: data.formatter names a function")
    stopped = tally(faults=[(1, "line 1")], faulty=30, stopped=True)
    with pytest.raises(DataError, match="at least 30 rows cannot be used"):
        counts.check([stopped], [TRAIN], ["train"])


def test_faults_that_say_the_same_are_told_once() -> None:
    places = [f"a: b.jsonl, line {i}" for i in range(1, 4)] + ["rows, partition 0, row 7"]
    faults = [f"{place}: the chat template leaves out the tools" for place in places]
    faults.insert(1, "c.jsonl, line 9, instance 2: a: b")
    found = tally(faults=list(enumerate(faults)), faulty=5)
    with pytest.raises(DataError) as caught:
        counts.check([found], [TRAIN], ["train"])
    assert str(caught.value).splitlines()[:3] == [
        "5 rows cannot be used:",
        "  - a: b.jsonl, line 1 and 3 more: the chat template leaves out the tools",
        "  - c.jsonl, line 9, instance 2: a: b",
    ]
    tools = [[(i, f"a.jsonl, line {i}: no tools") for i in range(at, at + 9)] for at in (1, 50)]
    parts = [tally(number, faults=some, faulty=99) for number, some in enumerate(tools)]
    with pytest.raises(DataError) as caught:
        counts.check(parts, [TRAIN], ["train"])
    assert str(caught.value).splitlines()[:-1] == [
        "198 rows cannot be used:",
        "  - a.jsonl, line 1 and 17 more of the first 18: no tools",
    ]


def test_settings_that_no_task_can_obey() -> None:
    with pytest.raises(DataError, match="no such thing"):
        counts.check([tally(error="no such thing")], [TRAIN], ["train"])


def test_rows_that_change_between_two_readings_are_refused() -> None:
    table = Input("train", "the DataFrame given as train", [], table=Table([], content=2**64 - 1))
    parts = [tally(0, content=2**64 - 3), tally(1, content=2)]
    counts.check(parts, [table], ["train"])
    with pytest.raises(DataError, match="gave other rows when it was read a second time"):
        counts.check(parts[:1], [table], ["train"])


def test_c93_the_audit_adds_up() -> None:
    parts = [
        tally(0, rows={"train": 4, "eval": 1}, dropped={"empty text": 2}, counted=7,
              lengths={"3": 3, "5": 1}, truncated={"train": 1}, ends=4),
        tally(1, rows={"train": 2, "test": 1, "eval-b": 2}, dropped={"empty text": 1}, counted=6,
              dropped_examples={"x": 1}, lengths={"3": 2}),
    ]  # fmt: skip
    packs = {
        "train": SplitStats(examples=2, rows=6, tokens=60, trained=40, ends=6),
        "eval": SplitStats(examples=1, rows=1, tokens=9, trained=5, documents_dropped=3),
    }
    audit = counts.audit(parts, packs, max_length=32)
    assert (audit.read_rows, audit.train_rows, audit.eval_rows, audit.test_rows) == (13, 6, 3, 1)
    assert audit.dropped == {"empty text": 3}
    assert audit.dropped_examples == {"x": 1, f"{counts.NOTHING_IN_PIECE} (eval)": 3}
    assert audit.lengths == (0, 0, 0, 5, 0, 1)
    assert audit.train_examples == 6
    assert audit.packing_efficiency == 60 / 64
    parts[0].counted += 1
    with pytest.raises(AssertionError):
        counts.audit(parts, packs, max_length=32)
