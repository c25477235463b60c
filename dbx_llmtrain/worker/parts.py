"""What a rank holds of a tensor: all of it, a shard of a ``DTensor``, or a partition of ZeRO-3's.

A tensor is taken as rows (its first dimension); one without dimensions is one row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


class Part(Protocol):
    """What a rank holds of one tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's."""
        ...

    @property
    def start(self) -> int:
        """The first row of which this rank holds something."""
        ...

    @property
    def stop(self) -> int:
        """Behind the last one."""
        ...

    @property
    def everywhere(self) -> bool:
        """Whether every rank holds everything."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The type it is held in."""
        ...

    def put(self, first: int, rows: Tensor) -> None:
        """Take over what is held of ``rows``, which are those from ``first`` on."""
        ...

    def finish(self) -> None:
        """Called by all ranks when all rows were put."""
        ...


@dataclass(frozen=True)
class Box:
    """A part that is a box: ``target`` begins at ``offsets`` of the whole tensor."""

    target: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    everywhere: bool

    @property
    def start(self) -> int:
        """First row."""
        return self.offsets[0]

    @property
    def stop(self) -> int:
        """Behind the last row."""
        rows = int(self.target.shape[0]) if self.target.numel() else 0
        return self.offsets[0] + rows

    @property
    def dtype(self) -> torch.dtype:
        """See ``Part``."""
        return self.target.dtype

    def finish(self) -> None:
        """Nothing is left to do."""

    def put(self, first: int, rows: Tensor) -> None:
        """See ``Part``."""
        low, high = max(first, self.start), min(first + len(rows), self.stop)
        if low >= high:
            return
        rows = rows[low - first : high - first]
        for dimension in range(1, rows.ndim):
            size = self.target.shape[dimension]
            rows = rows.narrow(dimension, self.offsets[dimension], size)
        self.target[low - self.start : high - self.start].copy_(rows)


@dataclass(frozen=True)
class Run:
    """A part that is a run of numbers of the flattened tensor, from ``first`` on. ``target`` may be
    longer than what is left of the tensor; the rest stays as it is."""

    target: Tensor
    shape: tuple[int, ...]
    first: int
    everywhere: bool = False

    @property
    def _width(self) -> int:
        return max(1, math.prod(self.shape[1:]))

    @property
    def _last(self) -> int:
        return min(self.first + int(self.target.numel()), math.prod(self.shape))

    @property
    def start(self) -> int:
        """First row."""
        return min(self.first // self._width, self.shape[0])

    @property
    def stop(self) -> int:
        """Behind the last row."""
        return max(self.start, -(-self._last // self._width))

    @property
    def dtype(self) -> torch.dtype:
        """See ``Part``."""
        return self.target.dtype

    def finish(self) -> None:
        """Nothing is left to do."""

    def put(self, first: int, rows: Tensor) -> None:
        """See ``Part``."""
        begin = first * self._width
        low, high = max(begin, self.first), min(begin + rows.numel(), self._last)
        if low < high:
            numbers = rows.reshape(-1)[low - begin : high - begin]
            self.target[low - self.first : high - self.first].copy_(numbers)


class Swapped:
    """A parameter of ZeRO-3's whose partitions lie on disk: it is collected, and then brought
    there by DeepSpeed."""

    everywhere = True
    """(Every rank takes all of it, one parameter at a time.)"""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter
        self._whole: Tensor | None = None
        self.shape: tuple[int, ...] = tuple(parameter.ds_shape) or (1,)
        self.start, self.stop = 0, self.shape[0]
        self.dtype: torch.dtype = parameter.ds_tensor.dtype

    def put(self, first: int, rows: Tensor) -> None:
        """See ``Part``."""
        if self._whole is None:
            self._whole = torch.empty(self.shape, dtype=self.dtype)
        self._whole[first : first + len(rows)].copy_(rows)

    def finish(self) -> None:
        """See ``Part``."""
        from deepspeed.zero import GatheredParameters

        with GatheredParameters([self._parameter], modifier_rank=0):
            if self._whole is not None:
                self._parameter.data.copy_(self._whole.reshape(self._parameter.ds_shape))
        self._whole = None


def part_of(tensor: Any) -> Part:
    """What this rank holds of a parameter or buffer."""
    if hasattr(tensor, "ds_id"):
        held = tensor.ds_tensor
        if held.numel() < held.ds_numel:
            return Swapped(tensor)
        rank = dist.get_rank(tensor.ds_process_group)
        held.zero_()  # the padding behind the last number
        return Run(held, tuple(tensor.ds_shape) or (1,), rank * held.numel())
    if isinstance(tensor, DTensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        local = tensor.detach().to_local()
        if not tensor.ndim:
            return Box(local.reshape(1), (1,), (0,), everywhere=False)
        return Box(local, tuple(tensor.shape), tuple(offsets), everywhere=False)
    whole = tensor.detach()
    whole = whole if whole.ndim else whole.reshape(1)
    return Box(whole, tuple(whole.shape), (0,) * whole.ndim, everywhere=True)
