"""Parts of strategies that need no ranks: the loss scale, the mesh, the options' checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.errors import ClusterError
from dbx_llmtrain.worker import loop
from dbx_llmtrain.worker.parallel.common import materialise
from dbx_llmtrain.worker.parallel.mesh import ranks_by_node
from dbx_llmtrain.worker.parallel.scaling import GROWTH_INTERVAL, LossScale
from dbx_llmtrain.worker.world import _use_tensor_cores
from tests import tiny
from tests.unit.test_config import MINIMAL, problems
from tests.unit.test_loop import Run


def test_the_scale_is_halved_at_an_overflow_and_doubled_after_good_steps() -> None:
    scale = LossScale(active=True, growth_interval=3)
    assert scale.value == 2.0**16
    assert scale.move(finite=False)
    assert [scale.move(finite=True) for _ in range(2)] == [False, False]
    assert scale.value == 2.0**15
    assert not scale.move(finite=True)
    assert (scale.value, scale.good_steps) == (2.0**16, 0)
    scale.move(finite=True)
    scale.move(finite=False)
    assert (scale.value, scale.good_steps) == (2.0**15, 0)
    assert GROWTH_INTERVAL == 2000


def test_the_scale_stays_within_its_bounds() -> None:
    scale = LossScale(active=True, growth_interval=1)
    lowered = [scale.move(finite=False) for _ in range(20)]
    assert lowered == [True] * 16 + [False] * 4
    assert scale.value == 1.0
    for _ in range(40):
        scale.move(finite=True)
    assert scale.value == 2.0**24


def test_without_fp16_there_is_no_scale() -> None:
    scale = LossScale(active=False)
    loss, gradient = torch.tensor(3.0), torch.tensor([2.0])
    assert scale.scaled(loss) is loss
    scale.unscale([gradient])
    assert float(gradient) == 2.0
    assert not scale.move(finite=False)
    assert scale.state() == {}


def test_scaling_changes_no_digit_of_an_fp32_gradient() -> None:
    scale = LossScale(active=True)
    values = torch.randn(1000)
    scaled = scale.scaled(values)
    scale.unscale([scaled])
    assert torch.equal(scaled, values)


def test_the_scale_goes_on_where_it_was() -> None:
    scale, other = LossScale(active=True), LossScale(active=True)
    for finite in (False, False, True):
        scale.move(finite=finite)
    assert scale.state() == {"loss_scale": 2.0**14, "good_steps": 1}
    other.load_state(scale.state())
    assert other.state() == scale.state()
    other.load_state({})  # of a checkpoint in another precision
    assert other.state() == scale.state()
    plain = LossScale(active=False)
    plain.load_state(scale.state())
    assert plain.value == 1.0


def test_c63_overflows_are_no_failure_until_the_scale_is_at_its_lowest(tmp_path: Path) -> None:
    """16 halvings from 65536 to 1 are part of training in fp16; ten more steps are a failure."""
    run = Run(tmp_path, tiny.examples(), steps=60, precision="fp16")
    run.root.register_forward_hook(lambda _, __, loss: loss * 1e30)
    reports = []
    with pytest.raises(RuntimeError, match="not finite in 10 steps in a row, up to step 26"):
        reports.extend(run.steps())
    assert run.strategy.state()["loss_scale"] == 1.0


def test_c63_another_scale_cannot_help_a_loss_that_is_no_number(tmp_path: Path) -> None:
    run = Run(tmp_path, tiny.examples(), steps=60, precision="fp16")
    run.root.register_forward_hook(lambda _, __, loss: loss * float("nan"))
    with pytest.raises(RuntimeError, match="not finite in 10 steps in a row, up to step 10"):
        list(run.steps())


def test_c63_a_scale_that_was_too_high_costs_steps_but_no_run(tmp_path: Path) -> None:
    run = Run(tmp_path, tiny.examples(), steps=30, precision="fp16")
    run.root.register_forward_hook(lambda _, __, loss: loss * 1e4)
    skipped = [report.skipped for report in run.steps()]
    count = skipped.count(loop.SCALE_LOWERED)
    assert skipped[0] == loop.SCALE_LOWERED
    assert 0 < count <= 16
    assert skipped.count("") == 30 - count
    assert run.strategy.state()["loss_scale"] == 2.0 ** (16 - count)


def test_c52_fp16_moves_as_far_as_fp32(tmp_path: Path) -> None:
    changes = []
    for precision in ("fp32", "fp16"):
        rows = tiny.examples((5, 9, 7))
        run = Run(tmp_path / precision, rows, precision=precision, steps=30, learning_rate=1e-5)
        before = run.state()
        assert not any(report.skipped for report in run.steps())
        after = run.state()
        moved = [(after[name] - before[name]).abs().flatten() for name in before]
        changes.append(float(torch.cat(moved).mean()))
    assert abs(changes[1] / changes[0] - 1) < 0.05


def test_ranks_are_grouped_by_node_whatever_their_order() -> None:
    assert ranks_by_node(("a", "b", "a", "b")) == [[0, 2], [1, 3]]
    assert ranks_by_node(("b", "a", "a", "b")) == [[0, 3], [1, 2]]
    assert ranks_by_node(("a", "a")) == [[0, 1]]
    assert ranks_by_node(("a", "b", "c")) == [[0], [1], [2]]


def test_hybrid_on_uneven_nodes_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"as many ranks on each, found a: 2, b: 1: set paral"):
        ranks_by_node(("a", "b", "a"))


@pytest.mark.parametrize("tied", [False, True])
def test_room_is_made_for_what_has_none_and_ties_stay(tied: bool) -> None:
    with torch.device("meta"):
        model = tiny.llama(tied=tied)
    model.lm_head.weight.requires_grad_(False)
    materialise(model, "cpu")
    assert not any(part.is_meta for part in (*model.parameters(), *model.buffers()))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert len(list(model.parameters())) == (20 if tied else 21)
    assert not model.lm_head.weight.requires_grad
    full = tiny.llama()
    weights = [p.clone() for p in full.parameters()]
    materialise(full, "cpu")
    assert all(torch.equal(*pair) for pair in zip(weights, full.parameters(), strict=True))


@pytest.mark.parametrize(
    ("parallel", "path", "message"),
    [
        ({"kind": "ddp", "shard": "hybrid"}, "parallel.shard", "parallel.kind is ddp: set"),
        ({"kind": "single", "cpu_offload": True}, "parallel.cpu_offload", "an option of fsdp"),
        (
            {"kind": "deepspeed", "cpu_offload": True},
            "parallel.cpu_offload",
            "or leave it out (DeepSpeed: parallel.offload_optimizer)",
        ),
    ],
)
def test_options_of_fsdp_are_refused_elsewhere(
    parallel: dict[str, Any], path: str, message: str
) -> None:
    found = problems(MINIMAL | {"parallel": parallel})
    assert list(found) == [path]
    assert message in found[path]


@pytest.mark.parametrize("kind", ["auto", "fsdp"])
def test_options_of_fsdp_are_taken_where_it_may_run(kind: str) -> None:
    parallel = {"kind": kind, "shard": "grad_op", "cpu_offload": True}
    assert TrainConfig.from_dict(MINIMAL | {"parallel": parallel}).parallel.cpu_offload


def test_tf32_is_on_where_gpus_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        assert _use_tensor_cores((7, 5)) == ()
        assert not torch.backends.cuda.matmul.allow_tf32
        (note,) = _use_tensor_cores((8, 0))
        assert "run in TF32" in note
        assert torch.backends.cuda.matmul.allow_tf32
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        assert _use_tensor_cores((9, 0)) == ()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
