"""Which rows share an example: lengths in, packs out. Pure arithmetic on numpy arrays.

A pack is a list of slices of rows that are laid end to end. Rows come in the order in which they
are to be packed; nothing here depends on anything but their lengths in that order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int32]

Packing = Literal["best_fit", "concat", "none"]


@dataclass(frozen=True)
class PackRules:
    """How rows become examples of at most ``max_length`` tokens.

    ``best_fit``: whole rows, each in the fullest pack that has room for it, longest rows first.
    ``concat``: rows end to end, cut wherever a pack is full. ``none``: every row on its own.
    ``split_long``: rows longer than ``max_length`` are cut in pieces instead of refused.
    ``in_order``: the order of the source is kept; whole rows are then put in the pack that is being
    filled or in a new one (next fit), which fills packs less well.
    """

    max_length: int
    packing: Packing = "best_fit"
    split_long: bool = False
    in_order: bool = False


@dataclass(frozen=True)
class Slices:
    """Slices of rows, in order: tokens ``start`` to ``stop`` of a row, and the pack each is in.

    All arrays (int32) have one entry per slice. Packs are numbered from 0 without a gap, in the
    order of their first slice; the slices of a pack are next to each other. ``labels`` are the
    trained tokens of a slice after the shift, ``ends`` the end tokens among them, where known.
    """

    row: Ints
    start: Ints
    stop: Ints
    pack: Ints
    labels: Ints
    ends: Ints

    @property
    def lengths(self) -> Ints:
        """Tokens of each slice."""
        return self.stop - self.start

    def at(self, places: NDArray[Any]) -> Slices:
        """Some of the slices, or all in another order."""
        return Slices(*(getattr(self, field.name)[places] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.row)


def cut_rows(lengths: Ints, rules: PackRules) -> Slices:
    """The slices that rows of ``lengths`` tokens are laid out as; each still a pack of its own
    (``concat``: in its final pack). Raises ``ValueError`` for a row that is empty or too long."""
    import numpy as np

    size = rules.max_length
    if len(lengths) and int(lengths.min()) < 1:
        raise ValueError(f"row {int(lengths.argmin())} has no tokens: expected at least 1")
    if rules.packing == "concat":
        # Cut where a row or a pack ends.
        ends = np.cumsum(lengths, dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        stops = np.union1d(ends, np.arange(size, total, size, dtype=np.int64))
        starts = np.concatenate([np.zeros(1, np.int64), stops])[:-1][: len(stops)]
        row = np.searchsorted(ends, starts, side="right")
        offset = ends[row] - lengths[row]
        return _slices(row, starts - offset, stops - offset, starts // size)
    longest = int(lengths.max(initial=0))
    if longest > size and not rules.split_long:
        raise ValueError(
            f"row {int(lengths.argmax())} has {longest} tokens: expected at most {size}"
        )
    pieces = -(-lengths // size)
    row = np.repeat(np.arange(len(lengths), dtype=np.int32), pieces)
    first = np.cumsum(pieces) - pieces
    start = (np.arange(len(row)) - first[row]) * size
    return _slices(row, start, np.minimum(start + size, lengths[row]), np.arange(len(row)))


def _slices(*columns: NDArray[Any]) -> Slices:
    """Slices of which neither labels nor ends are known."""
    import numpy as np

    row, start, stop, pack = (column.astype(np.int32, copy=False) for column in columns)
    nothing = np.zeros(len(row), np.int32)
    return Slices(row, start, stop, pack, nothing, nothing)


def pack_slices(slices: Slices, rules: PackRules) -> Slices:
    """Put the slices of ``cut_rows`` (or some of them) in packs."""
    import numpy as np

    if rules.packing == "concat":
        return slices
    if rules.packing == "none":
        return replace(slices, pack=np.arange(len(slices), dtype=np.int32))
    if rules.in_order:
        return replace(slices, pack=next_fit(slices.lengths, rules.max_length))
    pack = best_fit(slices.lengths, rules.max_length)
    # Number the packs by their first slice: the last that is written is the first in order.
    first = np.empty(int(pack.max(initial=-1)) + 1, np.int32)
    first[pack[::-1]] = np.arange(len(pack), dtype=np.int32)[::-1]
    rank = np.empty_like(first)
    rank[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
    pack = rank[pack]
    return replace(slices, pack=pack).at(np.argsort(pack, kind="stable"))


def next_fit(lengths: Ints, max_length: int) -> Ints:
    """The pack of each row when rows fill one pack after the other, in the order given."""
    import numpy as np

    packs = np.empty(len(lengths), np.int32)
    number, room = -1, 0
    for row, length in enumerate(lengths.tolist()):
        if length > room:
            number, room = number + 1, max_length
        packs[row] = number
        room -= length
    return packs


def best_fit(lengths: Ints, max_length: int) -> Ints:
    """The pack of each row by best-fit decreasing (Johnson 1974): the longest row first, each in
    the pack with the least room that is enough; a new one where there is none.

    Rows of one length are placed together, and so are packs with the same room, so the cost is the
    sort of ``lengths`` and one step per pair of length and room that meet: at most
    ``n log max_length``, in practice far less than one step a row. Ties are broken by the order of
    the rows, so equal input gives equal packs.
    """
    import numpy as np

    packs = np.empty(len(lengths), np.int32)
    by_length = np.argsort(-lengths, kind="stable")
    decreasing = lengths[by_length]
    rooms = _Rooms(max_length)
    for begin, end in _runs(decreasing):
        length = int(decreasing[begin])
        while begin < end:
            room, waiting = rooms.take(length)
            fits = room // length
            used = waiting[: -(-(end - begin) // fits)] if len(waiting) else None
            if used is None:
                used = rooms.open(-(-(end - begin) // fits))
            count = min(end - begin, len(used) * fits)
            packs[by_length[begin : begin + count]] = np.repeat(used, fits)[:count]
            last = count - (len(used) - 1) * fits
            rooms.put(room - fits * length, used[:-1])
            rooms.put(room - last * length, used[-1:])
            rooms.put(room, waiting[len(used) :])
            begin += count
    return packs


def _runs(values: Ints) -> Iterator[tuple[int, int]]:
    """Where each run of equal values begins and ends."""
    import numpy as np

    edges = np.flatnonzero(np.diff(values)) + 1
    bounds = [0, *edges.tolist(), len(values)] if len(values) else [0]
    yield from pairwise(bounds)


class _Rooms:
    """Packs by the room that is left in them. Full packs are forgotten."""

    def __init__(self, max_length: int) -> None:
        import numpy as np

        self._max_length = max_length
        self._packs: dict[int, list[Ints]] = {}
        self._sizes: list[int] = []  # the rooms that some pack has, sorted
        self._count = 0
        self._none = np.zeros(0, np.int32)

    def take(self, length: int) -> tuple[int, Ints]:
        """The least room for ``length`` tokens, and some of the packs that have it, taken out; the
        room of a new pack and none where no pack has room."""
        place = bisect_left(self._sizes, length)
        if place == len(self._sizes):
            return self._max_length, self._none
        room = self._sizes[place]
        packs = self._packs[room].pop()
        if not self._packs[room]:
            del self._packs[room]
            del self._sizes[place]
        return room, packs

    def open(self, count: int) -> Ints:
        """Numbers of ``count`` new packs."""
        import numpy as np

        self._count += count
        return np.arange(self._count - count, self._count, dtype=np.int32)

    def put(self, room: int, packs: Ints) -> None:
        """Packs that have ``room`` left."""
        if room and len(packs):
            if room not in self._packs:
                insort(self._sizes, room)
            self._packs.setdefault(room, []).append(packs)
