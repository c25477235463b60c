"""Two real ranks under their supervisors, one of which gets stuck: the driver's guard says which
and where."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dbx_llmtrain.driver import board, monitor, stalls
from dbx_llmtrain.errors import TrainingFailed
from dbx_llmtrain.events import Event
from dbx_llmtrain.records import RunPlan
from tests.dist import plans
from tests.dist.launch import TIMEOUT, free_port

pytestmark = pytest.mark.dist

SUPERVISE = """
import sys
from pathlib import Path
from dbx_llmtrain.worker import supervisor
supervisor.run(Path(sys.argv[1]).read_text(), {}, "tests.dist.stuck_rank")
"""


@contextmanager
def running(plan: RunPlan, folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Both ranks of a plan, each under a supervisor, until the block ends; then none is left."""
    (folder / "plan.json").write_text(plan.model_dump_json())
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"} | environment
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SUPERVISE, str(folder / "plan.json")],
            cwd=Path(__file__).parents[2],
            env=os.environ | shared | {"RANK": str(rank)},
            stdout=(folder / f"output-{rank}").open("wb"),
            stderr=subprocess.STDOUT,
        )
        for rank in (0, 1)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()  # their trainers go with them, also one that is stopped
        for process in processes:
            process.wait()


def stalled(folder: Path, how: str, *, channel: bool = True) -> tuple[TrainingFailed, float]:
    """What is said of a run whose rank 1 gets stuck, and how long it stood still until then."""
    plan = plans.plan(folder, export=False, strategy="ddp", world_size=2, train={"max_steps": 1000})
    config = plan.config.override("cluster.stall_timeout=6")
    plan = plan.model_copy(update={"config": config})
    last = time.monotonic()

    def heard(event: Event) -> None:
        nonlocal last
        if event.kind != "alive":
            last = time.monotonic()

    settings: dict[str, str] = {}
    with monitor.open_channel(settings, local_mode=True) as server:
        variables = (server.variables() if server and channel else {}) | {"STUCK": how}
        with (
            running(plan, folder, variables),
            monitor.follow(plan, heard, server=server, heard=heard) as live,
            board.kept(plan, live),
        ):
            guard = stalls.Guard(plan, live)
            deadline = time.monotonic() + TIMEOUT
            while time.monotonic() < deadline:
                try:
                    if both_train(live):
                        guard.check()
                except TrainingFailed as error:
                    return error, time.monotonic() - last
                time.sleep(0.5)
    output = "".join((folder / f"output-{rank}").read_text() for rank in (0, 1))
    raise AssertionError(f"nothing was said of it:\n{output}")


def both_train(live: monitor.LiveState) -> bool:
    """Until then a busy machine may take longer than the ranks are given here."""
    return [one.phase for one in live.ranks().values()] == ["training", "training"]


@pytest.mark.timeout(200)
def test_a_rank_that_is_stopped_is_named(tmp_path: Path) -> None:
    error, took = stalled(tmp_path, "stopped")
    assert took < 6 + stalls.STACKS_S + 5
    assert (error.cause, error.rank, error.host) == ("stalled", 1, os.uname().nodename)
    assert "silent: rank 1 on" in error.message
    assert "rank 0 on" in error.message
    assert ", in backward (dbx_llmtrain/worker/parallel/common.py:" in error.message
    written = sorted((tmp_path / "run" / "logs").glob("*.stacks.txt"))
    assert [path.name for path in written] == ["rank-00000.stacks.txt"]
    text = written[0].read_text()
    assert "in back_propagate" in text or "in _step" in text
    assert "SIGSTOP" in error.advice


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_rank_that_loops_in_python_is_named_with_its_frame(tmp_path: Path) -> None:
    error, _ = stalled(tmp_path, "loops")
    assert (error.cause, error.rank) == ("stalled", 1)
    assert "silent" not in error.message
    assert "rank 1 on" in error.message
    assert "in count_for_ever (" in error.message
    assert "count_for_ever" in error.traceback
    assert len(list((tmp_path / "run" / "logs").glob("*.stacks.txt"))) == 2


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_rank_that_hangs_in_native_code_is_named_with_its_frame(tmp_path: Path) -> None:
    error, _ = stalled(tmp_path, "hangs")
    assert (error.cause, error.rank) == ("stalled", 1)
    assert "silent: rank 1 on" in error.message
    assert "in hang_in_native_code (" in error.message
    assert "never gives the interpreter back" in error.advice


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_without_a_channel_the_files_tell_it(tmp_path: Path) -> None:
    error, _ = stalled(tmp_path, "loops", channel=False)
    assert (error.cause, error.rank) == ("stalled", 1)
    assert "in count_for_ever (" in error.message
