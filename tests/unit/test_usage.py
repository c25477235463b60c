"""What nodes are used for: read on each, heard by the driver, in MLflow under the node's name."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain import tracking
from dbx_llmtrain.channel import Client
from dbx_llmtrain.driver import monitor
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import usage
from dbx_llmtrain.worker.reporting import Reporter
from dbx_llmtrain.worker.world import World
from tests import sample

pytestmark = pytest.mark.timeout(60)

STAT = "cpu  {user} 0 100 {idle} 50 0 0 0 7 0\ncpu0 1 2 3 4\n"
MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    250 kB\n"
DEV = (
    "Inter-|   Receive  |  Transmit\n face |bytes packets\n"
    "    lo: 999 1 0 0 0 0 0 0 999 1 0 0 0 0 0 0\n"
    "  eth0: {received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0\n"
)
SMI = """#!/bin/sh
case "$*" in
*utilization.gpu*) echo "0, 37, 40000, 80000"; echo "1, [N/A], 5, 80000" ;;
*) exit 9 ;;
esac
"""


def lay(proc: Path, *, user: int, idle: int, received: int, sent: int) -> None:
    (proc / "net").mkdir(exist_ok=True)
    (proc / "stat").write_text(STAT.format(user=user, idle=idle))
    (proc / "meminfo").write_text(MEMINFO)
    (proc / "net" / "dev").write_text(DEV.format(received=received, sent=sent))


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose nvidia-smi knows two GPUs, of which one does not tell how busy it is."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return program


def world(rank: int, nodes: tuple[str, ...]) -> World:
    return World(
        rank=rank, size=len(nodes), local_rank=0, node=nodes[rank], host=nodes[rank],
        device="cpu", ranks_on_host=1, nodes=nodes,
    )  # fmt: skip


def plan(folder: Path, *, wanted: bool = True) -> RunPlan:
    cfg = sample.config(tracking={"system_metrics": wanted})
    return sample.run_plan(folder, config=cfg, local_dir=str(folder))


def test_rates_and_shares_are_since_the_last_time(tmp_path: Path, smi: Path) -> None:
    lay(tmp_path, user=100, idle=750, received=5000, sent=100)
    sampler = usage.Sampler(tmp_path / "not" / "made" / "yet", proc=tmp_path)
    lay(tmp_path, user=130, idle=820, received=25000, sent=100)
    began = time.monotonic()
    time.sleep(0.2)
    found = sampler.read()
    assert time.monotonic() - began < 5
    assert found["cpu_percent"] == 30.0
    assert found["memory_used_bytes"] == 750 * 1024
    assert found["memory_percent"] == 75.0
    assert 20000 / 5 < found["network_received_bytes_per_second"] <= 20000 / 0.2
    assert found["network_sent_bytes_per_second"] == 0
    assert found["disk_free_bytes"] > 0
    assert found["disk_used_bytes"] > 0
    assert found["gpu0_percent"] == 37.0
    assert found["gpu0_memory_used_bytes"] == 40000 * 2**20
    assert found["gpu0_memory_percent"] == 50.0
    assert not [name for name in found if name.startswith("gpu1")]


def test_this_machine_tells_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    sampler = usage.Sampler(tmp_path)
    time.sleep(0.1)
    found = sampler.read()
    assert {"cpu_percent", "memory_percent", "disk_free_bytes"} <= found.keys()
    assert 0 <= found["cpu_percent"] <= 100
    assert 0 < found["memory_percent"] < 100


def test_a_system_that_tells_nothing_is_no_error(tmp_path: Path, smi: Path) -> None:
    (tmp_path / "stat").write_text("nonsense")
    (tmp_path / "meminfo").write_bytes(b"\xff")
    smi.write_text("#!/bin/sh\nexit 1\n")
    sampler = usage.Sampler(tmp_path, proc=tmp_path)
    assert sampler.read().keys() == {"disk_used_bytes", "disk_free_bytes"}


def test_an_nvidia_smi_that_fails_is_not_asked_for_ever(tmp_path: Path, smi: Path) -> None:
    count = tmp_path / "count"
    smi.write_text(f"#!/bin/sh\necho x >> {count}\nexit 1\n")
    sampler = usage.Sampler(tmp_path)
    for _ in range(6):
        sampler.read()
    assert count.read_text().count("x") == 3


def test_samples_become_rare_in_a_long_run() -> None:
    assert usage.pause(0) == 1.0
    assert usage.pause(1) == usage.pause(9_999) == 10.0
    assert usage.pause(10_000) == 20.0
    week, taken, seconds = 7 * 86400, 0, 0.0
    while seconds < week:
        seconds += usage.pause(taken)
        taken += 1
    assert taken < 30_000


def test_one_rank_of_a_node_looks_and_only_where_it_is_wanted(tmp_path: Path) -> None:
    nodes = ("a", "b", "a", "b")
    heard: list[str] = []

    def tell(node: str, values: Mapping[str, float]) -> None:
        assert values["disk_free_bytes"] > 0
        heard.append(node)

    for wanted in (False, True):
        for rank in range(4):
            with usage.sampled(plan(tmp_path, wanted=wanted), world(rank, nodes), tell, every=0.01):
                deadline = time.monotonic() + (5 if wanted and rank < 2 else 0.1)
                while time.monotonic() < deadline and nodes[rank] not in heard:
                    time.sleep(0.01)
        assert set(heard) == ({"a", "b"} if wanted else set())
    count = len(heard)
    time.sleep(0.1)
    assert len(heard) == count, "it ends with the block"


def test_every_node_is_in_mlflow_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    run = tracking.start_run(sample.config(), "first", tmp_path, began=time.time() - 100)
    chosen = plan(tmp_path / "first")
    with (
        monitor.open_channel({}, local_mode=True) as server,
        monitor.follow(chosen, server=server, used=run.log_usage),
    ):
        assert server is not None
        for name, value in server.variables().items():
            monkeypatch.setenv(name, value)
        for rank, node in enumerate(("node-a", "node:b")):
            reporter = Reporter(chosen, rank, tmp_path / f"events-{rank}")
            reporter.used(node, {"cpu_percent": 12.5 + rank, "gpu0_percent": 99.0})
            reporter.close(5.0)
        stranger = Client(server.address, server.key)
        of_another = {"attempt": "another", "node": "c", "time": 1.0, "values": {"x": 1.0}}
        stranger.send({"usage": of_another})
        stranger.send({"usage": {"attempt": chosen.attempt}})
        assert stranger.close(5.0)
        assert run.wait(20.0)
    client: Any = mlflow.MlflowClient(tracking_uri=run.plan().uri)
    metrics = client.get_run(run.plan().run_id).data.metrics
    assert metrics == {
        "system/node-a/cpu_percent": 12.5,
        "system/node-a/gpu0_percent": 99.0,
        "system/node_b/cpu_percent": 13.5,
        "system/node_b/gpu0_percent": 99.0,
    }
    (value,) = client.get_metric_history(run.plan().run_id, "system/node-a/cpu_percent")
    assert 100 <= value.step < 200, "seconds since the run began"
    assert abs(value.timestamp / 1000 - time.time()) < 60


def test_usage_waits_behind_all_else_and_is_bounded(tmp_path: Path) -> None:
    from dbx_llmtrain.tracking_sender import PENDING_ROWS, Sender, Value
    from dbx_llmtrain.tracking_store import Run

    sender = Sender(Run("http://127.0.0.1:9", "r"), {})
    for step in range(2 * PENDING_ROWS):
        sender.add_usage([Value("system/a/cpu_percent", 1.0, 0, step)])
    assert len(sender._usage) == PENDING_ROWS
    assert not sender.empty()
    assert sender.left_out() == 0, "that a machine was busy is in no file"
