"""The prepared data set on disk: tokenized rows and which slices of them make up one example.

    rows/<part>.arrow     input_ids large_list<int32>, trained large_list<bool>, key string
    <split>/packs.arrow   rows large_list<int64>, starts, stops large_list<int32> (a slice of each
                          row, in order), tokens, trained int64 (of the example, after the shift)

All are Arrow IPC files, read through a memory map: opening a data set costs no memory for the
tokens, and ranks of one host share the pages. A row's number counts the rows of all parts, the
parts in the order of their names. Beside it, for the driver alone, lies an index with one line per
row (``<part>.arrow`` again), from which the packs are made without reading a token:

    key fixed_size_binary(16), digest uint64 (of the tokens and marks), order int64,
    item, length, trained, ends, copies, cut int32, split string,
    spans, end_places list<int32> (where trained tokens begin and stop, by turns; the trained end
    tokens), which are read for rows that are cut
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dbx_llmtrain.text.packing import Packing, PackRules
from dbx_llmtrain.text.packs import SplitStats, open_sink, rows_in_train, write_packs
from dbx_llmtrain.text.split import PACKS_FILE, ROWS_FOLDER, Document, Split, count_rows

__all__ = [
    "PACKS_FILE",
    "ROWS_FOLDER",
    "Document",
    "Example",
    "PackRules",
    "PartWriter",
    "Split",
    "SplitStats",
    "rows_in_train",
    "write_packs",
    "write_split",
]

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ROWS_PER_BATCH = 1000


@dataclass(frozen=True)
class Example:
    """One tokenized row. ``trained[i]`` says that token i is a label; the first token never is.

    ``ends`` are the positions of trained end tokens, ``cut`` the number of tokens that had to be
    left out at its end.
    """

    input_ids: Sequence[int]
    trained: Sequence[bool]
    ends: tuple[int, ...] = ()
    cut: int = 0


def rows_schema() -> Any:
    """Columns of a part."""
    import pyarrow as pa

    return pa.schema(
        [
            ("input_ids", pa.large_list(pa.int32())),
            ("trained", pa.large_list(pa.bool_())),
            ("key", pa.string()),
        ]
    )


def index_schema() -> Any:
    """Columns of a part's index."""
    import pyarrow as pa

    names = ("item", "length", "trained", "ends", "copies", "cut")
    numbers = [(name, pa.int32()) for name in names]
    lists = [(name, pa.list_(pa.int32())) for name in ("spans", "end_places")]
    return pa.schema(
        [
            *(("key", pa.binary(16)), ("digest", pa.uint64()), ("order", pa.int64())),
            *(*numbers, ("split", pa.string()), *lists),
        ]
    )


class PartWriter:
    """Writes one part of a data set and its index, as a context manager; to local files, since an
    Arrow file cannot be written on every shared storage. Use one name for both files.

    Examples of one row are written one after the other, with the row's ``key`` and ``order``.
    """

    def __init__(self, rows_path: Path, index_path: Path) -> None:
        self._paths = (rows_path, index_path)
        self._rows: list[tuple[NDArray[np.int32], NDArray[np.bool_], str]] = []
        self._index: list[dict[str, Any]] = []
        self._last: tuple[str, int] | None = None
        self._item = 0

    def __enter__(self) -> PartWriter:
        with ExitStack() as stack:
            schemas = (rows_schema(), index_schema())
            self._rows_sink, self._index_sink = (
                open_sink(stack, path, schema)
                for path, schema in zip(self._paths, schemas, strict=True)
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        with self._stack:
            if kind is None:
                self._flush()

    def write(self, example: Example, *, key: str, order: int, split: str, copies: int = 1) -> None:
        """Add an example. ``key``: content id of its row, 32 hex digits; ``order``: the row's place
        in the source; ``copies``: how often an epoch has it.

        The first token is stored as not trained, whatever the example says: nothing predicts it.
        Raises ``ValueError`` for one without tokens or whose marks are not as many.
        """
        import numpy as np

        ids = np.asarray(example.input_ids, np.int32)
        marks = np.array(example.trained, np.bool_)
        if not len(ids) or len(ids) != len(marks):
            raise ValueError(
                f"row {key!r} has {len(ids)} tokens and {len(marks)} marks of what is trained: "
                "expected at least one token and a mark for each"
            )
        marks[0] = False
        self._item = self._item + 1 if self._last == (key, order) else 0
        self._last = (key, order)
        ends = sorted(place for place in example.ends if place > 0)
        edges = np.diff(marks.view(np.int8), prepend=0, append=0)
        self._rows.append((ids, marks, key))
        self._index.append(
            {
                "key": bytes.fromhex(key),
                "digest": _digest(ids, marks),
                "order": order,
                "item": self._item,
                "length": len(ids),
                "trained": int(marks.sum()),
                "ends": len(ends),
                "copies": copies,
                "cut": example.cut,
                "split": split,
                "spans": np.flatnonzero(edges).astype(np.int32),
                "end_places": ends,
            }
        )
        if len(self._rows) == _ROWS_PER_BATCH:
            self._flush()

    def _flush(self) -> None:
        import numpy as np
        import pyarrow as pa

        if not self._rows:
            return
        ids, marks, keys = zip(*self._rows, strict=True)
        offsets = pa.array(np.cumsum([0, *map(len, ids)], dtype=np.int64))
        lists = [
            pa.LargeListArray.from_arrays(offsets, pa.array(np.concatenate(part)))
            for part in (ids, marks)
        ]
        batch = pa.record_batch([*lists, pa.array(keys)], schema=rows_schema())
        self._rows_sink.write_batch(batch)
        self._index_sink.write_batch(pa.RecordBatch.from_pylist(self._index, index_schema()))
        self._rows, self._index = [], []


def _digest(ids: NDArray[np.int32], marks: NDArray[np.bool_]) -> int:
    """64 bits that name tokens and what is trained of them."""
    found = hashlib.blake2b(ids.tobytes(), digest_size=8)
    found.update(marks.tobytes())
    return int.from_bytes(found.digest(), "little")


def write_split(
    folder: Path,
    examples: Iterable[Example],
    *,
    max_length: int,
    packing: bool | Packing,
    split: str = "train",
    in_order: bool = True,
    split_long: bool = False,
) -> SplitStats:
    """Write a split from examples at hand, as a part of its own, and its packs.

    The rows keep their order unless ``in_order`` is false. Further splits of the folder are written
    one after the other. Raises ``ValueError`` as ``PartWriter.write`` and ``write_packs`` do.
    """
    kind: Packing = packing if isinstance(packing, str) else "best_fit" if packing else "none"
    rules = PackRules(max_length, kind, split_long, in_order)
    parts = sorted((folder / ROWS_FOLDER).glob("*.arrow"))
    with tempfile.TemporaryDirectory() as name:
        index = Path(name) / f"part-{len(parts):05d}-{split}.arrow"
        with PartWriter(folder / ROWS_FOLDER / index.name, index) as part:
            for order, row in enumerate(examples):
                content = f"{list(row.input_ids)} {list(row.trained)}"
                key = hashlib.sha256(content.encode()).hexdigest()[:32]
                part.write(row, key=key, order=order, split=split)
        before = sum(count_rows(path) for path in parts)
        return write_packs(folder, [index], split, rules, first_row=before)
