"""Once per node: reports, locks and copies on this machine's disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain import storage
from dbx_llmtrain.channel import Server
from dbx_llmtrain.errors import StagingError
from dbx_llmtrain.records import NodeReport
from dbx_llmtrain.worker import copies, gpus, node

MIB = 1024 * 1024


def artifact(folder: Path, fingerprint: str = "f1") -> dict[str, Any]:
    files = [entry.model_dump() for entry in storage.entries(folder)]
    return {"kind": "models", "source": str(folder), "fingerprint": fingerprint, "files": files}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "weights.bin").write_bytes(os.urandom(200_000))
    return folder


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


def test_stage_copies_and_reuses(source: Path, tmp_path: Path) -> None:
    local = str(tmp_path / "local")
    target = node.stage(artifact(source), local)
    assert target == tmp_path / "local" / "models" / "f1"
    weights = target / "sub" / "weights.bin"
    assert weights.read_bytes() == (source / "sub" / "weights.bin").read_bytes()
    before = weights.stat().st_ino
    known = artifact(source)
    shutil.rmtree(source)  # a finished copy does not need its source
    assert node.stage(known, local) == target
    assert weights.stat().st_ino == before


def test_the_driver_hears_of_copies_and_only_of_them(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(node.NODE_VARIABLE, "worker-1")
    monkeypatch.setattr(copies, "_EVERY_S", 0.01)
    staged = [artifact(source, "f1"), artifact(source, "f2")]
    size = 2 * (200_000 + 2)
    got: list[dict[str, Any]] = []
    server = Server("127.0.0.1")
    events = (server.address, server.key)
    threads = threading.active_count()
    try:
        with server.listening(got.append):
            folders = node.stage_all(staged, str(tmp_path / "local"), events)
            assert got[-1] == {"copied": {"node": "worker-1", "done": size, "total": size}}
            amounts = [message["copied"]["done"] for message in got]
            assert amounts == sorted(amounts)
            got.clear()
            assert node.stage_all(staged, str(tmp_path / "local"), events) == folders
            assert got == [], "what is there costs nothing"
            shutil.rmtree(folders["f2"])
            node.stage_all(staged, str(tmp_path / "local"), events)
            assert got[-1]["copied"]["total"] == size // 2, "only what is copied counts"
            (source / "config.json").unlink()
            broken = staged[0] | {"fingerprint": "f3"}
            with pytest.raises(StagingError):
                node.stage_all([broken], str(tmp_path / "local"), events)
    finally:
        server.close()
    assert threading.active_count() < threads


def test_a_driver_that_is_gone_does_not_hold_up_copies(source: Path, tmp_path: Path) -> None:
    staged = [artifact(source)]
    started = time.monotonic()
    folders = node.stage_all(staged, str(tmp_path / "local"), ("127.0.0.1:9", "key"))
    assert time.monotonic() - started < 10.0
    assert (Path(folders["f1"]) / "config.json").read_text() == "{}"


def test_stage_repairs_a_damaged_copy(source: Path, tmp_path: Path) -> None:
    local = str(tmp_path / "local")
    target = node.stage(artifact(source), local)
    (target / "config.json").write_text("longer than it was")
    node.stage(artifact(source), local)
    assert (target / "config.json").read_text() == "{}"


def test_stage_removes_what_a_killed_copy_left(source: Path, tmp_path: Path) -> None:
    kind = tmp_path / "local" / "models"
    (kind / ".f1.partial").mkdir(parents=True)
    (kind / ".f1.partial" / "half").write_bytes(b"x" * 100)
    (kind / "f1").mkdir()  # a folder without the marker is not a copy
    target = node.stage(artifact(source), str(tmp_path / "local"))
    assert sorted(path.name for path in kind.iterdir()) == ["f1"]
    assert not (target / "half").exists()


def fault(source: dict[str, Any], local: Path) -> str:
    with pytest.raises(StagingError) as caught:
        node.stage(source, str(local))
    assert not list((local / "models").glob("*")), "nothing is left"
    return caught.value.nodes[node.node_id()]


def test_stage_refuses_a_file_that_changed(source: Path, tmp_path: Path) -> None:
    known = artifact(source)
    changed = source / "sub" / "weights.bin"
    changed.write_bytes(changed.read_bytes()[:-1] + b"!")
    cause = fault(known, tmp_path / "local")
    assert str(changed) in cause
    assert known["files"][1]["sha256"] in cause
    assert storage.hash_file(changed) in cause


def test_stage_names_a_missing_file(source: Path, tmp_path: Path) -> None:
    known = artifact(source)
    (source / "config.json").unlink()
    assert "config.json is missing" in fault(known, tmp_path / "local")


def test_stage_names_a_source_that_the_node_does_not_see(source: Path, tmp_path: Path) -> None:
    known = artifact(source)
    shutil.rmtree(source)
    assert "storage that every node sees" in fault(known, tmp_path / "local")


def test_stage_says_when_it_has_no_place(source: Path, tmp_path: Path) -> None:
    root = tmp_path / "local"
    root.mkdir()
    (root / "models").write_text("a file in the way")
    with pytest.raises(StagingError, match=r"cannot be made \(.*set cluster\.local_dir"):
        node.stage(artifact(source), str(root))


def test_stage_checks_the_free_space_first(source: Path, tmp_path: Path) -> None:
    known = artifact(source)
    known["files"][0]["size"] = 10**18
    cause = fault(known, tmp_path / "local")
    assert "free, 1,000,000,000,000," in cause
    assert "cluster.local_dir" in cause


def test_stage_says_when_the_disk_runs_full(source: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=17m", "tmpfs", str(disk)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk can only be mounted as root")
    try:
        known = artifact(source)
        (source / "config.json").write_bytes(b"x" * 18 * MIB)  # grew after it was registered
        assert "No space left on device" in fault(known, disk)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


STAGER = """
import json, sys
from dbx_llmtrain.worker import node
print(node.stage(json.loads(sys.argv[1]), sys.argv[2]).stat().st_ino)
"""


def test_stage_by_several_processes_is_one_copy(source: Path, tmp_path: Path) -> None:
    import json

    command = [sys.executable, "-c", STAGER, json.dumps(artifact(source)), str(tmp_path / "local")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    printed = {process.communicate(timeout=60)[0] for process in started}
    assert [process.returncode for process in started] == [0] * 4
    assert len(printed) == 1


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
    with node.file_lock(old):
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
