"""Estimates of memory against what a GPU's allocator counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dbx_llmtrain.memory import Setup, estimate
from dbx_llmtrain.worker.gpus import read_gpus
from tests.dist.memory_combinations import Combination, shape_of
from tests.dist.memory_rank import measure

GPUS = read_gpus()[0]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="nvidia-smi shows no GPU on this machine"),
]
BF16 = Setup("single", length=1024, micro_batch=4)


@pytest.mark.parametrize("model", ["smollm2-135m", "llama-147m", "gpt2-124m"])
@pytest.mark.parametrize(
    "setup",
    [
        BF16,
        replace(BF16, precision="fp32"),
        replace(BF16, gradient_checkpointing=1),
        replace(BF16, kind="ddp"),
        replace(BF16, kind="fsdp"),
        replace(BF16, kind="deepspeed", stage=2),
    ],
)
def test_estimates_are_what_a_gpu_allocates(model: str, setup: Setup, tmp_path: Path) -> None:
    found = measure(Combination(model, setup), tmp_path / "out.json")
    total = estimate(shape_of(model), setup).total
    assert total == pytest.approx(found["live"], rel=0.15), found
