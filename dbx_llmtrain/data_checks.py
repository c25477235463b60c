"""Faults between the fields of the data section that types cannot express."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from dbx_llmtrain import addresses
from dbx_llmtrain.errors import Problem

COLUMNS = frozenset(
    "messages tools conversations system prompt completion response question answer instruction "
    "output input context instances text input_ids labels attention_mask".split()
)
"""Our names of columns, in all formats."""
_WITHOUT_TEMPLATE = ("text", "tokens")
_OF_THE_HUB = ("name", "split", "revision")
_DEFAULT_MASKED = 0.15
_FILES = (".jsonl", ".json", ".csv", ".parquet")
TABLE = "table:"


def data_problems(data: Any) -> list[Problem]:
    """Every fault of a ``DataConfig`` that is valid field by field."""
    return [
        *_columns(data),
        *_objective(data),
        *_packing(data),
        *_order(data),
        *_shares(data),
        *_sources(data),
        *_places(data),
    ]


def _columns(data: Any) -> Iterator[Problem]:
    for name in data.columns:
        if name not in COLUMNS:
            # The names are easily taken for each other: {your column: our name}.
            turned = data.columns[name] in COLUMNS and f"{{{data.columns[name]}: {name}}}"
            close = difflib.get_close_matches(name, sorted(COLUMNS), n=1)
            hint = f"did you mean {turned or close[0]}? " if turned or close else ""
            yield Problem(
                f"data.columns.{name}",
                f"unknown name: {hint}Expected one of {', '.join(sorted(COLUMNS))} "
                "(our name: your column)",
            )


def _objective(data: Any) -> Iterator[Problem]:
    if data.objective == "mlm" and data.train_on is not None:
        yield Problem(
            "data.train_on",
            f"{data.train_on} cannot be obeyed with data.objective: mlm, which predicts the "
            "masked tokens of every row: remove one of them",
        )
    if data.objective == "pretrain" and data.train_on not in (None, "all"):
        yield Problem(
            "data.train_on",
            f"{data.train_on} cannot be obeyed with data.objective: pretrain, which trains every "
            "token: remove it, or use data.objective: sft",
        )
    if data.objective != "mlm" and data.mlm_probability != _DEFAULT_MASKED:
        yield Problem(
            "data.mlm_probability",
            f"is for data.objective: mlm, found {data.objective}: remove one of them",
        )
    if data.chat_template is not None and (
        data.objective == "mlm" or data.format in _WITHOUT_TEMPLATE
    ):
        what = "data.objective: mlm" if data.objective == "mlm" else f"data.format: {data.format}"
        yield Problem(
            "data.chat_template", f"is for conversations, {what} has none: remove one of them"
        )


def _packing(data: Any) -> Iterator[Problem]:
    if data.packing == "concat" and data.objective != "pretrain":
        yield Problem(
            "data.packing",
            "concat cuts texts wherever a pack is full, which only data.objective: pretrain "
            f"allows, found {data.objective}: use true",
        )
    if data.packing == "concat" and data.overflow != "truncate":
        yield Problem(
            "data.overflow",
            f"{data.overflow} has no effect with data.packing: concat, where no text is too long: "
            "remove one of them",
        )


def _order(data: Any) -> Iterator[Problem]:
    if data.group_by_length and data.packing:
        yield Problem(
            "data.group_by_length",
            "has no effect with data.packing, whose examples are all about data.max_length long: "
            "set data.packing: false or remove it",
        )
    for name in ("group_by_length", "longest_first"):
        if getattr(data, name) and not data.shuffle:
            yield Problem(
                f"data.{name}",
                "changes the order, which data.shuffle: false keeps: remove one of them",
            )


def _shares(data: Any) -> Iterator[Problem]:
    shares = [value for value in (data.eval, data.test) if isinstance(value, float)]
    if sum(shares) >= 1:
        yield Problem(
            "data.test",
            f"the shares of data.eval and data.test are {' + '.join(map(str, shares))}: nothing "
            "is left to train on",
        )


def _sources(data: Any) -> Iterator[Problem]:
    for path, source in _each(data):
        if source is not None and not (source if isinstance(source, str) else source.path).strip():
            yield Problem(path, "is empty: expected a file, a table or a data set of the hub")
        if isinstance(source, str) or source is None:
            continue
        if source.weight != 1 and not path.startswith("data.train"):
            yield Problem(
                path,
                f"weight {source.weight} is for training sources: held-out rows are read once",
            )
        given = [name for name in _OF_THE_HUB if getattr(source, name) is not None]
        kind = _kind(source.path)
        if given and kind:
            yield Problem(
                path,
                f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} for data sets of the "
                f"hub, {source.path} is a {kind}",
            )
        if source.version is not None and kind == "file":
            yield Problem(path, f"version is for Delta tables, {source.path} is a file")
        if source.version is not None and given:
            yield Problem(
                path,
                "version is for Delta tables and revision for data sets of the hub: give one",
            )


def _places(data: Any) -> Iterator[Problem]:
    """Addresses of remote storage, but for Delta tables."""
    for name, source in _each(data):
        path = "" if source is None else source if isinstance(source, str) else source.path
        if not addresses.may_be_table(path) and (
            why := addresses.refusal(path, f", or {TABLE}catalog.schema.name")
        ):
            yield Problem(name, why)
    if data.cache_dir and (why := addresses.refusal(data.cache_dir)):
        yield Problem("data.cache_dir", why)


def _kind(path: str) -> str:
    """What a path is by its looks: a ``file``, a ``table``, or not known (empty)."""
    if path.startswith(TABLE):
        return "table"
    return "file" if path.lower().endswith(_FILES) else ""


def _each(data: Any) -> Iterator[tuple[str, Any]]:
    """Every source with its dotted path."""
    for role in ("train", "eval", "test"):
        value = getattr(data, role)
        if isinstance(value, Mapping):
            yield from ((f"data.{role}.{name}", source) for name, source in value.items())
        elif isinstance(value, list):
            yield from ((f"data.{role}.{number}", source) for number, source in enumerate(value))
        elif not isinstance(value, float):
            yield f"data.{role}", value
