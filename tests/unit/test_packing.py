"""Rows into packs."""

from __future__ import annotations

import pytest

from dbx_llmtrain.text.packing import pack


def test_rows_fill_a_pack_in_their_order() -> None:
    assert pack([3, 4, 2, 8, 1, 1], 9) == [[0, 1, 2], [3, 4], [5]]


def test_a_row_as_long_as_a_pack_has_one_of_its_own() -> None:
    assert pack([9, 9, 1], 9) == [[0], [1], [2]]


def test_no_rows_no_packs() -> None:
    assert pack([], 9) == []


def test_every_row_is_in_exactly_one_pack() -> None:
    lengths = [1 + 7 * i % 31 for i in range(200)]
    packs = pack(lengths, 31)
    assert [row for rows in packs for row in rows] == list(range(200))
    assert max(sum(lengths[row] for row in rows) for rows in packs) <= 31


@pytest.mark.parametrize("length", [0, 10])
def test_a_row_that_is_empty_or_does_not_fit_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=rf"row 1 has {length} tokens: expected 1 to 9"):
        pack([3, length], 9)
