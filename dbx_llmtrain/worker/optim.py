"""The optimizer and its parameter groups. The learning rate of a step is in ``schedules``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dbx_llmtrain import optimizers
from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.model_sections import OptimConfig


def parameter_groups(model: nn.Module, train: OptimConfig) -> list[dict[str, Any]]:
    """The trainable parameters of ``model``, each once: matrices decay, vectors do not.

    A parameter is judged by its own shape, so take the groups where it still has one: a strategy
    that cuts parameters into flat pieces gets them before (DeepSpeed keeps ``ds_shape``, which is
    asked for). Raises ``ValueError`` when nothing is trainable or a trainable parameter is not
    fp32.
    """
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    # Tied weights are one parameter under two names; named_parameters gives it once.
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.dtype != torch.float32:
            raise ValueError(f"{name} is {parameter.dtype}: trainable weights have to be fp32")
        shape = getattr(parameter, "ds_shape", parameter.shape)
        (decaying if len(shape) >= 2 else others).append(parameter)
    if not decaying and not others:
        raise ValueError("the model has no trainable parameter")
    groups = [
        {"params": decaying, "weight_decay": train.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, train: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of ``train`` over the parameter groups of ``model``.

    Build it after the strategy has wrapped the model: ``fully_shard`` replaces the parameters, and
    an optimizer of the old ones would move nothing. AdamW's and Adafactor's decay of weights is
    decoupled from the gradient, SGD's is added to it. Raises ``ValueError`` as ``parameter_groups``
    does, and ``ConfigError`` for an optimizer that needs a GPU or a package that is not there.
    """
    groups = parameter_groups(model, train)
    name = optimizers.name_of(train.optimizer)
    options = optimizers.options_of(train.optimizer)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=train.learning_rate, **options)
    if name == "adafactor":
        options["eps"] = tuple(options["eps"])
        return torch.optim.Adafactor(groups, lr=train.learning_rate, **options)
    if name == "adamw_8bit":
        return _adamw_8bit(groups, train, options)
    return torch.optim.AdamW(
        groups, lr=train.learning_rate, betas=train.betas, fused=True, **options
    )


def _adamw_8bit(
    groups: list[dict[str, Any]], train: OptimConfig, options: dict[str, Any]
) -> torch.optim.Optimizer:
    device = groups[0]["params"][0].device
    if device.type != "cuda":
        problems = optimizers.strategy_problems(train, "single", use_gpu=False)
        raise ConfigError(problems)
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError([optimizers.missing_package(str(error))]) from error
    optimizer: torch.optim.Optimizer = AdamW8bit(
        groups, lr=train.learning_rate, betas=train.betas, **options
    )
    return optimizer
