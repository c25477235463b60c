"""The real Liger on a real GPU: the same loss and the same gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dbx_llmtrain.text.prepared import Split, write_split
from dbx_llmtrain.worker import compute, kernels
from dbx_llmtrain.worker.data import Order
from dbx_llmtrain.worker.gpus import read_gpus
from dbx_llmtrain.worker.loss import LossModule
from dbx_llmtrain.worker.parallel.fsdp import transformer_blocks
from dbx_llmtrain.worker.world import open_world
from tests import reference, sample, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not read_gpus()[0], reason="nvidia-smi shows no GPU on this machine"),
]


@pytest.mark.parametrize("name", ["llama", "mistral", "mixtral"])
@pytest.mark.parametrize("every", [0, 1])
def test_liger_computes_what_torch_computes(tmp_path: Path, name: str, every: int) -> None:
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    build: Any = getattr(tiny, name)
    model = {"source": "/models/tiny", "use_liger_kernel": True}
    plan = sample.run_plan(config=sample.config(model=model), use_gpu=True, precision="fp32")
    write_split(tmp_path, tiny.examples(), max_length=64, packing=True)
    with open_world(use_gpu=True) as world:
        order = Order(Split(tmp_path), 0, 8, 2, rank=0, world_size=1)
        fused, plain = (LossModule(build()).to(world.device) for _ in range(2))
        if every:
            compute.recompute_blocks(transformer_blocks(fused.model), every)
        (told,) = kernels.fuse(plan, world, fused, fused.model, order)
        assert "Liger's kernels are used" in told
        batch, gradients = order.step(0).batches[0].to(world.device), []
        for module in (fused, plain):
            (module(**batch.inputs()) / batch.trained).backward()
            gradients.append({n: p.grad for n, p in module.named_parameters()})
        assert reference.difference(*gradients) < 1e-4


def test_c78_compiled_blocks_give_the_same_gradient_on_a_gpu() -> None:
    device, found = torch.device("cuda"), []
    ids = torch.randint(3, tiny.VOCAB, (2, 24), device=device)
    for compiled in (False, True):
        module = LossModule(tiny.llama()).to(device)
        if compiled:
            compute.compile_blocks(transformer_blocks(module.model))
        module(ids, labels=ids).backward()
        found.append({name: p.grad / ids.numel() for name, p in module.named_parameters()})
    assert reference.difference(*found) < 1e-4
