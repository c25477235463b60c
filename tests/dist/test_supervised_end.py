"""A real trainer under a real supervisor that is told to end: it saves, and has not failed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain import storage
from dbx_llmtrain.driver import diagnosis
from dbx_llmtrain.events import read_events
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker.main import run
from tests import tiny
from tests.dist import plans
from tests.dist.launch import TIMEOUT, free_port
from tests.dist.test_main import same_threads

__all__ = ["same_threads"]
pytestmark = pytest.mark.dist

SUPERVISE = """
import sys
from pathlib import Path
from dbx_llmtrain.worker import supervisor
supervisor.run(Path(sys.argv[1]).read_text(), {})
"""


def until(condition: Any) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def supervised(plan: RunPlan, folder: Path) -> subprocess.Popen[str]:
    (folder / "plan.json").write_text(plan.model_dump_json())
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, str(folder / "plan.json")],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"} | meeting,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_supervisor_that_is_told_to_end_lets_its_trainer_save(tmp_path: Path) -> None:
    plan = plans.plan(tmp_path, export=False, train={"max_steps": 100_000, "log_every": 10})
    run_dir = Path(plan.run_dir)
    process = supervised(plan, tmp_path)
    try:
        until(lambda: any(e.kind == "step" for e in read_events(run_dir / "events.jsonl")))
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    (record,) = diagnosis.read_records(run_dir, plan.attempt, 1).values()
    assert (record.status, record.stopped, record.exit_code) == ("failed", True, 143), printed
    newest = storage.latest_checkpoint(run_dir)
    assert newest is not None
    assert storage.verify(newest) == []
    assert storage.step_of(newest) == record.step
    assert record.error == (
        f"Stopped: ended after step {record.step} as it was asked to (SIGTERM); the newest "
        f"checkpoint is {newest}"
    )
    assert f"[rank 0] {record.error}" in printed
    assert "Traceback" not in printed
    failure = diagnosis.failure({0: record}, 1, None)
    assert failure.message.startswith(
        f"the run ended after step {record.step} as it was asked to (SIGTERM); the newest "
        f"checkpoint is {newest}"
    )
    assert "What to do: run again" in str(failure)


@pytest.mark.slow
def test_time_is_left_for_an_evaluation_as_long_as_the_one_before(tmp_path: Path) -> None:
    """Half a minute, of which 14 s had gone before the ranks began; the driver needs 2 s."""
    began = time.time() - 14.0
    rows = tiny.examples([20] * 100)
    plan = plans.plan(tmp_path, export=False, held_out=rows, began=began,
                      train={"max_steps": 100_000})  # fmt: skip
    config = plan.config.override("train.max_time=00:00:00:30")
    plan = plan.model_copy(update={"config": config, "closing": 2.0})
    result = run(plan)
    assert time.time() < began + 30.0 - 2.0
    assert result.stop_reason == "train.max_time"
    found = list(read_events(Path(plan.run_dir) / "events.jsonl"))
    first = next(event for event in found if event.kind == "eval")
    entered = next(event for event in found if event.data.get("phase") == "evaluating")
    last = [event for event in found if event.kind == "step"][-1]
    took = first.time - entered.time
    assert took > 0.05
    assert last.step > 1, json.dumps({"took": took})
    assert last.time < began + 30.0 - took
