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
    strategy: str, world_size: int, folder: Path, cases: str = "tests.dist.cases"
) -> dict[str, Any]:
    """Results of a module's ``CASES`` by name, from ranks that torchrun starts (one: nobody).

    Raises ``AssertionError`` with the ranks' output when they fail or take too long.
    """
    out = folder / "results.json"
    program = ["-m", "tests.dist.rank", cases, strategy, str(folder), str(out)]
    if world_size > 1:
        # A rendezvous of its own on a free port: launches never meet each other.
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        program = [*torchrun, f"--nproc-per-node={world_size}", *program]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(
        [sys.executable, *program],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"the ranks took more than {TIMEOUT} s:\n{output}") from None
    assert process.returncode == 0, f"the ranks failed:\n{output}"
    results: dict[str, Any] = json.loads(out.read_text())
    return results


def two_ranks(folder: Path, plans: Sequence[Path | str], environment: dict[str, str]) -> None:
    """Run every plan folder's ``plan-0.json`` and ``plan-1.json``, one after the other, on two
    ranks at once (``main_rank``). Raises ``AssertionError`` with their output when one fails."""
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
        codes = [process.wait(timeout=TIMEOUT) for process in processes]
    finally:
        for process in processes:
            process.kill()
    output = "".join((folder / f"output-{rank}").read_text() for rank in (0, 1))
    assert codes == [0, 0], output
