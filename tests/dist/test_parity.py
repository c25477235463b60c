"""The same rows give the same gradient, however a step is cut and whichever strategy runs it."""

from __future__ import annotations

from typing import Any

import pytest

from dbx_llmtrain.compat import at_least
from tests.dist.table_cases import combinations

pytestmark = pytest.mark.dist
World = tuple[str, int]
Results = dict[str, Any]


PARAMETERS = {
    "untied": 21,
    "tied": 20,
    "gpt2": 28,
    "mixtral": 21 if at_least("transformers", "5") else 41,
}
"""Mixtral's layers have four experts of three weights each; since transformers 5 all four are in
two."""

APART: set[str] = set() if at_least("transformers", "4.53") else {"gpt2"}
"""Models that refuse a block mask, packed or not: each document has a row of its own."""

BATCHES_APART = {
    ("gpt2-padded-one", 1): 5,  # 40 | 30 | 25 | 9 6 5 4 | 3
    ("gpt2-padded-one", 2): 3,  # 30 | 6 5 4, and 40 | 25 | 9 3
    ("gpt2-padded-one", 4): 2,  # 5 4, and 30 | 6, and 25 | 3, and 40 | 9
    ("gpt2-packed-whole", 1): 2,  # 40 30 25 9 | 6 5 4 3
    ("gpt2-packed-whole", 2): 2,  # 40 9 6 5 | 3, and 30 25 4
    ("gpt2-packed-whole", 4): 1,  # 9 6, and 40 5 3, and 30 25 4, and nothing
}
"""Micro-batches on every rank, the busiest one's, where documents are apart: each rank has the
longest of its documents first, and as many (of these lengths) as take, with their padding, no more
tokens than its micro-batch of the longest examples would: 40, or three packs of 59."""
COMBINATIONS = [
    "-".join((name, "packed" if packing else "padded", "one" if single else "whole"))
    for name, packing, single in combinations()
]
"""Model, layout of the rows, and the micro-batch: all that a rank has, or one example."""

EVERY = pytest.mark.parametrize("combination", COMBINATIONS)


def test_every_pair_of_options_is_there() -> None:
    rows = [name.split("-") for name in COMBINATIONS]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        values = [len({row[place] for row in rows}) for place in (one, other)]
        assert len({(row[one], row[other]) for row in rows}) == values[0] * values[1]


@EVERY
def test_c32_gradient_and_loss_do_not_depend_on_the_cut(table: Results, combination: str) -> None:
    """(ranks, micro-batch, accumulation): (1,8,1) and (1,1,8), (2,4,1) and (2,1,4), (4,2,1) and
    (4,1,2), with every strategy; packed rows are three examples, which is uneven."""
    found = table[combination]
    assert found["gradient"] < 1e-6
    assert found["loss"] < 1e-6


@EVERY
def test_c32_the_weights_after_a_step_are_those_of_one_process(
    table_world: World, table: Results, combination: str
) -> None:
    """Of SGD, which shows a wrong scale."""
    found = table[combination]
    assert found["weights"] < (5e-5 if table_world[0].startswith("zero") else 1e-6)
    assert found["reported"] < 1e-6


@EVERY
def test_c56_the_norm_is_that_of_one_process_on_every_rank(
    table: Results, combination: str
) -> None:
    assert table[combination]["norm"] < 1e-6
    assert table[combination]["ranks_norms"] == 1


@EVERY
def test_c31_c30_steps_are_cut_into_micro_batches_and_ranks(
    table_world: World, table: Results, combination: str
) -> None:
    """Micro-batches of one row with unequal numbers of trained tokens, and whole shares."""
    _, size = table_world
    examples = 3 if "-packed-" in combination else 8
    batches = -(-examples // size) if combination.endswith("-one") else 1
    if combination.split("-")[0] in APART:
        batches = BATCHES_APART[combination, size]
    assert table[combination]["examples"] == examples
    assert table[combination]["batches"] == [batches] * size


@EVERY
def test_c67_weights_are_as_many_as_without_a_strategy(table: Results, combination: str) -> None:
    assert table[combination]["parameters"] == PARAMETERS[combination.split("-")[0]]
    assert table[combination]["parameters"] == table[combination]["parameters_alone"]


@EVERY
def test_every_rank_takes_the_same_way_out_of_the_probe(
    table_world: World, table: Results, combination: str
) -> None:
    """Documents are apart where the model needs it, and nowhere else; no loss is of own logits."""
    decision = [combination.split("-")[0] in APART, False]
    assert table[combination]["probe"] == [decision] * table_world[1]


def test_c33_the_last_step_of_an_epoch_has_the_gradient_of_its_own_rows(
    any_results: Results,
) -> None:
    """Seven rows, three a step, one at a time."""
    found = any_results["tail"]
    assert found["steps"] == 3
    assert max(found["gradients"]) < 1e-6
    assert max(found["losses"]) < 1e-6


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
    """One bucket of DDP. FSDP reduces two blocks and the root after every micro-batch, or each rank
    would hold the gradient of the whole model; nothing travels where there is one shard."""
    whole = {"single": 0, "ddp": 1, "fsdp": 3 if world[1] > 1 else 0}[world[0]]
    assert results["reductions"] == {"4": whole, "1": whole * (4 if world[0] == "fsdp" else 1)}


def test_c41_reductions_on_gloo_are_sums(any_world: World, any_results: Results) -> None:
    """With AVG, gloo returns the sum on torch 2.8 and earlier; parity proves the value."""
    expected = [] if any_world[0] in ("single", "ddp") else [True] * 3
    assert any_results["world"]["forced_sums"] == expected


def test_c67_tied_weights_stay_one_parameter(any_results: Results) -> None:
    found = any_results["tying"]
    assert found["tied"]
    assert found["parameters"] == 20
    assert found["names"] == ["model.embed_tokens.weight"]
    assert found["shape"] == [97, 32]
