"""The shell commands as a shell runs them: a process of their own, with a Spark of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dbx_llmtrain.records import ClusterReport

# The session of the other tests must not lend its settings to these processes.
FOREIGN = ("SPARK_HOME", "SPARK_CONF_DIR", "SPARK_LOCAL_IP", "PYSPARK_PYTHON", "PYTHONPATH")


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Run ``dbx-llmtrain`` with arguments in an empty folder."""
    for name in FOREIGN:
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(Path(sys.executable).with_name("dbx-llmtrain")), *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
        )

    return run


def test_probe_prints_json_alone_on_standard_output(shell) -> None:  # type: ignore[no-untyped-def]
    done = shell("probe", "--json", "--master", "local[1]", "--conf", "spark.app.name=mine")
    assert done.returncode == 0, done.stderr
    report = ClusterReport.model_validate_json(done.stdout)
    assert report.local
    assert report.master == "local[1]"


def test_a_local_cluster_is_started_and_leaves_nothing(shell) -> None:  # type: ignore[no-untyped-def]
    import pyspark

    work = Path(pyspark.__file__).parent / "work"
    before = set(work.glob("*"))
    done = shell("probe", "--master", "local-cluster[1,1,512]")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Cluster local-cluster[1,1,512]\n")
    assert set(work.glob("*")) <= before


def test_input_that_cannot_be_trained_on_is_code_2(shell, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    config = "model: {source: missing-folder/}\ndata: {train: rows.jsonl}\n"
    (tmp_path / "config.yaml").write_text(config)
    done = shell("train", "config.yaml", "--master", "local[1]")
    assert done.returncode == 2, done.stderr
    assert "error: " in done.stderr
    assert "missing-folder" in done.stderr
    assert "Traceback" not in done.stderr
