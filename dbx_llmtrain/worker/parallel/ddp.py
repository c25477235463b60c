"""Every rank holds the whole model; gradients are averaged over the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dbx_llmtrain.worker.parallel import clip_gradients

if TYPE_CHECKING:
    from dbx_llmtrain.worker.loss import LossModule
    from dbx_llmtrain.worker.world import World


class DDP:
    """``DistributedDataParallel`` over the loss module. bf16: autocast over fp32 weights, so
    gradients are accumulated and reduced in fp32."""

    name = "ddp"

    def __init__(self, world: World, precision: str) -> None:
        self._device = world.device
        self._precision = precision

    def wrap(self, module: LossModule) -> nn.Module:
        """Rank 0's weights are sent to the others when the module is wrapped."""
        module.autocast = torch.bfloat16 if self._precision == "bf16" else None
        # Buffers (rotary frequencies) never change. The option has a new name since torch 2.13.
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        root: nn.Module = DistributedDataParallel(
            module.to(self._device), gradient_as_bucket_view=True, **{buffers: False}
        )
        return root

    def accumulate(self, root: nn.Module, last: bool) -> AbstractContextManager[None]:
        """The gradients of all but the last micro-batch stay on the rank."""
        assert isinstance(root, DistributedDataParallel)
        quiet: AbstractContextManager[None] = root.no_sync()
        return nullcontext() if last else quiet

    def grad_norm_and_clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """The gradients are whole and equal on every rank: so is their norm."""
        return clip_gradients(parameters, max_norm)
