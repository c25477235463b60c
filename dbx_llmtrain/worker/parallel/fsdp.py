"""Parameters, gradients and optimizer state are sharded over the ranks (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dbx_llmtrain.worker.parallel import clip_gradients

if TYPE_CHECKING:
    from dbx_llmtrain.worker.loss import LossModule
    from dbx_llmtrain.worker.world import World


class FSDP:
    """``fully_shard`` on every transformer block and on the root, which holds the embeddings and
    the head (one group, or tied weights would come apart).

    bf16: weights stay fp32, compute is bf16, gradients are accumulated and reduced in fp32. The
    loss turns logits into fp32 itself, so no ``output_dtype`` is needed (on a block it would break
    the next matrix product).
    """

    name = "fsdp"

    def __init__(self, world: World, precision: str) -> None:
        self._device = world.device
        self._mesh = init_device_mesh(world.device.split(":")[0], (world.size,))
        self._policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if precision == "bf16"
            else MixedPrecisionPolicy()
        )

    def wrap(self, module: LossModule) -> nn.Module:
        """Shard the module in place. Nothing is sent: every rank must hold the same weights.

        Raises ``RuntimeError`` when a parameter is not sharded afterwards.
        """
        module.to(self._device)
        for block in transformer_blocks(module.model):
            fully_shard(block, mesh=self._mesh, mp_policy=self._policy)
        fully_shard(module, mesh=self._mesh, mp_policy=self._policy)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                self._set_up(part)
        plain = [name for name, p in module.named_parameters() if not isinstance(p, DTensor)]
        if plain:
            raise RuntimeError(f"fully_shard left parameters unsharded: {', '.join(plain[:5])}")
        root: nn.Module = module
        return root

    def _set_up(self, part: FSDPModule) -> None:
        """Keep gradient reduction right on gloo and with parameters that a rank does not use."""
        # gloo's reduce_scatter with AVG returns the sum on torch <= 2.8 (pytorch issue 162338).
        if self._device == "cpu" and hasattr(part, "set_force_sum_reduction_for_comms"):
            part.set_force_sum_reduction_for_comms(True)
        # Where the ranks' tokens reach different experts, the ranks would reduce different tensors.
        if hasattr(part, "set_reduce_scatter_unused_params"):
            part.set_reduce_scatter_unused_params(True, recurse=False)

    @contextmanager
    def accumulate(self, root: nn.Module, last: bool) -> Iterator[None]:
        """The gradients of all but the last micro-batch stay on the rank, unsharded."""
        assert isinstance(root, FSDPModule)
        root.set_requires_gradient_sync(last)
        root.set_is_last_backward(last)
        yield

    def grad_norm_and_clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """The norm over all shards, reduced over the ranks."""
        return clip_gradients(parameters, max_norm)


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model, in order: what is gathered and computed at a time.

    They are the modules of the classes that the model declares unsplittable, or else its longest
    ``ModuleList``, also where only parts of its items are declared so (the attention of BERT-like
    models before transformers 5); none that holds the embeddings or the head.
    """
    ends = {
        id(part)
        for getter in ("get_input_embeddings", "get_output_embeddings")
        if (part := getattr(model, getter)()) is not None
    }
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [
        part
        for part in model.modules()
        if type(part).__name__ in names and not any(id(inner) in ends for inner in part.modules())
    ]
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    longest: list[nn.Module] = list(max(lists, key=len, default=[]))
    if {id(block) for block in blocks} <= _inside(longest):
        return longest
    inside = _inside(blocks)
    return [block for block in blocks if id(block) not in inside]


def _inside(modules: Iterable[nn.Module]) -> set[int]:
    """Everything within the modules, but not they themselves."""
    return {id(part) for module in modules for part in module.modules() if part is not module}
