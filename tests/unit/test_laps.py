"""The ranks' own times: who is slow, and whether it is the data."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("torch", reason="a rank's modules need torch")

from dbx_llmtrain.worker.laps import MOST_LISTED, Lap, Laps, as_times
from dbx_llmtrain.worker.world import World


def world(rank: int, size: int) -> World:
    return World(rank, size, rank, "n", "h", "cpu", size)


def test_every_rank_has_its_own_places() -> None:
    laps = [Lap(world(rank, 3)) for rank in range(3)]
    for rank, lap in enumerate(laps):
        lap.begin(waited=float(rank))
        time.sleep(0.02 * rank)
        lap.end()
    own, waited = as_times(sum(lap.as_numbers() for lap in laps).tolist())  # type: ignore[union-attr]
    assert waited == (0.0, 1.0, 2.0)
    assert own[0] < own[1] < own[2]
    assert own[2] >= 0.04


def test_the_slowest_by_its_work_and_its_wait() -> None:
    laps = Laps()
    laps.add((1.0, 1.0, 1.2), (0.0, 0.5, 0.0))
    laps.add((), ())  # a step without trained tokens
    laps.add((1.0, 1.0, 1.2), (0.0, 0.5, 0.0))
    assert laps.metrics() == pytest.approx(
        {
            "data_wait_seconds": 0.5,
            "slowest_rank": 1.0,
            "slowest_rank_seconds": 1.5,
            "median_rank_seconds": 1.2,
        }
    )
    assert laps.by_rank() == {"rank_seconds": [1.0, 1.0, 1.2], "rank_data_seconds": [0.0, 0.5, 0.0]}


def test_one_rank_is_compared_with_nobody() -> None:
    laps = Laps()
    assert laps.metrics() == {}
    laps.add((1.0,), (0.25,))
    assert laps.metrics() == {"data_wait_seconds": 0.25}


def test_many_ranks_are_not_listed() -> None:
    laps = Laps()
    laps.add((1.0,) * (MOST_LISTED + 1), (0.0,) * (MOST_LISTED + 1))
    assert laps.by_rank() == {}
    assert laps.metrics()["median_rank_seconds"] == 1.0
