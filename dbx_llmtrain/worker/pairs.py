"""How fast every two hosts can talk: ``python -m dbx_llmtrain.worker.pairs plan.json``.

Every rank runs it. All meet; then one rank of each host sends and receives, with one other host at
a time, over the backend that training would use.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from dbx_llmtrain.outcomes import RankResult
from dbx_llmtrain.records import LaunchPlan
from dbx_llmtrain.worker import handover
from dbx_llmtrain.worker.world import World, gathered, leave_process, open_world

SENT = 64 * 1024 * 1024
"""Bytes each way."""
BETWEEN = " | "
"""Between the names of two nodes in a metric's name."""
_WARM = 1024 * 1024
_LIMIT_S = 45.0


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Every two of so many once, as many at the same time as can be: a round-robin tournament."""
    players: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(players) - 1):
        pairs = zip(players, reversed(players), strict=True)
        half = [pair for _, pair in zip(range(len(players) // 2), pairs, strict=False)]
        yield [(min(a, b), max(a, b)) for a, b in half if a is not None and b is not None]
        players.insert(1, players.pop())


def first_ranks(nodes: Sequence[str]) -> list[int]:
    """One rank of every node: its first."""
    return [rank for rank, node in enumerate(nodes) if nodes.index(node) == rank]


def measure(world: World, sent: int = SENT) -> dict[str, float]:
    """Bytes per second of every two nodes, by their names; all of it on every rank."""
    import torch.distributed as dist

    chosen = first_ranks(world.nodes)
    own: dict[str, float] = {}
    for pairs in rounds(len(chosen)):
        dist.barrier()  # the pairs of a round go at the same time, and no others
        for a, b in pairs:
            first, second = chosen[a], chosen[b]
            if world.rank in (first, second):
                other = second if world.rank == first else first
                name = f"{world.nodes[first]}{BETWEEN}{world.nodes[second]}"
                own[name] = _speed(world, other, begins=world.rank == first, sent=sent)
    everyone: list[dict[str, float] | None] = [None] * world.size
    dist.all_gather_object(everyone, own)
    return {name: speed for found in everyone if found for name, speed in found.items()}


def _speed(world: World, other: int, *, begins: bool, sent: int) -> float:
    import torch
    import torch.distributed as dist

    data = torch.zeros(sent, dtype=torch.uint8, device=world.device)
    seconds = 0.0
    for part in (data[:_WARM], data):  # the first one opens the connection
        began = time.perf_counter()
        for step in (dist.send, dist.recv) if begins else (dist.recv, dist.send):
            step(part, other)
        if data.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    return 2 * sent / seconds


def main(argv: Sequence[str]) -> int:
    """Meet and measure; the result is for the supervisor."""
    with handover.handed_over():
        plan = LaunchPlan.model_validate_json(Path(argv[0]).read_text(encoding="utf-8"))
        os.environ.update(plan.config.cluster.env)
        with (
            gathered() as met,
            open_world(use_gpu=plan.use_gpu, timeout_s=_LIMIT_S, met=met) as world,
        ):
            speeds = measure(world)
        result = RankResult(steps=0, metrics=speeds, checkpoint=None, model_path=None)
        handover.Handover().result(result)
    return 0


if __name__ == "__main__":
    leave_process(handover.exit_code(lambda: main(sys.argv[1:])))
