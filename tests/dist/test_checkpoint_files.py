"""Checkpoints whose files are damaged, incomplete, or made to do harm."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from dbx_llmtrain import storage
from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.worker import checkpoint, writing
from dbx_llmtrain.worker.metadata import METADATA, read_metadata
from dbx_llmtrain.worker.saving import Saved, saving
from dbx_llmtrain.worker.world import World, open_world
from tests import sample

pytestmark = pytest.mark.dist

FILES = [METADATA, "__0_0.distcp", "rng-00000.json"]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    threads = torch.get_num_threads()
    with open_world(use_gpu=False) as alone:
        yield alone
    torch.set_num_threads(threads)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))


def save(world: World, run_dir: Path, steps: int = 1, **plan: Any) -> tuple[Path, list[Saved]]:
    """The last of so many checkpoints of a small model, and what was told of them."""
    network, told = model(), list[Saved]()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    path = storage.checkpoint_folder(run_dir, steps)
    plan = {"config": sample.config(), **plan}
    with saving(
        sample.run_plan(run_dir, **plan), world, run_dir / "scratch", tell=told.append
    ) as saver:
        for step in range(1, steps + 1):
            saver.save(
                storage.checkpoint_folder(run_dir, step), model=network, optimizer=optimizer,
                state={"step": step}, identity={}, metrics={},
            )  # fmt: skip
    return path, told


def load(folder: Path, world: World) -> dict[str, Any]:
    network = model()
    optimizer = torch.optim.SGD(network.parameters())
    return checkpoint.load(folder, model=network, optimizer=optimizer, world=world, identity={})


@pytest.fixture(scope="module")
def whole(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, _ = save(world, tmp_path_factory.mktemp("whole"))
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "step-00000001"))


def readers(folder: Path, world: World) -> list[Callable[[], object]]:
    """Every way to read a checkpoint."""
    return [
        lambda: load(folder, world),
        lambda: checkpoint.load_weights(folder, model=model(), world=world),
        lambda: checkpoint.read_weights(folder),
    ]


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_what_was_written_is_read(whole: Path, world: World) -> None:
    assert load(whole, world) == {"step": 1}
    assert storage.verify(whole) == []
    weights = checkpoint.read_weights(whole)
    expected = dict(model().named_parameters())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("at", [0, -1])
def test_a_flipped_bit_is_found_and_named(folder: Path, world: World, name: str, at: int) -> None:
    flip(folder / name, at)
    assert storage.verify(folder) == [f"{name} is damaged: its hash is not the manifest's"]
    for read in readers(folder, world):
        with pytest.raises(CheckpointError, match=f"{name} is damaged") as raised:
            read()
        assert raised.value.damaged
        assert str(folder) in str(raised.value)


def test_a_flipped_bit_in_the_manifest_is_found(folder: Path, world: World) -> None:
    manifest = folder / storage.MANIFEST
    size = manifest.stat().st_size
    original = storage.read_manifest(folder) or {}
    for at in range(0, size, 5):
        flip(manifest, at)
        found = storage.read_manifest(folder)
        # (In the name of the hash it is none, but what counts is as it was.)
        assert found is None or original.items() <= found.items(), f"byte {at} of {size}"
        flip(manifest, at)
    flip(manifest, size // 2)
    for read in readers(folder, world):
        with pytest.raises(CheckpointError, match=r"no valid manifest\.json") as raised:
            read()
        assert raised.value.damaged


@pytest.mark.parametrize("name", [*FILES, storage.MANIFEST])
def test_a_file_that_is_missing_is_noticed(folder: Path, world: World, name: str) -> None:
    (folder / name).unlink()
    for read in readers(folder, world):
        with pytest.raises(CheckpointError, match="it is incomplete") as raised:
            read()
        assert raised.value.damaged


def test_what_is_no_damage_is_not_called_so(folder: Path, world: World) -> None:
    network = model()
    optimizer = torch.optim.SGD(network.parameters())
    with pytest.raises(CheckpointError, match=r"train\.seed: not set then, 1 now") as raised:
        checkpoint.load(
            folder, model=network, optimizer=optimizer, world=world, identity={"seed": 1}
        )
    assert not raised.value.damaged


# Files that were made to do harm, with hashes that are right


class Harm:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def replace(folder: Path, name: str, content: bytes) -> None:
    """Put other content in a checkpoint, as somebody would who also adapts the manifest."""
    (folder / name).write_bytes(content)
    manifest: Any = storage.read_manifest(folder) or json.loads(
        (folder / storage.MANIFEST).read_text()
    )
    manifest.pop("sha256", None)
    names = {entry["path"] for entry in manifest["files"]}
    files = storage.entries(folder, [folder / path for path in sorted(names)])
    storage.write_manifest(folder, manifest | {"files": [entry.model_dump() for entry in files]})
    assert storage.verify(folder) == []


def metadata(folder: Path) -> Metadata:
    return read_metadata(folder, FILES)


def test_a_pickle_in_the_metadata_never_runs(folder: Path, world: World, tmp_path: Path) -> None:
    harm = Harm(tmp_path / "harm")
    for content in (harm, {"state": harm}):
        replace(folder, METADATA, pickle.dumps(content))
        for read in readers(folder, world):
            with pytest.raises(
                CheckpointError, match=r"names posix\.mkdir, .*may be an attack"
            ) as e:
                read()
            assert not e.value.damaged
    assert not harm.path.exists()
    pickle.loads(pickle.dumps(harm))
    assert harm.path.exists(), "the attack would work elsewhere"


def test_a_pickle_in_the_metadata_of_a_real_checkpoint_never_runs(
    folder: Path, world: World, tmp_path: Path
) -> None:
    found = metadata(folder)
    found.planner_data = Harm(tmp_path / "harm")
    replace(folder, METADATA, pickle.dumps(found))
    for read in readers(folder, world):
        with pytest.raises(CheckpointError, match=r"posix\.mkdir"):
            read()
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "payload",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"\x80\x04\x8c\x05torch\x8c\x08Size.mro\x93.",
        b"\x80\x04\x8c\x05torch\x8c\x04load\x93.",
        b"\x80\x04\x8c\x13torch.serialization\x8c\x04load\x93.",
        b"ctorch.distributed.checkpoint.metadata\nos\n.",
        b"cbuiltins\ngetattr\n(ctorch\nSize\nS'mro'\ntR.",
    ],
)
def test_only_the_classes_of_a_description_are_allowed(folder: Path, payload: bytes) -> None:
    (folder / METADATA).write_bytes(payload)
    with pytest.raises(CheckpointError, match="no place in a checkpoint"):
        metadata(folder)


class EntriesByGetattr(pickle.Pickler):
    """Pickles entries of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_a_checkpoint_of_another_python_is_read(folder: Path) -> None:
    found = metadata(folder)
    written = io.BytesIO()
    EntriesByGetattr(written).dump(found)
    assert b"getattr" in written.getvalue()
    (folder / METADATA).write_bytes(written.getvalue())
    assert metadata(folder) == found


@pytest.mark.parametrize("payload", [b"", b"nonsense", pickle.dumps({"a": 1}), b"\x80\x04."])
def test_metadata_that_is_something_else_is_refused(folder: Path, payload: bytes) -> None:
    (folder / METADATA).write_bytes(payload)
    with pytest.raises(CheckpointError, match=r"\.metadata (cannot be read|does not describe)"):
        metadata(folder)


def test_a_pickle_in_a_tensors_file_never_runs(folder: Path, world: World, tmp_path: Path) -> None:
    """The bytes of a tensor are replaced by what ``torch.save`` makes of something else."""
    found = metadata(folder)
    harm = Harm(tmp_path / "harm")
    data = io.BytesIO()
    torch.save(harm, data)
    others = (folder / "__0_0.distcp").read_bytes()
    place = found.storage_data[MetadataIndex("model.0.weight", torch.Size([0, 0]))]
    place.offset, place.length = len(others), len(data.getvalue())
    replace(folder, METADATA, pickle.dumps(found))
    replace(folder, "__0_0.distcp", others + data.getvalue())
    for read in readers(folder, world):
        with pytest.raises(CheckpointError, match=r"[Ww]eights.only"):
            read()
    assert not harm.path.exists()
    assert zipfile.is_zipfile(io.BytesIO(data.getvalue()))
    torch.load(io.BytesIO(data.getvalue()), weights_only=False)
    assert harm.path.exists(), "the attack would work elsewhere"


def test_what_would_be_read_as_any_object_is_refused(
    folder: Path, world: World, tmp_path: Path
) -> None:
    """PyTorch reads what is no tensor without ``weights_only``."""
    found = metadata(folder)
    harm = Harm(tmp_path / "harm")
    data = io.BytesIO()
    torch.save(harm, data)
    found.state_dict_metadata["model.0.weight"] = BytesStorageMetadata()
    place = found.storage_data.pop(MetadataIndex("model.0.weight", torch.Size([0, 0])))
    place.offset, place.length = 0, len(data.getvalue())
    found.storage_data[MetadataIndex("model.0.weight")] = place
    replace(folder, METADATA, pickle.dumps(found))
    replace(folder, "__0_0.distcp", data.getvalue())
    for read in readers(folder, world):
        with pytest.raises(CheckpointError, match="BytesStorageMetadata"):
            read()
    assert not harm.path.exists()


def test_files_that_are_not_the_checkpoints_are_not_read(folder: Path, world: World) -> None:
    found = metadata(folder)
    for place in found.storage_data.values():
        place.relative_path = "../../other/__0_0.distcp"
    replace(folder, METADATA, pickle.dumps(found))
    for read in readers(folder, world):
        with pytest.raises(CheckpointError, match=r"not in the manifest: \.\./\.\./other/__0_0"):
            read()


# Writing


def test_a_disk_without_room_is_noticed_before_anything_is_written(
    world: World, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = (
        shutil.which("mount")
        and os.system(f"mount -t tmpfs -o size=256k tmpfs {small} 2>/dev/null") == 0
    )
    if not mounted:
        pytest.skip("a file system of a size of its own can only be mounted by root")
    try:
        run_dir = small / "run"
        run_dir.mkdir()
        (run_dir / "taken").write_bytes(bytes(250_000))
        folder, told = save(world, run_dir)
        assert [path.name for path in run_dir.rglob("*")] == ["taken"]
        (run_dir / "taken").unlink()
        folder, then = save(world, run_dir)
    finally:
        os.system(f"umount {small}")
    error = told[0].error
    assert f"there is no room for the checkpoint {folder}" in error
    assert "are needed in" in error
    assert "checkpoint.keep_last" in error
    assert then[0].error == ""


def test_the_run_keeps_what_it_is_told_to(world: World, tmp_path: Path) -> None:
    config = sample.config(checkpoint={"keep_last": 2})
    folder, told = save(world, tmp_path, steps=4, config=config)
    assert [one.step for one in told] == [1, 2, 3, 4]
    assert [path.name for path in storage.checkpoints(tmp_path)] == [
        "step-00000004",
        "step-00000003",
    ]
    assert load(folder, world) == {"step": 4}


def test_what_was_said_of_a_run_is_published_before_its_checkpoint_is_complete(
    world: World, tmp_path: Path
) -> None:
    """So a run that is killed and goes on from there has its whole history."""
    network = model()
    folder = storage.checkpoint_folder(tmp_path, 1)
    complete: list[bool] = []
    with saving(
        sample.run_plan(tmp_path), world, tmp_path / "scratch", tell=lambda _: None,
        publish=lambda: complete.append((folder / storage.MANIFEST).exists()),
    ) as saver:  # fmt: skip
        saver.save(
            folder, model=network, optimizer=torch.optim.SGD(network.parameters()),
            state={"step": 1}, identity={}, metrics={},
        )  # fmt: skip
    assert complete == [False]
    assert storage.verify(folder) == []


def test_a_state_that_is_no_json_is_an_error_of_ours(world: World, tmp_path: Path) -> None:
    network = model()
    optimizer = torch.optim.SGD(network.parameters())
    plan = sample.run_plan(tmp_path)
    with pytest.raises(TypeError, match="not JSON"):
        with saving(plan, world, tmp_path / "scratch", tell=print) as saver:
            saver.save(
                storage.checkpoint_folder(tmp_path, 1), model=network, optimizer=optimizer,
                state={"step": 1, "x": object()}, identity={}, metrics={},
            )  # fmt: skip


def test_a_model_without_memory_for_its_copy_goes_on(world: World, tmp_path: Path) -> None:
    """More than any machine has, of which nothing is stored yet."""
    network = model()
    network.register_parameter(
        "vast", torch.nn.Parameter(torch.zeros(1).expand(2**50), requires_grad=False)
    )
    told: list[Saved] = []
    optimizer = torch.optim.SGD(network[0].parameters())
    with saving(sample.run_plan(tmp_path), world, tmp_path / "scratch", tell=told.append) as saver:
        for step in (1, 2):
            saver.save(
                storage.checkpoint_folder(tmp_path, step), model=network, optimizer=optimizer,
                state={"step": step}, identity={}, metrics={},
            )  # fmt: skip
            network._parameters.pop("vast", None)
    assert "cannot be copied to memory: rank 0: RuntimeError" in told[0].error
    assert [one.step for one in told if not one.error] == [2]


def test_a_manifest_waits_for_the_files_of_other_machines(tmp_path: Path) -> None:
    (tmp_path / "shown").write_text("later")
    files = storage.entries(tmp_path)
    (tmp_path / "shown").rename(tmp_path / "hidden")
    later = threading.Timer(0.5, lambda: (tmp_path / "hidden").rename(tmp_path / "shown"))
    later.start()
    writing.declare(tmp_path, files, "{}", threading.Event())
    later.join()
    assert storage.verify(tmp_path) == []


def test_a_file_that_does_not_arrive_is_named(tmp_path: Path) -> None:
    (tmp_path / "lost").write_text("x")
    files = storage.entries(tmp_path)
    (tmp_path / "lost").write_text("of another size")
    with pytest.raises(CheckpointError, match="cannot be completed: lost did not arrive"):
        writing.declare(tmp_path, files, "{}", threading.Event(), patience_s=0.3)
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(CheckpointError, match="cannot be completed: the run ends"):
        writing.declare(tmp_path, files, "{}", given_up)
    assert not (tmp_path / storage.MANIFEST).exists()


def test_a_manifest_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / storage.MANIFEST).mkdir()
    with pytest.raises(CheckpointError, match="cannot be completed: IsADirectoryError"):
        writing.declare(tmp_path, (), "{}", threading.Event())
