"""Rows into packs: arithmetic on lengths."""

from __future__ import annotations

import numpy as np
import pytest

from dbx_llmtrain.text.packing import PackRules, Slices, best_fit, cut_rows, next_fit, pack_slices

MANY = np.random.Generator(np.random.PCG64(0)).integers(1, 32, 500)

# Tokens of GSM8K's 7,473 training rows as chats of SmolLM2, every fourth percentile.
GSM8K = [
    76, 105, 116, 124, 130, 137, 143, 149, 155, 161, 167, 173, 179,
    187, 193, 201, 209, 218, 226, 236, 248, 261, 280, 303, 338, 549,
]  # fmt: skip


def lay(lengths: list[int] | np.ndarray, max_length: int, packing: str, **rules: bool) -> Slices:
    made = PackRules(max_length, packing, **rules)  # type: ignore[arg-type]
    return pack_slices(cut_rows(np.array(lengths, np.int64), made), made)


def packs(slices: Slices) -> list[list[tuple[int, int, int]]]:
    """(row, start, stop) of every pack."""
    found: list[list[tuple[int, int, int]]] = []
    columns = (slices.row, slices.start, slices.stop, slices.pack)
    for row, start, stop, pack in zip(*(column.tolist() for column in columns), strict=True):
        assert pack in (len(found) - 1, len(found))
        if pack == len(found):
            found.append([])
        found[pack].append((row, start, stop))
    return found


def rows(slices: Slices) -> list[list[int]]:
    return [[row for row, _, _ in pack] for pack in packs(slices)]


def textbook(lengths: list[int], max_length: int) -> list[int]:
    """Best-fit decreasing, one row and one pack at a time: the room of each pack."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        enough = [room for room in rooms if room >= length]
        if enough:
            rooms[rooms.index(min(enough))] -= length
        else:
            rooms.append(max_length - length)
    return sorted(rooms)


def test_the_longest_rows_choose_first_and_take_the_fullest_pack() -> None:
    # 8 alone, 5 and 4 together, 3 with 2 and 2; packs in the order of their first row.
    assert rows(lay([2, 5, 3, 8, 2, 4], 9, "best_fit")) == [[0, 2, 4], [1, 5], [3]]


@pytest.mark.parametrize("max_length", [31, 32, 64, 100, 999])
def test_best_fit_is_the_textbook_s(max_length: int) -> None:
    found = best_fit(MANY, max_length)
    used = np.bincount(found, weights=MANY)
    assert sorted(max_length - used) == textbook(MANY.tolist(), max_length)


@pytest.mark.parametrize("packing", ["best_fit", "concat", "none"])
@pytest.mark.parametrize("in_order", [False, True])
def test_every_token_is_in_exactly_one_pack(packing: str, in_order: bool) -> None:
    slices = lay(MANY, 24, packing, split_long=True, in_order=in_order)
    tokens = [(row, place) for pack in packs(slices) for row, a, b in pack for place in range(a, b)]
    assert sorted(tokens) == [(row, i) for row, length in enumerate(MANY) for i in range(length)]
    assert max(sum(b - a for _, a, b in pack) for pack in packs(slices)) <= 24


def test_packs_are_ordered_by_their_first_row() -> None:
    firsts = [pack[0] for pack in rows(lay(MANY, 40, "best_fit"))]
    assert firsts == sorted(firsts)
    assert all(pack == sorted(pack) for pack in rows(lay(MANY, 40, "best_fit")))


def test_in_order_rows_fill_one_pack_after_the_other() -> None:
    assert rows(lay([3, 4, 2, 8, 1, 1], 9, "best_fit", in_order=True)) == [[0, 1, 2], [3, 4], [5]]
    assert next_fit(np.array([9, 9, 1]), 9).tolist() == [0, 1, 2]


def test_without_packing_a_row_is_an_example() -> None:
    assert rows(lay([3, 4, 2], 9, "none")) == [[0], [1], [2]]


def test_concat_cuts_where_a_pack_is_full_and_keeps_boundaries() -> None:
    assert packs(lay([3, 10, 5, 4], 8, "concat")) == [
        [(0, 0, 3), (1, 0, 5)],
        [(1, 5, 10), (2, 0, 3)],
        [(2, 3, 5), (3, 0, 4)],
    ]


def test_concat_fills_every_pack_but_the_last() -> None:
    sizes = [sum(b - a for _, a, b in pack) for pack in packs(lay(MANY, 24, "concat"))]
    assert set(sizes[:-1]) == {24}
    assert sizes[-1] == int(MANY.sum()) % 24


def test_long_rows_are_cut_in_pieces_where_that_is_asked_for() -> None:
    assert packs(lay([4, 20, 9], 9, "none", split_long=True)) == [
        [(0, 0, 4)],
        [(1, 0, 9)],
        [(1, 9, 18)],
        [(1, 18, 20)],
        [(2, 0, 9)],
    ]
    assert rows(lay([4, 20, 9], 9, "best_fit", split_long=True)) == [[0, 1], [1], [1], [2]]


@pytest.mark.parametrize("packing", ["best_fit", "concat", "none"])
def test_no_rows_no_packs(packing: str) -> None:
    assert packs(lay([], 9, packing)) == []


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_a_row_that_does_not_fit_is_refused(packing: str) -> None:
    with pytest.raises(ValueError, match="row 1 has 10 tokens: expected at most 9"):
        lay([3, 10], 9, packing)


@pytest.mark.parametrize("packing", ["best_fit", "concat", "none"])
def test_an_empty_row_is_refused(packing: str) -> None:
    with pytest.raises(ValueError, match="row 1 has no tokens: expected at least 1"):
        lay([3, 0], 9, packing)


def test_packs_of_chats_are_full() -> None:
    """The real lengths give 0.991."""
    points = np.linspace(0, 25, 7473)
    lengths = np.interp(points, np.arange(26), GSM8K).astype(np.int64)
    found = best_fit(np.random.Generator(np.random.PCG64(0)).permutation(lengths), 2048)
    assert lengths.sum() / ((found.max() + 1) * 2048) >= 0.98
