"""Parameter groups, and every optimizer's options, precision and arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dbx_llmtrain import optimizers
from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.model_sections import OptimConfig
from dbx_llmtrain.worker.optim import build_optimizer, parameter_groups
from tests import tiny

HERE = ("adamw", "sgd", "adafactor")
"""Optimizers that a CPU can run."""


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("tied", [False, True])
def test_c59_every_trainable_parameter_is_in_exactly_one_group(tied: bool, name: str) -> None:
    model = tiny.llama(tied=tied)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.1, optimizer=name))
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    decay = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    for label, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert decay[id(parameter)] == (0.0 if "norm" in label else 0.1), label


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
def test_c59_only_matrices_decay(build: Any, name: str) -> None:
    model = build()
    before = {label: p.detach().clone() for label, p in model.named_parameters()}
    train = OptimConfig(weight_decay=0.5, learning_rate=0.1, optimizer=name)
    optimizer = build_optimizer(model, train)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for label, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            assert torch.allclose(parameter, before[label] * (1 - 0.1 * 0.5) ** 3, atol=1e-7), label
        else:
            assert torch.equal(parameter, before[label]), label


def test_c59_adapters_decay_and_their_frozen_base_does_not() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny.llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    )
    (group,) = parameter_groups(model, OptimConfig(weight_decay=0.1))
    names = {id(p): label for label, p in model.named_parameters()}
    held = [names[id(p)] for p in group["params"]]
    assert len(held) == 2 * 2 * 2
    assert all("lora_" in label for label in held)
    assert group["weight_decay"] == 0.1


def test_c59_a_partition_is_judged_by_the_shape_of_the_whole() -> None:
    """DeepSpeed's ZeRO-3 leaves parameters without elements, and their shape in ``ds_shape``."""
    model = torch.nn.Linear(4, 3)
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    decaying, others = parameter_groups(model, OptimConfig(weight_decay=0.1))
    assert decaying["params"] == [model.weight]
    assert others["params"] == [model.bias]


@pytest.mark.parametrize("name", ["adamw", {"name": "sgd", "momentum": 0.9}, "adafactor"])
def test_c52_state_is_fp32_and_bf16_weights_are_refused(name: Any) -> None:
    model = tiny.llama()
    train = OptimConfig(optimizer=name)
    optimizer = build_optimizer(model, train)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values()]
    assert {value.dtype for value in state} == {torch.float32}
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight is torch\.bfloat16"):
        build_optimizer(tiny.llama().bfloat16(), train)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer(tiny.llama().requires_grad_(False), OptimConfig())


def test_adamw_is_fused_with_what_was_asked_for() -> None:
    options = {"name": "adamw", "eps": 1e-6, "amsgrad": True}
    optimizer = build_optimizer(tiny.llama(), OptimConfig(betas=(0.8, 0.9), optimizer=options))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["fused"]
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert (optimizer.defaults["eps"], optimizer.defaults["amsgrad"]) == (1e-6, True)


def test_sgd_with_momentum_moves_as_its_formula_says() -> None:
    """v1 = g, v2 = m * v1 + (1 - dampening) * g; the weights lose lr * v."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    model = torch.nn.Module()
    model.register_parameter("weight", weight)
    options = {"name": "sgd", "momentum": 0.5, "dampening": 0.25}
    optimizer = build_optimizer(model, OptimConfig(learning_rate=0.1, optimizer=options))
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert torch.allclose(weight, torch.full((2, 2), 1 - 0.1 * (1 + 0.5 + 0.75)))


def test_nesterov_is_passed_on() -> None:
    options = {"name": "sgd", "momentum": 0.9, "nesterov": True}
    optimizer = build_optimizer(tiny.llama(), OptimConfig(optimizer=options))
    assert optimizer.defaults["nesterov"]


def test_adafactor_keeps_rows_and_columns_of_a_matrix_alone() -> None:
    options = {"name": "adafactor", "eps": [1e-30, 1e-3], "d": 2.0, "beta2_decay": -0.5}
    model = tiny.llama()
    optimizer = build_optimizer(model, OptimConfig(optimizer=options))
    assert isinstance(optimizer, torch.optim.Adafactor)
    assert optimizer.defaults["eps"] == (1e-30, 1e-3)
    assert (optimizer.defaults["d"], optimizer.defaults["beta2_decay"]) == (2.0, -0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    matrix = model.lm_head.weight
    kept = sum(value.numel() for value in optimizer.state[matrix].values())
    assert kept < sum(matrix.shape) + 5 < matrix.numel()


def test_the_table_has_torchs_own_defaults() -> None:
    """What is not given is what torch would take."""
    weights = [torch.nn.Parameter(torch.ones(2))]
    for name, built in (
        ("adamw", torch.optim.AdamW(weights)),
        ("sgd", torch.optim.SGD(weights, lr=1)),
        ("adafactor", torch.optim.Adafactor(weights)),
    ):
        options = optimizers.options_of(name)
        assert options == {key: built.defaults[key] for key in options}, name


def test_eight_bits_need_a_gpu() -> None:
    with pytest.raises(ConfigError, match="adamw_8bit needs GPUs") as caught:
        build_optimizer(tiny.llama(), OptimConfig(optimizer="adamw_8bit"))
    assert [problem.path for problem in caught.value.problems] == ["train.optimizer"]
