"""What ``single``, ``ddp`` and ``fsdp`` do alike: everything but wrapping and reducing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dbx_llmtrain.model_sections import OptimConfig
from dbx_llmtrain.worker import four_bit, optim
from dbx_llmtrain.worker.parallel.scaling import LossScale

if TYPE_CHECKING:
    from dbx_llmtrain.worker.loss import LossModule
    from dbx_llmtrain.worker.parallel import Fill

COMPUTE: dict[str, torch.dtype | None] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Compute type of a precision; ``None`` where it is the weights' own."""


class TorchStrategy:
    """Gradients in ``parameter.grad``, an optimizer of torch, and the loss scale of fp16."""

    def __init__(self, device: str, precision: str) -> None:
        self.device = device
        self.compute = COMPUTE[precision]
        self.scale = LossScale(active=precision == "fp16")

    def place(self, module: LossModule, fill: Fill | None) -> LossModule:
        """The whole module on the device, with its weights, ready to compute in the run's type."""
        module.autocast = self.compute
        use_every_expert(module.model)
        if fill is not None:
            materialise(module, self.device)
            fill(module.model)
        placed: LossModule = module.to(self.device)
        return placed

    def build_optimizer(self, model: nn.Module, train: OptimConfig) -> torch.optim.Optimizer:
        """See ``optim.build_optimizer``."""
        return optim.build_optimizer(model, train)

    def backward(self, root: nn.Module, loss: Tensor) -> None:
        """Back-propagate; fp16 scales the loss first."""
        self.scale.scaled(loss).backward()

    def missing_gradients(self, root: nn.Module) -> list[str]:
        """Trainable parameters without a gradient."""
        return [name for name, p in root.named_parameters() if p.requires_grad and p.grad is None]

    def grad_norm_and_clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Take the loss scale out, then measure and clip."""
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        self.scale.unscale([parameter.grad for parameter in trained])
        return clip_gradients(trained, max_norm)

    def update(self, optimizer: torch.optim.Optimizer, *, finite: bool) -> bool:
        """The optimizer's step, if the gradient allows it; then no gradient is left."""
        if finite:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return self.scale.move(finite=finite)

    def state(self) -> dict[str, Any]:
        """The loss scale."""
        return self.scale.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """The loss scale of a checkpoint."""
        self.scale.load_state(state)


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


def materialise(module: nn.Module, device: str, *, parameters: str | None = None) -> None:
    """Give every parameter and buffer without storage (``meta``) room on ``device``, values
    undefined; ``parameters`` is where parameters go instead. Tied weights stay tied, which
    ``nn.Module.to_empty`` does not see to."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the old tensor, or its id would be reused
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None and weight.is_meta:
                if id(weight) not in made:
                    home = getattr(part, four_bit.HOME, parameters or device)
                    empty = torch.empty_like(weight, device=home)
                    trained = weight.requires_grad
                    made[id(weight)] = (nn.Parameter(empty, requires_grad=trained), weight)
                part._parameters[name] = made[id(weight)][0]
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                if id(buffer) not in made:
                    made[id(buffer)] = (torch.empty_like(buffer, device=device), buffer)
                part._buffers[name] = made[id(buffer)][0]


def use_every_expert(model: nn.Module) -> None:
    """Let the output of a block of experts depend on all of them, by adding 0 times a weight.

    Where experts are modules of a list (transformers before 5 have them so), one that no token of a
    rank reaches is left out of the graph, and the ranks would reduce the gradients of different
    weights: an error under DDP, a hang or another weight's gradient under FSDP.
    """
    for block in model.modules():
        experts = getattr(block, "experts", None)
        if isinstance(experts, nn.ModuleList):
            block.register_forward_hook(_with_every_expert)


def _with_every_expert(block: nn.Module, _: Any, output: Any) -> Any:
    weights = [weight for weight in block.experts.parameters() if weight.requires_grad]
    if not weights or not torch.is_grad_enabled():
        return output
    hidden, *rest = output if isinstance(output, tuple) else (output,)
    nothing = torch.stack([weight.flatten()[0].float() * 0 for weight in weights]).sum()
    hidden = hidden + nothing.to(hidden.dtype)
    return (hidden, *rest) if isinstance(output, tuple) else hidden
