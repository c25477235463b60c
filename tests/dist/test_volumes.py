"""Everything that ranks write, by the rules of a Unity Catalog volume (``tests/volumes.c``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain import storage
from dbx_llmtrain.events import read_events
from tests import volumes
from tests.dist import plans
from tests.dist.launch import two_ranks

pytestmark = pytest.mark.dist

ATTEMPTS = """
import errno, json, os, shutil, sys
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from dbx_llmtrain import storage

folder, outside = Path(sys.argv[1]), Path(sys.argv[2])

def seek():
    with (folder / "seek").open("wb") as file:
        file.write(b"abc")
        file.seek(1)
        file.write(b"d")

def write_at():
    file = os.open(folder / "p", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.pwrite(file, b"x", 5)

def grow():
    log = storage.GrowingFile(outside / "log", folder / "log", every=0)
    log.write(b"one")
    log.write(b"two")
    log.close()

def link():
    (folder / "link").symlink_to(folder / "first")

found = {}
(folder / "folder").mkdir()
for name, action in {
    "write": lambda: (folder / "first").write_text("x"),
    "write again": lambda: (folder / "first").write_text("xy"),
    "read": (folder / "first").read_text,
    "copy": lambda: shutil.copyfile(folder / "first", folder / "second"),
    "rename": lambda: (folder / "second").rename(folder / "third"),
    "write_text": lambda: storage.write_text(folder / "first", "changed"),
    "copy_file": lambda: storage.copy_file(folder / "first", folder / "a" / "b"),
    "growing file": grow,
    "append": lambda: (folder / "first").open("a"),
    "change": lambda: (folder / "first").open("r+"),
    "seek": seek,
    "truncate": lambda: os.truncate(folder / "first", 1),
    "pwrite": write_at,
    "rename folder": lambda: (folder / "folder").rename(folder / "other"),
    "rename from elsewhere": lambda: os.rename(outside / "log", folder / "moved"),
    "link": link,
    "safetensors": lambda: save_file({"a": np.zeros(3)}, folder / "x.safetensors"),
}.items():
    try:
        action()
        found[name] = "done"
    except OSError as error:
        found[name] = errno.errorcode[error.errno]
    except Exception as error:
        found[name] = str(error)
found["free"] = storage.free_space(folder)
found["text"] = (folder / "first").read_text()
found["log"] = (folder / "log").read_text()
found["there"] = sorted(path.name for path in folder.iterdir())
print(json.dumps(found))
"""


@pytest.fixture
def volume(tmp_path: Path) -> volumes.Volume:
    made = volumes.make(tmp_path / "rules")
    if made is None:
        pytest.skip(volumes.NO_COMPILER)
    return made


def attempts(volume: volumes.Volume, outside: Path) -> dict[str, Any]:
    outside.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", ATTEMPTS, str(volume.folder), str(outside)],
        cwd=Path(__file__).parents[2],
        env=os.environ | volume.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_rules(volume: volumes.Volume, tmp_path: Path) -> None:
    found = attempts(volume, tmp_path / "outside")
    allowed = {"write", "write again", "read", "copy", "rename", "write_text", "copy_file"}
    for name in {*allowed, "growing file"}:
        assert found.pop(name) == "done", name
    assert "os error 95" in found.pop("safetensors")
    assert found.pop("rename from elsewhere") == "EXDEV"
    assert found.pop("free") is None
    assert found.pop("text") == "changed"
    assert found.pop("log") == "onetwo"
    there = {"a", "first", "folder", "log", "third", "seek", "p"}
    assert set(found.pop("there")) == there
    assert set(found.values()) == {"ENOTSUP"}
    assert len(volume.refused()) == len(found) + 1
    assert any(line.startswith("seek-and-write ") for line in volume.refused())


def test_storage_that_cannot_rename_at_all_is_written_in_place(
    volume: volumes.Volume, tmp_path: Path
) -> None:
    volume.fixed.touch()
    found = attempts(volume, tmp_path / "outside")
    assert found["rename"] == "ENOTSUP"
    assert found["write_text"] == found["growing file"] == "done"
    assert (found["text"], found["log"]) == ("changed", "onetwo")
    assert not [name for name in found["there"] if name.startswith(".")]


@pytest.mark.slow
def test_two_ranks_train_go_on_and_export(volume: volumes.Volume, tmp_path: Path) -> None:
    """A run of 8 steps, and one that goes on from its step 4 in the same folder."""
    settings: dict[str, Any] = {"strategy": "fsdp", "world_size": 2, "every": 4}
    settings |= {"run_dir": str(volume.folder / "runs" / "first"), "train": {"eval_every": 3}}
    whole = plans.plan(tmp_path, "run", **settings)
    start = storage.checkpoint_folder(Path(whole.run_dir), 4)
    rest = whole.model_copy(update={"resume_from": str(start), "attempt": "second"})
    folders = []
    for plan in (whole, rest):
        folder = tmp_path / f"plan-{plan.attempt}"
        folder.mkdir()
        for rank in (0, 1):
            (folder / f"plan-{rank}.json").write_text(plan.model_dump_json())
        folders.append(folder)
    two_ranks(tmp_path, folders, os.environ | volume.environment)
    outcomes = [json.loads((folder / "outcome-0.json").read_text()) for folder in folders]
    assert volume.refused() == []
    assert outcomes[0]["metrics"]["eval_loss"] == outcomes[1]["metrics"]["eval_loss"]
    run_dir = Path(whole.run_dir)
    assert [storage.step_of(path) for path in storage.checkpoints(run_dir)] == [8, 4]
    assert [storage.verify(path) for path in storage.checkpoints(run_dir)] == [[], []]
    kinds = {event.kind for event in read_events(run_dir / "events.jsonl", attempt="second")}
    assert {"started", "step", "eval", "checkpoint", "export", "finished"} <= kinds
    assert not list(run_dir.rglob(".*.*[0-9]")), "temporary files are left"
    from transformers import AutoModelForCausalLM

    _, report = AutoModelForCausalLM.from_pretrained(
        outcomes[1]["model_path"], output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
