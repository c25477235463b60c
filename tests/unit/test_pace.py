"""How much time the end of a run is given."""

from __future__ import annotations

from typing import Any

import pytest

from dbx_llmtrain.driver import running
from dbx_llmtrain.estimates import MemoryEstimate
from dbx_llmtrain.forecasts import StrategyRow
from dbx_llmtrain.model_sections import ParallelConfig
from dbx_llmtrain.worker.pace import Pace
from tests import sample


def pace(**changes: Any) -> Pace:
    """A model of 1 GiB: 10.7 s of writing at 100 MB/s."""
    checkpoint = {"export": False} | changes.pop("checkpoint", {})
    data = {"train": "/data/train.jsonl", "eval": 0.1}
    config = sample.config(checkpoint=checkpoint, data=data, train={"eval_every": 1})
    return Pace(sample.run_plan(config=config), **changes)


def test_a_step_and_two_checkpoints_of_a_size_that_is_guessed() -> None:
    assert pace(step=2.0).to_come() == pytest.approx(1.25 * (2.0 + 2 * 6 * 10.74), abs=0.1)


def test_what_was_measured_takes_its_place() -> None:
    measured = pace(step=2.0)
    measured.saved(5.0, 1_000_000_000)
    assert measured.speed == pytest.approx(200e6)
    assert measured.to_come() == pytest.approx(1.25 * (2.0 + 2 * 5.0))


def test_a_small_checkpoint_says_nothing_of_the_speed() -> None:
    measured = pace()
    measured.saved(3.0, 1000)
    assert measured.speed == pytest.approx(100e6)
    assert measured.checkpoint == 3.0


def test_whole_sets_take_longer_than_the_part_that_was_measured() -> None:
    measured = pace(losses=4.0, rest=10.0, between=20, whole=60)
    measured.saved(0.0, 0)
    assert measured.to_come() == pytest.approx(1.25 * (3 * 4.0 + 10.0))


def test_what_was_not_evaluated_yet_is_taken_to_be_as_slow_as_training() -> None:
    """Steps of 32 examples."""
    measured = pace(step=8.0, whole=60)
    measured.saved(0.0, 0)
    assert measured.to_come() == pytest.approx(1.25 * (8.0 + 60 * 8.0 / 32))


def test_the_best_model_is_evaluated_and_exported_too() -> None:
    times: dict[str, Any] = {"losses": 4.0, "between": 5, "whole": 5, "opening": 7.0}
    one = pace(checkpoint={"export": True}, **times)
    two = pace(checkpoint={"export": True, "keep_best": 1}, **times)
    one.saved(0.5, 0)
    two.saved(0.5, 0)
    export = 3.5 + 3 * 10.74
    assert one.to_come() == pytest.approx(1.25 * (2 * 0.5 + 4.0 + export), abs=0.1)
    read = 0.5 + 3.5
    assert two.to_come() == pytest.approx(1.25 * (2 * 0.5 + read + 2 * (4.0 + export)), abs=0.1)


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({}, 0.0),
        ({"log_model": "none"}, 0.0),
        ({"log_model": "final"}, 10 + 3 * 10.74),
        ({"register_as": "name"}, 10 + 3 * 10.74),
        ({"log_checkpoints": True}, 0.0),
    ],
)
def test_what_the_driver_does_at_the_end_is_counted(settings: dict[str, Any], more: float) -> None:
    plan = sample.run_plan(config=sample.config(tracking=settings, checkpoint={"export": True}))
    closed = running.closing(plan, 2.0)
    assert closed.closing == pytest.approx(3.0 + 1.0 + more, abs=0.1)
    assert Pace(closed).to_come() == pytest.approx(Pace(plan).to_come() + 1.25 * closed.closing)


def test_so_is_the_checkpoint_that_is_logged() -> None:
    parts = "weights gradients optimizer activations logits communication total host disk"
    estimate = MemoryEstimate(**dict.fromkeys(parts.split(), 1), checkpoint=2 * 10**9)
    row = StrategyRow(
        name="fsdp", parallel=ParallelConfig(kind="fsdp"), micro_batch_size=1, why="",
        gradient_checkpointing=0, estimate=estimate, fits=True, spare=1, chosen=True,
    )  # fmt: skip
    config = sample.config(tracking={"log_checkpoints": True})
    plan = sample.run_plan(config=config, strategies=(row,))
    assert running.closing(plan, 0.0).closing == pytest.approx(3.0 + 20.0)
