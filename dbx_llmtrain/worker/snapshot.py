"""The tensors of a moment in host memory, so that training can go on while they are written.

Each rank copies what it will write and no more: its own shards, and of the tensors that all ranks
hold a share that is as large as everybody's.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from dbx_llmtrain.worker.whole import Cut, Stored
from dbx_llmtrain.worker.world import World


class Snapshot:
    """Copies of this rank's part of the tensors, in buffers that the next snapshot takes over."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pinned = world.device != "cpu"
        self._buffers: dict[MetadataIndex, Tensor] = {}
        self.items: list[WriteItem] = []
        """What this rank writes, as PyTorch's checkpoints describe it."""
        self.bytes = 0

    def take(self, tensors: Iterable[tuple[str, Stored]]) -> None:
        """Copy this rank's part of ``tensors`` (by name); every rank gives the same ones in the
        same order.

        Making them may take all ranks, so they are gone through to the end before an error of
        copying one (there is no memory left) is raised.
        """
        self.items, self.bytes = [], 0
        loads = [0] * self._world.size
        fault: Exception | None = None
        for number, (name, tensor) in enumerate(tensors):
            if fault is None and self._writes(number, tensor, loads):
                try:
                    self._copy(name, tensor)
                except (RuntimeError, MemoryError) as error:
                    fault = error
        if self._pinned:
            torch.cuda.synchronize(self._world.device)
        self._buffers = {item.index: self._buffers[item.index] for item in self.items}
        if fault is not None:
            raise fault

    def copy_of(self, index: MetadataIndex) -> Tensor:
        """The copy that is to be written for an item."""
        return self._buffers[index]

    def _writes(self, number: int, tensor: Stored, loads: list[int]) -> bool:
        """Whether this rank is the one that writes its part of a tensor, or the tensor.

        ``loads``: bytes that each rank has been given so far.
        """
        if isinstance(tensor, Cut):
            return True
        if not isinstance(tensor, DTensor):
            writer = loads.index(min(loads))
            loads[writer] += tensor.nbytes
            return writer == self._world.rank
        mesh = tensor.device_mesh
        position = mesh.get_coordinate()
        if position is None:
            return False
        return all(
            position[axis] == number % mesh.size(axis)
            for axis, placement in enumerate(tensor.placements)
            if placement.is_replicate()
        )

    def _copy(self, name: str, tensor: Stored) -> None:
        if isinstance(tensor, Cut):
            for place, box in tensor.boxes:
                self._add(_item(name, tensor.shape, place, box), box)
            return
        (item,) = create_default_local_save_plan({name: tensor}, is_coordinator=False).items
        self._add(item, tensor.to_local() if isinstance(tensor, DTensor) else tensor)

    def _add(self, item: WriteItem, tensor: Tensor) -> None:
        buffer = self._buffers.get(item.index)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pinned)
            self._buffers[item.index] = buffer
        buffer.copy_(tensor, non_blocking=self._pinned)
        self.items.append(item)
        self.bytes += buffer.nbytes


def _item(name: str, shape: torch.Size, place: tuple[int, ...], box: Tensor) -> WriteItem:
    """A box of a tensor, as PyTorch's checkpoints describe it."""
    offsets = torch.Size(place)
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=box.shape),
            properties=TensorProperties(dtype=box.dtype),
            size=shape,
        ),
    )


class Planner(DefaultSavePlanner):  # type: ignore[misc]  # torch is untyped
    """PyTorch's planner of who writes what, for copies that were made before."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(flatten_state_dict=False)
        self._snapshot = snapshot

    def create_local_plan(self) -> SavePlan:
        """What this rank has."""
        self.plan = SavePlan(self._snapshot.items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The copy to write."""
        return self._snapshot.copy_of(write_item.index)


class Writer(dcp.FileSystemWriter):  # type: ignore[misc]  # torch is untyped
    """PyTorch's writer of files on local disk. Where a disk is full it says so, and not what that
    does to the file's format."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write this rank's file."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
