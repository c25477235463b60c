"""Checkpoints that any strategy and any number of ranks can read.

Tensors are stored by the Hugging Face model's own names (``model.<name>``, and AdamW's state as
``optim.<name>.<key>``) in PyTorch's distributed format: every rank writes its part (``saving``), a
reader takes what it needs of it. What is not a tensor lies in the manifest; each rank's random
states lie in a JSON file of their own.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from dbx_llmtrain import storage
from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.records import FileEntry
from dbx_llmtrain.resuming import advice, differences
from dbx_llmtrain.worker.lora import is_adapted
from dbx_llmtrain.worker.metadata import Reader
from dbx_llmtrain.worker.model import named_weights
from dbx_llmtrain.worker.rng import restore_random_states
from dbx_llmtrain.worker.whole import Stored, pieces, shape_of, stored, stored_states
from dbx_llmtrain.worker.world import World

logger = logging.getLogger(__name__)

T = TypeVar("T")

MODEL = "model."
"""What the names of the model's own tensors begin with."""


def load(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    identity: Mapping[str, Any],
) -> dict[str, Any]:
    """Restore weights, optimizer state and, on as many ranks as wrote them, the random states.

    All ranks call it, after wrapping; returns the ``state`` given to ``Saver.save``. Every file is
    hashed once, by one of the ranks. Raises ``CheckpointError`` on every rank for a folder that is
    incomplete or damaged (``damaged`` is set), is of another model, or differs from ``identity``.
    """
    what = f"the checkpoint {folder} cannot be used"
    manifest = _checked(folder, world, what, lambda found: _check_identity(found, identity))

    def read() -> None:
        _read(folder, manifest, model, optimizer)
        if manifest["world_size"] == world.size:
            text = (folder / rng_file(world.rank)).read_text(encoding="utf-8")
            restore_random_states(json.loads(text), world.device)

    together(read, world, what)
    state: dict[str, Any] = manifest["state"]
    return state


def load_weights(folder: Path, *, model: nn.Module, world: World) -> None:
    """Restore the weights alone, whatever strategy and number of ranks wrote them. All ranks call
    it, after wrapping. Raises ``CheckpointError`` on every rank as ``load`` does."""
    what = f"the weights of the checkpoint {folder} cannot be used"
    manifest = _checked(folder, world, what)
    together(lambda: _read(folder, manifest, model), world, what)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The whole weights on the CPU by the model's own names, in the type they were trained in (of
    a model with adapters the trained ones). For one process, which needs no process group.

    Raises ``CheckpointError`` for a folder that is incomplete or damaged.
    """
    try:
        manifest = read_state(folder)
        _check_files(folder, manifest["files"])
        reader = _reader(folder, manifest)
        found = reader.read_metadata().state_dict_metadata
        weights = {
            name: torch.empty(meta.size, dtype=meta.properties.dtype)
            for name, meta in found.items()
            if name.startswith(MODEL)
        }
        with warnings.catch_warnings():  # that there is no process group
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(weights, storage_reader=reader, no_dist=True)
    except (CheckpointException, CheckpointError, OSError, RuntimeError) as error:
        damaged = isinstance(error, CheckpointError) and error.damaged
        message = f"the checkpoint {folder} cannot be read: {_fault(error, 0)}"
        raise CheckpointError(message, damaged=damaged) from error
    return {name.removeprefix(MODEL): tensor for name, tensor in weights.items()}


def read_state(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. The files that it names are there; hashes are checked by
    whoever reads them. Raises ``CheckpointError`` for a folder that is none."""
    manifest = storage.read_manifest(folder)
    if manifest is None:
        message = "it is incomplete: no valid manifest.json, or a file is missing"
        raise CheckpointError(message, damaged=True)
    lacking = {"state", "identity", "world_size"} - manifest.keys()
    if lacking:
        raise CheckpointError(f"its manifest lacks {', '.join(sorted(lacking))}")
    return manifest


def stored_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Stored]]:
    """This rank's part of everything that is stored as a tensor, by the name it is stored under;
    each is there until the next one is."""
    for name, tensor in _kept(model):
        with stored(tensor) as part:
            yield f"{MODEL}{name}", part
    for name, parameter in model.named_parameters():
        for key, part in stored_states(optimizer, parameter):
            yield f"optim.{name}.{key}", part


def rng_file(rank: int) -> str:
    """Name of the file with a rank's random states."""
    return f"rng-{rank:05d}.json"


def together(
    action: Callable[[], T], world: World, what: str, group: dist.ProcessGroup | None = None
) -> list[T]:
    """Run ``action`` on every rank and return all results, by rank; they are exchanged in
    ``group``.

    If it fails anywhere, every rank raises one ``CheckpointError`` that starts with ``what`` and
    names each rank and cause: no rank is left waiting in a collective that the others never reach.
    """
    outcome: tuple[T | None, str | None, bool] = (None, None, False)
    cause: BaseException | None = None
    try:
        outcome = (action(), None, False)
    except (Exception, CheckpointException) as error:  # (the latter is a BaseException)
        logger.debug("%s", what, exc_info=True)
        cause = error
        damaged = isinstance(error, CheckpointError) and error.damaged
        outcome = (None, _fault(error, world.rank), damaged)
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, outcome, group=group)
    failed = {rank: fault for rank, (_, fault, _) in enumerate(everyone) if fault is not None}
    if failed:
        faults = [f"rank {rank}: {fault}" for rank, fault in failed.items() if fault]
        damaged = any(damaged for _, _, damaged in everyone)
        raise CheckpointError(f"{what}: {'; '.join(faults)}", damaged=damaged) from cause
    return [result for result, _, _ in everyone]


def _fault(error: BaseException, rank: int) -> str:
    """An error in one line. DCP raises on every rank what happened on any: of that the rank's own,
    or nothing."""
    if isinstance(error, CheckpointException) and error.failures:
        own: Any = error.failures.get(rank)
        if own is None:
            return ""
        error = own[0] if isinstance(own, tuple) else own
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _checked(
    folder: Path,
    world: World,
    what: str,
    check: Callable[[dict[str, Any]], object] = lambda _: None,
) -> dict[str, Any]:
    """The manifest, after ``check`` of it and of the files' hashes, each by one of the ranks."""

    def examine() -> dict[str, Any]:
        manifest = read_state(folder)
        check(manifest)
        _check_files(folder, manifest["files"][world.rank :: world.size])
        return manifest

    return together(examine, world, what)[world.rank]


def _reader(folder: Path, manifest: Mapping[str, Any]) -> Reader:
    return Reader(folder, {entry["path"] for entry in manifest["files"]})


def _read(
    folder: Path,
    manifest: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Load what the checkpoint has for the model and, where it is given, the optimizer."""
    reader = _reader(folder, manifest)
    found = reader.read_metadata().state_dict_metadata
    targets = _model_targets(model, found)
    if optimizer is not None:
        targets |= _optimizer_targets(model, optimizer, found)
    dcp.load(targets, storage_reader=reader)
    _put(model, targets)


def _kept(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model that are stored: of one with adapters those that are trained. (Its
    base is the model that the run is named after, see ``identity``.)"""
    adapted = is_adapted(model)
    for name, tensor in named_weights(model):
        if tensor.requires_grad or not adapted:
            yield name, tensor


def _model_targets(model: nn.Module, found: Mapping[str, Any]) -> dict[str, Tensor]:
    """The model's tensors to load into; the stored ones must be exactly these, in their shapes."""
    ours = {f"{MODEL}{name}": tensor for name, tensor in _kept(model)}
    theirs = {name for name in found if name.startswith(MODEL)}
    shapes = [
        f"{name} is {tuple(found[name].size)} there and {tuple(shape_of(tensor))} here"
        for name, tensor in ours.items()
        if name in theirs and tuple(found[name].size) != tuple(shape_of(tensor))
    ]
    names = [f"{name} is only in one of them" for name in sorted(theirs ^ ours.keys())]
    if names or shapes:
        raise CheckpointError(f"it is of another model: {', '.join((names + shapes)[:8])}")
    return {name: _target(tensor, None, found[name]) for name, tensor in ours.items()}


def _target(tensor: Tensor, key: str | None, meta: Any) -> Tensor:
    """A tensor to load into: itself, or where DeepSpeed cut it up, one that is put in place later.

    ``key``: of the optimizer's state instead."""
    held = pieces(tensor)
    return tensor.detach() if held is None else held.target(key, meta)


def _optimizer_targets(
    model: nn.Module, optimizer: torch.optim.Optimizer, found: Mapping[str, Any]
) -> dict[str, Tensor]:
    """State tensors of the kind that the optimizer itself makes at its first step, to load into.

    A parameter without stored state (no step was taken yet) gets none. The step counter lies on the
    parameter's device only for the fused and the capturable implementation, as PyTorch has it.
    """
    on_device = {
        id(parameter): bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    trained = {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) in on_device or (pieces(parameter) and parameter.requires_grad)
    }
    targets: dict[str, Tensor] = {}
    for full_name, meta in found.items():
        if not full_name.startswith("optim."):
            continue
        name, key = full_name.removeprefix("optim.").rsplit(".", 1)
        parameter = trained.get(name)
        if parameter is None:
            raise CheckpointError(f"it trained {name}, which is not trained here")
        dtype = meta.properties.dtype
        if pieces(parameter) is not None:
            targets[full_name] = _target(parameter, key, meta)
            continue
        if key == "step":
            device = parameter.device if on_device[id(parameter)] else torch.device("cpu")
            value = torch.zeros((), dtype=dtype, device=device)
        else:
            value = torch.zeros_like(parameter, dtype=dtype).detach()
        optimizer.state[parameter][key] = value
        targets[full_name] = value
    return targets


def _put(model: nn.Module, targets: Mapping[str, Tensor]) -> None:
    """Put what was loaded where DeepSpeed holds it. Every rank goes in the same order."""
    weights = ((name, pieces(tensor)) for name, tensor in named_weights(model))
    held = {name: found for name, found in weights if found is not None}
    for full_name in sorted(targets):
        kind, name = full_name.split(".", 1)
        key = None
        if kind == "optim":
            name, key = name.rsplit(".", 1)
        if name in held:
            held[name].put(key, targets[full_name])


def _check_identity(manifest: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    differing = differences(manifest["identity"], ours)
    if differing:
        raise CheckpointError(f"{'; '.join(differing)}. {advice(manifest['identity'], ours)}")


def _check_files(folder: Path, files: Sequence[Mapping[str, Any]]) -> None:
    for entry in map(FileEntry.model_validate, files):
        if storage.hash_file(folder / entry.path) != entry.sha256:
            message = f"{entry.path} is damaged: its hash is not the manifest's"
            raise CheckpointError(message, damaged=True)
