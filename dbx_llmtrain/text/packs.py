"""From the index of a data set to a split's packs: in numpy arrays of at most 200 bytes a row, and
about two seconds for a million rows.

The order in which rows are packed, and so the packs and their order, follow from the rows' content
(or place in the source) alone: the same rows give the same examples however they were spread over
parts. Where several rows have the same content, which of them comes first makes no difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbx_llmtrain.text.packing import PackRules, Slices, cut_rows, pack_slices
from dbx_llmtrain.text.split import PACKS_FILE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_COUNTS = ("length", "trained", "ends", "cut")
_FAR = 1 << 32  # more than any row has tokens


@dataclass(frozen=True)
class SplitStats:
    """What was written: examples (packs), rows (each copy counts), tokens, and trained tokens after
    the shift; ``ends`` of them are end tokens, ``documents`` the slices that rows were laid out as.

    Nothing is lost without being counted: ``tokens_in == tokens + tokens_cut + tokens_dropped``,
    where rows of ``tokens_in`` tokens were encoded, truncation cut ``tokens_cut`` of them, and
    ``tokens_dropped`` are those of ``documents_dropped`` pieces of long rows that have nothing to
    train on. ``rows_split`` rows were cut in pieces; ``rows_dropped`` have no piece left, and are
    not among ``rows``.

    ``digest`` (24 hex digits) names the examples: their tokens, what is trained of them, and their
    order. It says the same of the same examples in any data set.
    """

    examples: int
    rows: int
    tokens: int
    trained: int
    ends: int = 0
    documents: int = 0
    tokens_in: int = 0
    tokens_cut: int = 0
    tokens_dropped: int = 0
    documents_dropped: int = 0
    rows_split: int = 0
    rows_dropped: int = 0
    digest: str = ""


@dataclass(frozen=True)
class _Index:
    """The lines of one split: arrays with one entry per line. ``row`` is the global number,
    ``digest`` names its tokens, ``counts`` has int32 columns by name, ``order`` (int32) the lines
    in the order in which they are packed, each as often as it has copies. ``tables`` are the index
    files, memory-mapped, with the number of their first row."""

    row: NDArray[np.int64]
    digest: NDArray[np.uint64]
    counts: dict[str, NDArray[np.int32]]
    order: NDArray[np.int32]
    tables: tuple[tuple[Any, int], ...]

    def lists(self, name: str, lines: NDArray[np.int32]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Values of a list column for some lines (sorted), and how many each line has."""
        import numpy as np

        values: list[Any] = [np.zeros(0, np.int64)]
        sizes: list[Any] = [np.zeros(0, np.int64)]
        rows = self.row[lines]
        for table, first in self.tables:
            begin, end = np.searchsorted(rows, (first, first + table.num_rows))
            chosen = table.column(name).take(rows[begin:end] - first)
            for chunk in chosen.chunks:
                values.append(chunk.flatten().to_numpy())
                sizes.append(np.diff(chunk.offsets.to_numpy()))
        return np.concatenate(values), np.concatenate(sizes)


def write_packs(
    folder: Path, index_files: Sequence[Path], split: str, rules: PackRules, *, first_row: int = 0
) -> SplitStats:
    """Write ``<folder>/<split>/packs.arrow`` from the index of all parts (any order of files).

    ``first_row``: how many rows are in parts that come before these and have no index here.
    Raises ``ValueError`` for two index files of one name, and for a row that is too long.
    """
    index = _read_index(index_files, split, first_row, in_order=rules.in_order)
    order = index.order
    lengths = index.counts["length"][order]
    try:
        laid = cut_rows(lengths, rules)
    except ValueError as error:
        raise ValueError(f"split {split!r}, in packing order: {error}") from error
    whole = laid.lengths == lengths[laid.row]
    laid = _count_labels(laid, index, order[laid.row], whole)
    kept = whole | (laid.labels > 0) | (rules.packing == "concat")
    dropped = laid.at(~kept)
    cut = int(index.counts["cut"][order].sum(dtype="int64"))
    split_rows = _distinct(laid.row[~whole], len(order))
    tokens_in = int(lengths.sum(dtype="int64")) + cut
    laid = pack_slices(laid if kept.all() else laid.at(kept), rules)
    examples = _write(folder / split / PACKS_FILE, index.row[order[laid.row]], laid)
    rows = _distinct(laid.row, len(order))
    return SplitStats(
        examples=examples,
        rows=rows,
        tokens=int(laid.lengths.sum(dtype="int64")),
        trained=int(laid.labels.sum(dtype="int64")),
        ends=int(laid.ends.sum(dtype="int64")),
        documents=len(laid),
        tokens_in=tokens_in,
        tokens_cut=cut,
        tokens_dropped=int(dropped.lengths.sum(dtype="int64")),
        documents_dropped=len(dropped),
        rows_split=split_rows,
        rows_dropped=len(order) - rows,
        digest=_name(index.digest[order[laid.row]], laid),
    )


def _name(digests: NDArray[np.uint64], laid: Slices) -> str:
    """The ``digest`` of a split whose slices are of rows with these digests."""
    import numpy as np

    found = hashlib.sha256(np.flatnonzero(np.diff(laid.pack, prepend=-1)).tobytes())
    for part in (digests, laid.start, laid.stop):
        found.update(np.ascontiguousarray(part, part.dtype.newbyteorder("<")).data)
    return found.hexdigest()[:24]


def rows_in_train(index_files: Sequence[Path]) -> dict[str, int]:
    """How many rows of every held-out split have the content of a training row, where any has."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    found: dict[str, list[NDArray[np.bytes_]]] = {}
    for path in index_files:
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all()
        for split in pc.unique(table.column("split")).to_pylist():
            # A row may have several examples.
            chosen = pc.and_(pc.equal(table.column("split"), split), pc.equal(table["item"], 0))
            keys = table.column("key").filter(chosen).chunks
            found.setdefault(split, []).extend(
                np.frombuffer(chunk.buffers()[1], "S16", len(chunk), 16 * chunk.offset)
                for chunk in keys
                if len(chunk)
            )
    train = np.concatenate([np.zeros(0, "S16"), *found.pop("train", [])])
    counts = {name: int(np.isin(np.concatenate(keys), train).sum()) for name, keys in found.items()}
    return {name: count for name, count in counts.items() if count}


def _distinct(numbers: NDArray[np.int32], count: int) -> int:
    """How many of the numbers below ``count`` there are."""
    import numpy as np

    seen = np.zeros(count, np.bool_)
    seen[numbers] = True
    return int(seen.sum())


def _read_index(files: Sequence[Path], split: str, first: int, *, in_order: bool) -> _Index:
    """The lines of a split, in the order of the parts' names."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    names = [path.name for path in files]
    if len(set(names)) < len(names):
        raise ValueError(f"two index files have one name: {', '.join(sorted(names))}")
    sorting = ("order", "item", "copies") if in_order else ("item", "copies")
    columns: dict[str, list[Any]] = {name: [np.zeros(0, np.int32)] for name in (*_COUNTS, *sorting)}
    columns |= {"row": [np.zeros(0, np.int64)], "digest": [np.zeros(0, np.uint64)]}
    columns |= {"key": [np.zeros(0, np.uint64)]}
    tables = []
    for path in sorted(files, key=lambda path: path.name):
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all()
        places = np.flatnonzero(pc.equal(table.column("split"), split).to_numpy())
        columns["row"].append(places + first)
        for name in ("digest", *_COUNTS, *sorting):
            columns[name].append(table.column(name).to_numpy()[places])
        for chunk in () if in_order else table.column("key").take(places).chunks:
            columns["key"].append(np.frombuffer(chunk.buffers()[1], ">u8", 2 * len(chunk)))
        tables.append((table, first))
        first += table.num_rows
    # One column after the other, so that none but it is there twice.
    whole = {name: np.concatenate(columns.pop(name)) for name in list(columns)}
    key = whole.pop("key").reshape(-1, 2)
    order = _packing_order(key, **{name: whole.pop(name) for name in sorting})
    return _Index(whole.pop("row"), whole.pop("digest"), whole, order, tuple(tables))


def _packing_order(
    key: NDArray[np.uint64],
    *,
    item: NDArray[np.int32],
    copies: NDArray[np.int32],
    order: NDArray[np.int64] | None = None,
) -> NDArray[np.int32]:
    """Lines in the order in which they are packed, each as often as it has copies.

    By content: by a hash of the row's ``key`` (n, 2), the example's number within its row and that
    of the copy, which sets equal rows far apart. With an ``order`` in the source, by that: the
    second copies after the whole source.
    """
    import numpy as np

    line = np.repeat(np.arange(len(copies), dtype=np.int32), copies)
    copy = np.arange(len(line)) - (np.cumsum(copies) - copies)[line]
    if order is not None:
        return line[np.lexsort((item[line], order[line], copy))]
    salted = _mixed(item[line].astype(np.uint64) << np.uint64(32) | copy.astype(np.uint64))
    del copy
    with np.errstate(over="ignore"):
        salted += key[line, 0]
    return line[np.lexsort((key[line, 1], _mixed(salted)))]


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele et al. 2014), in place: one-to-one, every bit depends on
    all."""
    import numpy as np

    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values ^= values >> np.uint64(shift)
        values *= np.uint64(factor)
    values ^= values >> np.uint64(31)
    return values


def _count_labels(
    laid: Slices, index: _Index, line: NDArray[np.int32], whole: NDArray[np.bool_]
) -> Slices:
    """``laid`` with its labels and ends; those of slices that are not ``whole`` rows are counted
    from the row's lists. The first token of a slice is never a label."""
    import numpy as np

    labels, ends = (index.counts[name][line] for name in ("trained", "ends"))
    if whole.all():
        return replace(laid, labels=labels, ends=ends)
    lines, row = np.unique(line[~whole], return_inverse=True)
    # Places of all these rows on one line, rows far apart, so that one search serves them all.
    begin = row * _FAR + laid.start[~whole] + 1
    stop = row * _FAR + laid.stop[~whole]
    spans = _far_apart(*index.lists("spans", lines))
    trained = np.concatenate([np.zeros(1, np.int64), np.cumsum(spans[1::2] - spans[::2])])

    def before(place: NDArray[np.int64]) -> NDArray[np.int64]:
        """Trained tokens before a place."""
        passed = np.searchsorted(spans, place, side="right")
        since = place - np.append(spans, 0)[passed - 1]
        found: NDArray[np.int64] = trained[passed // 2] + np.where(passed % 2 == 1, since, 0)
        return found

    labels[~whole] = before(stop) - before(begin)
    places = _far_apart(*index.lists("end_places", lines))
    ends[~whole] = np.searchsorted(places, stop) - np.searchsorted(places, begin)
    return replace(laid, labels=labels, ends=ends)


def _far_apart(values: NDArray[Any], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    import numpy as np

    spread: NDArray[np.int64] = np.repeat(np.arange(len(sizes)) * _FAR, sizes) + values
    return spread


def _write(path: Path, rows: NDArray[np.int64], packed: Slices) -> int:
    """Write the packs as one record batch, which is read without a copy; how many there are."""
    import numpy as np
    import pyarrow as pa

    first = np.flatnonzero(np.diff(packed.pack, prepend=-1))
    offsets = pa.array(np.append(first, len(packed)))
    lists = [
        pa.LargeListArray.from_arrays(offsets, pa.array(values))
        for values in (rows, packed.start, packed.stop)
    ]
    sums = [
        pa.array(np.add.reduceat(values.astype(np.int64), first) if len(first) else first)
        for values in (packed.lengths, packed.labels)
    ]
    batch = pa.record_batch([*lists, *sums], ["rows", "starts", "stops", "tokens", "trained"])
    with ExitStack() as stack:
        open_sink(stack, path, batch.schema).write_batch(batch)
    return len(first)


def open_sink(stack: ExitStack, path: Path, schema: Any) -> Any:
    """A writer of an Arrow IPC file, closed by ``stack``."""
    import pyarrow as pa

    path.parent.mkdir(parents=True, exist_ok=True)
    sink = stack.enter_context(pa.OSFile(str(path), "wb"))
    return stack.enter_context(pa.ipc.new_file(sink, schema))
