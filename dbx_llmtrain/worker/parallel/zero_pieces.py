"""Where DeepSpeed keeps the parts of a parameter: fp32 weights, gradients, optimizer state.

Stages 1 and 2 cut the flattened parameters of a group, laid end to end, into one part a rank; a
parameter may lie in several parts, and a part may hold many parameters. Stage 3 cuts every
parameter by itself. Both keep the fp32 weights in flat tensors, which are the optimizer's own
parameters. A checkpoint holds neither: it has rows of whole parameters, so any strategy and any
number of ranks can read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dbx_llmtrain.worker.whole import Cut, Stored

COUNT = "step"
"""Key of an optimizer's count of steps: one number, not one an element."""


@dataclass(frozen=True)
class Piece:
    """This rank's part of a parameter: elements ``start`` to ``start + size`` of the flattened
    parameter are ``offset`` to ``offset + size`` of ``flat``."""

    flat: Tensor
    offset: int
    start: int
    size: int

    def of(self, flat: Tensor) -> Tensor:
        """The same elements of a tensor that is laid out as ``flat``."""
        return flat.detach().narrow(0, self.offset, self.size)

    def cut(self, parameter: Tensor) -> Tensor:
        """The same elements of the flattened parameter."""
        return parameter.narrow(0, self.start, self.size)


class ZeroPieces:
    """One parameter under ZeRO (``whole.Pieces``)."""

    def __init__(
        self,
        parameter: nn.Parameter,
        engine: Any,
        base: torch.optim.Optimizer,
        device: str,
        mesh: DeviceMesh,
    ) -> None:
        self._parameter = parameter
        self._optimizer = engine.optimizer
        self._base = base
        self._device = device
        self._mesh = mesh

    @property
    def _partitioned(self) -> bool:
        """Stage 3: the model itself holds but a part."""
        return hasattr(self._parameter, "ds_id")

    @property
    def _has_part(self) -> bool:
        """Stages 1 and 2: whether any of the parameter is this rank's to update."""
        return getattr(self._parameter, "_hp_mapping", None) is not None

    def shape(self) -> torch.Size:
        """See ``Pieces``."""
        shape: torch.Size = getattr(self._parameter, "ds_shape", self._parameter.shape)
        return shape

    def whole(self) -> Tensor:
        """Trained: the optimizer's fp32 weights. Frozen: what the model holds."""
        if self._parameter.requires_grad:
            return self._gathered(lambda piece: piece.of(piece.flat))
        if not self._partitioned:
            return self._parameter.detach()
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([self._parameter]):
            return self._parameter.detach().clone()

    def gradient(self) -> Tensor:
        """See ``Pieces``."""
        optimizer = self._optimizer
        if hasattr(optimizer, "fp32_groups_gradient_flat_partition"):
            group = self._parameter._hp_mapping.param_group_index if self._has_part else 0
            flat = optimizer.fp32_groups_gradient_flat_partition[group]
            return self._gathered(lambda piece: piece.of(flat))
        from deepspeed.utils import safe_get_full_grad

        gradient: Tensor = safe_get_full_grad(self._parameter)
        return gradient.detach().float().clone().reshape(self.shape())

    @contextmanager
    def stored(self) -> Iterator[Stored]:
        """See ``Pieces``. What is frozen is whole on every rank, or is made whole."""
        if not self._parameter.requires_grad:
            yield self.whole()
            return
        with self._piece() as piece:
            yield self._cut(piece, lambda found: found.flat)

    def states(self) -> Iterator[tuple[str, Stored]]:
        """The optimizer's count of steps, and its state that has a number for each element. Empty
        before the first step, which every rank takes at the same time."""
        known = self._known_state() if self._parameter.requires_grad else {}
        for key, value in known.items():
            if key == COUNT:
                yield key, torch.tensor(float(value))
                continue
            with self._piece() as piece:
                yield key, self._cut(piece, self._state_reader(key))

    def target(self, key: str | None, meta: Any) -> Tensor:
        """See ``Pieces``."""
        dtype = meta.properties.dtype
        if key == COUNT:
            return torch.zeros((), dtype=dtype)
        first, end = self._own_rows()
        return self._distributed(torch.zeros((end - first, *self.shape()[1:]), dtype=dtype))

    def put(self, key: str | None, value: Tensor) -> None:
        """See ``Pieces``."""
        if key == COUNT:
            self._put_count(float(value))
            return
        assert isinstance(value, DTensor)
        rows = self._distributed(value.to_local().to(self._device))
        whole: Tensor = rows.full_tensor()
        if key is None:
            self.put_whole(whole)
            return
        for flat in self._flats():
            self._make_state(flat, key, value.dtype)
        with self._piece(write=True) as piece:
            if piece is not None:
                self._make_state(piece.flat, key, value.dtype)  # it may have been on disk
                piece.of(self._base.state[piece.flat][key]).copy_(piece.cut(whole.reshape(-1)))

    def put_whole(self, value: Tensor) -> None:
        """Set the weights from a whole tensor, which every rank has: the optimizer's and the
        model's own."""
        parameter = self._parameter
        with torch.no_grad():
            if parameter.requires_grad:
                with self._piece(write=True) as piece:
                    if piece is not None:
                        piece.of(piece.flat).copy_(piece.cut(value.reshape(-1)))
            if not self._partitioned:
                parameter.data.copy_(value)
                return
            from deepspeed.runtime.zero import GatheredParameters

            with GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(value)

    def put_own(self, values: Tensor) -> None:
        """Set this rank's part of the optimizer's weights: from the flattened parameter, or in
        stage 3 from this rank's part of it."""
        with torch.no_grad(), self._piece(write=True) as piece:
            if piece is not None:
                own = values[: piece.size] if self._partitioned else piece.cut(values)
                piece.of(piece.flat).copy_(own)

    # The optimizer's state

    def _known_state(self) -> dict[str, Any]:
        """Any of the optimizer's states: they have the same keys, and the same count."""
        return next((state for state in self._base.state.values() if state), {})

    def _state_reader(self, key: str) -> Callable[[Piece], Tensor]:
        return lambda piece: self._base.state[piece.flat][key]

    def _make_state(self, flat: Tensor, key: str, dtype: torch.dtype) -> None:
        """Room for the state of a flat tensor, also of one that holds nothing but padding."""
        state = self._base.state[flat]
        if key not in state and flat.numel():
            state[key] = torch.zeros_like(flat, dtype=dtype).detach()

    def _put_count(self, count: float) -> None:
        """PyTorch's fused and capturable implementations count on the device, others on the host;
        DeepSpeed's own count in a Python integer."""
        group = self._base.param_groups[0]
        on_device = bool(group.get("fused") or group.get("capturable"))
        for flat in self._flats():
            device = flat.device if on_device else torch.device("cpu")
            is_torch = type(self._base).__module__.startswith("torch.")
            self._base.state[flat][COUNT] = (
                torch.tensor(count, device=device) if is_torch else int(count)
            )

    # Parts into a whole

    def _gathered(self, part: Callable[[Piece], Tensor]) -> Tensor:
        """A tensor of the parameter's shape from every rank's part; exact, as each element is one
        rank's and the others add zero."""
        total = torch.zeros(self.shape().numel(), dtype=torch.float32, device=self._device)
        with self._piece() as piece:
            if piece is not None:
                piece.cut(total).copy_(part(piece))
        dist.all_reduce(total)
        return total.view(self.shape())

    # Boxes and rows, as PyTorch's checkpoints hold them

    def _cut(self, piece: Piece | None, flat: Callable[[Piece], Tensor]) -> Cut:
        """This rank's elements, as boxes of the whole parameter, in fp32."""
        if piece is None:
            return Cut(self.shape(), ())
        elements = piece.of(flat(piece)).float()
        cut, taken = [], 0
        for place, sizes in boxes(self.shape(), piece.start, piece.start + piece.size):
            count = math.prod(sizes)
            cut.append((place, elements.narrow(0, taken, count).view(sizes)))
            taken += count
        return Cut(self.shape(), tuple(cut))

    def _own_rows(self) -> tuple[int, int]:
        """The first of this rank's rows and the one past its last (the cut of ``torch.chunk``)."""
        count = self.shape()[0]
        each = -(-count // self._mesh.size())
        first = min(count, each * self._mesh.get_local_rank())
        return first, min(count, first + each)

    def _distributed(self, rows: Tensor) -> DTensor:
        stride = torch.empty(self.shape(), device="meta").stride()
        return DTensor.from_local(
            rows, self._mesh, [Shard(0)], run_check=False, shape=self.shape(), stride=stride
        )

    # DeepSpeed's own books

    def _flats(self) -> list[Tensor]:
        """This rank's flat fp32 weights, one a group of parameters."""
        optimizer = self._optimizer
        for name in (
            "fp32_partitioned_groups_flat",  # stage 3
            "single_partition_of_fp32_groups",  # stages 1 and 2
            "fp32_groups_flat_partition",  # stage 1 in bf16
        ):
            if hasattr(optimizer, name):
                flats: list[Tensor] = getattr(optimizer, name)
                return flats
        raise RuntimeError(
            f"deepspeed's {type(optimizer).__name__} keeps its weights where this package does not "
            "know: install a version of deepspeed that is in its constraints"
        )

    @contextmanager
    def _piece(self, *, write: bool = False) -> Iterator[Piece | None]:
        """This rank's part, read from disk where it lies there; ``None`` where it has none."""
        parameter, optimizer = self._parameter, self._optimizer
        if not self._partitioned:
            if not self._has_part:
                yield None
                return
            mapping = parameter._hp_mapping
            mine, theirs = mapping.hp_fragment_address, mapping.lp_fragment_address
            flat = self._flats()[mapping.param_group_index]
            yield Piece(flat, mine.start, theirs.start, mine.numel)
            return
        group, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = length * dist.get_rank()
        size = min(length, parameter.ds_numel - start)
        swapped = optimizer._swappable_optimizer_subgroup(group)
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_in(group)
        yield Piece(self._flats()[group], offset, start, size) if size > 0 else None
        if swapped and write:
            optimizer._optimizer_states_and_gradient_swap_out(group)
        elif swapped:
            optimizer._release_swap_buffers(group)


def boxes(
    shape: tuple[int, ...], start: int, end: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements ``start`` to ``end`` of a flattened tensor as boxes of it, in their order: the place
    and the sizes of each. (Of a matrix: the end of a row, whole rows, the beginning of a row.)"""
    if start >= end:
        return []
    if len(shape) <= 1:
        return [((start,), (end - start,))] if shape else [((), ())]
    row = math.prod(shape[1:])
    head, tail = -(-start // row), end // row  # the first whole row, and the one past the last
    if head > tail:  # within one row
        return _in_row(shape, tail, start, end)
    found = _in_row(shape, head - 1, start, head * row)
    if head < tail:
        found.append(((head, *(0 for _ in shape[1:])), (tail - head, *shape[1:])))
    return found + _in_row(shape, tail, tail * row, end)


def _in_row(
    shape: tuple[int, ...], number: int, start: int, end: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The same of elements that are all in one row."""
    before = number * math.prod(shape[1:])
    inner = boxes(shape[1:], start - before, end - before)
    return [((number, *place), (1, *sizes)) for place, sizes in inner]
