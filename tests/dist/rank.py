"""What one rank of a launch runs: every case, in the same order on all of them."""

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

from dbx_llmtrain.worker.world import leave_process, open_world
from tests.dist.launch import TIMEOUT
from tests.dist.runs import Context


def main() -> None:
    """Arguments: module of the cases, strategy, their folder, the file for rank 0's results."""
    cases, strategy, folder, out = sys.argv[1:]
    # A rank that hangs says where before the launcher gives up on it.
    faulthandler.dump_traceback_later(TIMEOUT - 20, exit=True)
    warnings.simplefilter("error", UserWarning)
    results: dict[str, Any] = {}
    with open_world(use_gpu=False, timeout_s=60) as world:
        results["threads"] = {"own": torch.get_num_threads(), "cpus": len(os.sched_getaffinity(0))}
        # The models are too small to share out, and a busy machine makes threads wait.
        torch.set_num_threads(1)
        for name, case in importlib.import_module(cases).CASES.items():
            started = time.perf_counter()
            own = Path(folder) / f"{name}-{world.rank}"
            results[name] = case(Context(strategy, world, own))
            if world.rank == 0:
                print(f"{name}: {time.perf_counter() - started:.2f} s", flush=True)
    if world.rank == 0:
        Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
    leave_process(0)
