"""Steps on real ranks: uneven rows, nothing to train on, gradients that are not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytestmark = pytest.mark.dist
World = tuple[str, int]
Results = dict[str, Any]


def test_c114_there_is_a_group_for_host_tensors_and_objects(world: World, results: Results) -> None:
    _, size = world
    found = results["world"]
    assert found["backend"] == "gloo"
    assert found["device"] == "cpu"
    assert found["ranks"] == [[rank, size, rank, size] for rank in range(size)]
    assert found["nodes"] == 1


def test_processors_are_shared_by_the_ranks_of_a_host(world: World, results: Results) -> None:
    threads = results["threads"]
    assert threads["own"] == max(1, threads["cpus"] // world[1])


def test_c34_uneven_rows_are_each_trained_once(world: World, results: Results) -> None:
    found = results["uneven"]["5"]
    assert found["rows"] == ([5] if world[1] == 1 else [3, 2])
    assert found["gradient"] < 1e-6


def test_c112_ranks_run_the_same_number_of_forwards(world: World, results: Results) -> None:
    """It is known from the index: nothing is exchanged, and no rank waits for another."""
    assert results["uneven"]["5"]["forwards"] == ([5] if world[1] == 1 else [3, 3])


def test_c35_one_row_is_trained_once(world: World, results: Results) -> None:
    found = results["uneven"]["1"]
    assert found["rows"] == ([1] if world[1] == 1 else [1, 0])
    assert len(set(found["forwards"])) == 1
    assert found["gradient"] < 1e-6


def test_c17_a_rank_without_trained_tokens_joins_with_weight_zero(
    world: World, results: Results
) -> None:
    found = results["silent_rank"]
    assert found["trained"][-1] == 0 or world[1] == 1
    assert found["gradient"] < 1e-6
    assert found["loss"] < 1e-6


def test_c17_a_step_without_trained_tokens_is_skipped_by_all(results: Results) -> None:
    found = results["silent_step"]
    assert all(rank == ["no trained token"] * 2 for rank in found["skipped"])
    assert found["losses"] == [0.0, 0.0]
    assert found["unchanged"]


def test_c63_one_rank_without_a_finite_loss_makes_all_skip(results: Results) -> None:
    found = results["poisoned"]
    assert all(rank == ["the gradient is not finite", ""] for rank in found["skipped"])
    assert all(found["unchanged"])
    assert found["moved"]


def test_c66_no_gradient_is_left_by_a_skipped_step(results: Results) -> None:
    assert not results["poisoned"]["alive"]


CUTS = [f"{micro_batch}-{packing}" for micro_batch in (1, 2, 4) for packing in (False, True)]


@pytest.mark.parametrize("cut", CUTS)
def test_c47_the_held_out_loss_is_the_token_mean(results: Results, cut: str) -> None:
    assert results["evaluation"][cut]["loss"] < 1e-6


@pytest.mark.parametrize("cut", CUTS)
def test_c48_every_held_out_row_counts_once(results: Results, cut: str) -> None:
    assert results["evaluation"][cut]["rows"] == 7


@pytest.mark.parametrize("cut", CUTS)
def test_c50_ranks_evaluate_in_the_same_number_of_forwards(results: Results, cut: str) -> None:
    found = results["evaluation"][cut]
    assert (found["ranks"], found["forwards"]) == (1, 1)


def test_c53_the_optimizer_moves_the_model(results: Results) -> None:
    found = results["training"]
    assert found["same"]
    assert found["after"] < found["before"] - 0.3
    assert found["equal_on_ranks"] == 1
    assert found["tokens"] == 3 * 122


def test_c49_evaluation_between_steps_changes_nothing(results: Results) -> None:
    assert results["training"]["bitwise"]


def test_c44_the_logged_loss_is_the_token_mean(results: Results) -> None:
    found = results["logged_loss"]
    assert found["loss"] < 1e-6
    assert found["ranks"] == 1


def test_c60_learning_rates_do_not_depend_on_the_cut(results: Results) -> None:
    """Four steps whatever the ranks and micro-batches: the same list for every world."""
    expected = [0.01 * (1 + math.cos(math.pi * gone)) / 2 for gone in (0, 0.25, 0.5, 0.75)]
    for rates in results["rates"].values():
        assert rates == pytest.approx(expected, abs=1e-12)
    assert results["rates"]["1"] == results["rates"]["2"]


def test_c46_steps_of_an_epoch_do_not_depend_on_the_cut(results: Results) -> None:
    """8 rows, 4 a step, two epochs: (ranks, micro-batches) = (1, 4), (1, 2), (2, 2), (2, 1)."""
    assert [len(rates) for rates in results["rates"].values()] == [4, 4]


def test_c58_the_whole_gradient_is_clipped_once(results: Results) -> None:
    found = results["clipping"]
    assert found["before"] > 0.5
    assert found["after"] == pytest.approx(0.01, rel=1e-4)


def test_c54_bf16_computes_and_fp32_stores_and_reduces(results: Results) -> None:
    found = results["precision"]
    assert found["blocks"] == ["torch.bfloat16"]
    assert found["logits"] == "torch.bfloat16"
    for what in ("stored", "gradients", "buffers"):
        assert found[what] == ["torch.float32"], what
    assert found["loss"] == "torch.float32"
    assert found["error"] < 0.02
