"""The prepared data set on disk: tokenized rows and which of them make up one example.

A split is a folder of two Arrow IPC files. ``rows.arrow`` has ``input_ids`` (large_list<int32>),
``trained`` (large_list<bool>: token i is a label) and ``key`` (string: the row's content id);
``packs.arrow`` has ``rows`` (large_list<int64>: row numbers of one example, in order), ``tokens``
and ``trained`` (int64: tokens of the example, and labels after the shift). Both are read through a
memory map: opening a split costs no memory for the tokens, and ranks of one host share the pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbx_llmtrain.text.packing import pack

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Document = tuple[NDArray[np.int32], NDArray[np.bool_]]

ROWS_FILE = "rows.arrow"
PACKS_FILE = "packs.arrow"
_ROWS_PER_BATCH = 1000
_PACKS_PER_BATCH = 100_000


@dataclass(frozen=True)
class Example:
    """One tokenized row. ``trained[i]`` says that token i is a label; the first token never is."""

    input_ids: list[int]
    trained: list[bool]
    key: str = ""


@dataclass(frozen=True)
class SplitStats:
    """What was written: examples (packs), rows, tokens, and trained tokens after the shift."""

    examples: int
    rows: int
    tokens: int
    trained: int


def write_split(
    folder: Path, examples: Iterable[Example], *, max_length: int, packing: bool
) -> SplitStats:
    """Write ``rows.arrow`` and ``packs.arrow``; rows are read once and never all held in memory.

    Without ``packing`` every row is an example of its own. The first token of a row is stored as
    not trained, whatever the row says: nothing predicts it. Raises ``ValueError`` for a row that
    is empty, longer than ``max_length`` or whose two lists differ in length.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lengths: list[int] = []
    trained: list[int] = []
    _write_rows(folder / ROWS_FILE, examples, max_length, lengths, trained)
    packs = pack(lengths, max_length) if packing else [[row] for row in range(len(lengths))]
    _write_packs(folder / PACKS_FILE, packs, lengths, trained)
    return SplitStats(len(packs), len(lengths), sum(lengths), sum(trained))


def _write_rows(
    path: Path,
    examples: Iterable[Example],
    max_length: int,
    lengths: list[int],
    trained: list[int],
) -> None:
    """Write the rows in order; appends each row's tokens and labels to ``lengths``, ``trained``."""
    import pyarrow as pa

    schema = pa.schema(
        [
            ("input_ids", pa.large_list(pa.int32())),
            ("trained", pa.large_list(pa.bool_())),
            ("key", pa.string()),
        ]
    )
    rows = iter(examples)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        while block := list(islice(rows, _ROWS_PER_BATCH)):
            marks = [[False, *row.trained[1:]] for row in block]
            for row, mark in zip(block, marks, strict=True):
                _check_row(row, len(lengths), max_length)
                lengths.append(len(row.input_ids))
                trained.append(sum(mark))
            columns = [[row.input_ids for row in block], marks, [row.key for row in block]]
            arrays = [
                pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)
            ]
            writer.write_batch(pa.record_batch(arrays, schema=schema))


def _check_row(row: Example, number: int, max_length: int) -> None:
    if not 0 < len(row.input_ids) <= max_length:
        raise ValueError(
            f"row {number} ({row.key!r}) has {len(row.input_ids)} tokens: "
            f"expected 1 to {max_length}"
        )
    if len(row.input_ids) != len(row.trained):
        raise ValueError(
            f"row {number} ({row.key!r}) has {len(row.input_ids)} tokens "
            f"but {len(row.trained)} marks of what is trained"
        )


def _write_packs(
    path: Path, packs: list[list[int]], lengths: Sequence[int], trained: Sequence[int]
) -> None:
    import pyarrow as pa

    schema = pa.schema(
        [("rows", pa.large_list(pa.int64())), ("tokens", pa.int64()), ("trained", pa.int64())]
    )
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for start in range(0, len(packs), _PACKS_PER_BATCH):
            block = packs[start : start + _PACKS_PER_BATCH]
            arrays = [
                pa.array(block, schema.field("rows").type),
                pa.array([sum(lengths[row] for row in rows) for rows in block], pa.int64()),
                pa.array([sum(trained[row] for row in rows) for rows in block], pa.int64()),
            ]
            writer.write_batch(pa.record_batch(arrays, schema=schema))


class Split:
    """A split, memory-mapped: ``len(split)`` examples, each one or more documents.

    Arrays with one entry per example: ``tokens``, ``trained`` (labels after the shift) and
    ``documents_count``.
    """

    def __init__(self, folder: Path) -> None:
        import numpy as np

        self._rows = _open_batches(folder / ROWS_FILE)
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._rows)])
        self._ids = [_list_column(batch, "input_ids") for batch in self._rows]
        self._marks = [batch.column("trained") for batch in self._rows]
        packs = _open_batches(folder / PACKS_FILE)
        self._packs = _joined_lists([_list_column(batch, "rows") for batch in packs])
        self.tokens = _joined(packs, "tokens")
        self.trained = _joined(packs, "trained")
        self.documents_count: NDArray[np.int64] = np.diff(self._packs[1])

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, example: int) -> NDArray[np.int64]:
        """Row numbers of an example, in order."""
        values, offsets = self._packs
        return values[offsets[example] : offsets[example + 1]]

    def row_length(self, row: int) -> int:
        """Tokens of a row."""
        block, offset = self._place(row)
        offsets = self._ids[block][1]
        return int(offsets[offset + 1] - offsets[offset])

    def document(self, row: int) -> Document:
        """Token ids (int32) and marks (bool: the token is a label) of a row."""
        block, offset = self._place(row)
        values, offsets = self._ids[block]
        begin, end = int(offsets[offset]), int(offsets[offset + 1])
        marks = self._marks[block].values.slice(begin, end - begin)
        return values[begin:end], marks.to_numpy(zero_copy_only=False)

    def documents(self, example: int) -> list[Document]:
        """The documents of an example, in order."""
        return [self.document(int(row)) for row in self.rows(example)]

    def keys(self, example: int) -> list[str]:
        """Content ids of the rows of an example."""
        places = [self._place(int(row)) for row in self.rows(example)]
        return [str(self._rows[block].column("key")[offset]) for block, offset in places]

    def _place(self, row: int) -> tuple[int, int]:
        """The record batch that holds a row, and the row's place in it."""
        import numpy as np

        block = int(np.searchsorted(self._starts, row, side="right")) - 1
        return block, row - int(self._starts[block])


def _open_batches(path: Path) -> list[Any]:
    import pyarrow as pa

    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    return [reader.get_batch(number) for number in range(reader.num_record_batches)]


def _list_column(batch: Any, name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Values and offsets of a list column, without a copy."""
    column = batch.column(name)
    return column.values.to_numpy(), column.offsets.to_numpy()


def _joined(batches: list[Any], name: str) -> NDArray[np.int64]:
    import numpy as np

    parts = [batch.column(name).to_numpy() for batch in batches]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _joined_lists(
    parts: list[tuple[NDArray[np.int64], NDArray[np.int64]]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """One array of values and one of offsets, over all batches."""
    import numpy as np

    values = [part[0] for part in parts] or [np.zeros(0, np.int64)]
    sizes = [np.diff(part[1]) for part in parts] or [np.zeros(0, np.int64)]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(sizes))])
    return np.concatenate(values), offsets
