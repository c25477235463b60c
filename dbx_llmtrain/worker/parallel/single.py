"""One rank: nothing is shared."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dbx_llmtrain.worker.parallel import clip_gradients

if TYPE_CHECKING:
    from dbx_llmtrain.worker.loss import LossModule
    from dbx_llmtrain.worker.world import World


class Single:
    """The loss module itself. bf16: autocast over fp32 weights."""

    name = "single"

    def __init__(self, world: World, precision: str) -> None:
        if world.size != 1:
            raise ValueError(f"strategy single needs one rank, there are {world.size}")
        self._device = world.device
        self._precision = precision

    def wrap(self, module: LossModule) -> nn.Module:
        """Move the module to the device; it is its own root."""
        module.autocast = torch.bfloat16 if self._precision == "bf16" else None
        root: nn.Module = module.to(self._device)
        return root

    def accumulate(self, root: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Nothing to reduce."""
        return nullcontext()

    def grad_norm_and_clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """See ``Strategy``."""
        return clip_gradients(parameters, max_norm)
