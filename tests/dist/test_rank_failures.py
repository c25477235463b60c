"""What is told of a rank that fails: by a real supervisor and a real trainer, up to the shell."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dbx_llmtrain import cli
from dbx_llmtrain.driver import diagnosis
from dbx_llmtrain.errors import TrainingFailed
from dbx_llmtrain.records import RunPlan
from tests.dist import plans
from tests.dist.launch import TIMEOUT

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
SUPERVISE = """
import sys
from pathlib import Path
from dbx_llmtrain.worker import supervisor
supervisor.run(Path(sys.argv[1]).read_text(), {})
"""
CAUSE = "  - model.lora: peft"
"""It knows the names of the layers once the model is built."""


def supervised(
    plan: RunPlan, text: str, folder: Path, **env: str
) -> tuple[str, str, TrainingFailed]:
    """The one rank of a plan in this JSON: what it printed, its log, and the driver's judgement."""
    (folder / "plan.json").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", SUPERVISE, str(folder / "plan.json")],
        cwd=ROOT,
        env=os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    run_dir = Path(plan.run_dir)
    records = diagnosis.read_records(run_dir, plan.attempt, 1)
    log = (run_dir / "logs" / "rank-00000.log").read_text()
    return done.stdout, log, diagnosis.failure(records, 1, None)


def test_a_plan_that_cannot_be_read_is_told_whole(tmp_path: Path) -> None:
    plan = plans.plan(tmp_path)
    content = json.loads(plan.model_dump_json()) | {"world_size": "two"}
    _, _, failed = supervised(plan, json.dumps(content), tmp_path)
    assert failed.message.startswith(
        "ValidationError: 1 validation error for RunPlan\nworld_size\n  Input should be a valid int"
    )
    assert str(failed).startswith("training failed: rank 0, on ")
    assert "ValidationError" in str(failed).splitlines()[0]
    assert "model_validate_json" in failed.traceback
    assert cli.exit_code(failed) == 1


def test_a_launcher_that_says_too_little_is_told_before_anything_is_reported(
    tmp_path: Path,
) -> None:
    plan = plans.plan(tmp_path)
    _, _, failed = supervised(plan, plan.model_dump_json(), tmp_path)
    assert failed.message == (
        "ClusterError: the cluster cannot run this:\n  - [error] launcher: the launcher set RANK, "
        "WORLD_SIZE but not MASTER_ADDR, MASTER_PORT"
    )
    assert failed.step is None


def test_a_configuration_that_only_a_rank_can_refuse_is_told_in_a_few_lines(tmp_path: Path) -> None:
    plan = plans.plan(tmp_path)
    config = plan.config.override("model.lora={target_modules: [no_such_layer]}")
    plan = plan.model_copy(update={"config": config})
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    printed, log, failed = supervised(plan, plan.model_dump_json(), tmp_path, **meeting)
    assert failed.message.startswith(f"ConfigError: 1 problem in the configuration:\n{CAUSE}")
    assert failed.cause == "configuration"
    assert "worker/lora.py" in failed.traceback
    assert "Traceback" in log
    assert "Traceback" not in printed
    assert f"[rank 0] {CAUSE}" in printed
    assert len(str(failed).splitlines()) <= 5
    assert str(failed).endswith("change the configuration as said above, and run again")
    assert cli.exit_code(failed) == 2
