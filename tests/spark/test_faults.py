"""Faults of a running run: each ends in its time, with its message, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dbx_llmtrain as llm
from dbx_llmtrain.driver import lease
from dbx_llmtrain.driver.run_folder import RunFolder
from tests.spark import faults
from tests.spark.faults import FAULTS, GONE_S, OWN_SPARK, Fault, Ranks
from tests.spark.helpers import wait_until
from tests.spark.test_resume import mlflow_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ENDED_BY_US = (faults.stopped_rank, faults.full_disk)
"""Faults that leave the ranks running until somebody ends them."""


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", faults.SECRET)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[None]:
    folder = tmp_path / "local"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"no disk can be mounted here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.act.__name__)
def test_a_fault_ends_a_run_in_time_and_leaves_nothing(
    spark: Any, tmp_path: Path, secret: None, request: pytest.FixtureRequest, fault: Fault
) -> None:
    if fault.act is faults.full_disk:
        request.getfixturevalue("small_disk")
    cfg = faults.config(tmp_path, "first", *fault.settings)
    seen = faults.train(spark, cfg, tmp_path, fault.act)
    assert isinstance(seen.error, llm.TrainingFailed), seen
    assert re.search(fault.message, str(seen.error)), str(seen.error)
    assert seen.error.cause in fault.causes, str(seen.error)
    assert seen.after_s < fault.seconds
    if fault.act not in ENDED_BY_US:
        assert seen.gone_s < GONE_S
    assert not Ranks(tmp_path).processes()
    assert not seen.left
    status = mlflow_run(tmp_path / "runs" / "first").info.status
    assert status == ("KILLED" if seen.error.cause == "stopped" else "FAILED")


class Silent:
    """A server that takes every connection and never says a word."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._taken: list[socket.socket] = []
        self.uri = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        while True:
            try:
                self._taken.append(self._socket.accept()[0])
            except OSError:
                return

    def close(self) -> None:
        self._socket.close()
        for each in self._taken:
            each.close()


def test_a_tracking_server_that_hangs_ends_no_run(
    spark: Any,
    tmp_path: Path,
    secret: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Silent()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    began = time.time()
    try:
        result = llm.train(faults.config(tmp_path, "silent", steps=8), spark=spark)
    finally:
        server.close()
    assert time.time() - began < 120
    assert result.steps == 8
    assert "MLflow" in caplog.text
    assert not Ranks(tmp_path).processes()
    assert not faults.leftovers(began)


def test_a_killed_driver_leaves_no_trainer_and_the_next_call_says_so(tmp_path: Path) -> None:
    ranks, run = Ranks(tmp_path), tmp_path / "runs" / "killed"
    (tmp_path / "tmp").mkdir()
    driver = program(tmp_path, "killed", TMPDIR=str(tmp_path / "tmp"))
    try:
        wait_until(lambda: ranks.have_begun() or driver.poll() is not None, 180)
        assert driver.poll() is None, said(tmp_path)
        os.kill(driver.pid, signal.SIGKILL)
        wait_until(lambda: not ranks.processes(), GONE_S)
    finally:
        driver.kill()
        driver.wait()
    # Their supervisors write a record first.
    wait_until(lambda: not list((tmp_path / "tmp").glob("dbx_llmtrain-*/rank-*")), GONE_S)
    wait_until(lambda: not any(map(has_secret, (tmp_path / "tmp").rglob("*"))), GONE_S)
    assert mlflow_run(run).info.status == "RUNNING", "nobody has told MLflow"
    folder = RunFolder("killed", run, tmp_path / "runs" / ".cache", "next")
    with lease.held(folder):
        """What the next call does first."""
    assert mlflow_run(run).info.status == "FAILED"


def has_secret(path: Path) -> bool:
    try:
        return faults.SECRET.encode() in path.read_bytes()
    except OSError:
        return False


def program(folder: Path, what: str, **env: str) -> subprocess.Popen[bytes]:
    environ = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"} | env
    environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    with (folder / "said").open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.spark.faults_program", what, str(folder)],
            stdout=file, stderr=file, env=environ, cwd=folder,
        )  # fmt: skip


def said(folder: Path) -> str:
    return (folder / "said").read_text(errors="replace")[-5000:]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program saw that has a Spark of its own; see ``faults_program``."""
    folder = tmp_path_factory.mktemp("faults")
    run = program(folder, "faults")
    try:
        assert run.wait(380) == 0, said(folder)
    finally:
        run.kill()
        run.wait()
    found: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return found


def test_a_killed_executor_is_replaced_and_the_run_ends_with_the_same_weights(
    seen: dict[str, Any],
) -> None:
    found = seen["restarted"]
    assert found["error"] == "None"
    (told,) = found["restarts"]
    assert re.search(r"after step \d+: .*ExecutorLost.*; started again from step \d+ with 2", told)
    whole, torn = found["files"]
    assert whole
    assert torn == whole, "bitwise"
    assert not found["left"]


@pytest.mark.parametrize("fault", OWN_SPARK, ids=lambda fault: fault.act.__name__)
def test_a_fault_that_costs_spark_ends_a_run_in_time_and_leaves_nothing(
    seen: dict[str, Any], fault: Fault
) -> None:
    found = seen[fault.name]
    assert found["kind"] == "TrainingFailed", found
    assert re.search(fault.message, found["error"]), found
    assert found["cause"] in fault.causes, found
    assert found["after_s"] < fault.seconds
    assert found["gone_s"] < GONE_S
    assert not found["left"]
    assert not found["threads"]
