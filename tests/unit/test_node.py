"""Once per node: reports, locks and copies on this machine's disk."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from dbx_llmtrain.errors import StagingError
from dbx_llmtrain.reports import NodeReport
from dbx_llmtrain.worker import gpus, locks, node

MIB = 1024 * 1024


def fake_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_gpus_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        "0, GPU-a, NVIDIA H200, 143771, 4, 570.1, 9.0\n"
        "1, GPU-b, NVIDIA GB10, [N/A], [N/A], 580.2, [N/A]"
    )
    fake_smi(tmp_path, f'[ "$2" = "--format=csv,noheader,nounits" ] && echo "{lines}"', monkeypatch)
    found, problem = gpus.read_gpus()
    assert problem == ""
    assert [gpu["uuid"] for gpu in found] == ["GPU-a", "GPU-b"]
    assert found[0]["memory_total"] == 143771 * MIB
    assert found[0]["memory_used"] == 4 * MIB
    assert found[1]["memory_total"] == 0
    assert found[1]["name"] == "NVIDIA GB10"
    assert [gpu["capability"] for gpu in found] == ["9.0", None]


def test_an_old_nvidia_smi_does_not_know_the_compute_capability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = 'Field "compute_cap" is not a valid field to query.'
    script = (
        f"case \"$1\" in *compute_cap*) echo '{refusal}'; exit 2;; esac\n"
        "echo '0, GPU-a, Tesla T4, 15360, 3, 470.2'"
    )
    fake_smi(tmp_path, script, monkeypatch)
    found, problem = gpus.read_gpus()
    assert problem == ""
    assert [(gpu["name"], gpu["capability"]) for gpu in found] == [("Tesla T4", None)]


def test_no_nvidia_smi_is_a_normal_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.read_gpus() == ([], "")


def test_no_devices_is_a_normal_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, 'echo "No devices were found"; exit 6', monkeypatch)
    assert gpus.read_gpus() == ([], "")


def test_failing_nvidia_smi_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, 'echo "Failed to initialize NVML" >&2; exit 9', monkeypatch)
    report = NodeReport.model_validate(node.report(str(tmp_path)))
    assert report.gpus == ()
    assert "exit code 9" in report.problem
    assert "Failed to initialize NVML" in report.problem


def test_unknown_lines_of_nvidia_smi_are_reported() -> None:
    found, problem = gpus.parse_gpus("0, GPU-a, H200, 1, 1, 5\nsomething else\n\n")
    assert len(found) == 1
    assert "something else" in problem


def test_nvidia_smi_that_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, "", monkeypatch)
    (tmp_path / "nvidia-smi").write_bytes(b"\x00\x01")
    assert "cannot be run" in gpus.read_gpus()[1]


def test_hanging_nvidia_smi_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, "exec sleep 20", monkeypatch)
    monkeypatch.setattr(gpus, "_TIMEOUT_S", 0.3)
    assert "did not answer" in gpus.read_gpus()[1]


def test_report_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.9")
    report = NodeReport.model_validate(node.report(str(tmp_path / "new"), "127.0.0.1"))
    assert report.memory_total > report.memory_available > 0
    assert report.disk_free > 0
    assert report.cpus >= 1
    assert report.packages["torch"]
    assert {"127.0.0.1", "127.0.0.9"} <= set(report.addresses)
    assert report.local_dir == str(tmp_path / "new")
    assert report.problem == ""


@pytest.mark.parametrize("backport", [False, True])
def test_what_an_interrupted_installation_has_left_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backport: bool
) -> None:
    if backport:  # it reads metadata for everybody from then on
        pytest.importorskip("importlib_metadata")
    (tmp_path / "torch-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    report = NodeReport.model_validate(node.report(str(tmp_path / "local")))
    assert "torch" not in report.packages
    assert report.packages["transformers"]


def test_report_says_what_it_could_not_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    report = NodeReport.model_validate(node.report(str(tmp_path / "file")))
    assert "cluster.local_dir" in report.problem
    assert report.disk_free == 0


def test_node_id(monkeypatch: pytest.MonkeyPatch) -> None:
    assert node.node_id() == os.uname().nodename
    monkeypatch.setenv("DBX_LLMTRAIN_NODE", "second")
    assert node.node_id() == "second"


def test_local_dir_default_is_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(node, "_DATABRICKS_DISK", str(tmp_path / "none"))
    assert node.local_dir() == tmp_path / "dbx_llmtrain"
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(node, "_DATABRICKS_DISK", str(tmp_path / "disk"))
    assert node.local_dir() == tmp_path / "disk" / "dbx_llmtrain"
    shutil.rmtree(tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "dbx_llmtrain").write_text("a file is in the way")
    assert node.local_dir() == tmp_path / "dbx_llmtrain"


def test_local_dir_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StagingError, match=r"set cluster\.local_dir") as caught:
        node.local_dir(str(tmp_path / "file" / "below"))
    assert list(caught.value.nodes) == [node.node_id()]


def test_call_keeps_an_exception(tmp_path: Path) -> None:
    outcome = node.call("dbx_llmtrain.worker.node:no_such_function", ())
    assert outcome["error"].startswith("AttributeError")
    assert "Traceback" in outcome["traceback"]
    outcome = node.call("dbx_llmtrain.worker.node:local_dir", ("/proc/nothing",))
    assert outcome["error"].startswith("/proc/nothing cannot be written")
    assert outcome["traceback"] == ""


def test_once_is_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    job, target = f"job-{time.time()}", "dbx_llmtrain.worker.node:node_id"
    first = node.once(job, [], 0.0, target, ())
    assert first is not None
    assert first["value"] == node.node_id()
    assert node.once(job, [], 0.0, target, ()) is None
    assert node.once("another", [node.node_id()], 0.0, target, ()) is None
    old = tmp_path / f"dbx_llmtrain-{os.getuid()}" / "jobs" / f"{job}-{node.node_id()}"
    os.utime(old, (1, 1))
    assert node.once(job, [], 0.0, target, ()) is None
    assert time.time() - old.stat().st_mtime < 60  # this job still goes on
    os.utime(old, (time.time() - 3700,) * 2)
    with locks.file_lock(old):
        node.once("third", [], 0.0, target, ())
        assert old.exists()
    node.once("fourth", [], 0.0, target, ())
    assert sorted(path.name for path in old.parent.iterdir()) == [
        f"fourth-{node.node_id()}",
        f"third-{node.node_id()}",
    ]


def test_private_dir_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert node.private_dir().stat().st_mode & 0o077 == 0
    assert node.private_dir() == node.private_dir()
