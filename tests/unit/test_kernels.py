"""Liger's kernels are used where they are there, wanted and equal, and leave no trace elsewhere.

The package needs a GPU: a stand-in with its one entry point is installed here, which changes what
the real one changes. (The real one: ``tests/gpu``.)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.text.prepared import Split, write_split
from dbx_llmtrain.worker import kernels
from dbx_llmtrain.worker.data import Order
from dbx_llmtrain.worker.loss import LossModule
from dbx_llmtrain.worker.world import World, open_world
from tests import reference, sample, tiny
from tests.unit.test_loss import _gradients, _packed

LIGER = """
import types
import torch
from transformers.models.llama import modeling_llama

SCALE = 1.0


class LigerRMSNorm(torch.nn.Module):
    def forward(self, hidden):
        if SCALE is None:
            raise RuntimeError("no such kernel")
        return torch.nn.functional.rms_norm(
            hidden, self.weight.shape, self.weight * SCALE, self.variance_epsilon
        )


def rotary(*args, **kwargs):
    raise AssertionError("a kernel for GPUs ran on the CPU")


def _apply_liger_kernel_to_instance(model, **options):
    assert options == {"cross_entropy": False, "fused_linear_cross_entropy": False}
    if model.config.model_type != "llama":
        return
    modeling_llama.apply_rotary_pos_emb = rotary
    modeling_llama.LlamaRMSNorm = LigerRMSNorm
    modeling_llama.LlamaMLP.forward = rotary
    for part in model.modules():
        if type(part).__name__ == "LlamaRMSNorm":
            part.in_place = True
            part.forward = types.MethodType(LigerRMSNorm.forward, part)
"""


@pytest.fixture
def liger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in, installed; its ``SCALE`` makes it compute something else."""
    package = tmp_path / "site" / "liger_kernel" / "transformers"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text(LIGER)
    about = tmp_path / "site" / "liger_kernel-0.8.5.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: liger-kernel\nVersion: 0.8.5\n")
    monkeypatch.syspath_prepend(str(package.parents[1]))
    import liger_kernel.transformers

    yield liger_kernel.transformers
    for name in [name for name in sys.modules if name.startswith("liger_kernel")]:
        del sys.modules[name]


@pytest.fixture
def world() -> Iterator[World]:
    with open_world(use_gpu=False) as opened:
        yield opened


def _order(folder: Path, world: World) -> Order:
    write_split(folder, tiny.examples(), max_length=64, packing=True)
    return Order(Split(folder), 0, 8, 2, rank=world.rank, world_size=world.size)


def _plan(wanted: Any, *, use_gpu: bool = True, precision: str = "fp32") -> Any:
    model = {"source": "/models/tiny", "use_liger_kernel": wanted}
    return sample.run_plan(config=sample.config(model=model), use_gpu=use_gpu, precision=precision)


def _globals() -> list[Any]:
    from transformers.models.llama import modeling_llama

    found = modeling_llama
    return [
        found.LlamaRMSNorm, found.LlamaRMSNorm.forward, found.LlamaMLP.forward
    ]  # fmt: skip


@pytest.mark.parametrize("wanted", ["auto", True])
def test_equal_kernels_are_used_by_this_model_alone(
    tmp_path: Path, world: World, liger: Any, wanted: Any
) -> None:
    module, plain, before = LossModule(tiny.llama()), LossModule(tiny.llama()), _globals()
    names = list(module.state_dict())
    told = kernels.fuse(_plan(wanted), world, module, module.model, _order(tmp_path, world))
    assert told == ("Liger's kernels are used in 5 parts of the model",)
    assert _globals() == before
    norm = module.model.model.norm
    assert norm.forward.__func__ is liger.LigerRMSNorm.forward
    assert list(module.state_dict()) == names
    batch = _packed(tiny.examples((9, 5)))
    found, expected = _gradients(module, batch)[1], _gradients(plain, batch)[1]
    assert reference.difference(found, expected) < 1e-6


@pytest.mark.parametrize(
    ("scale", "cause"),
    [
        (1.5, r"with Liger's kernels the loss differs by .* of itself"),
        (None, r"with Liger's kernels the model fails \(RuntimeError: no such kernel\)"),
    ],
)
def test_other_kernels_are_undone_or_refused(
    tmp_path: Path,
    world: World,
    liger: Any,
    monkeypatch: pytest.MonkeyPatch,
    scale: float | None,
    cause: str,
) -> None:
    monkeypatch.setattr(liger, "SCALE", scale)
    from transformers.models.llama import modeling_llama

    rotary, before = modeling_llama.apply_rotary_pos_emb, _globals()
    order = _order(tmp_path, world)
    for wanted in ("auto", True):
        module = LossModule(tiny.llama())
        attributes = [dict(vars(part)) for part in module.modules()]
        if wanted is True:
            with pytest.raises(ConfigError, match=rf"use_liger_kernel: {cause}: set it to false"):
                kernels.fuse(_plan(wanted), world, module, module.model, order)
        else:
            (told,) = kernels.fuse(_plan(wanted), world, module, module.model, order)
            assert told.endswith(": they are not used")
        assert [dict(vars(part)) for part in module.modules()] == attributes
        assert _globals() == before
        assert modeling_llama.apply_rotary_pos_emb is rotary


def test_a_model_that_liger_does_not_know(tmp_path: Path, world: World, liger: Any) -> None:
    module, order = LossModule(tiny.mistral()), _order(tmp_path, world)
    arguments = (world, module, module.model, order)
    (told,) = kernels.fuse(_plan("auto"), *arguments)
    assert told == "Liger has no kernels for MistralForCausalLM: they are not used"
    with pytest.raises(ConfigError, match="Liger has no kernels for MistralForCausalLM: set it to"):
        kernels.fuse(_plan(True), *arguments)


@pytest.mark.parametrize(("wanted", "use_gpu"), [(False, True), ("auto", False)])
def test_where_they_are_not_wanted_or_there_is_no_gpu(
    tmp_path: Path, world: World, liger: Any, wanted: Any, use_gpu: bool
) -> None:
    module = LossModule(tiny.llama())
    plan = _plan(wanted, use_gpu=use_gpu)
    assert kernels.fuse(plan, world, module, module.model, _order(tmp_path, world)) == ()
    assert "forward" not in vars(module.model.model.norm)


def test_auto_without_the_package_says_nothing(tmp_path: Path, world: World) -> None:
    module = LossModule(tiny.llama())
    order = _order(tmp_path, world)
    assert kernels.fuse(_plan("auto"), world, module, module.model, order) == ()


def test_true_with_the_package_and_a_gpu_is_allowed(liger: Any) -> None:
    kernels.check_liger(True, use_gpu=True)


def test_memory_that_runs_out_is_not_a_fault_of_the_kernels(
    tmp_path: Path, world: World, liger: Any
) -> None:
    module = LossModule(tiny.llama())
    calls: list[int] = []

    def run_out(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("out of memory")

    module.register_forward_hook(run_out)
    with pytest.raises(torch.OutOfMemoryError):
        kernels.fuse(_plan("auto"), world, module, module.model, _order(tmp_path, world))
