"""Tensors of a model whatever a strategy has made of them: whole, or as a checkpoint stores them.

DeepSpeed cuts parameters into flat pieces, and keeps in fp32 what the model holds in bf16; its
strategy leaves a ``Pieces`` at each parameter that knows where they lie. All ranks call these
functions for the same tensors in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

PIECES = "dbx_llmtrain_pieces"
"""Attribute of a parameter that DeepSpeed holds; its value is a ``Pieces``."""


@dataclass(frozen=True)
class Cut:
    """What this rank has of a tensor of this ``shape``: boxes of it, each with the place of its
    first element. All ranks' boxes are the tensor."""

    shape: torch.Size
    boxes: tuple[tuple[tuple[int, ...], Tensor], ...]


Stored: TypeAlias = Tensor | Cut
"""This rank's part of a tensor, as it is written: a plain tensor is the same on all ranks."""


class Pieces(Protocol):
    """Where the parts of one parameter lie."""

    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        ...

    def whole(self) -> Tensor:
        """The parameter on the rank's device; trained ones in fp32, as the optimizer has them."""
        ...

    def gradient(self) -> Tensor:
        """The whole gradient after the last backward pass of a step, in fp32."""
        ...

    def stored(self) -> AbstractContextManager[Stored]:
        """What this rank writes of the parameter, there as long as the block lasts."""
        ...

    def states(self) -> Iterator[tuple[str, Stored]]:
        """The same of the optimizer's state, by its keys, each there until the next one is; a
        count is a plain tensor."""
        ...

    def target(self, key: str | None, meta: Any) -> Tensor:
        """Room to load the parameter, or the state ``key``, into; ``meta`` describes what is
        stored."""
        ...

    def put(self, key: str | None, value: Tensor) -> None:
        """Take what was loaded into ``target``."""
        ...


def pieces(tensor: Tensor) -> Pieces | None:
    """How DeepSpeed holds a parameter; ``None`` for any other tensor."""
    found: Pieces | None = getattr(tensor, PIECES, None)
    return found


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, detached, on the rank's device."""
    held = pieces(tensor)
    if held is not None:
        return held.whole()
    plain = tensor.detach()
    return plain.full_tensor() if isinstance(plain, DTensor) else plain


def whole_gradient(parameter: Tensor) -> Tensor:
    """All of the gradient of a trained parameter, before the optimizer has used it."""
    held = pieces(parameter)
    if held is not None:
        return held.gradient()
    gradient = parameter.grad
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def stored(tensor: Tensor) -> AbstractContextManager[Stored]:
    """This rank's part of a tensor, as long as the block lasts."""
    held = pieces(tensor)
    return nullcontext(tensor.detach()) if held is None else held.stored()


def stored_states(
    optimizer: torch.optim.Optimizer, parameter: Tensor
) -> Iterator[tuple[str, Stored]]:
    """This rank's part of the optimizer's state of a parameter, each there until the next one is.
    Nothing before the first step."""
    held = pieces(parameter)
    if held is not None:
        yield from held.states()
        return
    for key, value in optimizer.state.get(parameter, {}).items():
        yield key, value.detach()


def shape_of(tensor: Tensor) -> torch.Size:
    """The shape of the whole tensor."""
    held = pieces(tensor)
    return tensor.shape if held is None else held.shape()
