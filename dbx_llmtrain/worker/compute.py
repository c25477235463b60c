"""What is traded for memory or speed inside the model: gradient checkpointing, compilation.

Both replace the ``forward`` of a block on the block itself. Parameter names stay as they are, and
the hooks by which a strategy gathers and frees weights stay outside: they run once a pass, and are
not compiled. (Fused kernels come later, when weights are there to compare with: ``kernels``.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dbx_llmtrain.errors import ConfigError, Problem
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker.kernels import check_liger
from dbx_llmtrain.worker.parallel.fsdp import transformer_blocks

Forward = Callable[..., Any]


def prepare(model: nn.Module, plan: RunPlan) -> tuple[str, ...]:
    """Change the model in place as the plan says, before it is wrapped; what was done, in words.

    The weights need not be there yet. Raises ``ConfigError`` where the plan asks for what this
    machine or this model cannot do.
    """
    check_liger(plan.config.model.use_liger_kernel, use_gpu=plan.use_gpu)
    every, compiled = plan.gradient_checkpointing, plan.config.model.compile
    if not every and not compiled:
        return ()
    blocks = transformer_blocks(model)
    if not blocks:
        field = "gradient_checkpointing" if every else "compile"
        message = f"{type(model).__name__} has no list of repeated blocks: set it to " + (
            "none" if every else "false"
        )
        raise ConfigError([Problem(f"model.{field}", message)])
    notes = []
    if compiled:
        compile_blocks(blocks)
        notes.append(f"{len(blocks)} blocks are compiled at their first training step")
    if every:
        chosen = recompute_blocks(blocks, every)
        notes.append(
            f"activations of {chosen} of {len(blocks)} blocks are computed again in the backward "
            "pass"
        )
    return tuple(notes)


def recompute_blocks(blocks: list[nn.Module], every: int) -> int:
    """Compute the activations of every n-th block again in the backward pass; how many that are.

    Without reentrance, so that frozen inputs and outputs of any form do no harm. Random numbers and
    autocast are replayed.
    """
    chosen = blocks[::every]
    for block in chosen:
        _replace_forward(block, _recomputed)
    return len(chosen)


def compile_blocks(blocks: list[nn.Module], backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile every block for training, for rows of any length.

    Passes without gradients run as they are: the start-up probe and an evaluation would only be
    further shapes to compile for.
    """
    for block in blocks:
        _replace_forward(block, functools.partial(_compiled, backend=backend))


def _replace_forward(block: Any, change: Callable[[Forward], Forward]) -> None:
    # An attribute of the instance wins over the class, and is no submodule: no name changes.
    block.forward = change(block.forward)


def _recomputed(forward: Forward) -> Forward:
    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # (Bound here: a block's argument may have the name of one of checkpoint's own.)
        return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=False)

    return recomputed


def _compiled(forward: Forward, *, backend: str | Callable[..., Any]) -> Forward:
    fast = torch.compile(forward, dynamic=True, backend=backend)

    @functools.wraps(forward)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        try:
            return fast(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            cause = str(getattr(error, "inner_exception", error)).partition("\n")[0]
            message = f"torch cannot compile {_owner(forward)} here ({cause}): set it to false"
            raise ConfigError([Problem("model.compile", message)]) from error

    return compiled


def _owner(forward: Any) -> str:
    return type(getattr(forward, "__self__", None)).__name__
