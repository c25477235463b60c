"""How ranks share one training step: a strategy wraps the loss module and reduces its gradients.

Every strategy that has several ranks averages gradients over them, so a micro-batch that
back-propagates ``local_sum * world_size / N`` gives the gradient of the mean over all N trained
tokens of the step, whatever the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from dbx_llmtrain.model_sections import OptimConfig, ParallelConfig

if TYPE_CHECKING:
    from dbx_llmtrain.records import RunPlan
    from dbx_llmtrain.worker.loss import LossModule
    from dbx_llmtrain.worker.world import World

Fill = Callable[[nn.Module], None]
"""Fills every parameter and buffer of the Hugging Face model in place, whatever holds them by then:
plain tensors, this rank's shards (``DTensor``), or DeepSpeed's partitions."""


class Strategy(Protocol):
    """What differs between ``single``, ``ddp``, ``fsdp`` and ``deepspeed``.

    The order of calls: ``wrap``, ``build_optimizer``, perhaps ``load_state``; then for each
    optimizer step ``accumulate`` and ``backward`` for every micro-batch, ``missing_gradients``,
    ``grad_norm_and_clip``, ``update``.
    """

    name: str

    def wrap(self, module: LossModule, fill: Fill | None = None) -> nn.Module:
        """Move the module to the rank's device and return the root to call. Once per model, and
        before an optimizer is built: wrapping may replace the parameters.

        With ``fill`` the parameters have no storage yet (``meta``): each rank makes room for what
        it will hold, and ``fill`` is called with the Hugging Face model. Without, the module holds
        its weights, the same on every rank.
        """
        ...

    def build_optimizer(self, model: nn.Module, train: OptimConfig) -> torch.optim.Optimizer:
        """The optimizer of the trainable parameters, after ``wrap``."""
        ...

    def accumulate(self, root: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward pass of a micro-batch: gradients are reduced at the last."""
        ...

    def backward(self, root: nn.Module, loss: Tensor) -> None:
        """Back-propagate a micro-batch's summed loss times ``world_size / N``."""
        ...

    def missing_gradients(self, root: nn.Module) -> list[str]:
        """Names of the trainable parameters that got no gradient in this step."""
        ...

    def grad_norm_and_clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """The global norm of the whole gradient before clipping, without any loss scale: the same
        plain 0-d tensor on every rank. The gradient is clipped to ``max_norm`` (0: left as it is).
        """
        ...

    def update(self, optimizer: torch.optim.Optimizer, *, finite: bool) -> bool:
        """Step where the gradient is ``finite``, else leave the weights bitwise as they are. No
        gradient is left either way.

        Returns whether it lowered its loss scale, so that the next gradient may be finite.
        """
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the strategy itself, as JSON."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on with what ``state`` gave, of whichever strategy."""
        ...


def make_strategy(
    name: str,
    world: World,
    precision: str,
    *,
    parallel: ParallelConfig | None = None,
    train: OptimConfig | None = None,
    plan: RunPlan | None = None,
) -> Strategy:
    """The strategy called ``name`` in ``fp32``, ``bf16`` or ``fp16``.

    ``parallel`` has its options; DeepSpeed also needs to know what is trained (``train``) and how
    (``plan``). Raises ``ValueError`` for another name or precision, for ``single`` on several
    ranks and for ``fp16`` with DeepSpeed, and ``ClusterError`` where the ranks do not allow it.
    """
    parallel = parallel or ParallelConfig()
    if precision not in ("fp32", "bf16", "fp16"):
        raise ValueError(f"precision {precision!r}: expected fp32, bf16 or fp16")
    if name == "single":
        from dbx_llmtrain.worker.parallel.single import Single

        return Single(world, precision)
    if name == "ddp":
        from dbx_llmtrain.worker.parallel.ddp import DDP

        return DDP(world, precision)
    if name == "fsdp":
        from dbx_llmtrain.worker.parallel.fsdp import FSDP

        return FSDP(world, precision, parallel)
    if name == "deepspeed":
        if precision == "fp16":
            raise ValueError("precision fp16 is not offered with deepspeed: expected fp32 or bf16")
        from dbx_llmtrain.worker.parallel.deepspeed import DeepSpeed

        strategy: Strategy = DeepSpeed(world, precision, parallel, train or OptimConfig(), plan)
        return strategy
    raise ValueError(f"strategy {name!r}: expected single, ddp, fsdp or deepspeed")
