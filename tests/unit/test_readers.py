"""Files cut into pieces: every row once, in order, with its line, wherever the cuts are."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from dbx_llmtrain.driver import rows as rows_module
from dbx_llmtrain.driver.rows import Unit, make_units, source_files, unit_rows
from dbx_llmtrain.errors import DataError
from dbx_llmtrain.text.readers import Fault, Piece, exact_place, read_piece


def rows_of(units: list[Unit]) -> list[Any]:
    found = [item for unit in units for item in unit_rows(unit)]
    assert not [item for item in found if isinstance(item, Fault)]
    return [item[0] for item in found]  # type: ignore[index]


def test_every_cut_of_a_file_gives_every_line_once(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"n": i, "text": "\u3042" * (i % 5)} for i in range(12)]
    lines = [json.dumps(row, ensure_ascii=i % 2 == 0) for i, row in enumerate(rows)]
    text = "\ufeff" + "\r\n".join(lines[:6]) + "\n\n\n" + "\n".join(lines[6:])
    file.write_bytes(text.encode())
    size = file.stat().st_size
    for cut in range(1, size):
        pieces = (Piece(str(file), 0, cut), Piece(str(file), cut, size))
        found = [item for piece in pieces for item in read_piece(piece)]
        assert [item[0] for item in found] == rows, cut  # type: ignore[index]
        places = [exact_place(f"{item[1]}: x") for item in found]  # type: ignore[index]
        numbers = [*range(1, 7), *range(9, 15)]
        assert places == [f"{file}, line {number}: x" for number in numbers], cut


def test_faults_keep_their_line_and_the_rows_behind_them_are_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"a": 1}\n{"a": \n{"a": 3}\n"\xff"\n{"a": 5}\n')
    pieces = (Piece(str(file), 0, 12), Piece(str(file), 12, None))
    found = [item for piece in pieces for item in read_piece(piece)]
    faults = [exact_place(item.message) for item in found if isinstance(item, Fault)]
    assert faults[0] == f"{file}, line 2: expected a JSON object: Expecting value at column 6"
    assert faults[1].startswith(f"{file}, line 4: expected UTF-8 text: ")
    assert [item[0]["a"] for item in found if not isinstance(item, Fault)] == [1, 3, 5]


def test_a_place_stays_where_its_file_is_gone(tmp_path: Path) -> None:
    message = f"{tmp_path}/gone.jsonl, byte 17: x"
    assert exact_place(message) == message
    assert exact_place("a, line 3: b, byte 4: c") == "a, line 3: b, byte 4: c"


def test_a_file_that_vanishes_is_a_fault(tmp_path: Path) -> None:
    (found,) = read_piece(Piece(str(tmp_path / "gone.jsonl")))
    assert isinstance(found, Fault)
    assert "gone.jsonl cannot be read" in found.message


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "json", "csv"])
def test_units_share_files_out_in_order(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "_LEAST_BYTES", 100)
    draw = random.Random(0)
    rows = [{"n": str(i), "text": "x" * draw.randrange(50)} for i in range(60)]
    for number, (begin, end) in enumerate(((0, 3), (3, 4), (4, 40), (40, 60))):
        file = tmp_path / f"{number}.{ending}"
        block = rows[begin:end]
        if ending == "parquet":
            parquet.write_table(pa.Table.from_pylist(block), file, row_group_size=3)
        elif ending == "csv":
            text = "\n".join(["n,text", *(f"{row['n']},{row['text']}" for row in block)])
            file.write_text(text)
        else:
            lines = [json.dumps(row) for row in block]
            file.write_text("\n".join(lines) if ending == "jsonl" else f"[{', '.join(lines)}]")
    files = source_files(str(tmp_path))
    counts = []
    for tasks in (1, 2, 5, 1000):
        units = make_units(files, None, tasks)
        assert rows_of(units) == rows
        counts.append(len(units))
    assert counts == sorted(counts)
    assert counts[-1] >= 4
    assert rows_of(make_units(files, 5, 100)) == rows[:5]


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "_delta").mkdir()
    for name in ("part/b.jsonl", "a.jsonl", "_delta/c.jsonl", ".d.jsonl", "_SUCCESS"):
        (tmp_path / name).write_text('{"a": 1}\n')
    assert [path.name for path in source_files(str(tmp_path))] == ["a.jsonl", "b.jsonl"]
    (tmp_path / "x.csv").write_text("a\n1\n")
    with pytest.raises(DataError, match=r"a folder with \.csv and \.jsonl files: give a pattern"):
        source_files(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="is a folder without files that end in"):
        source_files(str(tmp_path / "empty"))
