"""A frozen base in 4 bits (bitsandbytes): NF4 with double quantisation, as QLoRA has it.

Layers are quantised one by one when their weights are there, so that the device never holds the
base in more bits than that. Until then a layer's weights lie in host memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dbx_llmtrain.errors import ConfigError, Problem

FIELD = "model.load_in_4bit"
HOME = "weights_home"
"""Attribute of a module without storage: the device where its own parameters are to be made."""


def choose(model: Any, device: str) -> int:
    """Mark the frozen linear layers of an adapted model, all but its head; how many there are.

    Raises ``ConfigError`` without a GPU, without bitsandbytes, and for a model without such layers.
    """
    if not device.startswith("cuda"):
        raise ConfigError([Problem(FIELD, "needs a GPU, and this rank has none: set it to false")])
    _bitsandbytes()
    return mark(model)


def mark(model: Any) -> int:
    """See ``choose``."""
    head = model.get_output_embeddings()
    ends = {id(part) for part in (head.modules() if head is not None else ())}
    chosen = [
        part
        for part in model.modules()
        if isinstance(part, nn.Linear) and not part.weight.requires_grad and id(part) not in ends
    ]
    if not chosen:
        message = f"{type(model).__name__} has no linear layers to keep in 4 bits: set it to false"
        raise ConfigError([Problem(FIELD, message)])
    for part in chosen:
        setattr(part, HOME, "cpu")
    return len(chosen)


def quantise(model: nn.Module, device: torch.device) -> None:
    """Put 4-bit layers in the place of those that were marked, on ``device``."""
    for parent in [*model.modules()]:
        for name, part in [*parent.named_children()]:
            if hasattr(part, HOME):
                setattr(parent, name, _quantised(part, device))


def count(model: nn.Module) -> int:
    """How many layers are marked, or in 4 bits already."""
    return sum(
        hasattr(part, HOME) or type(part).__name__ == "Linear4bit" for part in model.modules()
    )


def _quantised(part: Any, device: torch.device) -> nn.Module:
    bitsandbytes = _bitsandbytes()
    weight = part.weight.detach()
    layer: nn.Module = bitsandbytes.nn.Linear4bit(
        part.in_features,
        part.out_features,
        bias=part.bias is not None,
        compute_dtype=weight.dtype,
        compress_statistics=True,
        quant_type="nf4",
        device="meta",
    )
    layer.weight = bitsandbytes.nn.Params4bit(
        weight, requires_grad=False, compress_statistics=True, quant_type="nf4"
    )
    layer.bias = part.bias
    layer.to(device)
    return layer.train(part.training)


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except (ImportError, OSError, RuntimeError) as error:
        message = f"bitsandbytes cannot be used on this node ({error}): install it on every node"
        raise ConfigError([Problem(FIELD, message)]) from error
    return bitsandbytes
