"""Start real ranks, run every case in them once, and read what they found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TIMEOUT = 150
"""Seconds for a launch with all its cases (a quiet machine needs about ten)."""


def launch(
    strategies: str, world_size: int, folder: Path, cases: str = "tests.dist.cases", nodes: int = 1
) -> dict[str, Any]:
    """Results of a module's ``CASES`` by name, from ranks that torchrun starts (one: nobody).

    Several strategies are given with commas, and the results then are by strategy. The ranks are
    dealt to ``nodes`` in turn. Raises ``AssertionError`` with the ranks' output when they fail or
    take too long.
    """
    out = folder / "results.json"
    program = ["tests.dist.rank", cases, strategies, str(nodes), str(folder), str(out)]
    run_ranks(program, world_size, {"PYTHONFAULTHANDLER": "1"}, TIMEOUT)
    results: dict[str, Any] = json.loads(out.read_text())
    threads = {"threads": results.pop("threads")}
    return results if "," in strategies else results[strategies] | threads


def run_ranks(
    program: Sequence[str], world_size: int, environment: dict[str, str], timeout: float
) -> None:
    """Run a module with its arguments on that many ranks, with one thread each. Raises
    ``AssertionError`` with their output when they fail or take more than ``timeout`` seconds."""
    command = ["-m", *program]
    if world_size > 1:
        # A rendezvous of its own on a free port: launches never meet each other.
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, f"--nproc-per-node={world_size}", *command]
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"the ranks took more than {timeout:g} s:\n{output}") from None
    assert process.returncode == 0, f"the ranks failed:\n{output}"


def two_ranks(
    folder: Path,
    plans: Sequence[Path | str],
    environment: dict[str, str],
    *,
    codes: tuple[int, int] = (0, 0),
) -> None:
    """Run every plan folder's ``plan-0.json`` and ``plan-1.json``, one after the other, on two
    ranks at once (``main_rank``). Raises ``AssertionError`` with their output when they do not end
    with these exit ``codes``."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.dist.main_rank", rank, *map(str, plans)],
            cwd=Path(__file__).parents[2],
            env=environment | {"OMP_NUM_THREADS": "1"},
            stdout=(folder / f"output-{rank}").open("wb"),
            stderr=subprocess.STDOUT,
        )
        for rank in ("0", "1")
    ]
    try:
        found = tuple(process.wait(timeout=TIMEOUT) for process in processes)
    finally:
        for process in processes:
            process.kill()
    output = "".join((folder / f"output-{rank}").read_text() for rank in (0, 1))
    assert found == codes, output
