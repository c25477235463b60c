from __future__ import annotations

import itertools
import math

import pytest
import torch

from dbx_llmtrain.worker.parallel.zero_pieces import boxes


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (4, 1), (1, 5), (2, 3, 4), (3, 1, 2, 2)])
def test_boxes_are_the_elements_of_a_range_in_their_order(shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    whole = torch.arange(count).reshape(shape)
    for start, end in itertools.combinations(range(count + 1), 2):
        found = []
        for place, sizes in boxes(shape, start, end):
            assert all(sizes)
            area = tuple(slice(at, at + size) for at, size in zip(place, sizes, strict=True))
            found += whole[area].flatten().tolist()
        assert found == list(range(start, end))


def test_as_few_boxes_as_there_can_be() -> None:
    assert boxes((4, 3), 0, 12) == [((0, 0), (4, 3))]
    assert boxes((4, 3), 3, 9) == [((1, 0), (2, 3))]
    assert boxes((4, 3), 2, 10) == [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    assert boxes((4, 3), 4, 5) == [((1, 1), (1, 1))]
    assert boxes((4, 3), 2, 5) == [((0, 2), (1, 1)), ((1, 0), (1, 2))]
    assert boxes((5,), 1, 3) == [((1,), (2,))]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 4)])
def test_nothing_has_no_boxes(shape: tuple[int, ...]) -> None:
    assert boxes(shape, 0, 0) == []
