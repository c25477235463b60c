"""Every rank holds the whole model; gradients are averaged over the ranks."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dbx_llmtrain.worker.parallel import Fill
from dbx_llmtrain.worker.parallel.common import TorchStrategy

if TYPE_CHECKING:
    from dbx_llmtrain.worker.loss import LossModule
    from dbx_llmtrain.worker.world import World


class DDP(TorchStrategy):
    """``DistributedDataParallel`` over the loss module. bf16 and fp16: autocast over fp32 weights,
    so gradients are accumulated and reduced in fp32."""

    name = "ddp"

    def __init__(self, world: World, precision: str) -> None:
        super().__init__(world.device, precision)

    def wrap(self, module: LossModule, fill: Fill | None = None) -> nn.Module:
        """Rank 0's weights are sent to the others when the module is wrapped."""
        # Buffers (rotary frequencies) never change. The option has a new name since torch 2.13.
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        # Gradients lie in the buckets that travel, instead of a second time beside them.
        root: nn.Module = DistributedDataParallel(
            self.place(module, fill), gradient_as_bucket_view=True, **{buffers: False}
        )
        return root

    def accumulate(self, root: nn.Module, last: bool) -> AbstractContextManager[None]:
        """The gradients of all but the last micro-batch stay on the rank."""
        assert isinstance(root, DistributedDataParallel)
        quiet: AbstractContextManager[None] = root.no_sync()
        return nullcontext() if last else quiet
