"""What a rank sets up by itself."""

from __future__ import annotations

import random

import numpy as np
import torch

from dbx_llmtrain.worker import starting


def first_draws(seed: int, rank: int, start: int) -> tuple[float, float, float]:
    """What each generator gives first. Training changes their state, so it is put back."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        starting.seed(seed, rank, start)
        return random.random(), float(np.random.rand()), float(torch.rand(()))
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def test_c92_every_rank_draws_other_numbers_and_the_same_ones_again() -> None:
    """There are no reading processes: a rank's own generators are all there are."""
    places = [(seed, rank, start) for seed in (0, 1) for rank in range(4) for start in (0, 1)]
    draws = [first_draws(*place) for place in places]
    for generator in zip(*draws, strict=True):
        assert len(set(generator)) == len(places)
    assert [first_draws(*place) for place in places] == draws
