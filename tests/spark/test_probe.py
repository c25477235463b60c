"""Every check of a cluster in one report: of a good one, of one with faults, and from a shell."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dbx_llmtrain as llm
from dbx_llmtrain.driver import checklist, survey
from dbx_llmtrain.errors import ClusterError, Finding
from dbx_llmtrain.reports import ClusterReport
from dbx_llmtrain.worker import node
from tests.spark import spark_env

pytestmark = pytest.mark.timeout(200)

LO = {"GLOO_SOCKET_IFNAME": "lo"}


def config(folder: Path, **cluster: Any) -> llm.TrainConfig:
    """A configuration whose model is not looked at, but for whether it is there."""
    (folder / "model").mkdir(exist_ok=True)
    return llm.TrainConfig(
        model={"source": str(folder / "model")},
        data={"train": str(folder / "rows.jsonl")},
        checkpoint={"dir": str(folder / "not" / "yet" / "there")},
        cluster={"local_dir": str(folder / "local"), "env": LO, **cluster},
    )


def found(report: ClusterReport) -> dict[str, Finding]:
    return {finding.check: finding for finding in report.findings}


def test_a_full_probe_lists_every_check_and_leaves_nothing(spark: Any, tmp_path: Path) -> None:
    report = llm.probe(config(tmp_path), full=True, spark=spark)
    told = found(report)
    assert {finding.level for finding in report.findings} == {"ok"}, str(report)
    assert set(told) == {
        "access mode", "task slots", "dynamic allocation", "autoscaling", "task GPUs",
        "visible GPUs", "encryption", "Python memory", "nodes", "GPUs", "Python", "packages",
        "local disk", "memory", "network interface", "run folder", "hub", "collective",
        "bandwidth",
    }  # fmt: skip
    assert told["collective"].message.startswith("all 2 ranks have met, ")
    assert told["bandwidth"].message == "all ranks are on one host"
    assert not (tmp_path / "not").exists()
    assert "0 errors, 0 warnings:" in str(report)


def test_faults_are_told_together_and_no_rank_is_started(
    spark: Any, fake_gpus: Callable[[str], None], spark_folder: Path, tmp_path: Path
) -> None:
    lines = spark_env.gpu_lines(["GPU-1", "GPU-2"]).replace(", 12, 5", ", 70000, 5")
    fake_gpus(lines)
    apps = spark_folder / "gpus.csv.apps"
    apps.write_text("1, 69000, GPU-1\n")
    try:
        cfg = config(tmp_path, processes=5)
        report = llm.probe(cfg, full=True, spark=spark)
        with pytest.raises(ClusterError) as caught:
            survey.look(cfg, spark, began=0.0)
    finally:
        apps.unlink()
    told = [finding for finding in report.findings if finding.level != "ok"]
    assert [finding.check for finding in told if finding.level == "error"] == ["task slots"]
    held = [finding.message for finding in told if finding.check == "GPU memory"]
    assert len(held) == 2
    assert "GPU 0 of" in held[0]
    assert "(pid 1, 67.4 GiB)" in held[0]
    assert found(report)["collective"].message.startswith("not tried: ranks are not started")
    assert {"task slots", "GPU memory"} <= {finding.check for finding in caught.value.findings}
    assert not (tmp_path / "not").exists()


def test_a_run_folder_that_a_node_does_not_share(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's file is taken away before the nodes look, as where they see another disk."""
    real = checklist.cluster.probe

    def elsewhere(session: Any, **arguments: Any) -> ClusterReport:
        moved = Path(arguments["folder"]).with_name("moved")
        report = real(session, **arguments | {"folder": str(moved)})
        return report

    monkeypatch.setattr(checklist.cluster, "probe", elsewhere)
    looked = checklist.look(config(tmp_path), spark)
    (finding,) = [one for one in looked.findings if one.check == "run folder"]
    assert finding.level == "error"
    assert "moved" in finding.message
    assert node.node_id() in finding.message
    assert "Set checkpoint.dir to storage that the driver and every node" in finding.message


def test_without_a_configuration_what_needs_one_is_left(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17.3")
    monkeypatch.setenv("DATABRICKS_TOKEN", "not-asked-for")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    told = found(llm.probe(full=True, spark=spark))
    assert "give a configuration with checkpoint.dir" in told["collective"].message
    assert not {"run folder", "hub", "MLflow"} & set(told)
    assert list(tmp_path.iterdir()) == []


def test_a_report_survives_json(spark: Any, tmp_path: Path) -> None:
    cfg = config(tmp_path, processes=1)
    report = llm.probe(cfg, full=True, spark=spark)
    assert ClusterReport.model_validate(json.loads(report.model_dump_json())) == report
