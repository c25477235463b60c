"""Checkpointed and compiled blocks, and router losses, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.compute_cases import MODELS
from tests.dist.launch import launch

pytestmark = pytest.mark.dist
Results = dict[str, Any]


@pytest.fixture(
    scope="module",
    params=[("single", 1), pytest.param(("ddp", 2), marks=pytest.mark.slow), ("fsdp", 2)],
    ids=["single", "ddp", "fsdp"],
)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the cases found on these ranks, by case."""
    strategy, size = request.param
    return launch(strategy, size, tmp_path_factory.mktemp(strategy), "tests.dist.compute_cases")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_c76_checkpointing_changes_no_gradient(
    results: Results, model: str, frozen: bool, dropout: float
) -> None:
    """Twelve cases for each strategy."""
    assert results["checkpointing"][f"{model}-{frozen}-{dropout}"] < 1e-6


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_c76_nor_in_low_precision(results: Results, precision: str) -> None:
    """Relative to the largest gradient (in fp16 it still has its loss scale)."""
    assert results["low_precision"][precision] < 1e-6


@pytest.mark.parametrize("every", ["0", "1"])
def test_c78_compiled_blocks_are_wrapped_like_others(results: Results, every: str) -> None:
    found = results["compiled"][every]
    assert found["gradient"] < 1e-5
    assert found["names"]


def test_c38_the_router_loss_has_the_same_weight_however_a_step_is_cut(results: Results) -> None:
    """Ranks 1 and 2, accumulation 1, 4 and 8: against the same sum, written out by hand."""
    found = results["router"]
    assert len(found) == 3
    for cut in found.values():
        assert cut["difference"] < 1e-6
        assert cut["size"] > 1e-3
