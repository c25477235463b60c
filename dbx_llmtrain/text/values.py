"""Values of a row in words, and JSON within a row."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from dbx_llmtrain.credentials import redact

_SHOWN = 60
# What looks like a credential: the known prefixes, or a long run of letters and digits mixed.
_SECRET = re.compile(
    r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|dapi|xox[abp]-|AKIA|eyJ)[\w.\-]{8,}"
    r"|\b(?=[\w\-]*\d)(?=[\w\-]*[A-Za-z])[\w\-]{32,}"
)


def kind(value: Any) -> str:
    """A value's type and beginning, for an error message; what looks like a secret is hidden."""
    if value is None:
        return "nothing (null)"
    text = value if isinstance(value, str) else repr(value)
    return f"{type(value).__name__} {shortened(text)!r}" if text.strip() else "an empty string"


def shortened(text: str) -> str:
    """The beginning of a text, without what looks like a secret."""
    return _SECRET.sub("***", redact(text[: 10 * _SHOWN], {}))[:_SHOWN]


def listed(names: Iterable[Any]) -> str:
    """Names of columns in words."""
    return ", ".join(sorted(map(str, names))) or "no columns"


def meant(name: str, names: Iterable[Any]) -> str:
    """A question after the one of ``names`` that was probably meant; empty where none is near."""
    close = difflib.get_close_matches(name, [str(other) for other in names], n=1)
    return f": did you mean {close[0]!r}?" if close else ""


def as_list(value: Any) -> list[Any] | None:
    """A list, tuple or array as a list; ``None`` for anything else."""
    if hasattr(value, "tolist") and not isinstance(value, str | bytes):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else None


def from_json(value: Any) -> Any:
    """The content of a string of JSON, another value as it is. ``ValueError``: not JSON."""
    return json.loads(value) if isinstance(value, str) else value


def without_nulls(value: Any) -> Any:
    """A copy without keys whose value is null.

    Columnar files give every struct the keys of all rows, null where a row has none.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    items = as_list(value)
    return value if items is None else [without_nulls(item) for item in items]


def with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy in which every string (not the keys) has been changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: with_strings(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [with_strings(item, change) for item in value]
    return value
