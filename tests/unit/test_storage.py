from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from dbx_llmtrain import storage


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("/Volumes/a/b", "/Volumes/a/b"),
        ("dbfs:/Volumes/a/b", "/Volumes/a/b"),
        ("dbfs:/x/y", "/dbfs/x/y"),
        ("dbfs:///x", "/dbfs/x"),
        ("runs", "runs"),
        ("~/x", str(Path.home() / "x")),
    ],
)
def test_local_path(given: str, expected: str) -> None:
    assert str(storage.local_path(given)) == expected


def test_entries_and_copies_have_the_hash_of_the_content(tmp_path: Path) -> None:
    source = tree(tmp_path / "a", {"x.txt": "one", "sub/y.txt": "two"})
    digest = hashlib.sha256(b"one").hexdigest()
    assert storage.hash_file(source / "x.txt") == digest
    found = storage.publish_folder(source, tmp_path / "b")
    assert found == storage.entries(source) == storage.entries(tmp_path / "b")
    assert [entry.path for entry in found] == ["sub/y.txt", "x.txt"]
    assert (found[1].size, found[1].sha256) == (3, digest)
    assert storage.entries(source, [source / "x.txt"]) == found[1:]
    assert storage.copy_file(source / "x.txt", tmp_path / "deep" / "er" / "x") == digest


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "new" / "file"
    storage.write_text(target, "text")
    storage.write_text(target, "more")
    assert target.read_text() == "more"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        storage.write_text(tmp_path / "folder", "text")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "new"]


def test_a_folder_counts_with_a_manifest_and_all_its_files(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", {"x.txt": "one"})
    assert storage.read_manifest(folder) is None
    files = [entry.model_dump() for entry in storage.entries(folder)]
    storage.write_manifest(folder, {"files": files, "step": 3})
    assert storage.read_manifest(folder) == {"files": files, "step": 3}
    (folder / "x.txt").write_text("longer")
    assert storage.read_manifest(folder) is None
    (folder / "x.txt").unlink()
    assert storage.read_manifest(folder) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": [{"path": 1}]}', '{"files": 3}'])
def test_a_broken_manifest_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / storage.MANIFEST).write_text(text)
    assert storage.read_manifest(tmp_path) is None


def test_a_manifest_that_was_changed_does_not_count(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", {"x.txt": "one"})
    files = [entry.model_dump() for entry in storage.entries(folder)]
    content: dict[str, object] = {"files": files, "rates": {2: 0.1, 10: 1e-5}, "state": None}
    storage.write_manifest(folder, content)
    read = storage.read_manifest(folder)
    assert read == content | {"rates": {"2": 0.1, "10": 1e-5}}
    manifest = folder / storage.MANIFEST
    manifest.write_text(manifest.read_text().replace("1e-05", "1e-04"))
    assert storage.read_manifest(folder) is None
    # One without a hash, as earlier versions wrote it.
    manifest.write_text(json.dumps(content))
    assert storage.read_manifest(folder) == read


def test_every_file_of_a_folder_is_verified(tmp_path: Path) -> None:
    folder = tree(tmp_path / "a", {"x.txt": "one", "y/z.txt": "two"})
    assert storage.verify(folder) == ["incomplete: no valid manifest.json, or a file is missing"]
    files = [entry.model_dump() for entry in storage.entries(folder)]
    storage.write_manifest(folder, {"files": files})
    assert storage.verify(folder) == []
    (folder / "y" / "z.txt").write_text("twp")
    assert storage.verify(folder) == ["y/z.txt is damaged: its hash is not the manifest's"]


def test_complete_and_torn_checkpoints(tmp_path: Path) -> None:
    assert storage.checkpoints(tmp_path) == storage.torn(tmp_path) == []
    for step in (2, 10, 9, 1):
        folder = tree(storage.checkpoint_folder(tmp_path, step), {"x": "y"})
        files = [entry.model_dump() for entry in storage.entries(folder)]
        storage.write_manifest(folder, {"files": files})
    (storage.checkpoint_folder(tmp_path, 10) / storage.MANIFEST).unlink()
    (storage.checkpoint_folder(tmp_path, 2) / "x").unlink()
    tree(tmp_path / "checkpoints", {"notes/x": "", "step-x/x": "", "step--1/x": "", "step-3": ""})
    names = [
        [path.name for path in found(tmp_path)] for found in (storage.checkpoints, storage.torn)
    ]
    assert names == [
        ["step-00000009", "step-00000001"],
        ["step-00000010", "step-3", "step-00000002"],
    ]
    assert storage.step_of(tmp_path / "step-00000010") == 10
    assert storage.step_of(tmp_path / "step-x") is storage.step_of(tmp_path / "export") is None


def test_free_space_of_what_is_not_there_yet(tmp_path: Path) -> None:
    free = storage.free_space(tmp_path / "not" / "yet")
    assert free == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    assert storage.free_space(Path("/proc/self")) is None  # it has no size
    assert storage.device(tmp_path / "not" / "yet") == tmp_path.stat().st_dev


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    assert storage.latest_checkpoint(tmp_path) is None
    for step in (2, 10, 9):
        folder = storage.checkpoint_folder(tmp_path, step)
        tree(folder, {"x": "y"})
        if step != 10:
            entries = [entry.model_dump() for entry in storage.entries(folder)]
            storage.write_manifest(folder, {"files": entries})
    assert storage.checkpoint_folder(tmp_path, 9).name == "step-00000009"
    assert storage.latest_checkpoint(tmp_path) == storage.checkpoint_folder(tmp_path, 9)


def test_remove(tmp_path: Path) -> None:
    storage.remove(tree(tmp_path / "a", {"b/c": "d"}))
    storage.remove(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_growing_file_is_republished_whole(tmp_path: Path) -> None:
    shared = tmp_path / "shared" / "log"
    file = storage.GrowingFile(tmp_path / "local" / "log", shared, every=3600)
    file.write(b"one\n")
    assert shared.read_bytes() == b"one\n"  # the first write is published at once
    file.write(b"two \xff\n")
    assert shared.read_bytes() == b"one\n"
    assert file.tail(6) == "two \ufffd\n"
    file.close()
    assert shared.read_bytes() == b"one\ntwo \xff\n"
    assert [path.name for path in shared.parent.iterdir()] == ["log"]


def test_a_growing_file_never_raises_for_shared_storage(tmp_path: Path) -> None:
    (tmp_path / "shared").write_text("a file where a folder is needed")
    file = storage.GrowingFile(tmp_path / "log", tmp_path / "shared" / "log")
    file.write(b"kept")
    file.close()
    assert (tmp_path / "log").read_bytes() == b"kept"


def test_json_of_a_manifest_is_sorted(tmp_path: Path) -> None:
    storage.write_manifest(tmp_path, {"b": 1, "a": 2})
    content = json.loads((tmp_path / storage.MANIFEST).read_text())
    assert list(content) == ["a", "b", "sha256"]
