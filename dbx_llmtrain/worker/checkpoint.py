"""Checkpoints that any strategy and any number of ranks can read.

Tensors are stored by the Hugging Face model's own names (``model.<name>``, and AdamW's state as
``optim.<name>.<key>``) in PyTorch's distributed format: every rank writes its part, a reader takes
what it needs of it. What is not a tensor lies in the manifest; each rank's random states lie in a
JSON file of their own.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from dbx_llmtrain import compat, storage
from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.planning import differences
from dbx_llmtrain.records import FileEntry
from dbx_llmtrain.worker.model import named_weights
from dbx_llmtrain.worker.world import World

T = TypeVar("T")

_WRITTEN_BY = ("dbx_llmtrain", "torch", "transformers")


def save(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    state: Mapping[str, Any],
    identity: Mapping[str, Any],
    scratch: Path,
) -> Path:
    """Write a checkpoint into ``folder`` on shared storage; all ranks call it.

    Each rank writes to its own folder in ``scratch``, on local disk, and copies its files over;
    rank 0 writes the manifest when all have. ``state`` (JSON) is what ``load`` returns,
    ``identity`` (JSON) what a run that resumes must have in common with this one. Raises
    ``CheckpointError`` on every rank when any of them fails; no local file is left either way.
    """
    if world.rank == 0:
        storage.remove(folder)  # what an attempt that was killed left, if any
    with _scratch_folder(scratch, world) as local:

        def write() -> tuple[FileEntry, ...]:
            writer = dcp.FileSystemWriter(local, sync_files=False)
            dcp.save(_tensors(model, optimizer), storage_writer=writer)
            rng = json.dumps(_random_states(world.device))
            (local / _rng_file(world.rank)).write_text(rng, encoding="utf-8")
            return storage.publish_folder(local, folder)

        parts = together(write, world, f"the checkpoint {folder} cannot be written")

    def declare() -> None:
        storage.write_manifest(
            folder,
            {
                "files": [entry.model_dump() for part in parts for entry in part],
                "state": dict(state),
                "identity": dict(identity),
                "world_size": world.size,
                "versions": {name: str(compat.installed(name)) for name in _WRITTEN_BY},
            },
        )

    together(
        declare if world.rank == 0 else _nothing,
        world,
        f"the checkpoint {folder} cannot be completed",
    )
    return folder


def load(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    identity: Mapping[str, Any],
) -> dict[str, Any]:
    """Restore weights, optimizer state and, on as many ranks as wrote them, the random states.

    All ranks call it, after wrapping; returns the ``state`` given to ``save``. Every file is hashed
    once, by one of the ranks. Raises ``CheckpointError`` on every rank for a folder that is
    incomplete or damaged, is of another model, or differs from ``identity``.
    """
    what = f"the checkpoint {folder} cannot be used"

    def check() -> dict[str, Any]:
        manifest = _manifest(folder)
        _check_identity(manifest["identity"], identity)
        _check_files(folder, manifest["files"][world.rank :: world.size])
        return manifest

    manifest = together(check, world, what)[world.rank]

    def read() -> None:
        reader = dcp.FileSystemReader(folder)
        stored = reader.read_metadata().state_dict_metadata
        targets = _model_targets(model, stored) | _optimizer_targets(model, optimizer, stored)
        dcp.load(targets, storage_reader=reader)
        if manifest["world_size"] == world.size:
            text = (folder / _rng_file(world.rank)).read_text(encoding="utf-8")
            _restore_random_states(json.loads(text), world.device)

    together(read, world, what)
    state: dict[str, Any] = manifest["state"]
    return state


def together(action: Callable[[], T], world: World, what: str) -> list[T]:
    """Run ``action`` on every rank and return all results, by rank.

    If it fails anywhere, every rank raises one ``CheckpointError`` that starts with ``what`` and
    names each rank and cause: no rank is left waiting in a collective that the others never reach.
    """
    outcome: tuple[T | None, str, BaseException | None]
    try:
        outcome = (action(), "", None)
    except (CheckpointException, CheckpointError, OSError, RuntimeError, ValueError) as error:
        outcome = (None, _cause(error), error)
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, outcome[:2])
    faults = [f"rank {rank}: {fault}" for rank, (_, fault) in enumerate(everyone) if fault]
    if faults:
        causes = "; ".join(faults)
        raise CheckpointError(f"{what}: {causes}") from outcome[2]
    return [result for result, _ in everyone]


def _cause(error: BaseException) -> str:
    """An error in one line; of DCP's error, which gathers those of all ranks, the first one."""
    if isinstance(error, CheckpointException) and error.failures:
        first = next(iter(error.failures.values()))
        error = first[0] if isinstance(first, tuple) else first
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _nothing() -> None:
    """What the other ranks do while rank 0 acts."""


@contextmanager
def _scratch_folder(parent: Path, world: World) -> Iterator[Path]:
    """A folder on local disk for one rank's files, gone afterwards in any case."""
    created: list[Path] = []

    def create() -> None:
        parent.mkdir(parents=True, exist_ok=True)
        created.append(Path(tempfile.mkdtemp(prefix=f"checkpoint-{world.rank}-", dir=parent)))

    try:
        together(create, world, f"no temporary folder in {parent}")
        yield created[0]
    finally:
        for path in created:
            storage.remove(path)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that is stored as a tensor, sharded or not, by the name it is stored under."""
    tensors = {f"model.{name}": tensor.detach() for name, tensor in named_weights(model)}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optim.{name}.{key}"] = value.detach()
    return tensors


def _model_targets(model: nn.Module, stored: Mapping[str, Any]) -> dict[str, Tensor]:
    """The model's tensors to load into; the stored ones must be exactly these, in their shapes."""
    ours = {f"model.{name}": tensor.detach() for name, tensor in named_weights(model)}
    theirs = {name for name in stored if name.startswith("model.")}
    shapes = [
        f"{name} is {tuple(stored[name].size)} there and {tuple(tensor.shape)} here"
        for name, tensor in ours.items()
        if name in theirs and tuple(stored[name].size) != tuple(tensor.shape)
    ]
    names = [f"{name} is only in one of them" for name in sorted(theirs ^ ours.keys())]
    if names or shapes:
        raise CheckpointError(f"it is of another model: {', '.join((names + shapes)[:8])}")
    return ours


def _optimizer_targets(
    model: nn.Module, optimizer: torch.optim.Optimizer, stored: Mapping[str, Any]
) -> dict[str, Tensor]:
    """State tensors of the kind that the optimizer itself makes at its first step, to load into.

    A parameter without stored state (no step was taken yet) gets none. The step counter lies on the
    parameter's device only for the fused and the capturable implementation, as PyTorch has it.
    """
    parameters = dict(model.named_parameters())
    on_device = {
        id(parameter): bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    targets: dict[str, Tensor] = {}
    for full_name, meta in stored.items():
        if not full_name.startswith("optim."):
            continue
        name, key = full_name.removeprefix("optim.").rsplit(".", 1)
        parameter = parameters.get(name)
        if parameter is None or id(parameter) not in on_device:
            raise CheckpointError(f"it trained {name}, which is not trained here")
        dtype = meta.properties.dtype
        if key == "step":
            device = parameter.device if on_device[id(parameter)] else torch.device("cpu")
            value = torch.zeros((), dtype=dtype, device=device)
        else:
            value = torch.zeros_like(parameter, dtype=dtype).detach()
        optimizer.state[parameter][key] = value
        targets[full_name] = value
    return targets


def _manifest(folder: Path) -> dict[str, Any]:
    manifest = storage.read_manifest(folder)
    if manifest is None:
        raise CheckpointError("it is incomplete: no valid manifest.json, or a file is missing")
    lacking = {"state", "identity", "world_size"} - manifest.keys()
    if lacking:
        raise CheckpointError(f"its manifest lacks {', '.join(sorted(lacking))}")
    return manifest


def _check_identity(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    differing = differences(theirs, ours)
    if differing:
        raise CheckpointError(
            f"{'; '.join(differing)}: undo the change, or start afresh under another "
            "tracking.run_name"
        )


def _check_files(folder: Path, files: Sequence[Mapping[str, Any]]) -> None:
    for entry in map(FileEntry.model_validate, files):
        if storage.hash_file(folder / entry.path) != entry.sha256:
            raise CheckpointError(f"{entry.path} is damaged: its hash is not the manifest's")


def _rng_file(rank: int) -> str:
    return f"rng-{rank:05d}.json"


def _random_states(device: str) -> dict[str, Any]:
    """This rank's generators of Python, numpy and torch, as JSON."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if device != "cpu":
        states["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes().hex()
    return states


def _restore_random_states(states: Mapping[str, Any], device: str) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes(states["torch"]))
    if device != "cpu" and "cuda" in states:
        torch.cuda.set_rng_state(_bytes(states["cuda"]), device)


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
