"""The ranks' first act: all of them come to one place and add up a number, or are named.

It costs milliseconds where all is well. Where it is not, a collective would wait for its time-out
and not say for whom.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from dbx_llmtrain.errors import ClusterError, Finding
from dbx_llmtrain.worker import network

if TYPE_CHECKING:
    from torch.distributed import Store

WITHIN = "DBX_LLMTRAIN_ARRIVAL_S"
"""Seconds for all ranks to come, where the default is too short (``cluster.env``)."""
_WITHIN_S = 60.0
_ARRIVED, _DONE, _READY = "arrived", "added up", "ready"
_COPYING_S = 6 * 3600.0
"""How long another rank may need for what its node has to copy first. (One that ends meanwhile is
noticed by its supervisor.)"""
_SLICE_S = 5.0
"""Between two chances for Python's handlers of signals."""
_NAMED = 8


@dataclass(frozen=True)
class Meeting:
    """Where the ranks have met: the store by which they find each other, and how long each act of
    theirs may take."""

    store: Store
    rank: int
    size: int
    within_s: float


def meet(launcher: Mapping[str, str], node: str, within_s: float | None = None) -> Meeting:
    """Come to the meeting point that the launcher names (its variables, see ``world``), wait for
    all, and do a first collective over CPUs' network.

    Raises ``ClusterError`` that names the ranks which did not come in time, or those that came
    where the collective does not end.
    """
    import torch.distributed as dist

    seconds = within_s or _limit()
    if not launcher:
        return Meeting(dist.HashStore(), 0, 1, seconds)
    os.environ.update(launcher)
    os.environ.update(network.variables(os.environ))
    rank, size = int(launcher["RANK"]), int(launcher["WORLD_SIZE"])
    met = Meeting(_open_store(launcher, node, seconds), rank, size, seconds)
    met.store.set(_key(_ARRIVED, rank), node)
    if missing := _wait(met, _ARRIVED):
        there = [other for other in range(size) if other not in missing]
        raise _error(
            f"{_ranks(missing)} did not come to {_place(launcher)} within {seconds:.0f} s; "
            f"{_ranks(there, met.store)} did. Their processes have not started, or cannot reach "
            "that address: look at their logs in the run folder, and let all ports pass between "
            f"the nodes. Where Python starts slowly, set cluster.env: {{{WITHIN}: '300'}}"
        )
    _add_up(met)
    return met


def _limit() -> float:
    text = os.environ.get(WITHIN, str(_WITHIN_S))
    try:
        return float(text)
    except ValueError:
        raise _error(f"{WITHIN} is {text!r}: expected a number of seconds") from None


def _open_store(launcher: Mapping[str, str], node: str, seconds: float) -> Store:
    """The store at the meeting point: rank 0 opens it, unless its launcher has."""
    import torch.distributed as dist

    rank = int(launcher["RANK"])
    # torchrun keeps the store itself, one for all attempts, in some of its ways to start.
    given = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            launcher["MASTER_ADDR"],
            int(launcher["MASTER_PORT"]),
            int(launcher["WORLD_SIZE"]),
            is_master=rank == 0 and not given,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=not given,
        )
    except (RuntimeError, ValueError) as error:
        raise _error(
            f"rank {rank} on {node} cannot reach {_place(launcher)} within {seconds:.0f} s "
            f"({_first_line(error)}): let all ports pass between the nodes (the security group of "
            "the workers), or set cluster.env: {GLOO_SOCKET_IFNAME: ..., NCCL_SOCKET_IFNAME: ...}"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if given else "0"
    return dist.PrefixStore(f"dbx_llmtrain/{attempt}", store)


def _add_up(met: Meeting) -> None:
    """A collective of all ranks in a group of its own, which is gone afterwards."""
    import torch
    import torch.distributed as dist

    limit = timedelta(seconds=met.within_s)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("first", met.store),
            rank=met.rank,
            world_size=met.size,
            timeout=limit,
        )
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        raise unmet(met, "over the CPUs' network (gloo)", error) from error
    met.store.set(_key(_DONE, met.rank), "yes")
    if missing := _wait(met, _DONE):  # nobody leaves before the others have its part
        unended = RuntimeError(f"{_ranks(missing)} did not end it")
        raise unmet(met, "over the CPUs' network (gloo)", unended)
    dist.destroy_process_group()


def unmet(met: Meeting, how: str, error: Exception) -> ClusterError:
    """The error for ranks that are all there and cannot work together."""
    return _error(
        f"all {met.size} ranks have come, but their first collective {how} failed on rank "
        f"{met.rank} ({_first_line(error)}): let all ports pass between the nodes; "
        f"{network.GLOO} is {os.environ.get(network.GLOO, 'not set')}, {network.NCCL} is "
        f"{os.environ.get(network.NCCL, 'not set')}: set them in cluster.env to the interface that "
        "connects the nodes"
    )


def wait_until_ready(met: Meeting) -> None:
    """Return when every rank has come here. Raises ``ClusterError`` after hours."""
    met.store.set(_key(_READY, met.rank), "yes")
    if missing := _wait(met, _READY, _COPYING_S):
        raise _error(f"{_ranks(missing)} did not have model and data after {_COPYING_S:.0f} s")


def _wait(met: Meeting, what: str, seconds: float | None = None) -> list[int]:
    """The ranks that have not said so in time."""
    import torch.distributed as dist

    keys = [_key(what, rank) for rank in range(met.size)]
    deadline = time.monotonic() + (seconds or met.within_s)
    while True:
        left = max(0.01, min(_SLICE_S, deadline - time.monotonic()))
        try:
            met.store.wait(keys, timedelta(seconds=left))
        except dist.DistStoreError:
            missing = [rank for rank in range(met.size) if not met.store.check([keys[rank]])]
            if time.monotonic() > deadline:
                return missing
        else:
            return []


def _key(what: str, rank: int) -> str:
    return f"{what}/{rank}"


def _ranks(ranks: list[int], store: Store | None = None) -> str:
    """``rank 1``, ``ranks 1, 2``; with the store each with its node."""
    shown = [
        f"{rank} ({store.get(_key(_ARRIVED, rank)).decode()})" if store else str(rank)
        for rank in ranks[:_NAMED]
    ]
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}{more}"


def _place(launcher: Mapping[str, str]) -> str:
    return f"{launcher['MASTER_ADDR']}:{launcher['MASTER_PORT']}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _error(message: str) -> ClusterError:
    return ClusterError([Finding("error", "network", message)])
