"""Reading a prepared data set: what the ranks memory-map."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Document = tuple[NDArray[np.int32], NDArray[np.bool_]]
else:
    Document = tuple

ROWS_FOLDER = "rows"
PACKS_FILE = "packs.arrow"


class Split:
    """A split, memory-mapped: ``len(split)`` examples, each one or more documents.

    A document is a row, or a slice of one that was cut; its number counts the documents of all
    examples. Arrays with one entry per example: ``tokens``, ``trained`` (labels after the shift)
    and ``documents_count``. Raises ``ValueError`` for a folder whose parts are not all there.
    """

    def __init__(self, folder: Path, name: str = "train") -> None:
        import numpy as np

        paths = sorted((folder / ROWS_FOLDER).glob("*.arrow"))
        self._batches = [batch for path in paths for batch in _open_batches(path)]
        self._first = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        self._ids = [_list_column(batch, "input_ids") for batch in self._batches]
        self._marks = [batch.column("trained") for batch in self._batches]
        (packs,) = _open_batches(folder / name / PACKS_FILE)
        self._rows, self._offsets = _list_column(packs, "rows")
        self._starts, _ = _list_column(packs, "starts")
        self._stops, _ = _list_column(packs, "stops")
        self.tokens: NDArray[np.int64] = packs.column("tokens").to_numpy()
        self.trained: NDArray[np.int64] = packs.column("trained").to_numpy()
        self.documents_count: NDArray[np.int64] = np.diff(self._offsets)
        if int(self._rows.max(initial=-1)) >= self._first[-1]:
            raise ValueError(
                f"{folder} has {self._first[-1]} rows in {len(paths)} part(s), but split {name} "
                f"has row {int(self._rows.max())}: a part is missing"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    def numbers(self, example: int) -> range:
        """Numbers of the documents of an example, in order."""
        return range(int(self._offsets[example]), int(self._offsets[example + 1]))

    def length(self, document: int) -> int:
        """Tokens of a document."""
        return int(self._stops[document] - self._starts[document])

    def document(self, document: int) -> Document:
        """Token ids (int32) and marks (bool: the token is a label) of a document. Nothing predicts
        its first token, so that one is never a label."""
        block, row = self._place(document)
        start, stop = int(self._starts[document]), int(self._stops[document])
        values, offsets = self._ids[block]
        begin = int(offsets[row]) + start
        marks = self._marks[block].values.slice(begin, stop - start)
        marks = marks.to_numpy(zero_copy_only=False)
        if start:
            marks = marks.copy()
            marks[0] = False
        return values[begin : begin + stop - start], marks

    def source(self, document: int) -> tuple[str, int]:
        """Content id of the row that a document is taken from, and its first token's place there.

        It says the same of the same content in any data set.
        """
        block, row = self._place(document)
        return str(self._batches[block].column("key")[row]), int(self._starts[document])

    def documents(self, example: int) -> list[Document]:
        """The documents of an example, in order."""
        return [self.document(number) for number in self.numbers(example)]

    def rows(self, example: int) -> NDArray[np.int64]:
        """Numbers of the rows that the documents of an example are taken from."""
        found: NDArray[np.int64] = self._rows[slice(*self._offsets[example : example + 2])]
        return found

    def keys(self, example: int) -> list[str]:
        """Content ids of the rows of an example."""
        return [self.source(number)[0] for number in self.numbers(example)]

    def _place(self, document: int) -> tuple[int, int]:
        """The record batch that holds a document's row, and the row's place in it."""
        import numpy as np

        row = int(self._rows[document])
        block = int(np.searchsorted(self._first, row, side="right")) - 1
        return block, row - int(self._first[block])


def count_rows(path: Path) -> int:
    """Rows of a part."""
    return sum(batch.num_rows for batch in _open_batches(path))


def _open_batches(path: Path) -> list[Any]:
    import pyarrow as pa

    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    return [reader.get_batch(number) for number in range(reader.num_record_batches)]


def _list_column(batch: Any, name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Values and offsets of a list column, without a copy."""
    column = batch.column(name)
    return column.values.to_numpy(), column.offsets.to_numpy()
