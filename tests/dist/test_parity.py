"""The same rows give the same gradient, however a step is cut and whichever strategy runs it."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.dist
World = tuple[str, int]
Results = dict[str, Any]


MODELS = pytest.mark.parametrize("model", ["untied", "tied", "gpt2"])


@MODELS
def test_c30_gradients_do_not_depend_on_accumulation(results: Results, model: str) -> None:
    """Micro-batches of one row, with unequal numbers of trained tokens, against the whole batch."""
    cuts = [found for name, found in results["parity"].items() if name.startswith(f"{model}-")]
    assert len(cuts) == 2
    assert all(found["gradient"] < 1e-6 for found in cuts)


@MODELS
def test_c31_ranks_are_weighted_by_token(world: World, results: Results, model: str) -> None:
    """One micro-batch on each rank: nothing but the split over ranks differs from one process."""
    _, size = world
    found = results["parity"][f"{model}-{size}-{8 // size}-1"]
    assert found["gradient"] < 1e-6
    assert found["loss"] < 1e-6


@MODELS
@pytest.mark.parametrize("cut", ["whole", "one"])
def test_c32_gradient_and_loss_do_not_depend_on_the_cut(
    world: World, results: Results, model: str, cut: str
) -> None:
    """(ranks, micro-batch, accumulation): (1,8,1) and (1,1,8), (2,4,1) and (2,1,4)."""
    _, size = world
    micro_batch = 8 // size if cut == "whole" else 1
    found = results["parity"][f"{model}-{size}-{micro_batch}-{8 // size // micro_batch}"]
    assert found["gradient"] < 1e-6
    assert found["loss"] < 1e-6


def test_c56_the_norm_is_that_of_one_process_on_every_rank(results: Results) -> None:
    for found in results["parity"].values():
        assert found["norm"] < 1e-5
        assert found["ranks_norms"] == 1


def test_c26_packed_rows_give_the_same_gradient(results: Results) -> None:
    assert results["packed"]["examples"] == 3
    assert results["packed"]["gradient"] < 1e-6


@pytest.mark.parametrize("model", ["bert", "roberta", "modernbert"])
@pytest.mark.parametrize("packing", [False, True])
def test_c32_masked_tokens_give_the_same_gradient_and_loss(
    results: Results, model: str, packing: bool
) -> None:
    """Every rank knows how many tokens are hidden in the whole step."""
    cuts = [f for name, f in results["masked"].items() if name.startswith(f"{model}-{packing}-")]
    assert len(cuts) == 2
    for found in cuts:
        assert found["gradient"] < 1e-6
        assert found["loss"] < 1e-6
        assert found["held_out"] < 1e-6
        assert found["totals"] == [found["counted"]]


def test_c39_gradients_travel_once_per_step(world: World, results: Results) -> None:
    """One bucket of DDP; two blocks and the root of FSDP; nothing where there is one shard."""
    expected = {"single": 0, "ddp": 1, "fsdp": 3 if world[1] > 1 else 0}[world[0]]
    assert results["reductions"] == {"4": expected, "1": expected}


def test_c41_reductions_on_gloo_are_sums(world: World, results: Results) -> None:
    """With AVG, gloo returns the sum on torch 2.8 and earlier; parity proves the value."""
    expected = [True] * 3 if world[0] == "fsdp" else []
    assert results["world"]["forced_sums"] == expected


def test_c67_tied_weights_stay_one_parameter(results: Results) -> None:
    found = results["tying"]
    assert found["tied"]
    assert found["parameters"] == 20
    assert found["names"] == ["model.embed_tokens.weight"]
    assert found["shape"] == [97, 32]
    for name, parity in results["parity"].items():
        expected = {"untied": 21, "tied": 20, "gpt2": 28}[name.split("-")[0]]
        assert parity["parameters"] == expected


def test_every_rank_takes_the_same_way_out_of_the_probe(results: Results) -> None:
    for found in results["parity"].values():
        assert all(decision == found["probe"][0] for decision in found["probe"])
        assert not found["probe"][0][1]
