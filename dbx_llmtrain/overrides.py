"""Settings given as ``key.path=value`` strings, applied to nested mappings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from dbx_llmtrain.errors import Problem


def apply(values: dict[str, Any], overrides: Iterable[str]) -> tuple[dict[str, Any], list[Problem]]:
    """``values`` with every ``key.path=value`` applied, and what is wrong with the others."""
    problems: list[Problem] = []
    for text in overrides:
        path, equals, raw = text.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            problems.append(Problem("", f"override {text!r}: expected key.path=value"))
            continue
        try:
            value = yaml.safe_load(raw)
        except yaml.YAMLError:
            problems.append(Problem(path, f"override value {raw!r} is not valid YAML"))
            continue
        values = _with(values, keys, _number(value))
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
