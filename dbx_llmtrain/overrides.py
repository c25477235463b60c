"""Settings given as ``key.path=value`` strings, applied to nested mappings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from dbx_llmtrain import yaml_text
from dbx_llmtrain.errors import Problem
from dbx_llmtrain.secret_text import hide

_EITHER = (("train.epochs", "train.max_steps"),)
"""Fields of which one takes the place of the other."""


def apply(values: dict[str, Any], overrides: Iterable[str]) -> tuple[dict[str, Any], list[Problem]]:
    """``values`` with every ``key.path=value`` applied, and what is wrong with the others.

    Of two fields that exclude each other the one that is given takes the place of the one that
    ``values`` had; both given stay a contradiction.
    """
    problems: list[Problem] = []
    given: dict[str, Any] = {}
    for text in overrides:
        path, equals, raw = text.partition("=")
        path = path.strip()
        if not equals or not all(path.split(".")):
            problems.append(Problem("", f"override {hide(text)!r}: expected key.path=value"))
            continue
        value, faults = yaml_text.read(raw, f"override value {hide(raw)!r}")
        problems += [
            Problem(f"{path}.{fault.path}" if fault.path else path, fault.message)
            for fault in faults
        ]
        if not faults:
            given[path] = value = _number(value)
            values = _with(values, path.split("."), value)
    for one, other in (*_EITHER, *((b, a) for a, b in _EITHER)):
        if given.get(one) is not None and other not in given:
            values = _without(values, other.split("."))
    return values, problems


def _number(value: Any) -> Any:
    """YAML 1.1 reads ``1e-5`` as a string; people mean a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _with(values: Any, keys: list[str], value: Any) -> dict[str, Any]:
    if isinstance(values, BaseModel):
        values = values.model_dump(mode="json", exclude_unset=True)
    copy = dict(values) if isinstance(values, Mapping) else {}
    key, rest = keys[0], keys[1:]
    copy[key] = _with(copy.get(key, {}), rest, value) if rest else value
    return copy


def _without(values: Any, keys: list[str]) -> Any:
    """A copy that leaves a field at its default, where it has it at all."""
    key, rest = keys[0], keys[1:]
    if isinstance(values, BaseModel):
        values = values.model_dump(mode="json", exclude_unset=True)
    if not isinstance(values, Mapping) or key not in values:
        return values
    copy = dict(values)
    if rest:
        copy[key] = _without(copy[key], rest)
    else:
        del copy[key]
    return copy
