"""Which hosts talk when: every two once, and each with one at a time."""

from __future__ import annotations

import itertools

import pytest

from dbx_llmtrain.worker import pairs


@pytest.mark.parametrize("count", range(9))
def test_every_two_meet_once_and_nobody_two_at_a_time(count: int) -> None:
    found = list(pairs.rounds(count))
    for taking_part in found:
        players = [player for pair in taking_part for player in pair]
        assert len(players) == len(set(players))
    met = sorted(itertools.chain.from_iterable(found))
    assert met == sorted(itertools.combinations(range(count), 2))


def test_one_rank_of_every_node() -> None:
    assert pairs.first_ranks(("a", "b", "a", "b", "c")) == [0, 1, 4]
    assert pairs.first_ranks(("a",)) == [0]
