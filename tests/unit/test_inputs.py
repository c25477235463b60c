"""Sources of every kind, found and named: files, folders, Delta tables, Datasets."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver import hub_data, tables
from dbx_llmtrain.driver.inputs import Input, Places, check_given, find_inputs
from dbx_llmtrain.errors import ConfigError, DataError
from dbx_llmtrain.sections import DataConfig, SourceConfig

ROWS = [{"text": f"row {i}"} for i in range(10)]


def data_config(**data: Any) -> DataConfig:
    return TrainConfig(model={"source": "m"}, data=data).data


def find(folder: Path, given: Any = None, **data: Any) -> list[Input]:
    return find_inputs(data_config(**data), given, Places(None, folder / "cache"))


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows_of(item: Input) -> list[dict[str, Any]]:
    return [row for row, _ in item.first_rows()]


def problems(error: pytest.ExceptionInfo[ConfigError]) -> dict[str, str]:
    return {problem.path: problem.message for problem in error.value.problems}


def test_sources_by_role_in_order(tmp_path: Path) -> None:
    a, b, c = (str(write(tmp_path / f"{name}.jsonl")) for name in "abc")
    found = find(
        tmp_path,
        train=[a, {"path": b, "weight": 2, "max_rows": 3}],
        eval={"x": c, "y": {"path": a, "max_rows": 1}},
        test=c,
    )
    assert [item.role for item in found] == ["train", "train", "eval-x", "eval-y", "test"]
    assert [item.weight for item in found] == [1.0, 2.0, 1.0, 1.0, 1.0]
    assert [len(rows_of(item)) for item in found] == [10, 3, 10, 1, 10]
    assert len({json.dumps(item.key) for item in found}) == 4, "rows.jsonl of x is that of test"
    assert [item.role for item in find(tmp_path, train=a, eval=0.1, test=0.1)] == ["train"]


def test_files_that_only_the_driver_sees_are_copied_once(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl")
    places = Places(None, tmp_path / "cache", None, lambda path: True)
    first, second = (find_inputs(data_config(train=str(file)), None, places)[0] for _ in range(2))
    assert first == second
    assert [path.parent.parent for path in first.files] == [tmp_path / "cache" / "sources"]
    assert rows_of(first) == ROWS
    assert first.key == find(tmp_path, train=str(file))[0].key, "named by the user's file"


def test_a_dataset_is_named_by_its_rows(tmp_path: Path) -> None:
    import datasets

    first, second, other = (
        find(tmp_path, given)[0]
        for given in (
            datasets.Dataset.from_list(ROWS),
            {"train": datasets.Dataset.from_list([*ROWS[5:], *ROWS[:5]]).select(
                [5, 6, 7, 8, 9, 0, 1, 2, 3, 4])},
            datasets.Dataset.from_list(ROWS[:9]),
        )
    )  # fmt: skip
    assert first.key == second.key != other.key
    assert first.files == second.files
    assert rows_of(first) == ROWS
    assert first.told == "the Dataset given as train"


def test_an_empty_dataset_is_refused_when_it_is_looked_at(tmp_path: Path) -> None:
    import datasets

    empty = datasets.Dataset.from_dict({"text": []})
    with pytest.raises(DataError, match="the Dataset given as train has no rows"):
        rows_of(find(tmp_path, empty)[0])


def test_what_was_passed_takes_the_place_of_the_configured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import datasets

    file = str(write(tmp_path / "rows.jsonl"))
    given = {"eval": {"a": datasets.Dataset.from_list(ROWS[:2])}, "test": None}
    with caplog.at_level(logging.WARNING):
        found = find(tmp_path, given, train=file, eval=0.5)
    assert [item.role for item in found] == ["train", "eval-a"]
    assert "replaces data.eval of the configuration" in caplog.text


def test_what_cannot_be_passed() -> None:
    import datasets
    import pandas as pd

    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    with pytest.raises(ConfigError) as caught:
        check_given(
            data_config(),
            {"train": {"a": stream}, "eval": {"b": pd.DataFrame(), "c/d": None}, "test": "x.jsonl",
             "validation": stream},
        )  # fmt: skip
    found = problems(caught)
    assert "streaming=True" in found["data.train.a"]
    assert "spark.createDataFrame(it) makes one" in found["data.eval.b"]
    assert "set data.train to a path" in found["data.test"]
    assert "several train sources" in str(caught.value)
    assert "has the name 'c/d'" in found["data.eval"]
    assert "has the key 'validation': expected train, eval, test" in str(caught.value)
    with pytest.raises(ConfigError, match=r"data\.train: missing: give a source, or pass"):
        check_given(data_config(), None)


def delta_table(folder: Path) -> Path:
    """A real Delta table of three versions: 2 rows, 4 rows, and without the first."""
    deltalake = pytest.importorskip("deltalake")
    for begin in (0, 2):
        rows = pa.Table.from_pylist(ROWS[begin : begin + 2])
        deltalake.write_deltalake(str(folder), rows, mode="append")
    deltalake.DeltaTable(str(folder)).delete("text = 'row 0'")
    return folder


def test_a_delta_table_is_read_at_its_version(tmp_path: Path) -> None:
    folder = str(delta_table(tmp_path / "table"))
    newest = find(tmp_path, train=folder)[0]
    assert sorted(row["text"] for row in rows_of(newest)) == ["row 1", "row 2", "row 3"]
    before = find(tmp_path, train={"path": folder, "version": 0})[0]
    assert rows_of(before) == ROWS[:2]
    assert newest.key[:2] == before.key[:2] == ["delta", newest.key[1]]
    assert (newest.key[2], before.key[2]) == (2, 0)
    assert find(tmp_path, train={"path": folder, "version": 2})[0].key == newest.key
    limited = find(tmp_path, train={"path": folder, "max_rows": 2})[0]
    assert len(rows_of(limited)) == 2
    assert limited.key != newest.key
    late = find(tmp_path, train={"path": folder, "version": "2040-01-01T00:00:00Z"})[0]
    assert late.key == newest.key


def test_delta_tables_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(delta_table(tmp_path / "table"))
    with pytest.raises(DataError, match=r"cannot be read as a Delta table at version 7: "):
        find(tmp_path, train={"path": folder, "version": 7})
    with pytest.raises(ConfigError, match=r"data\.train: split is for .* is a Delta table"):
        find(tmp_path, train={"path": folder, "split": "train"})
    monkeypatch.setitem(__import__("sys").modules, "deltalake", None)
    with pytest.raises(DataError, match=r"which neither this Spark reads .* package deltalake"):
        find(tmp_path, train=folder)


def test_fields_that_do_not_fit_what_was_found(tmp_path: Path) -> None:
    folder = write(tmp_path / "rows" / "a.jsonl").parent
    with pytest.raises(ConfigError, match=r"data\.eval: revision is for .* a file or folder"):
        find(tmp_path, train=str(folder), eval={"path": str(folder), "revision": "main"})
    with pytest.raises(ConfigError, match=r"data\.eval\.x: version is for Delta tables, .*folder"):
        find(tmp_path, train=str(folder), eval={"x": {"path": str(folder), "version": 1}})
    with pytest.raises(ConfigError, match=r"data\.train: version is for .*set of the hub"):
        find(tmp_path, train={"path": "org/rows", "version": 1})


def test_what_needs_spark(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"table:a\.b needs a Spark session"):
        find(tmp_path, train="table:a.b")


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SourceConfig(path="org/rows", revision="0" * 40)
    with pytest.raises(
        DataError, match=r"no file or folder org/rows \(looked for /.*\), and the .* hub did not"
    ):
        hub_data.fetch(source, tmp_path, None)


def test_parquet_of_the_same_rows_is_the_same_file(tmp_path: Path) -> None:
    from dbx_llmtrain.driver import kept

    table = pa.Table.from_pylist(ROWS * 500)
    for name, blocks in (("a", [table]), ("b", table.to_batches(max_chunksize=7))):
        kept.write_parquet(tmp_path / name, blocks)
    assert parquet.read_table(tmp_path / "a") == table
    assert parquet.ParquetFile(tmp_path / "a").num_row_groups == 3
    assert parquet.read_table(tmp_path / "b") == table


def test_an_address_that_is_no_delta_table_may_have_been_meant_for_files(tmp_path: Path) -> None:
    pytest.importorskip("deltalake")
    with pytest.raises(DataError) as caught:
        find(tmp_path, train="none://bucket/table")
    assert "none://bucket/table cannot be read as a Delta table" in str(caught.value)
    assert "For files: expected a path that the driver and every node can" in str(caught.value)


def test_errors_of_spark_in_one_line() -> None:
    def fail() -> None:
        raise RuntimeError("\n  no permission\n\tat org.x\n")

    with pytest.raises(DataError, match=r"^table x cannot be read: no permission$"):
        tables._ask("table x", fail)
