"""One rank: nothing is shared."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torch import nn

from dbx_llmtrain.worker.parallel import Fill
from dbx_llmtrain.worker.parallel.common import TorchStrategy

if TYPE_CHECKING:
    from dbx_llmtrain.worker.loss import LossModule
    from dbx_llmtrain.worker.world import World


class Single(TorchStrategy):
    """The loss module itself. bf16 and fp16: autocast over fp32 weights."""

    name = "single"

    def __init__(self, world: World, precision: str) -> None:
        if world.size != 1:
            raise ValueError(f"strategy single needs one rank, there are {world.size}")
        super().__init__(world.device, precision)

    def wrap(self, module: LossModule, fill: Fill | None = None) -> nn.Module:
        """Move the module to the device; it is its own root."""
        root: nn.Module = self.place(module, fill)
        return root

    def accumulate(self, root: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Nothing to reduce."""
        return nullcontext()
