"""A rank that leaves the group in one way or another: ``python -m tests.dist.leaving MANNER``."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from dbx_llmtrain.worker.world import leave_process, open_world


def main() -> None:
    """Rank 1 behaves as the manner says, rank 0 waits for it in a collective."""
    manner = sys.argv[1]
    with open_world(use_gpu=False, timeout_s=3) as world:
        print(f"rank {world.rank} of {world.size} is in", flush=True)
        if world.rank == 1 and manner == "raise":
            raise ValueError("the rank's own error")
        if world.rank == 1 and manner == "wait":
            time.sleep(20)
        if manner != "leave":
            dist.all_reduce(torch.zeros(1))
    print(f"rank {world.rank} left, group: {dist.is_initialized()}", flush=True)


if __name__ == "__main__":
    main()
    leave_process(0)
