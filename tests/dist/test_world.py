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

from tests.dist import warm
from tests.dist.launch import free_port

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


# The first act --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int | None, str]]:
    """Exit codes and output of ranks whose first act fails: a first and a second rank of two whose
    other one never starts, and one that has no network."""
    folder, first = tmp_path_factory.mktemp("alone"), f"127.0.0.1:{free_port()}"
    two, one = [first, "127.0.0.1:1"], [f"127.0.0.1:{free_port()}"]
    cases = {
        "first": (two, 0, {"DBX_LLMTRAIN_NODE": "node-a"}),
        "second": ([f"127.0.0.1:{free_port()}", *two[1:]], 1, {"DBX_LLMTRAIN_NODE": "node-b"}),
        "no network": (one, 0, {"GLOO_SOCKET_IFNAME": "nosuch0"}),
    }
    processes = {}
    for name, (worker, index, environment) in cases.items():
        config = {"cluster": {"worker": worker}, "task": {"type": "worker", "index": index}}
        environ = os.environ | environment | {
            "TF_CONFIG": json.dumps(config), "DBX_LLMTRAIN_ARRIVAL_S": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        processes[name] = warm.start("tests.dist.leaving", ["leave"], environ, folder / name)
    for process in processes.values():
        process.join(60)
        process.kill()
    return {
        name: (process.exitcode, (folder / name).read_text()) for name, process in processes.items()
    }


def test_a_rank_that_never_arrives_is_named(alone: dict[str, tuple[int | None, str]]) -> None:
    code, output = alone["first"]
    assert code == 1, output
    assert "[error] network: rank 1 did not come to 127.0.0.1:" in output
    assert "within 1 s; rank 0 (node-a) did" in output


def test_a_rank_that_does_not_reach_the_first_one_says_so(
    alone: dict[str, tuple[int | None, str]],
) -> None:
    code, output = alone["second"]
    assert code == 1, output
    assert "[error] network: rank 1 on node-b cannot reach 127.0.0.1:" in output
    assert "security group" in output


def test_ranks_that_meet_and_cannot_work_together_say_how(
    alone: dict[str, tuple[int | None, str]],
) -> None:
    code, output = alone["no network"]
    assert code == 1, output
    assert "all 1 ranks have come, but their first collective" in output
    assert "GLOO_SOCKET_IFNAME is nosuch0" in output
