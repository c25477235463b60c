"""Data files: which ones a source has, and how their rows are shared out between tasks."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

from dbx_llmtrain.errors import DataError
from dbx_llmtrain.sections import SourceConfig
from dbx_llmtrain.storage import local_path
from dbx_llmtrain.text.readers import READERS, Fault, Located, Piece, exact_place, read_piece

_LEAST_BYTES, _MOST_BYTES = 256 * 1024, 64 * 1024 * 1024
"""Of the files that one task reads: less is not worth a task, more is too much to do again."""

_TABLE_NAME = re.compile(r"(\w+|`[^`]+`)(\.(\w+|`[^`]+`)){2}")


@dataclass(frozen=True)
class Unit:
    """What one task reads: pieces of files in order, at most ``limit`` rows of them."""

    pieces: tuple[Piece, ...]
    limit: int | None = None


def source_config(source: str | SourceConfig) -> SourceConfig:
    """A source in its long form."""
    return SourceConfig(path=source) if isinstance(source, str) else source


def source_files(source: str | SourceConfig) -> list[Path]:
    """The files of a source, sorted: a file, those of a pattern, or all data files of a folder.

    Raises ``DataError`` for none, for one of an unknown kind, and for a folder with several kinds.
    """
    given = source_config(source).path
    path = local_path(given)
    if path.is_dir():
        return _folder(path, given)
    if path.is_file():
        files = [path]
    else:
        files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        files = [file for file in files if file.is_file()]
    if not files:
        hint = f"; did you mean table:{given}?" if _TABLE_NAME.fullmatch(given) else ""
        raise DataError(
            f"no file {given} (looked for {path.absolute()}): expected a file or a pattern that "
            f"the driver can read{hint}"
        )
    for file in files:
        if file.suffix.lower() not in READERS:
            raise DataError(
                f"{file}: expected a file that ends in {', '.join(READERS)}, found "
                f"{file.suffix or 'no ending'}"
            )
    return files


def _folder(folder: Path, given: str) -> list[Path]:
    """Files below a folder. Names that begin with ``_`` or ``.`` are what other writers keep."""
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in READERS
        and path.is_file()
        and not any(part[0] in "._" for part in path.relative_to(folder).parts)
    ]
    kinds = sorted({path.suffix.lower() for path in files})
    if not files:
        raise DataError(f"{given} is a folder without files that end in {', '.join(READERS)}")
    if len(kinds) > 1:
        raise DataError(
            f"{given} is a folder with {' and '.join(kinds)} files: give a pattern such as "
            f"{given}/*{kinds[0]}"
        )
    return files


def read_rows(source: str | SourceConfig) -> Iterator[Located]:
    """The rows of every file of a source in order, at most ``max_rows`` of them.

    Raises ``DataError`` for a missing file, a source without rows, and whatever is not a row.
    """
    config = source_config(source)
    unit = Unit(tuple(Piece(str(file)) for file in source_files(config)), config.max_rows)
    count = 0
    for row in unit_rows(unit):
        if isinstance(row, Fault):
            raise DataError(exact_place(row.message))
        count += 1
        yield row
    if not count:
        raise DataError(f"{config.path} has no rows")


def unit_rows(unit: Unit) -> Iterator[Located | Fault]:
    """The rows of a unit in order."""
    rows = (row for piece in unit.pieces for row in read_piece(piece))
    return islice(rows, unit.limit)


def make_units(files: Sequence[Path], max_rows: int | None, tasks: int) -> list[Unit]:
    """Share the files of a source between about ``tasks`` tasks, in order.

    With ``max_rows`` one task reads all of it, since nobody else knows where the last row is.
    """
    if max_rows is not None:
        return [Unit(tuple(Piece(str(file)) for file in files), max_rows)]
    sizes = [file.stat().st_size for file in files]
    target = min(max(sum(sizes) // max(1, tasks), _LEAST_BYTES), _MOST_BYTES)
    units: list[Unit] = []
    pieces: list[Piece] = []
    filled = 0
    for file, size in zip(files, sizes, strict=True):
        for piece, piece_size in _pieces(file, size, target):
            if pieces and filled + piece_size > target:
                units.append(Unit(tuple(pieces)))
                pieces, filled = [], 0
            pieces.append(piece)
            filled += piece_size
    return [*units, Unit(tuple(pieces))] if pieces else units


def _pieces(file: Path, size: int, target: int) -> Iterator[tuple[Piece, int]]:
    """A file in pieces of about ``target`` bytes, with their sizes."""
    count = max(1, round(size / target))
    if count > 1 and file.suffix.lower() == ".jsonl":
        borders = [size * number // count for number in range(count + 1)]
        for begin, end in pairwise(borders):
            yield Piece(str(file), begin, end), end - begin
    elif count > 1 and file.suffix.lower() == ".parquet":
        groups = _row_groups(file)
        count = max(1, min(count, groups))
        borders = [groups * number // count for number in range(count + 1)]
        for begin, end in pairwise(borders):
            yield Piece(str(file), begin, end), size * (end - begin) // max(1, groups)
    else:
        yield Piece(str(file)), size


def _row_groups(file: Path) -> int:
    """Row groups of a Parquet file; one where it cannot be read, which its reader will tell."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as table:
            return int(table.num_row_groups)
    except (pa.ArrowInvalid, OSError):
        return 1
