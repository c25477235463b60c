"""What one rank of a launch runs: every case of every strategy, in the same order on all."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from dbx_llmtrain.worker.node import NODE_VARIABLE
from dbx_llmtrain.worker.world import leave_process, open_world
from tests.dist.launch import TIMEOUT
from tests.dist.runs import Context


def main() -> None:
    """Arguments: module of the cases, strategies (with commas), number of nodes, the folder of the
    cases, the file for rank 0's results."""
    cases, strategies, nodes, folder, out = sys.argv[1:]
    if int(nodes) > 1:
        # Not node by node, as launchers do not number ranks so either.
        os.environ[NODE_VARIABLE] = f"node-{int(os.environ['RANK']) % int(nodes)}"
    # A rank that hangs says where before the launcher gives up on it.
    faulthandler.dump_traceback_later(TIMEOUT - 20, exit=True)
    warnings.simplefilter("error", UserWarning)
    results: dict[str, Any] = {}
    with open_world(use_gpu=False, timeout_s=60) as world:
        results["threads"] = {"own": torch.get_num_threads(), "cpus": len(os.sched_getaffinity(0))}
        # The models are too small to share out, and a busy machine makes threads wait.
        torch.set_num_threads(1)
        for strategy in strategies.split(","):
            found = results.setdefault(strategy, {})
            for name, case in importlib.import_module(cases).CASES.items():
                started = time.perf_counter()
                own = Path(folder) / f"{strategy}-{name}-{world.rank}"
                found[name] = case(Context(strategy, world, own))
                if world.rank == 0:
                    seconds = time.perf_counter() - started
                    print(f"{strategy} {name}: {seconds:.2f} s", flush=True)
    if world.rank == 0:
        Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
    leave_process(0)
