"""What is told of a rank that fails: by a real supervisor and a real trainer, up to the shell."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain import cli
from dbx_llmtrain.calls import CallPlan
from dbx_llmtrain.driver import calling, diagnosis
from dbx_llmtrain.driver.run_folder import RunFolder
from dbx_llmtrain.driver.survey import Survey
from dbx_llmtrain.errors import TrainingFailed
from dbx_llmtrain.layout import Layout
from dbx_llmtrain.records import RunPlan
from tests import sample
from tests.dist import plans
from tests.dist.launch import TIMEOUT, free_port

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
SUPERVISE = """
import sys
from pathlib import Path
from dbx_llmtrain.worker import supervisor
supervisor.run(Path(sys.argv[1]).read_text(), {}, *sys.argv[2:])
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


def start(plan: CallPlan, folder: Path, rank: int = 0, port: int = 0) -> subprocess.Popen[str]:
    """A rank of a function's plan under its supervisor."""
    (folder / "plan.json").write_text(plan.model_dump_json())
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": plan.world_size, "MASTER_PORT": port}
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, str(folder / "plan.json"), calling.MODULE],
        cwd=ROOT,
        env=os.environ | {name: str(value) for name, value in places.items()}
        | {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def call_plan(folder: Path, function: Any, *args: Any, ranks: int = 1) -> CallPlan:
    content = calling.pickled(function, args, {})
    run_folder = RunFolder("mine", folder / "mine", folder / ".cache", "a1")
    run_folder.path.mkdir()
    case = Survey(sample.cluster(), Layout(ranks, True, False, ()), run_folder, 0.0)
    cfg = calling.settle(None, "mine", str(folder), {})
    return calling.make_plan(cfg, case, content, ())


def judged(plan: CallPlan, processes: list[subprocess.Popen[str]]) -> TrainingFailed:
    """The first one is to fail; the others are told to end then, as a launcher does."""
    try:
        printed = processes[0].communicate(timeout=TIMEOUT)[0]
        for process in processes[1:]:
            process.terminate()
            process.communicate(timeout=TIMEOUT)
    finally:
        for process in processes:
            process.kill()
    assert processes[0].returncode == 1, printed
    assert "Traceback" not in printed
    run_dir = Path(plan.run_dir)
    records = diagnosis.read_records(run_dir, plan.attempt, plan.world_size)
    assert len(records) == plan.world_size
    return diagnosis.failure(records, plan.world_size, None, run_dir)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"nothing can be mounted here: {error}")
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(path: str) -> None:
    with open(path, "wb") as file:
        while True:
            file.write(bytes(4096))


def test_a_full_disk_is_told_with_what_to_do(tmp_path: Path, tiny_disk: Path) -> None:
    plan = call_plan(tmp_path, fill, str(tiny_disk / "weights"))
    failed = judged(plan, [start(plan, tmp_path)])
    assert failed.message.startswith("OSError: [Errno 28] No space left on device")
    assert failed.cause == "disk_full"
    assert "cluster.local_dir" in failed.advice
    assert failed.traceback.splitlines()[1].endswith(", in fill"), "the user's own code is first"


def crash() -> None:
    import ctypes

    print("about to read nowhere", flush=True)
    ctypes.string_at(0)


def test_a_crash_of_native_code_is_told_with_its_stack(tmp_path: Path) -> None:
    plan = call_plan(tmp_path, crash)
    failed = judged(plan, [start(plan, tmp_path)])
    assert (failed.exit_code, failed.cause) == (-11, "crash")
    assert "about to read nowhere" in failed.log_tail
    assert "Fatal Python error: Segmentation fault" in failed.log_tail
    assert " in string_at\n" in failed.log_tail
    assert "native code crashed" in failed.advice


def meet_late() -> None:
    import time
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(100)
    dist.all_reduce(torch.ones(1))


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    plan = call_plan(tmp_path, meet_late, ranks=2)
    port = free_port()
    ranks = [start(plan, tmp_path, rank, port) for rank in (0, 1)]
    failed = judged(plan, ranks)
    assert (failed.rank, failed.cause) == (0, "network"), failed
    assert "Timed out waiting" in failed.message
    assert "not there: rank 1 on " in failed.message
    assert "did not come to a collective operation in time" in failed.advice
