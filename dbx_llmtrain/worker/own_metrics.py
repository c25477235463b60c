"""A user's own metrics: a function of the model and its tokenizer, called at each evaluation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from dbx_llmtrain.errors import ConfigError, Problem
from dbx_llmtrain.worker import lending
from dbx_llmtrain.worker.tools import METRICS_PATH, Tools
from dbx_llmtrain.worker.world import World

_NAME = re.compile(r"[A-Za-z_][\w./-]*")
_OURS = re.compile(r"(initial_|best_).*|train_loss|peak_memory_bytes|seconds_to_first_step")
"""Names in a run's result, beside those that events have."""


def measure(
    root: nn.Module, model: Any, world: World, tools: Tools, *, taken: Iterable[str]
) -> dict[str, float]:
    """What the function gives on rank 0, on every rank; it is called on all of them. ``taken`` are
    the names of this evaluation's own metrics.

    Raises ``ConfigError`` on every rank where that is not numbers by names which are free. What the
    function raises itself ends the run, with a note that says whose function it was.
    """
    given: list[Any] = []
    function = tools.metrics
    assert function is not None
    assert tools.generation is not None

    def use(lent: Any) -> None:
        try:
            given.append(function(lent, tools.tokenizer))
        except Exception as error:
            error.add_note("(raised by the function that was passed as metrics=)")
            raise

    lending.lend(root, model, world, use, tools.generation)
    outcome: list[Any] = [None]
    if world.rank == 0:
        outcome = [_checked(given[0], set(taken))]
    if world.size > 1:
        dist.broadcast_object_list(outcome, 0)
    values, fault = outcome[0]
    if fault:
        raise ConfigError([Problem(METRICS_PATH, fault)])
    found: dict[str, float] = values
    return found


def _checked(given: Any, taken: set[str]) -> tuple[dict[str, float], str]:
    """The numbers by name, or what is wrong with them."""
    from dbx_llmtrain.tracking import METRICS

    if not isinstance(given, Mapping):
        kind = type(given).__name__
        return {}, f"expected a mapping of names to numbers as the function's result, found {kind}"
    values: dict[str, float] = {}
    for name, value in given.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return {}, (
                f"expected names of letters, digits and any of _ . / - that begin with a letter, "
                f"found {name!r}"
            )
        if name in taken | METRICS.keys() or _OURS.fullmatch(name):
            return {}, f"{name} is the name of a metric of ours: give yours another one"
        number = _number(value)
        if number is None:
            return {}, f"expected a number for {name}, found {value!r:.80} ({type(value).__name__})"
        values[name] = number
    return values, ""


def _number(value: Any) -> float | None:
    """Numbers of Python and NumPy, and tensors of one element."""
    if isinstance(value, str | bytes):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
