"""Two standalone Workers as two machines: each with its own name, address, disk and GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain.reports import ClusterReport

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two-nodes")


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, Any]:
    """What the driver program saw; see ``two_nodes``."""
    environ = dict(os.environ) | {"PYTHONPATH": str(Path(__file__).parents[2])}
    for name in ("SPARK_HOME", "SPARK_LOCAL_IP"):
        environ.pop(name, None)
    command = [sys.executable, "-m", "tests.spark.two_nodes", str(folder)]
    run = subprocess.run(
        command, env=environ, timeout=540, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout.decode(errors="replace")[-5000:]
    content: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return content


def test_a_cluster_without_workers_is_an_error(seen: dict[str, Any]) -> None:
    assert "no executor of spark://127.0.0.1" in seen["no_executors"]


def test_probe_sees_two_nodes_with_their_own_gpus(seen: dict[str, Any], folder: Path) -> None:
    report = ClusterReport.model_validate(seen["report"])
    assert report.executors == ("127.0.0.2", "127.0.0.3")
    assert report.slots == 4
    assert report.missing == ()
    assert [node.node for node in report.nodes] == ["node-a", "node-b"]
    for node in report.nodes:
        assert [gpu.uuid for gpu in node.gpus] == [f"{node.node}-gpu-0", f"{node.node}-gpu-1"]
        assert node.local_dir == str(folder / node.node / "tmp" / "dbx_llmtrain")
    assert report.driver.gpus == ()


def test_a_full_probe_measures_between_the_nodes(seen: dict[str, Any], folder: Path) -> None:
    report = ClusterReport.model_validate(seen["full"])
    told = {finding.check: finding for finding in report.findings}
    assert [node.tried for node in report.nodes] == [{"run folder": ""}] * 2
    assert told["run folder"].level == "ok"
    assert told["collective"].message.startswith("all 4 ranks have met")
    (pair,) = report.speeds
    assert (pair.first, pair.second) in (("node-a", "node-b"), ("node-b", "node-a"))
    assert pair.bytes_per_second > 1e6
    assert told["bandwidth"].message.startswith("1 pair of hosts")
    assert not (folder / "probed").exists()


def test_staging_makes_one_copy_on_each_node(seen: dict[str, Any], folder: Path) -> None:
    assert sorted(seen["staged"]) == ["node-a", "node-b"]
    for node, path in seen["staged"].items():
        assert Path(path).is_relative_to(folder / node)
        assert (Path(path) / "weights.bin").stat().st_size == 100_000
    (name,) = {Path(path).name for path in seen["staged"].values()}
    copies = list(folder.glob(f"node-*/tmp/dbx_llmtrain/models/{name}/weights.bin"))
    assert len(copies) == 2


def test_the_node_that_cannot_stage_is_named(seen: dict[str, Any]) -> None:
    assert list(seen["failed"]) == ["node-b"]
    assert "cannot be made" in seen["failed"]["node-b"]


def test_a_node_that_is_busy_does_not_end_the_run(seen: dict[str, Any]) -> None:
    """Its ranks copy for themselves."""
    assert seen["beside"] == ["node-a"]


def test_four_ranks_meet_across_the_nodes(seen: dict[str, Any]) -> None:
    assert seen["result"]["metrics"] == {"total": 10.0}
    assert sorted(seen["ranks"]) == ["node-a", "node-a", "node-b", "node-b"]


def test_a_lost_executor_ends_the_run(seen: dict[str, Any]) -> None:
    assert "ExecutorLostFailure" in seen["lost"]["error"]
    assert "on node-b, the first to end" in seen["lost"]["error"]
    assert "a machine or an executor was lost" in seen["lost"]["error"]
    assert seen["lost"]["left"] == []
    assert seen["lost"]["secrets"] == []
    assert seen["lost"]["after_s"] < 60
