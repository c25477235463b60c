"""A writer of checkpoints that is killed again and again, and what it leaves each time.

    python -m tests.dist.killed_writer FOLDER SEED KILLS

Every writer goes on where the last one was killed, keeps one checkpoint, and has nothing but
tensors: all are filled with the number of the step. Prints a JSON list, an entry for each kill.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what a writer would spend its first seconds with
from torch import nn

from dbx_llmtrain import storage
from dbx_llmtrain.worker import checkpoint
from dbx_llmtrain.worker.saving import saving
from dbx_llmtrain.worker.world import open_world
from tests import sample

SAVES = 5
"""Checkpoints of a writer that is left alone."""


def write(run_dir: Path, scratch: Path, ready: Callable[[], object]) -> None:
    """Write so many checkpoints more."""
    first = storage.step_of(storage.latest_checkpoint(run_dir) or Path()) or 0
    network = nn.ParameterList([nn.Parameter(torch.zeros(150_000)) for _ in range(4)])
    optimizer = torch.optim.SGD(network.parameters())
    config = sample.config(checkpoint={"keep_last": 1})
    plan = sample.run_plan(run_dir, config=config)
    with (
        open_world(use_gpu=False) as world,
        saving(plan, world, scratch, tell=lambda _: None) as saver,
    ):
        ready()
        for step in range(first + 1, first + 1 + SAVES):
            with torch.no_grad():
                for parameter in network:
                    parameter.fill_(step)
            saver.save(
                storage.checkpoint_folder(run_dir, step), model=network, optimizer=optimizer,
                state={"step": step}, identity={}, metrics={},
            )  # fmt: skip


def start(run_dir: Path, scratch: Path) -> int:
    """A writer in a process of its own; returns its id when it is about to write."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            write(run_dir, scratch, lambda: os.write(writing, b"x"))
        finally:
            os._exit(0)
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)
    return child


def found(run_dir: Path) -> dict[str, Any]:
    """What is there now."""
    newest = storage.latest_checkpoint(run_dir)
    torn = len(storage.torn(run_dir))
    if newest is None:
        return {"step": None, "torn": torn}
    values = {
        float(value) for w in checkpoint.read_weights(newest).values() for value in w.unique()
    }
    return {
        "step": storage.step_of(newest),
        "torn": torn,
        "complete": len(storage.checkpoints(run_dir)),
        "faults": storage.verify(newest),
        "state": checkpoint.read_state(newest)["state"],
        "values": sorted(values),
    }


def main() -> None:
    folder, seed, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    scratch = folder.parent / "scratch"
    child = start(folder, scratch)
    began = time.monotonic()
    os.waitpid(child, 0)
    whole = time.monotonic() - began
    moments = random.Random(seed)
    seen = [found(folder)]
    for _ in range(kills):
        child = start(folder, scratch)
        time.sleep(moments.uniform(0, whole))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        seen.append(found(folder))
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
