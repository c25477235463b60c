"""The optimizer, its parameter groups, and the learning rate of a step."""

from __future__ import annotations

import math

import torch
from torch import nn

from dbx_llmtrain.sections import OptimConfig


def build_optimizer(model: nn.Module, train: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters of ``model``, each once: matrices decay, vectors do not.

    Build it after the strategy has wrapped the model: ``fully_shard`` replaces the parameters, and
    an optimizer of the old ones would move nothing. Raises ``ValueError`` when nothing is trainable
    or a trainable parameter is not fp32.
    """
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    # Tied weights are one parameter under two names; named_parameters gives it once.
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.dtype != torch.float32:
            raise ValueError(f"{name} is {parameter.dtype}: trainable weights have to be fp32")
        (decaying if parameter.ndim >= 2 else others).append(parameter)
    if not decaying and not others:
        raise ValueError("the model has no trainable parameter")
    groups = [
        {"params": decaying, "weight_decay": train.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=train.learning_rate,
        betas=train.betas,
        fused=True,
    )


def learning_rate(step: int, train: OptimConfig, *, warmup_steps: int, total_steps: int) -> float:
    """The learning rate of optimizer step ``step``, counted from 1.

    Warm-up: peak * step / warmup_steps, so the first step already learns. Then from the peak down
    to ``min_learning_rate``, which the last step has: along a half cosine, a line, or not at all.
    A lowest rate of 0 is reached one step later, where the run is over: the last step learns, too.
    """
    peak, lowest = train.learning_rate, min(train.min_learning_rate, train.learning_rate)
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if train.schedule == "constant":
        return peak
    top = max(warmup_steps, 1)
    length = total_steps - top + (lowest == 0)
    gone = min(1.0, (step - top) / max(1, length))
    left = 1 - gone if train.schedule == "linear" else (1 + math.cos(math.pi * gone)) / 2
    return lowest + (peak - lowest) * left
