"""How ranks share one training step: a strategy wraps the loss module and reduces its gradients.

Every strategy that has several ranks averages gradients over them, so a micro-batch that
back-propagates ``local_sum * world_size / N`` gives the gradient of the mean over all N trained
tokens of the step, whatever the cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from dbx_llmtrain.worker.loss import LossModule
    from dbx_llmtrain.worker.world import World


class Strategy(Protocol):
    """What differs between ``single``, ``ddp`` and ``fsdp``."""

    name: str

    def wrap(self, module: LossModule) -> nn.Module:
        """Move the module to the rank's device and return the root to call. Once per model, and
        before an optimizer is built: wrapping may replace the parameters."""
        ...

    def accumulate(self, root: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward pass of a micro-batch: gradients are reduced at the last."""
        ...

    def grad_norm_and_clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """The global norm of the whole gradient before clipping, the same plain 0-d tensor on
        every rank, and the gradient clipped to ``max_norm`` (0: left as it is)."""
        ...


def make_strategy(name: str, world: World, precision: str) -> Strategy:
    """The strategy called ``name`` (``single``, ``ddp``, ``fsdp``) in ``fp32`` or ``bf16``.

    Raises ``ValueError`` for another name or precision, and for ``single`` on several ranks.
    """
    if precision not in ("fp32", "bf16"):
        raise ValueError(f"precision {precision!r}: expected fp32 or bf16")
    if name == "single":
        from dbx_llmtrain.worker.parallel.single import Single

        return Single(world, precision)
    if name == "ddp":
        from dbx_llmtrain.worker.parallel.ddp import DDP

        return DDP(world, precision)
    if name == "fsdp":
        from dbx_llmtrain.worker.parallel.fsdp import FSDP

        return FSDP(world, precision)
    raise ValueError(f"strategy {name!r}: expected single, ddp or fsdp")


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Euclidean norm of all gradients together; clips them to it where ``max_norm`` is not 0.

    The norm of sharded gradients is global (a DTensor norm reduces over the ranks), and what is
    returned is a plain tensor. Nothing waits for the device.
    """
    from torch.distributed.tensor import DTensor
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    trained = [parameter for parameter in parameters if parameter.grad is not None]
    norm = get_total_norm([parameter.grad for parameter in trained])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm > 0:
        clip_grads_with_norm_(trained, max_norm, norm)
    total: Tensor = torch.as_tensor(norm)
    return total
