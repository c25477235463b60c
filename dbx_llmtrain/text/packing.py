"""Which rows share an example: lengths in, packs out. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Lay rows end to end in packs of at most ``max_length`` tokens, in the order given (next-fit).

    ``lengths`` are tokens per row; the result holds row numbers. Every row is in exactly one pack
    and keeps its place in the order. Raises ``ValueError`` for a row that is empty or does not fit.
    """
    packs: list[list[int]] = []
    room = 0
    for row, length in enumerate(lengths):
        if not 0 < length <= max_length:
            raise ValueError(f"row {row} has {length} tokens: expected 1 to {max_length}")
        if length > room:
            packs.append([])
            room = max_length
        packs[-1].append(row)
        room -= length
    return packs
