"""Rows of data files, a piece of a file at a time, each with the place it came from.

A piece is a range of bytes of a ``.jsonl`` file (the lines that begin in it), a range of row groups
of a ``.parquet`` file, or a whole ``.json`` or ``.csv`` file. What is wrong with one row is a
``Fault`` in its place; the rows behind it are still read.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbx_llmtrain.errors import DataError

_BLOCK = 1 << 20
_BOM = b"\xef\xbb\xbf"
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_OFFSET = re.compile(r"^(.*?), byte (\d+)(?=[:,])", re.DOTALL)


@dataclass(frozen=True)
class Piece:
    """Part of a file: bytes (``.jsonl``) or row groups (``.parquet``) ``begin`` to ``end``, which
    is exclusive; without ``end`` all of it."""

    file: str
    begin: int = 0
    end: int | None = None


@dataclass(frozen=True)
class Fault:
    """A row, or a file, that cannot be read: the message begins with the place."""

    message: str


Located = tuple[dict[str, Any], str]
"""A row, and its file and number in words: ``data.jsonl, line 3``."""


def read_piece(piece: Piece) -> Iterator[Located | Fault]:
    """The rows of a piece in order. Raises nothing for bad content or a file that is gone.

    In a piece that begins later in a file, the place of a row is a byte (``data.jsonl, byte 17``)
    until ``exact_place`` turns it into a line.
    """
    file = Path(piece.file)
    try:
        yield from READERS[file.suffix.lower()](piece)
    except UnicodeDecodeError as error:
        yield Fault(f"{file}: expected UTF-8 text: {error}")
    except OSError as error:
        yield Fault(f"{file} cannot be read: {error}")


def exact_place(message: str) -> str:
    """The message with the line where it has a byte. Reads the file up to there."""
    found = _OFFSET.match(message)
    if not found:
        return message
    file, offset = found[1], int(found[2])
    try:
        with open(file, "rb") as lines:
            number = 1
            while offset > 0 and (block := lines.read(min(_BLOCK, offset))):
                number += block.count(b"\n")
                offset -= len(block)
    except OSError:
        return message
    return f"{file}, line {number}{message[found.end() :]}"


def _jsonl(piece: Piece) -> Iterator[Located | Fault]:
    with open(piece.file, "rb") as lines:
        place = piece.begin
        if place:
            # The line that crosses the border belongs to the piece before.
            lines.seek(place - 1)
            place += len(lines.readline()) - 1
        for number, raw in enumerate(lines, start=1):
            if piece.end is not None and place >= piece.end:
                return
            line = raw.removeprefix(_BOM) if place == 0 else raw
            where = f"byte {place}" if piece.begin else f"line {number}"
            place += len(raw)
            if line.strip():
                yield _json_line(line, f"{piece.file}, {where}")


def _json_line(line: bytes, where: str) -> Located | Fault:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return Fault(f"{where}: expected UTF-8 text: {error}")
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        column = min(error.pos, len(text.rstrip())) + 1
        return Fault(f"{where}: expected a JSON object: {error.msg} at column {column}")
    except ValueError as error:
        return Fault(f"{where}: expected a JSON object: {error}")
    return _object(row, where, _HALF_PAIR.search(text) is not None)


def _json(piece: Piece) -> Iterator[Located | Fault]:
    file = piece.file
    text = Path(file).read_text(encoding="utf-8-sig")
    try:
        rows = json.loads(text)
    except ValueError as error:
        yield Fault(
            f"{file}: expected a JSON list of objects: {error}. One object a line is .jsonl"
        )
        return
    if not isinstance(rows, list):
        yield Fault(f"{file}: expected a JSON list of objects, found {_type(rows)}")
        return
    suspicious = _HALF_PAIR.search(text) is not None
    del text
    for number, row in enumerate(rows, start=1):
        yield _object(row, f"{file}, row {number}", suspicious)


def _csv(piece: Piece) -> Iterator[Located | Fault]:
    file = piece.file
    with open(file, encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            for row in reader:
                where = f"{file}, line {reader.line_num}"
                if None in row or None in row.values():
                    yield Fault(
                        f"{where}: expected {len(reader.fieldnames or ())} fields as in the first "
                        "line, found another number"
                    )
                else:
                    yield dict(row), where
        except csv.Error as error:
            yield Fault(f"{file}, after line {reader.line_num}: {error}")


def _parquet(piece: Piece) -> Iterator[Located | Fault]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(piece.file) as table:
            count = table.num_row_groups
            groups = range(piece.begin, count if piece.end is None else piece.end)
            number = sum(table.metadata.row_group(i).num_rows for i in range(piece.begin))
            for batch in table.iter_batches(batch_size=1000, row_groups=groups):
                for row in batch.to_pylist():
                    number += 1
                    yield row, f"{piece.file}, row {number}"
    except pa.ArrowInvalid as error:
        yield Fault(f"{piece.file}: expected a Parquet file: {error}")


def _object(row: Any, where: str, suspicious: bool) -> Located | Fault:
    """``suspicious``: the text has an escape that may be half of a surrogate pair."""
    if not isinstance(row, dict):
        return Fault(f"{where}: expected a JSON object, found {_type(row)}")
    if suspicious:
        try:
            for key, value in row.items():
                _check_text(key, f"{where}: a key")
                _check_text(value, f"{where}, field {key!r}: the text")
        except DataError as error:
            return Fault(str(error))
    return row, where


def _type(value: Any) -> str:
    return "null" if value is None else type(value).__name__


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


READERS: dict[str, Callable[[Piece], Iterator[Located | Fault]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
