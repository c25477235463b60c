"""The group around a run: how ranks find each other, and how they leave it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist
ROOT = Path(__file__).parents[2]


def _start(manner: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.dist.leaving", manner],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _two(manner: str) -> tuple[list[int], list[str], float]:
    """Exit codes and output of two ranks that a launcher of the TF_CONFIG kind started, and the
    seconds that rank 0 was in the group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cluster = {"worker": [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]}
    ranks = [
        _start(
            manner,
            TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}),
        )
        for index in range(2)
    ]
    try:
        assert ranks[0].stdout is not None
        head = ranks[0].stdout.readline()
        started = time.monotonic()
        output = [head + ranks[0].communicate(timeout=60)[0]]
        seconds = time.monotonic() - started
        if manner == "wait":
            ranks[1].kill()
        output.append(ranks[1].communicate(timeout=60)[0])
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], output, seconds


def test_without_a_launcher_there_is_one_rank() -> None:
    output, _ = (process := _start("leave")).communicate(timeout=60)
    assert process.returncode == 0, output
    assert output.splitlines() == ["rank 0 of 1 is in", "rank 0 left, group: False"]


def test_ranks_find_each_other_by_tf_config_and_leave_together() -> None:
    codes, output, _ = _two("leave")
    assert codes == [0, 0], output
    for rank in range(2):
        assert f"rank {rank} of 2 is in" in output[rank]
        assert f"rank {rank} left, group: False" in output[rank]


def test_c113_a_rank_that_raises_does_not_leave_the_other_waiting() -> None:
    codes, output, seconds = _two("raise")
    assert codes == [1, 1], output
    assert "ValueError: the rank's own error" in output[1]
    assert seconds < 30


def test_c112_a_rank_that_never_comes_fails_the_other_after_the_time_out() -> None:
    codes, output, seconds = _two("wait")
    assert codes[0] == 1, output
    assert 2 < seconds < 3 + 5
