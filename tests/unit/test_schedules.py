"""The learning rate of every step: warm-up, stable part, fall and floor."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.model_sections import OptimConfig
from dbx_llmtrain.schedules import highest_rate, learning_rate, steps_of_decay, steps_of_share
from tests.unit.test_planning import cluster, config, plan

FALLING = ("cosine", "linear", "wsd")


def rates(total: int, warmup: int, **fields: Any) -> list[float]:
    train = OptimConfig(**({"learning_rate": 1.0} | fields))
    falling = steps_of_decay(train, warmup_steps=warmup, total_steps=total)
    found = [
        learning_rate(step, train, warmup_steps=warmup, total_steps=total, decay_steps=falling)
        for step in range(1, total + 1)
    ]
    bare = [
        learning_rate(step, train, warmup_steps=warmup, total_steps=total)
        for step in range(1, total + 1)
    ]
    assert bare == found, "the plan's number is the default"
    return found


def test_c61_the_first_step_of_the_warm_up_learns() -> None:
    assert rates(6, 2)[:3] == [0.5, 1.0, pytest.approx((1 + math.cos(math.pi / 5)) / 2)]


@pytest.mark.parametrize("schedule", FALLING)
def test_c61_the_last_step_has_the_lowest_rate_and_none_is_below(schedule: str) -> None:
    found = rates(10, 3, schedule=schedule, min_learning_rate=0.1)
    assert found[2] == 1.0
    assert found[-1] == pytest.approx(0.1)
    assert found[2:] == sorted(found[2:], reverse=True)
    assert min(found[2:]) >= 0.1 - 1e-12


@pytest.mark.parametrize("schedule", [*FALLING, "constant"])
def test_c61_no_step_is_run_at_a_rate_of_zero(schedule: str) -> None:
    assert min(rates(10, 3, schedule=schedule)) > 0
    assert min(rates(2, 1, schedule=schedule)) > 0
    assert min(rates(1, 0, schedule=schedule)) > 0


def test_linear_is_a_line_and_constant_stays() -> None:
    falling = rates(5, 1, schedule="linear", min_learning_rate=0.2)
    assert falling == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(4, 2, schedule="constant") == [0.5, 1.0, 1.0, 1.0]


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert rates(3, 0, schedule="linear") == pytest.approx([1.0, 2 / 3, 1 / 3])
    assert rates(1, 0) == [1.0]
    assert rates(1, 1) == [1.0]


def test_a_lowest_rate_above_the_peak_does_not_raise_it() -> None:
    assert rates(3, 0, min_learning_rate=5.0) == [1.0, 1.0, 1.0]


def test_the_floor_is_reached_at_decay_steps_and_held() -> None:
    found = rates(9, 2, schedule="linear", decay_steps=4, min_learning_rate=0.2)
    assert found == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2, 0.2])
    found = rates(9, 2, schedule="cosine", decay_steps=4, min_learning_rate=0.2)
    assert found[3] == pytest.approx(0.6)  # halfway between peak and floor
    assert found[5:] == pytest.approx([0.2] * 4)


def test_a_floor_of_zero_is_reached_a_step_later_and_held() -> None:
    found = rates(8, 2, schedule="linear", decay_steps=3)
    assert found == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0])


def test_wsd_is_stable_and_then_falls_to_the_end() -> None:
    found = rates(10, 2, schedule="wsd", decay_steps=4, min_learning_rate=0.2)
    assert found == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(10, 2, schedule="wsd", decay_steps=0.4, min_learning_rate=0.2) == found


def test_wsd_falls_in_the_last_tenth_by_default() -> None:
    found = rates(40, 4, schedule="wsd")
    assert found[3:36] == [1.0] * 33
    assert found[36:] == pytest.approx([0.8, 0.6, 0.4, 0.2])


def test_wsd_that_has_less_than_its_fall_begins_it_after_the_warm_up() -> None:
    found = rates(6, 2, schedule="wsd", decay_steps=50, min_learning_rate=0.2)
    assert found == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_a_fall_that_is_longer_than_the_run_is_cut_off() -> None:
    found = rates(4, 1, schedule="linear", decay_steps=9, min_learning_rate=0.1)
    assert found == pytest.approx([1.0, 0.9, 0.8, 0.7])


@pytest.mark.parametrize(
    ("schedule", "given", "steps"),
    [
        ("cosine", None, 17),
        ("linear", None, 17),
        ("wsd", None, 2),
        ("constant", None, None),
        ("cosine", 5, 5),
        ("cosine", 0.25, 5),
        ("wsd", 0.01, 1),
    ],
)
def test_c62_shares_are_rounded_up(schedule: str, given: float | None, steps: int | None) -> None:
    train = OptimConfig(schedule=schedule, decay_steps=given)
    assert steps_of_decay(train, warmup_steps=3, total_steps=20) == steps


def test_c62_a_share_is_rounded_up_once_and_exactly() -> None:
    assert steps_of_share(0.1, 7) == 1
    assert steps_of_share(0.1, 70) == 7, "in floats 0.1 * 70 is more than 7"
    assert steps_of_share(0.03, 100) == 3
    assert steps_of_share(1e-9, 5) == 1
    assert steps_of_share(0, 5) == 0


def test_the_highest_rate_of_a_warm_up_that_is_longer_than_the_run() -> None:
    train = OptimConfig(learning_rate=1e-4)
    assert highest_rate(train, warmup_steps=100, total_steps=25) == pytest.approx(2.5e-5)
    assert highest_rate(train, warmup_steps=25, total_steps=25) == 1e-4
    assert highest_rate(train, warmup_steps=0, total_steps=25) == 1e-4
    assert rates(25, 100)[-1] == pytest.approx(0.25)


@pytest.mark.parametrize("schedule", [*FALLING, "constant"])
def test_c46_c60_steps_and_rates_do_not_depend_on_ranks_and_accumulation(schedule: str) -> None:
    """8 examples a step on 1 rank with 4 micro-batches, and on 2 with 2 each."""
    lists = []
    for ranks in (1, 2):
        train = {"global_batch_size": 8, "micro_batch_size": 2, "epochs": 3, "warmup": 0.1}
        cfg = config(train=train | {"schedule": schedule})
        found = plan(cfg, cluster(nodes=ranks), examples=100)
        assert (found.world_size, found.accumulation) == (ranks, 4 // ranks)
        assert (found.total_steps, found.warmup_steps) == (39, 4)
        lists.append(
            [
                learning_rate(
                    step, cfg.train, warmup_steps=found.warmup_steps,
                    total_steps=found.total_steps, decay_steps=found.decay_steps,
                )
                for step in range(1, found.total_steps + 1)
            ]
        )  # fmt: skip
    assert lists[0] == lists[1]
    wrong = {"global_batch_size": 8, "micro_batch_size": 2, "gradient_accumulation_steps": 3}
    with pytest.raises(ConfigError, match=r"2 x 2 x 3 = 12, found 8"):
        plan(config(train=wrong), cluster(nodes=2))
