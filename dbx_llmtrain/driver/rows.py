"""Rows of data files, one at a time, each with the place it came from."""

from __future__ import annotations

import csv
import glob
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from dbx_llmtrain.errors import DataError
from dbx_llmtrain.sections import SourceConfig
from dbx_llmtrain.storage import local_path

Located = tuple[dict[str, Any], str]
"""A row, and its file and number in words: ``data.jsonl, line 3``."""


def source_config(source: str | SourceConfig) -> SourceConfig:
    """A source in its long form."""
    return SourceConfig(path=source) if isinstance(source, str) else source


def source_files(source: str | SourceConfig) -> list[Path]:
    """The files of a source, sorted. ``DataError`` for none, or one of an unknown kind."""
    given = source_config(source).path
    path = local_path(given)
    if path.is_dir():
        raise DataError(f"{given} is a folder: give a file or a pattern such as {given}/*.jsonl")
    if path.is_file():
        files = [path]
    else:
        files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        files = [file for file in files if file.is_file()]
    if not files:
        raise DataError(
            f"no file {given} (looked for {path.absolute()}): expected a file or a pattern that "
            "the driver can read"
        )
    for file in files:
        if file.suffix.lower() not in _READERS:
            raise DataError(
                f"{file}: expected a file that ends in {', '.join(_READERS)}, found "
                f"{file.suffix or 'no ending'}"
            )
    return files


def read_rows(source: str | SourceConfig) -> Iterator[Located]:
    """The rows of every file of a source in order, at most ``max_rows`` of them.

    Raises ``DataError`` for a missing file, a source without rows, and whatever is not a row.
    """
    config = source_config(source)
    count = 0
    for row in islice(_all_rows(source_files(config)), config.max_rows):
        count += 1
        yield row
    if not count:
        raise DataError(f"{config.path} has no rows")


def _all_rows(files: list[Path]) -> Iterator[Located]:
    for file in files:
        try:
            yield from _READERS[file.suffix.lower()](file)
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: expected UTF-8 text: {error}") from error
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error}") from error


def _jsonl(file: Path) -> Iterator[Located]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{where}: expected a JSON object: {error}") from error
            yield _object(row, where), where


def _json(file: Path) -> Iterator[Located]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        raise DataError(
            f"{file}: expected a JSON list of objects: {error}. One object a line is .jsonl"
        ) from error
    if not isinstance(rows, list):
        raise DataError(f"{file}: expected a JSON list of objects, found {type(rows).__name__}")
    for number, row in enumerate(rows, start=1):
        where = f"{file}, row {number}"
        yield _object(row, where), where


def _csv(file: Path) -> Iterator[Located]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            for row in reader:
                where = f"{file}, line {reader.line_num}"
                if None in row or None in row.values():
                    raise DataError(
                        f"{where}: expected {len(reader.fieldnames or ())} fields as in the first "
                        "line, found another number"
                    )
                yield dict(row), where
        except csv.Error as error:
            raise DataError(f"{file}, after line {reader.line_num}: {error}") from error


def _parquet(file: Path) -> Iterator[Located]:
    import pyarrow as pa
    from pyarrow import parquet

    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=1000):
            for row in batch.to_pylist():
                number += 1
                yield row, f"{file}, row {number}"
    except pa.ArrowInvalid as error:
        raise DataError(f"{file}: expected a Parquet file: {error}") from error


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}")
    for key, value in row.items():
        _check_text(key, f"{where}: a key")
        _check_text(value, f"{where}, field {key!r}: the text")
    return row


def _check_text(value: Any, what: str) -> None:
    r"""Refuse half of a surrogate pair anywhere in a value: JSON can write it (``\ud83d``), but no
    file and no tokenizer takes it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise DataError(
            f"{what} cannot be encoded as UTF-8: it has \\u{half:04x}, half of a surrogate pair. "
            "Write the whole character, put \\ufffd in its place, or leave the row out"
        ) from error


_READERS: dict[str, Callable[[Path], Iterator[Located]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
