"""Weights of a model that starts at random: by its architecture's own initialiser, and the same
however many ranks there are and whatever a rank holds of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dbx_llmtrain.errors import CheckpointError


def tensors(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of ``model`` (tied ones once) with its first value: fp32, whole, on the CPU.

    The model has no storage (``model.build``) and gets none. A block at a time is made real and
    initialised by the model's own ``_init_weights``, from random numbers that depend on ``seed``
    and the block's name only, so that a rank never holds more than a block and all ranks draw the
    same. The random state is left as it was.
    """
    for unit, names in _units(model):
        drawn = hashlib.sha256(f"{seed} {unit}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(drawn[:8], "big") >> 1)
            yield from _initialised(model, names).items()


def _units(model: nn.Module) -> list[tuple[str, list[str]]]:
    """The parameters by what is initialised at a time: the items of the outermost lists (blocks),
    and whatever else has parameters of its own."""
    lists = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{one}.") for one in lists)]
    units: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        block = next((one for one in outermost if name.startswith(f"{one}.")), None)
        if block is None:
            unit = name.rpartition(".")[0]
        else:
            item = name.removeprefix(f"{block}.").partition(".")[0]
            unit = f"{block}.{item}"
        units.setdefault(unit, []).append(name)
    return list(units.items())


def _initialised(model: nn.Module, names: list[str]) -> dict[str, Tensor]:
    """The parameters of these names after a pass of the initialiser over the whole model, in which
    only they have storage: what writes to a parameter may be any module above it.

    Raises ``CheckpointError`` for one that nothing gives a value.
    """
    wanted = {id(model.get_parameter(name)): name for name in names}
    places = [
        (part, name, parameter)
        for part in model.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None and id(parameter) in wanted
    ]
    made = {wanted[id(parameter)]: _start(parameter) for _, _, parameter in places}
    for part, name, parameter in places:
        part._parameters[name] = made[wanted[id(parameter)]]
    try:
        with torch.no_grad():
            for part in dict.fromkeys(part for part, _, _ in places):
                if type(part).__module__.startswith("torch.nn"):
                    getattr(part, "reset_parameters", lambda: None)()
            _apply(model, model)
    finally:
        for part, name, parameter in places:
            part._parameters[name] = parameter
    values = {name: parameter.detach() for name, parameter in made.items()}
    empty = [name for name, value in values.items() if value.isnan().any()]
    if empty:
        raise CheckpointError(
            f"model.init random: the architecture's own initialiser gives no value to "
            f"{', '.join(empty[:4])}"
        )
    return values


def _start(parameter: nn.Parameter) -> nn.Parameter:
    """Room for a parameter: what it was built with, as far as that is known, else no number."""
    built = getattr(parameter, "built", None)
    if built is None:
        built = torch.full_like(parameter, torch.nan, device="cpu")
    return nn.Parameter(built.clone(), requires_grad=False)


def _apply(part: nn.Module, owner: Any) -> None:
    """``_init_weights`` of the nearest model above each module, children first, as transformers
    does it."""
    for child in part.children():
        _apply(child, child if hasattr(child, "_init_weights") else owner)
    owner._init_weights(part)
