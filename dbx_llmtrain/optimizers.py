"""The optimizers of ``train.optimizer``: which options each takes and which strategies can run it.

Known without importing torch, so that a wrong option is told before anything is started.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dbx_llmtrain.errors import Problem

PATH = "train.optimizer"


@dataclass(frozen=True)
class Option:
    """An option by torch's name: its default, what is valid, and that in words."""

    default: Any
    words: str
    valid: Callable[[Any], bool]


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer takes. ``betas``: whether it has ``train.betas``; ``kinds``: the strategies
    that can run it; ``gpu``: whether only a GPU can."""

    options: Mapping[str, Option]
    betas: bool = False
    kinds: tuple[str, ...] = ("single", "ddp", "fsdp", "deepspeed")
    gpu: bool = False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _positive(default: float) -> Option:
    return Option(default, "a number above 0", lambda value: _is_number(value) and value > 0)


_EPS_OF_ADAFACTOR = "a pair of numbers of which the first may be null"
_SHARE = "a number from 0 up to, but not, 1"

OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(
        {"eps": _positive(1e-8), "amsgrad": Option(False, "true or false", _is_bool)},
        betas=True,
    ),
    "adamw_8bit": Optimizer(
        {
            "eps": _positive(1e-8),
            "min_8bit_size": Option(
                4096,
                "a whole number of elements above 0",
                lambda value: _is_number(value) and isinstance(value, int) and value > 0,
            ),
        },
        betas=True,
        kinds=("single", "ddp"),
        gpu=True,
    ),
    "sgd": Optimizer(
        {
            "momentum": Option(0.0, _SHARE, lambda value: _is_number(value) and 0 <= value < 1),
            "dampening": Option(0.0, _SHARE, lambda value: _is_number(value) and 0 <= value < 1),
            "nesterov": Option(False, "true or false", _is_bool),
        }
    ),
    "adafactor": Optimizer(
        {
            "beta2_decay": Option(
                -0.8, "a number below 0", lambda value: _is_number(value) and value < 0
            ),
            "eps": Option((None, 1e-3), _EPS_OF_ADAFACTOR, lambda value: _is_eps_pair(value)),
            "d": _positive(1.0),
        },
        kinds=("single", "ddp"),
    ),
}

_ELSEWHERE = {
    "lr": "train.learning_rate",
    "learning_rate": "train.learning_rate",
    "betas": "train.betas",
    "beta1": "train.betas",
    "beta2": "train.betas",
    "weight_decay": "train.weight_decay",
    "fused": "",
    "foreach": "",
    "maximize": "",
}
"""Options that are fields of ``train``, or that we choose ourselves (empty)."""

_WHY_NOT = {
    "adafactor": "torch's Adafactor takes whole matrices apart by rows and columns, and refuses "
    "sharded ones",
    "adamw_8bit": "bitsandbytes' kernels work on whole tensors",
}


def name_of(optimizer: Any) -> str:
    """The name in ``train.optimizer``, be it a name or a mapping."""
    return optimizer if isinstance(optimizer, str) else str(optimizer.name)


def options_of(optimizer: Any) -> dict[str, Any]:
    """Every option of ``train.optimizer`` by torch's name, with its default where none is given."""
    given = {} if isinstance(optimizer, str) else dict(optimizer.model_extra or {})
    options = OPTIMIZERS[name_of(optimizer)].options
    return {name: option.default for name, option in options.items()} | given


def problems(train: Any) -> list[Problem]:
    """Faults of ``train.optimizer`` and of the fields that are only some optimizers'."""
    name = name_of(train.optimizer)
    known = OPTIMIZERS[name]
    found = []
    given = {} if isinstance(train.optimizer, str) else (train.optimizer.model_extra or {})
    for key, value in given.items():
        option = known.options.get(key)
        if option is None:
            found.append(Problem(f"{PATH}.{key}", _unknown(name, key, known)))
        elif not option.valid(value):
            found.append(Problem(f"{PATH}.{key}", f"expected {option.words}, found {value!r}"))
    if "betas" in train.model_fields_set and not known.betas:
        having = " and ".join(one for one, what in OPTIMIZERS.items() if what.betas)
        found.append(Problem("train.betas", f"{name} has none, only {having} have: remove it"))
    if not found and name == "sgd":
        found += _nesterov(options_of(train.optimizer))
    return found


def strategy_problems(train: Any, kind: str, *, use_gpu: bool | None = None) -> list[Problem]:
    """Why ``train.optimizer`` cannot run with this strategy (``parallel.kind``, not ``auto``), or
    on this device where that is known."""
    name = name_of(train.optimizer)
    known = OPTIMIZERS[name]
    found = []
    if kind not in known.kinds:
        message = f"{name} does not work with parallel.kind={kind}: {_WHY_NOT[name]}. Use adamw, or"
        found.append(Problem(PATH, f"{message} parallel.kind={known.kinds[-1]}"))
    if known.gpu and use_gpu is False:
        found.append(Problem(PATH, f"{name} needs GPUs, and this run has none: use adamw"))
    return found


def missing_package(cause: str) -> Problem:
    """bitsandbytes cannot be imported where a rank runs."""
    return Problem(
        PATH,
        f"adamw_8bit needs the package bitsandbytes on every node ({cause}): install it as a "
        "library of the cluster or with %pip, or use adamw",
    )


def _unknown(name: str, key: str, known: Optimizer) -> str:
    if key in _ELSEWHERE:
        place = _ELSEWHERE[key]
        return f"unknown key: give {place}" if place else "unknown key: it is chosen by itself"
    close = difflib.get_close_matches(key, ("name", *known.options), n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"unknown key: {hint}{name} takes {', '.join(sorted(known.options))}"


def _nesterov(options: Mapping[str, Any]) -> list[Problem]:
    """Torch's own condition, told in our words."""
    if options["nesterov"] and (options["momentum"] == 0 or options["dampening"] != 0):
        words = "needs a momentum above 0 and no dampening"
        return [Problem(f"{PATH}.nesterov", f"{words}, found {options}")]
    return []


def _is_eps_pair(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    first, second = value
    return (first is None or (_is_number(first) and first > 0)) and (
        _is_number(second) and second > 0
    )
