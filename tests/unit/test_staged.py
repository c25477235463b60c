"""Copies on a node's own disk: made once, checked, kept in use, removed where room is needed."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain import channel, storage
from dbx_llmtrain.channel import Server
from dbx_llmtrain.errors import StagingError
from dbx_llmtrain.records import Artifact
from dbx_llmtrain.reports import NodeReport
from dbx_llmtrain.worker import copies, folders, locks, node, room, staged
from tests import sample

pytestmark = pytest.mark.timeout(120)

MIB = 1024 * 1024

PROGRAM = """
import json, os, sys, time
from dbx_llmtrain.worker import staged
held = staged.hold(json.loads(sys.argv[1]), sys.argv[2])
print(*[each.folder.stat().st_ino for each in held], flush=True)
if len(sys.argv) > 3:
    time.sleep(60)
"""


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


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """What starts a process that holds copies (``stay``: until it is ended)."""
    running = []

    def start(
        artifacts: list[dict[str, Any]], local: Path, *, stay: bool = True
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", PROGRAM, json.dumps(artifacts), str(local)]
        process = subprocess.Popen(
            [*command, *(["stay"] if stay else [])], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate(timeout=20)


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def slow_file(folder: Path, content: bytes, name: str = "slow.bin") -> Path:
    """A file that gives what somebody writes to it, once."""
    path = folder / name
    path.write_bytes(content)
    return path


def as_pipe(path: Path) -> Path:
    path.unlink()
    os.mkfifo(path)
    return path


def ledger(local: Path, fingerprint: str = "f1") -> list[dict[str, Any]]:
    """The files that a copy in the making has finished."""
    path = local / "models" / f".{fingerprint}.partial" / room.LEDGER
    try:
        return [json.loads(line) for line in path.read_text().splitlines()[1:]]
    except OSError:
        return []


def test_stage_copies_and_reuses(source: Path, tmp_path: Path) -> None:
    local = str(tmp_path / "local")
    target = staged.stage(artifact(source), local)
    assert target == tmp_path / "local" / "models" / "f1"
    weights = target / "sub" / "weights.bin"
    assert weights.read_bytes() == (source / "sub" / "weights.bin").read_bytes()
    assert not (target / room.LEDGER).exists()
    before = weights.stat().st_ino
    known = artifact(source)
    shutil.rmtree(source)  # a finished copy does not need its source
    assert staged.stage(known, local) == target
    assert weights.stat().st_ino == before


def test_a_second_run_takes_no_time(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(500):
        (folder / f"{number}.arrow").write_bytes(b"x" * number)
    known = artifact(folder)
    staged.stage(known, str(tmp_path / "local"))
    began = time.monotonic()
    staged.stage(known, str(tmp_path / "local"))
    assert time.monotonic() - began < 1.0


def test_the_driver_hears_of_copies_and_only_of_them(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(node.NODE_VARIABLE, "worker-1")
    monkeypatch.setattr(copies, "_EVERY_S", 0.01)
    wanted = [artifact(source, "f1"), artifact(source, "f2")]
    size = 2 * (200_000 + 2)
    got: list[dict[str, Any]] = []
    server = Server("127.0.0.1")
    events = (server.address, server.key)
    threads = threading.active_count()
    try:
        with server.listening(got.append):
            found = staged.stage_all(wanted, str(tmp_path / "local"), events)
            assert got[-1] == {"copied": {"node": "worker-1", "done": size, "total": size}}
            amounts = [message["copied"]["done"] for message in got]
            assert amounts == sorted(amounts)
            got.clear()
            assert staged.stage_all(wanted, str(tmp_path / "local"), events) == found
            assert got == [], "what is there costs nothing"
            shutil.rmtree(found["f2"])
            staged.stage_all(wanted, str(tmp_path / "local"), events)
            assert got[-1]["copied"]["total"] == size // 2, "only what is copied counts"
            (source / "config.json").unlink()
            broken = wanted[0] | {"fingerprint": "f3"}
            with pytest.raises(StagingError):
                staged.stage_all([broken], str(tmp_path / "local"), events)
    finally:
        server.close()
    assert threading.active_count() < threads


def test_a_driver_that_is_gone_does_not_hold_up_copies(source: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    found = staged.stage_all([artifact(source)], str(tmp_path / "local"), ("127.0.0.1:9", "key"))
    assert time.monotonic() - started < 10.0
    assert (Path(found["f1"]) / "config.json").read_text() == "{}"


def test_a_rank_copies_for_itself_holds_it_and_tells(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a node that joined later, or was busy when the others got their copies."""
    model = Artifact.model_validate(artifact(source))
    data = Artifact.model_validate(artifact(source, "f2") | {"kind": "data"})
    plan = sample.run_plan(tmp_path, local_dir=str(tmp_path / "local"))
    plan = plan.model_copy(
        update={
            "model": plan.model.model_copy(update={"artifact": model}),
            "data": plan.data.model_copy(update={"artifact": data}),
        }
    )
    got: list[dict[str, Any]] = []
    server = Server("127.0.0.1")
    monkeypatch.setenv(channel.ADDRESS, server.address)
    monkeypatch.setenv(channel.SECRET, server.key)
    try:
        with server.listening(got.append):
            found = folders.stage(plan, tmp_path / "scratch")
    finally:
        server.close()
    assert (found.model / "config.json").read_text() == "{}"
    assert (found.data / "sub" / "weights.bin").stat().st_size == 200_000
    assert got[-1]["copied"]["done"] == got[-1]["copied"]["total"] == 2 * 200_002
    assert in_use(tmp_path / "local") == {"models/f1": True, "data/f2": True}
    for each in found.held:
        each.release()
    assert in_use(tmp_path / "local") == {"models/f1": False, "data/f2": False}


def in_use(local: Path) -> dict[str, bool]:
    report = NodeReport.model_validate(node.report(str(local)))
    return {copy.name: copy.in_use for copy in report.copies}


def test_stage_repairs_a_damaged_copy_unless_it_is_in_use(source: Path, tmp_path: Path) -> None:
    local = str(tmp_path / "local")
    target = staged.stage(artifact(source), local)
    (target / "config.json").write_text("longer than it was")
    staged.stage(artifact(source), local)
    assert (target / "config.json").read_text() == "{}"
    with staged.using([artifact(source)], local):
        (target / "config.json").write_text("longer than it was")
        with pytest.raises(StagingError, match=r"f1 is damaged .* in use by another run: wait"):
            staged.stage(artifact(source), local)
    staged.stage(artifact(source), local)
    assert (target / "config.json").read_text() == "{}"


def test_a_copy_from_before_the_machine_was_started_is_read_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not on the disk yet is lost, and the sizes are right all the same."""
    local = str(tmp_path / "local")
    weights = staged.stage(artifact(source), local) / "sub" / "weights.bin"
    before = weights.stat().st_ino
    boot = tmp_path / "boot"
    monkeypatch.setattr(copies, "_BOOT", boot)
    boot.write_text("second\n")
    staged.stage(artifact(source), local)
    assert weights.stat().st_ino == before
    weights.write_bytes(bytes(200_000))
    staged.stage(artifact(source), local)
    assert weights.read_bytes() == bytes(200_000), "once is enough"
    boot.write_text("third\n")
    staged.stage(artifact(source), local)
    assert weights.read_bytes() == (source / "sub" / "weights.bin").read_bytes()
    boot.unlink()
    assert copies.boot_id() == ""


def test_stage_removes_what_is_no_copy(source: Path, tmp_path: Path) -> None:
    kind = tmp_path / "local" / "models"
    (kind / ".f1.partial").mkdir(parents=True)
    (kind / ".f1.partial" / "half").write_bytes(b"x" * 100)
    (kind / "f1").mkdir()  # a folder without the marker is not a copy
    target = staged.stage(artifact(source), str(tmp_path / "local"))
    assert sorted(path.name for path in kind.iterdir()) == ["f1"]
    assert not (target / "half").exists()


def test_a_killed_copy_goes_on_where_it_was(
    source: Path, tmp_path: Path, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    content = os.urandom(300_000)
    slow = slow_file(source, content)
    known = artifact(source)
    as_pipe(slow)
    local = tmp_path / "local"
    process = started([known], local)
    with slow.open("wb", buffering=0) as writer:
        writer.write(content[:1000])
        partial = local / "models" / ".f1.partial"
        until(lambda: len(ledger(local)) == 2)
        until(lambda: (partial / "slow.bin").stat().st_size == 1000)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    inode = (partial / "sub" / "weights.bin").stat().st_ino
    (partial / "sub" / "left.tmp").write_text("by somebody")
    with (partial / room.LEDGER).open("a") as file:
        file.write('{"path": "slow.bin", "si')  # torn
    slow.unlink()
    slow.write_bytes(content)
    (source / "config.json").unlink()  # what is finished is not read again
    target = staged.stage(known, str(local))
    assert (target / "sub" / "weights.bin").stat().st_ino == inode
    assert (target / "slow.bin").read_bytes() == content
    assert sorted(path.name for path in storage.list_files(target)) == [
        room.MARKER, "config.json", "slow.bin", "weights.bin",
    ]  # fmt: skip


def test_a_ledger_of_another_boot_or_with_other_sizes_is_not_believed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = artifact(source)["files"]
    partial = tmp_path / "partial"
    shutil.copytree(source, partial)
    assert copies.begin(files, files, partial) == []
    assert copies.finished(files, partial) == files
    (partial / "config.json").write_text("torn")
    assert [entry["path"] for entry in copies.finished(files, partial)] == ["sub/weights.bin"]
    assert not (partial / "config.json").exists()
    monkeypatch.setattr(copies, "_BOOT", tmp_path / "none")
    assert copies.finished(files, partial) == []
    assert not partial.exists()


def test_what_is_finished_is_kept_where_storage_failed_for_a_moment(
    source: Path, tmp_path: Path
) -> None:
    local, known = tmp_path / "local", artifact(source)
    files = known["files"]
    partial = local / "models" / ".f1.partial"
    shutil.copytree(source, partial)
    copies.begin(files, files, partial)  # an earlier copy was killed
    (source / "more.bin").write_text("12345")
    more = artifact(source)["files"][1]
    # Linux has no page there: reading it is an input/output error.
    failing = known | {"files": [*files, more | {"origin": "/proc/self/mem"}]}
    with pytest.raises(StagingError, match="Input/output error"):
        staged.stage(failing, str(local))
    assert ledger(local) == files
    inode = (partial / "config.json").stat().st_ino
    target = staged.stage(known | {"files": [*files, more]}, str(local))
    assert (target / "config.json").stat().st_ino == inode
    assert (target / "more.bin").read_text() == "12345"


def fault(source: dict[str, Any], local: Path) -> str:
    with pytest.raises(StagingError) as caught:
        staged.stage(source, str(local))
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


def test_the_first_fault_ends_the_other_files(source: Path, tmp_path: Path) -> None:
    """One of them would take for ever."""
    known = artifact(source)
    (source / "config.json").unlink()
    entry = {"path": "endless.bin", "size": 10**6, "sha256": "0", "origin": "/dev/zero"}
    known["files"].append(entry)
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
        staged.stage(artifact(source), str(root))


def test_stage_checks_the_free_space_first(source: Path, tmp_path: Path) -> None:
    known = artifact(source)
    known["files"][0]["size"] = 10**18
    cause = fault(known, tmp_path / "local")
    assert " bytes free, 1,000,000,000,000," in cause
    assert "cluster.local_dir" in cause


def test_copies_of_one_disk_are_listed_with_their_sizes(source: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    staged.stage(artifact(source), str(local))
    (local / "data" / ".f2.partial").mkdir(parents=True)
    (local / "data" / ".f2.partial" / "rows").write_bytes(b"x" * 100)
    report = NodeReport.model_validate(node.report(str(local)))
    listed = {copy.name: copy.size for copy in report.copies}
    assert listed["data/f2"] == 100
    assert 200_002 <= listed["models/f1"] < 201_000
    with locks.try_lock(local / "locks" / "models-f1") as free:
        assert free, "looking does not keep it"


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own with so much room."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk can only be mounted as root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def blob(folder: Path, name: str, mebibytes: int) -> dict[str, Any]:
    """An artifact of one file of so many MiB, and its fingerprint ``name``."""
    path = folder / name
    path.mkdir()
    (path / "weights.bin").write_bytes(name.encode() * (mebibytes * MIB // len(name)))
    return artifact(path, name)


def there(disk: Path) -> set[str]:
    return {path.name for path in (disk / "models").iterdir()}


def test_copies_make_room_for_others_unless_they_are_in_use(tmp_path: Path) -> None:
    a, b, c = (blob(tmp_path, name, 10) for name in "abc")
    d, e = (blob(tmp_path, name, 20) for name in "de")
    f = blob(tmp_path, "f", 40)
    with small_disk(tmp_path / "disk", "60m") as disk:
        for each in (b, a, c):
            staged.stage(each, str(disk))
        with staged.using([b], str(disk)):
            staged.stage(a, str(disk))  # used again: now c is the oldest that nobody uses
            staged.stage(d, str(disk))
            assert there(disk) == {"a", "b", "d"}
            with staged.using([e], str(disk)):
                assert there(disk) == {"b", "e"}
                with pytest.raises(StagingError) as caught:
                    staged.stage(f, str(disk))
                assert there(disk) == {"b", "e"}, "nothing is removed in vain"
                told = caught.value.nodes[node.node_id()]
                assert "bytes free, 41,943,040 are needed for" in told
                assert "set cluster.local_dir" in told
            with pytest.raises(StagingError, match=r"free and 20,9.* in copies that nobody uses"):
                staged.stage(blob(tmp_path, "g", 45), str(disk))
        staged.stage(f, str(disk))
        assert there(disk) == {"f"}


def test_copies_of_one_plan_do_not_push_each_other_out(tmp_path: Path) -> None:
    a, b, c = (blob(tmp_path, name, 12) for name in "abc")
    with small_disk(tmp_path / "disk", "44m") as disk:
        staged.stage(a, str(disk))
        staged.stage(b, str(disk))
        staged.stage_all([a, c], str(disk))
        assert there(disk) == {"a", "c"}


def test_two_jobs_do_not_count_on_the_same_room(
    tmp_path: Path, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    a, b = (blob(tmp_path, name, 20) for name in "ab")
    pipe = as_pipe(tmp_path / "a" / "weights.bin")
    with small_disk(tmp_path / "disk", "50m") as disk:
        process = started([a], disk)
        with pipe.open("wb", buffering=0) as writer:
            writer.write(b"a" * MIB)
            with pytest.raises(StagingError, match=r"beside 1\d,\d{3},\d{3} for other copies"):
                staged.stage(b, str(disk))
            writer.write(b"a" * (19 * MIB))
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 30)[0], "it has its copy"
        with pytest.raises(StagingError, match="are needed"):
            staged.stage(b, str(disk))
        process.kill()
        process.wait(10)
        staged.stage(b, str(disk))  # who has ended uses nothing
        assert there(disk) == {"b"}


def test_a_full_disk_is_told_and_left_as_it_was(source: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "18m") as disk:
        other = staged.stage(artifact(source, "other"), str(disk))
        known = artifact(source)
        (source / "config.json").write_bytes(b"x" * 19 * MIB)  # grew after it was registered
        with pytest.raises(StagingError, match="No space left on device"):
            staged.stage(known, str(disk))
        assert there(disk) == {"other"}
        assert (other / "config.json").read_text() == "{}"
        (disk / "filler").write_bytes(b"x" * (shutil.disk_usage(disk).free - 4096))
        (source / "config.json").write_text("{}")
        with pytest.raises(StagingError, match="are needed"):
            staged.stage(known, str(disk))


def test_stage_by_several_processes_reads_the_source_once(
    source: Path, tmp_path: Path, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    content = os.urandom(100_000)
    slow = slow_file(source, content)
    known = artifact(source)
    as_pipe(slow)  # what is read from it is gone
    running = [started([known], tmp_path / "local", stay=False) for _ in range(4)]
    with slow.open("wb") as writer:
        writer.write(content)
    printed = {process.communicate(timeout=60)[0] for process in running}
    assert [process.returncode for process in running] == [0] * 4
    assert len(printed) == 1
