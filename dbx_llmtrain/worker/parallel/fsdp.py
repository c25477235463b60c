"""Parameters, gradients and optimizer state are sharded over the ranks (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from dbx_llmtrain.compat import at_least
from dbx_llmtrain.model_sections import ParallelConfig
from dbx_llmtrain.worker.parallel import Fill
from dbx_llmtrain.worker.parallel.common import TorchStrategy, materialise, use_every_expert
from dbx_llmtrain.worker.parallel.mesh import shard_mesh

if TYPE_CHECKING:
    from dbx_llmtrain.worker.loss import LossModule
    from dbx_llmtrain.worker.world import World


class FSDP(TorchStrategy):
    """``fully_shard`` on every transformer block and on the root, which holds the embeddings and
    the head (one group, or tied weights would come apart).

    ``shard``: ``full`` gathers a block's weights for its forward pass and again for its backward
    pass, ``grad_op`` keeps them in between, ``hybrid`` shards within a node and holds a copy on
    each. Gradients and optimizer state are sharded in any case. bf16 and fp16: weights stay fp32,
    compute is in that type, gradients are accumulated and reduced in fp32. The loss turns logits
    into fp32 itself, so no ``output_dtype`` is needed (on a block it would break the next matrix
    product).
    """

    name = "fsdp"

    def __init__(self, world: World, precision: str, parallel: ParallelConfig) -> None:
        super().__init__(world.device, precision)
        on_gpu = world.device != "cpu"
        options: dict[str, Any] = {"mesh": shard_mesh(world, parallel.shard)}
        if self.compute is not None:
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=self.compute, reduce_dtype=torch.float32
            )
        if parallel.cpu_offload:
            # Pinned memory is for copies to a GPU; without one it cannot be had.
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=on_gpu)
        self._options = options
        self._blocks = {"reshard_after_forward": parallel.shard != "grad_op"}
        self._home = "cpu" if parallel.cpu_offload else world.device

    def wrap(self, module: LossModule, fill: Fill | None = None) -> nn.Module:
        """Shard the module in place. Nothing is sent: every rank must hold the same weights.

        Raises ``RuntimeError`` when a parameter is not sharded afterwards.
        """
        use_every_expert(module.model)
        if fill is None:
            module.to(self.device)
        for block in transformer_blocks(module.model):
            for adapter in _adapters_apart(block):
                fully_shard(adapter, **self._options, **self._blocks)
            fully_shard(block, **self._options, **self._blocks)
        fully_shard(module, **self._options)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                self._set_up(part)
        plain = [name for name, p in module.named_parameters() if not isinstance(p, DTensor)]
        if plain:
            raise RuntimeError(f"fully_shard left parameters unsharded: {', '.join(plain[:5])}")
        if fill is not None:
            materialise(module, self.device, parameters=self._home)
            fill(module.model)
        root: nn.Module = module
        return root

    def _set_up(self, part: FSDPModule) -> None:
        """Keep gradient reduction right on gloo and with parameters that a rank does not use."""
        # gloo's reduce_scatter with AVG returns the sum on torch <= 2.8 (pytorch issue 162338).
        if self.device == "cpu" and hasattr(part, "set_force_sum_reduction_for_comms"):
            part.set_force_sum_reduction_for_comms(True)
        # Where the ranks' tokens reach different experts, the ranks would reduce different tensors.
        if hasattr(part, "set_reduce_scatter_unused_params"):
            part.set_reduce_scatter_unused_params(True, recurse=False)

    @contextmanager
    def accumulate(self, root: nn.Module, last: bool) -> Iterator[None]:
        """Every micro-batch's gradient is reduced and added to the shards: kept for later, each
        rank would hold the gradient of the whole model. Between nodes it travels once a step."""
        assert isinstance(root, FSDPModule)
        root.set_requires_all_reduce(last)
        root.set_is_last_backward(last)
        yield


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


def _adapters_apart(block: nn.Module) -> list[nn.Module]:
    """Layers with trainable weights to be sharded as groups of their own: none, but before torch
    2.8, whose groups cannot mix the type of a frozen base with another one of adapters."""
    if len({weight.dtype for weight in block.parameters()}) == 1 or at_least("torch", "2.8"):
        return []
    return [
        part
        for part in block.modules()
        if isinstance(part, nn.Linear) and all(p.requires_grad for p in part.parameters())
    ]


def _inside(modules: Iterable[nn.Module]) -> set[int]:
    """Everything within the modules, but not they themselves."""
    return {id(part) for module in modules for part in module.modules() if part is not module}
