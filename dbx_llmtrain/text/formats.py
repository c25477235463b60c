"""Rows of any supported shape to conversations, prompts with completions, text or token ids.

Formats and their columns:

- ``messages``: ``messages`` is a list of ``{"role": ..., "content": ...}``; optional ``tools``
- ``sharegpt``: ``conversations`` is a list of ``{"from": ..., "value": ...}``; optional ``system``
  and ``tools``
- ``prompt_completion``: ``prompt`` and ``completion`` (or ``response``), or ``question`` and
  ``answer``: both strings or both lists of messages
- ``instruction``: ``instruction`` with ``input`` and ``output`` (Alpaca's names) or ``context`` and
  ``response`` (Dolly's); ``input`` and ``context`` may be missing or empty. Or ``instruction`` with
  ``instances``, a list of ``{"input", "output"}``: each is an example
- ``text``: ``text``
- ``tokens``: ``input_ids``; optional ``labels`` and ``attention_mask``

Columns of other names are renamed by a mapping ``{our name: theirs}``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from dbx_llmtrain.errors import DataError
from dbx_llmtrain.text import turns
from dbx_llmtrain.text.turns import Chat, Message
from dbx_llmtrain.text.values import as_list, kind, listed, meant

Format = Literal["messages", "sharegpt", "prompt_completion", "instruction", "text", "tokens"]

# What a row of each format must have: one of these sets of columns.
_REQUIRED: dict[Format, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages",),),
    "sharegpt": (("conversations",),),
    "prompt_completion": (("prompt", "completion"), ("prompt", "response"), ("question", "answer")),
    "instruction": (
        ("instruction", "output"),
        ("instruction", "response"),
        ("instruction", "instances"),
    ),
    "text": (("text",),),
    "tokens": (("input_ids",),),
}
_OPTIONAL: dict[Format, tuple[str, ...]] = {
    "messages": ("tools",),
    "sharegpt": ("system", "tools"),
    "instruction": ("input", "context"),
    "tokens": ("labels", "attention_mask"),
}


@dataclass(frozen=True)
class PromptCompletion:
    """A prompt with its completion.

    ``prompt`` is what a model without a chat template sees, ``user`` what the user says in the
    chat that a model with one sees. ``control``: control tokens that the prompt and the completion
    spell out stand for themselves (in a prompt of the row's own; not in a layout of ours).
    """

    prompt: str
    completion: str
    user: str
    control: bool = True


@dataclass(frozen=True)
class Text:
    """Plain text."""

    text: str


@dataclass(frozen=True)
class TokenIds:
    """A row that is tokenised already; what is masked as padding has been cut off."""

    ids: tuple[int, ...]
    labels: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Dropped:
    """A row that is left out, why, and how many tokens it had where they were counted."""

    reason: str
    tokens: int = 0


Row = Chat | PromptCompletion | Text | TokenIds


def detect_format(names: Iterable[str], columns: Mapping[str, str], where: str) -> Format:
    """The only format that a row with these columns can have.

    Where columns were renamed, only formats that have one of the renamed columns count. Raises
    ``DataError`` when no format fits, or several do.
    """
    found = {str(name) for name in names}
    there = {ours for ours in known_columns() if columns.get(ours, ours) in found}
    fitting = [name for name, sets in _REQUIRED.items() if any(set(s) <= there for s in sets)]
    if columns:
        fitting = [name for name in fitting if _columns_of(name) & set(columns)] or fitting
    if len(fitting) == 1:
        return fitting[0]
    names_ = listed(found)
    if fitting:
        raise DataError(
            f"{where}: data.format is auto, but the columns ({names_}) fit several formats: "
            f"{', '.join(fitting)}. Set data.format to one of them"
        )
    for ours, theirs in columns.items():
        if theirs not in found:
            raise DataError(
                f"{where}: data.columns.{ours}: there is no column {theirs!r}, found {names_}"
                f"{meant(theirs, found)}"
            )
    shapes = "; ".join(
        f"{name}: {' or '.join(' + '.join(need) for need in sets)}"
        for name, sets in _REQUIRED.items()
    )
    raise DataError(
        f"{where}: no known format has the columns {names_}. Known: {shapes}. Rename columns with "
        "data.columns, or give data.formatter, a function that makes such a row of yours"
    )


def parse_rows(
    row: Mapping[str, Any], fmt: Format, columns: Mapping[str, str], where: str
) -> tuple[Row, ...] | Dropped:
    """What a row holds in the shape that its format stands for: several only for instances.

    ``where`` (file and row) starts every message. Raises ``DataError`` for a missing column, a
    wrong type, an unknown role, an empty answer, or ids and masks that do not fit each other; rows
    of empty text or without tokens are ``Dropped``.
    """
    reader = _Reader(row, columns, where)
    if fmt == "messages":
        given = turns.messages(*reader.with_wrong("messages"))
        return (_chat(reader, "messages", _apart(reader, "messages", given)),)
    if fmt == "sharegpt":
        return (_sharegpt(reader),)
    if fmt == "prompt_completion":
        return (_prompt_completion(reader),)
    if fmt == "instruction":
        return _instructions(reader)
    if fmt == "tokens":
        ids = _token_ids(reader)
        return (ids,) if ids.ids else Dropped("no tokens")
    text = reader.text("text", empty=True)
    return (Text(text),) if text.strip() else Dropped("empty text")


def content_key(*rows: Row) -> str:
    """Name of a row's content: 32 hex digits of the SHA-256 of its canonical JSON."""
    content = [_content(row) for row in rows]
    text = json.dumps(
        content[0] if len(content) == 1 else content,
        ensure_ascii=True,
        sort_keys=True,
        separators=(",", ":"),
        default=str,
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _content(row: Row) -> dict[str, Any]:
    if isinstance(row, Chat):
        turns_ = [[m.role, m.content, *([m.extra] if m.extra else [])] for m in row.messages]
        content = {"messages": turns_, "completion_from": row.completion_from}
        return content | ({"tools": row.tools} if row.tools else {})
    if isinstance(row, PromptCompletion):
        return {"prompt": row.prompt, "completion": row.completion}
    if isinstance(row, TokenIds):
        return {"ids": row.ids, "labels": row.labels}
    return {"text": row.text}


def known_columns() -> set[str]:
    """Our names of columns, in all formats."""
    return {name for fmt in _REQUIRED for name in _columns_of(fmt)}


def _columns_of(fmt: Format) -> set[str]:
    return {name for need in _REQUIRED[fmt] for name in need} | set(_OPTIONAL.get(fmt, ()))


@dataclass(frozen=True)
class _Reader:
    """A row's columns by our names, with errors that say where, what was expected and found."""

    row: Mapping[str, Any]
    columns: Mapping[str, str]
    where: str

    def name(self, ours: str) -> str:
        return self.columns.get(ours, ours)

    def get(self, ours: str) -> Any:
        return self.row.get(self.name(ours))

    def value(self, ours: str) -> Any:
        theirs = self.name(ours)
        if theirs not in self.row:
            said = f" (data.columns: {ours})" if ours in self.columns else ""
            raise DataError(
                f"{self.where}: expected a column {theirs!r}{said}, found {listed(self.row)}"
                f"{meant(theirs, self.row)}"
            )
        return self.row[theirs]

    def text(self, ours: str, *, empty: bool) -> str:
        value = self.value(ours)
        if value is None and empty:
            return ""
        if not isinstance(value, str):
            raise self.wrong(ours, "a string", value)
        if not empty and not value.strip():
            raise self.wrong(ours, "a non-empty string", value)
        return value

    def with_wrong(self, ours: str) -> tuple[Any, turns.Wrong]:
        """A column's value, and what makes the error for it."""
        return self.value(ours), lambda expected, found: self.wrong(ours, expected, found)

    def wrong(self, ours: str, expected: str, value: Any) -> DataError:
        return DataError(
            f"{self.where}: column {self.name(ours)!r}: expected {expected}, found {kind(value)}"
        )

    def one_of(self, *names: str) -> str | None:
        """Which of several names for the same thing the row has; ``None``: none of them."""
        there = [name for name in names if self.get(name) is not None]
        if len(there) > 1:
            raise DataError(
                f"{self.where}: expected one of the columns {self.name(there[0])!r} and "
                f"{self.name(there[1])!r}, found both: rename the right one with data.columns"
            )
        return there[0] if there else None


def _chat(reader: _Reader, ours: str, messages: tuple[Message, ...], start: int = 0) -> Chat:
    """A conversation whose answers to train are among the messages from ``start``."""
    if not any(message.role == "assistant" for message in messages[start:]):
        roles = ", ".join(message.role for message in messages[start:])
        raise DataError(
            f"{reader.where}: column {reader.name(ours)!r}: expected at least one assistant "
            f"message, found the roles {roles}"
        )
    if reader.get("tools") is None:
        return Chat(messages, start)
    return Chat(messages, start, turns.tools(*reader.with_wrong("tools")))


def _apart(reader: _Reader, ours: str, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages, refused where one answer follows another: what the model should have said at
    the end of the first, stop or go on, the row does not tell."""
    at = turns.two_answers(messages)
    if at is None:
        return messages
    raise DataError(
        f"{reader.where}: column {reader.name(ours)!r}: two answers in a row (messages {at} and "
        f"{at + 1}): join them into one"
    )


def _sharegpt(reader: _Reader) -> Chat:
    messages = turns.sharegpt(*reader.with_wrong("conversations"))
    _apart(reader, "conversations", messages)
    if reader.get("system") is not None:
        system = reader.text("system", empty=True)
        if system.strip() and messages[0].role == "system":
            raise DataError(
                f"{reader.where}: expected one system message, found the column "
                f"{reader.name('system')!r} and a system turn in {reader.name('conversations')!r}"
            )
        if system.strip():
            messages = (Message("system", system), *messages)
    return _chat(reader, "conversations", messages)


def _prompt_completion(reader: _Reader) -> Row:
    before, after = _prompt_names(reader)
    prompt, completion = reader.value(before), reader.value(after)
    if as_list(prompt) is not None or as_list(completion) is not None:
        asked = turns.messages(*reader.with_wrong(before))
        answered = turns.messages(*reader.with_wrong(after))
        _apart(reader, f"{before} + {after}", asked + answered)
        return _chat(reader, after, asked + answered, len(asked))
    text = reader.text(before, empty=False)
    return PromptCompletion(text, reader.text(after, empty=False), user=text)


def _prompt_names(reader: _Reader) -> tuple[str, str]:
    """Which two columns the row has its prompt and its completion in."""
    pairs = _REQUIRED["prompt_completion"]
    pairs = tuple(pair for pair in pairs if set(pair) & set(reader.columns)) or pairs
    there = [pair for pair in pairs if all(reader.name(name) in reader.row for name in pair)]
    filled = [pair for pair in there if all(reader.get(name) is not None for name in pair)]
    if len(filled) > 1:
        first, second = (" + ".join(reader.name(name) for name in pair) for pair in filled[:2])
        raise DataError(
            f"{reader.where}: expected one prompt with one completion, found {first} and {second}: "
            "rename the right ones with data.columns"
        )
    # A row that has one column of a pair is told which is missing.
    some = [pair for pair in pairs if any(reader.name(name) in reader.row for name in pair)]
    if not some:
        names = ", or ".join(" and ".join(map(reader.name, pair)) for pair in pairs)
        raise DataError(f"{reader.where}: expected the columns {names}, found {listed(reader.row)}")
    before, after = (*filled, *there, *some)[0]
    return before, after


def _instructions(reader: _Reader) -> tuple[Row, ...]:
    if reader.one_of("instances", "output", "response") != "instances":
        return (_instruction(reader),)
    instances = as_list(reader.value("instances"))
    if not instances:
        raise reader.wrong("instances", "a non-empty list", reader.value("instances"))
    rows = []
    for index, instance in enumerate(instances):
        if not isinstance(instance, Mapping):
            raise reader.wrong("instances", f"instance {index} to be an object", instance)
        inner = {**instance, reader.name("instruction"): reader.value("instruction")}
        place = f"{reader.where}, instance {index}"
        rows.append(_instruction(replace(reader, row=inner, where=place)))
    return tuple(rows)


def _instruction(reader: _Reader) -> PromptCompletion:
    instruction = reader.text("instruction", empty=False)
    extra = reader.one_of("input", "context")
    answer = reader.one_of("output", "response")
    context = reader.text(extra, empty=True).strip() if extra else ""
    completion = reader.text(answer or "output", empty=False)
    parts = [f"### Instruction:\n{instruction}"]
    parts += [f"### Input:\n{context}"] if context else []
    return PromptCompletion(
        prompt="\n\n".join([*parts, "### Response:\n"]),
        completion=completion,
        user=f"{instruction}\n\n{context}" if context else instruction,
        control=False,
    )


def _token_ids(reader: _Reader) -> TokenIds:
    ids = _integers(reader, "input_ids")
    labels = None if reader.get("labels") is None else _integers(reader, "labels")
    if labels is not None and len(labels) != len(ids):
        raise reader.wrong("labels", f"{len(ids)} labels, as there are input_ids", len(labels))
    for at, (id_, label) in enumerate(zip(ids, labels or (), strict=False)):
        if label not in (-100, id_):
            raise reader.wrong("labels", f"-100 or the input id {id_} at position {at}", label)
    if reader.get("attention_mask") is None:
        return TokenIds(ids, labels)
    mask = _integers(reader, "attention_mask")
    if len(mask) != len(ids):
        raise reader.wrong("attention_mask", f"{len(ids)} values, as input_ids", len(mask))
    begin, end = _unpadded(reader, mask)
    if any(label != -100 for label in (labels or ())[:begin] + (labels or ())[end:]):
        raise reader.wrong("labels", "-100 where attention_mask is 0", "a label")
    return TokenIds(ids[begin:end], None if labels is None else labels[begin:end])


def _unpadded(reader: _Reader, mask: tuple[int, ...]) -> tuple[int, int]:
    """Where the ones of a mask begin and end; they must be one run."""
    if not set(mask) <= {0, 1}:
        raise reader.wrong("attention_mask", "zeros and ones", sorted(set(mask)))
    count = sum(mask)
    begin = mask.index(1) if count else 0
    if any(value == 0 for value in mask[begin : begin + count]):
        at = mask.index(0, begin)
        raise reader.wrong(
            "attention_mask", "ones without a gap, and zeros at the ends only", f"0 at {at}"
        )
    return begin, begin + count


def _integers(reader: _Reader, ours: str) -> tuple[int, ...]:
    values = as_list(reader.value(ours))
    if values is None:
        raise reader.wrong(ours, "a list of integers", reader.value(ours))
    for value in values:
        if type(value) is not int:
            raise reader.wrong(ours, "a list of integers", value)
    return tuple(values)
