"""Parameter groups, the optimizer's precision, and the learning rate of every step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dbx_llmtrain.sections import OptimConfig
from dbx_llmtrain.worker.optim import build_optimizer, learning_rate
from tests import tiny


def _rates(total: int, warmup: int, **fields: Any) -> list[float]:
    train = OptimConfig(**({"learning_rate": 1.0} | fields))
    return [
        learning_rate(step, train, warmup_steps=warmup, total_steps=total)
        for step in range(1, total + 1)
    ]


@pytest.mark.parametrize("tied", [False, True])
def test_c59_every_trainable_parameter_is_in_exactly_one_group(tied: bool) -> None:
    model = tiny.llama(tied=tied)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.1))
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    decay = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert decay[id(parameter)] == (0.0 if "norm" in name else 0.1), name


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
def test_c59_only_matrices_decay(build: Any) -> None:
    model = build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.5, learning_rate=0.1))
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            assert torch.allclose(parameter, before[name] * (1 - 0.1 * 0.5) ** 3, atol=1e-7), name
        else:
            assert torch.equal(parameter, before[name]), name


def test_c52_state_is_fp32_and_bf16_weights_are_refused() -> None:
    model = tiny.llama()
    optimizer = build_optimizer(model, OptimConfig())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values()]
    assert {value.dtype for value in state} == {torch.float32}
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight is torch\.bfloat16"):
        build_optimizer(tiny.llama().bfloat16(), OptimConfig())


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer(tiny.llama().requires_grad_(False), OptimConfig())


def test_adamw_is_fused_with_the_betas_asked_for() -> None:
    optimizer = build_optimizer(tiny.llama(), OptimConfig(betas=(0.8, 0.9)))
    assert optimizer.defaults["fused"]
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)


def test_c61_the_first_step_of_the_warm_up_learns() -> None:
    assert _rates(6, 2)[:3] == [0.5, 1.0, pytest.approx((1 + math.cos(math.pi / 5)) / 2)]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_c61_the_last_step_has_the_lowest_rate_and_none_is_below(schedule: str) -> None:
    rates = _rates(10, 3, schedule=schedule, min_learning_rate=0.1)
    assert rates[2] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert min(rates[2:]) >= 0.1 - 1e-12


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_c61_no_step_is_run_at_a_rate_of_zero(schedule: str) -> None:
    assert min(_rates(10, 3, schedule=schedule)) > 0
    assert min(_rates(2, 1, schedule=schedule)) > 0


def test_linear_is_a_line_and_constant_stays() -> None:
    falling = _rates(5, 1, schedule="linear", min_learning_rate=0.2)
    assert falling == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert _rates(4, 2, schedule="constant") == [0.5, 1.0, 1.0, 1.0]


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert _rates(3, 0, schedule="linear") == pytest.approx([1.0, 2 / 3, 1 / 3])
    assert _rates(1, 0) == [1.0]
    assert _rates(1, 1) == [1.0]


def test_a_lowest_rate_above_the_peak_does_not_raise_it() -> None:
    assert _rates(3, 0, min_learning_rate=5.0) == [1.0, 1.0, 1.0]
