"""Rows that only the driver can read, kept as Parquet where every node sees them."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from dbx_llmtrain import storage
from dbx_llmtrain.driver.model_files import digest
from dbx_llmtrain.records import FileEntry

_ROWS_PER_GROUP = 2000
"""Few enough that a small data set is read by several tasks."""


def find(cache_dir: Path, name: str) -> list[Path] | None:
    """The files that were kept under a name; ``None`` where there are none yet."""
    folder = cache_dir / "sources" / name
    manifest: Any = storage.read_manifest(folder)
    return [folder / entry["path"] for entry in manifest["files"]] if manifest else None


def keep_rows(
    cache_dir: Path, name: str, tables: Iterable[Any], work_dir: Path | None
) -> list[Path]:
    """Keep Arrow tables or record batches of one schema under a name."""
    with tempfile.TemporaryDirectory(prefix="dbx_llmtrain-", dir=work_dir) as temporary:
        file = Path(temporary) / "rows.parquet"
        write_parquet(file, tables)
        return keep_files(cache_dir, name, [file])


def keep_files(cache_dir: Path, name: str, files: Sequence[Path]) -> list[Path]:
    """Copy files to shared storage under a name. Two drivers may do so at once: each has files of
    its own, and the manifest of the last one counts."""
    folder = cache_dir / "sources" / name
    mine = uuid.uuid4().hex[:8]
    entries = []
    for number, file in enumerate(files):
        copy = f"{number:05d}-{mine}{file.suffix.lower()}"
        sha256 = storage.copy_file(file, folder / copy)
        entries.append(FileEntry(path=copy, size=file.stat().st_size, sha256=sha256))
    storage.write_manifest(folder, {"files": [entry.model_dump() for entry in entries]})
    return [folder / entry.path for entry in entries]


def write_parquet(file: Path, tables: Iterable[Any]) -> None:
    """Write Arrow tables or record batches of one schema. The same rows give the same bytes."""
    import pyarrow as pa
    from pyarrow import parquet

    writer = None
    rows: list[Any] = []
    count = 0
    try:
        for table in tables:
            rows.append(pa.table(table) if isinstance(table, pa.RecordBatch) else table)
            writer = writer or parquet.ParquetWriter(file, rows[0].schema)
            count += table.num_rows
            if count >= _ROWS_PER_GROUP:
                writer.write_table(pa.concat_tables(rows).combine_chunks(), _ROWS_PER_GROUP)
                rows, count = [], 0
        if rows and writer is not None:
            writer.write_table(pa.concat_tables(rows).combine_chunks(), _ROWS_PER_GROUP)
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        parquet.write_table(pa.table({}), file)


def shared_files(
    files: Sequence[Path], cache_dir: Path, work: Callable[[Path], bool]
) -> list[Path]:
    """The files, or their copies where ``work(file)`` says that only the driver sees them."""
    if not any(work(file) for file in files):
        return list(files)
    states = [
        f"{file.absolute()} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files
    ]
    name = digest("files", *states)
    return find(cache_dir, name) or keep_files(cache_dir, name, files)
