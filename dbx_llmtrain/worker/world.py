"""The ranks: who this process is, which device it has, and the process group around a run."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

from dbx_llmtrain.errors import ClusterError, Finding
from dbx_llmtrain.worker import meeting

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class World:
    """This rank among the others.

    ``local_rank`` counts the ranks of this host (launchers disagree on ``LOCAL_RANK``: under
    Spark's it may be 0 on every rank); ``node`` is the node's id, ``host`` the machine's name,
    ``device`` is ``cpu`` or ``cuda:N``. ``nodes`` has the node of every rank (launchers do not
    number ranks node by node), ``notes`` what the user should know of the device.
    """

    rank: int
    size: int
    local_rank: int
    node: str
    host: str
    device: str
    ranks_on_host: int
    nodes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Place:
    """What a rank tells the others about itself."""

    rank: int
    host: str
    node: str
    cpus: int
    local_rank: int
    gpus: tuple[str, ...]


def launcher_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as the launcher gives them.

    From those variables, or from ``TF_CONFIG`` (a JSON of host:port lists, which some launchers
    set instead). Empty where there is no launcher: one rank. Raises ``ClusterError`` when only
    some of them are there or ``TF_CONFIG`` cannot be read.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = {name: environment[name] for name in names if name in environment}
    if len(found) == len(names):
        return found
    if found:
        missing = ", ".join(name for name in names if name not in found)
        raise _error(f"the launcher set {', '.join(found)} but not {missing}")
    if "TF_CONFIG" in environment:
        return _from_tf_config(environment["TF_CONFIG"])
    return {}


def _from_tf_config(text: str) -> dict[str, str]:
    """Chief and workers are the ranks, in that order; the first one's address is the meeting."""
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        ranks = [
            (kind, i) for kind in ("chief", "worker") for i in range(len(cluster.get(kind, ())))
        ]
        rank = ranks.index((task["type"], int(task["index"])))
        kind, index = ranks[0]
        host, _, port = cluster[kind][index].rpartition(":")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise _error(f"TF_CONFIG names no rank for this process ({error!r}): {text}") from error
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(ranks)),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }


@contextmanager
def gathered(within_s: float | None = None) -> Iterator[meeting.Meeting]:
    """A rank's first act: come to where the launcher wants the ranks to meet, and wait for all.

    Raises ``ClusterError`` that names those which are missing after ``within_s`` seconds (60), or
    where the first collective fails.
    """
    yield _meet(within_s)


def _meet(within_s: float | None = None) -> meeting.Meeting:
    from dbx_llmtrain.worker.node import node_id

    return meeting.meet(launcher_environment(os.environ), node_id(), within_s)


@contextmanager
def open_world(
    *, use_gpu: bool, timeout_s: float = 600, met: meeting.Meeting | None = None
) -> Iterator[World]:
    """Join the process group, yield this rank's place in it, and leave it again. ``met`` is where
    this rank has met the others; without it they meet here.

    There is a group also for one rank, so the code after it knows no special case. On a GPU it has
    NCCL for device tensors and gloo for host ones (checkpoints and objects travel by the latter).
    A collective that waits longer than ``timeout_s`` seconds fails. After success the ranks wait
    for each other; after a failure the group is aborted at once, so that none hangs in it.
    Raises ``ClusterError`` where two ranks were given one GPU or a rank has none.
    """
    import torch.distributed as dist

    met = met or _meet()
    meeting.wait_until_ready(met)
    _join(met, use_gpu, timedelta(seconds=timeout_s))
    try:
        world = _place(use_gpu)
        if use_gpu:
            _add_up_on_gpus(met, world)
        yield world
        # The first to leave would take the meeting point of the others with it. (A barrier, not
        # an all_reduce: it has no tensor that gloo's thread frees later, see ``leave_process``.)
        dist.barrier()
    except BaseException:
        _abort()
        raise
    dist.destroy_process_group()


def leave_process(code: int) -> NoReturn:
    """End the process of a rank: output flushed, the interpreter's own shutdown left out.

    gloo's threads free the tensors of a collective in their own time, and need the interpreter's
    lock for it. One that asks while the interpreter shuts down is made to exit, which C++ answers
    with SIGABRT ("terminate called without an active exception"): on a busy machine a few in a
    hundred ranks would look as if they had failed after they had finished.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _join(met: meeting.Meeting, use_gpu: bool, timeout: timedelta) -> None:
    import torch.distributed as dist

    met.store.set_timeout(timeout)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if use_gpu else "gloo",
        store=dist.PrefixStore("default_pg", met.store),
        rank=met.rank,
        world_size=met.size,
        timeout=timeout,
    )


def _add_up_on_gpus(met: meeting.Meeting, world: World) -> None:
    """The first collective over the GPUs, which opens their connections."""
    import torch
    import torch.distributed as dist

    work = dist.all_reduce(torch.ones(1, device=world.device), async_op=True)
    assert work is not None
    try:
        work.wait(timedelta(seconds=met.within_s))
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise meeting.unmet(met, "over the GPUs' network (NCCL)", error) from error


def _place(use_gpu: bool) -> World:
    """Find out who shares this host, and take a device and a fair part of its processors."""
    import torch
    import torch.distributed as dist

    from dbx_llmtrain.worker.node import node_id

    me = _Place(
        rank=dist.get_rank(),
        host=socket.gethostname(),
        node=node_id(),
        cpus=_cpus(),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        gpus=_gpus() if use_gpu else (),
    )
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, me)
    neighbours = [place for place in everyone if place.host == me.host]
    torch.set_num_threads(max(1, me.cpus // len(neighbours)))
    device = "cpu"
    notes: tuple[str, ...] = ()
    if use_gpu:
        index = _check_gpus(everyone)[me.rank]
        torch.cuda.set_device(index)
        device = f"cuda:{index}"
        notes = _use_tensor_cores(torch.cuda.get_device_capability(index))
    return World(
        rank=me.rank,
        size=len(everyone),
        local_rank=[place.rank for place in neighbours].index(me.rank),
        node=me.node,
        host=me.host,
        device=device,
        ranks_on_host=len(neighbours),
        nodes=tuple(place.node for place in everyone),
        notes=notes,
    )


def _use_tensor_cores(capability: tuple[int, int]) -> tuple[str, ...]:
    """Matrix products of fp32 tensors in TF32, which GPUs have from compute capability 8.0 on: its
    range is that of fp32, with 10 bits instead of 23 behind the point. Weights, sums and the
    optimizer stay fp32."""
    import torch

    if capability < (8, 0):
        return ()
    torch.backends.cuda.matmul.allow_tf32 = True
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        return ()
    return (
        "fp32 matrix products run in TF32 (cluster.env: {NVIDIA_TF32_OVERRIDE: '0'} keeps them "
        "in full fp32)",
    )


def _cpus() -> int:
    """Processors that this process may use (a container is often given fewer than there are)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus() -> tuple[str, ...]:
    import torch

    count = torch.cuda.device_count()
    return tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(count))


def _check_gpus(places: list[_Place]) -> list[int]:
    """Each rank's device index, or a ``ClusterError`` that names the ranks without one of theirs.

    A rank that sees one GPU was given it by the launcher. Among ranks that see the same several,
    ``LOCAL_RANK`` decides where the launcher numbers them, else their order on the host.
    """
    indices: list[int] = []
    users: dict[tuple[str, str], int] = {}
    problems: list[str] = []
    for place in places:
        alike = [p for p in places if (p.host, p.gpus) == (place.host, place.gpus)]
        numbered = len({p.local_rank for p in alike}) == len(alike)
        index = place.local_rank if numbered else alike.index(place)
        index = 0 if len(place.gpus) == 1 else index
        indices.append(index)
        if index >= len(place.gpus):
            problems.append(
                f"rank {place.rank} on {place.host} is number {index + 1} there "
                f"and sees {len(place.gpus)} GPU(s)"
            )
            continue
        first = users.setdefault((place.host, place.gpus[index]), place.rank)
        if first != place.rank:
            problems.append(
                f"ranks {first} and {place.rank} on {place.host} were given the same GPU "
                f"{place.gpus[index]}"
            )
    if problems:
        raise ClusterError([Finding("error", "gpu", problem) for problem in problems])
    return indices


def _abort() -> None:
    """Leave the process group without waiting for anyone; the cause is already on its way."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    try:
        # Aborting frees a rank whose GPU waits in a collective; destroying would wait for it.
        abort = getattr(distributed_c10d, "_abort_process_group", dist.destroy_process_group)
        abort()
    except (RuntimeError, ValueError) as error:
        logger.debug("the process group could not be aborted: %s", error)


def _error(message: str) -> ClusterError:
    return ClusterError([Finding("error", "launcher", message)])
