"""YAML as people write it: faults told by line, and a key that is there twice is refused."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import yaml

from dbx_llmtrain.errors import Problem


class _Named(io.StringIO):
    """A text whose faults are told by the name of its file, without repeating the line: it may hold
    a secret."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name


def read(text: str, name: str) -> tuple[Any, list[Problem]]:
    """The value of ``text``, and what is wrong with it. ``name`` is what the user calls it."""
    try:
        loader = yaml.SafeLoader(_Named(text, name))
        try:
            node = loader.get_single_node()
            twice = list(_twice(node, (), set()))
            value = loader.construct_document(node) if node is not None and not twice else None
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return None, [Problem("", f"{name} is not valid YAML: {_told(error)}")]
    return value, twice


def _told(error: Exception) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    begun = error.context_mark
    text = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return text + (f" ({error.context}, line {begun.line + 1})" if begun and error.context else "")


def _twice(node: Any, path: tuple[str, ...], seen: set[int]) -> Iterator[Problem]:
    """Keys that a mapping has more than once: YAML itself would keep the last one, silently."""
    if node is None or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            yield from _twice(item, (*path, str(number)), seen)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[tuple[str, str], list[int]] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        lines.setdefault((key.tag, key.value), []).append(key.start_mark.line + 1)
        yield from _twice(value, (*path, key.value), seen)
    for (_, name), found in lines.items():
        if len(found) > 1:
            numbers = list(dict.fromkeys(map(str, found)))
            where = f"line{'s' if len(numbers) > 1 else ''} {' and '.join(numbers)}"
            yield Problem(
                ".".join((*path, name)), f"given {len(found)} times, in {where}: keep one of them"
            )
