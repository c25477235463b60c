"""Which ranks share the shards of a model, and which hold copies of each other's."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dbx_llmtrain.errors import ClusterError, Finding

if TYPE_CHECKING:
    from dbx_llmtrain.worker.world import World


def ranks_by_node(nodes: tuple[str, ...]) -> list[list[int]]:
    """The ranks of each node, both in the order in which the ranks come.

    ``nodes`` has every rank's node. Raises ``ClusterError`` where the nodes have unequal numbers:
    a rank's copies on the other nodes would hold other shards.
    """
    grouped: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        grouped.setdefault(node, []).append(rank)
    if len({len(ranks) for ranks in grouped.values()}) > 1:
        counts = ", ".join(f"{node}: {len(ranks)}" for node, ranks in grouped.items())
        raise ClusterError(
            [
                Finding(
                    "error",
                    "parallel.shard",
                    "hybrid shards within a node and needs as many ranks on each, found "
                    f"{counts}: set parallel.shard=full, or cluster.processes so that the nodes "
                    "are even",
                )
            ]
        )
    return list(grouped.values())


def shard_mesh(world: World, shard: str) -> DeviceMesh:
    """The ranks to shard over, as (W,); ``hybrid``: (nodes, ranks of a node), which shards over the
    second and replicates over the first. Launchers do not number ranks node by node."""
    device = world.device.split(":")[0]
    if shard == "hybrid":
        nodes = ranks_by_node(world.nodes)
        mesh = DeviceMesh(device, nodes, mesh_dim_names=("replicate", "shard"))
        _wait_as_long(mesh, device)
        return mesh
    return init_device_mesh(device, (world.size,))


def _wait_as_long(mesh: DeviceMesh, device: str) -> None:
    """A collective of some ranks waits as long as one of all: the groups of a mesh are made with
    torch's usual time-out, after which NCCL would end a stalled run before it is looked at."""
    whole = dist.group.WORLD
    assert whole is not None
    with suppress(AttributeError):  # private: without it only that
        timeout = whole._get_backend(torch.device(device)).options._timeout
        for group in mesh.get_all_groups():
            distributed_c10d._set_pg_timeout(timeout, group)
