"""Estimates of memory against what training really takes: ``benchmarks/memory.py`` has the whole
table, here is one combination, and the others as ``slow``.

Bounds: 15% of the most live tensor bytes, 25% of the most resident memory above the base.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dbx_llmtrain.memory import estimate
from tests.dist.memory_combinations import COMBINATIONS, shape_of
from tests.dist.memory_rank import measure

QUICK: tuple[str, ...] = ()

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in COMBINATIONS
    ],
)
def test_estimates_are_what_training_takes(name: str, tmp_path: Path) -> None:
    combination = COMBINATIONS[name]
    shape = shape_of(combination.model)
    assert shape.parameters >= 80_000_000
    found = measure(combination, tmp_path / "out.json")
    total = estimate(shape, combination.setup).total
    assert total == pytest.approx(found["live"], rel=0.15), found
    assert total == pytest.approx(found["resident"], rel=0.25), found


def test_there_are_combinations_of_every_strategy() -> None:
    kinds = {(one.setup.kind, one.setup.shard, one.setup.stage) for one in COMBINATIONS.values()}
    assert {kind for kind, _, _ in kinds} == {"single", "ddp", "fsdp", "deepspeed"}
    assert {("fsdp", "grad_op", None), ("deepspeed", "full", 3)} <= kinds
    assert len(COMBINATIONS) >= 12
