"""Rows of any supported shape to conversations, prompts with completions, or plain text.

Formats and their columns:

- ``messages``: ``messages`` is a list of ``{"role": ..., "content": ...}``
- ``prompt_completion``: ``prompt`` and ``completion``, both strings or both lists of messages
- ``instruction``: ``instruction`` with ``input`` and ``output`` (Alpaca's names) or ``context`` and
  ``response`` (Dolly's); ``input`` and ``context`` may be missing or empty
- ``text``: ``text``

Columns of other names are renamed by a mapping ``{our name: theirs}``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dbx_llmtrain.errors import DataError

Format = Literal["messages", "prompt_completion", "instruction", "text"]

ROLES = ("system", "user", "assistant")

# What a row of each format must have: one of these sets of columns.
_REQUIRED: dict[Format, tuple[frozenset[str], ...]] = {
    "messages": (frozenset({"messages"}),),
    "prompt_completion": (frozenset({"prompt", "completion"}),),
    "instruction": (
        frozenset({"instruction", "output"}),
        frozenset({"instruction", "response"}),
    ),
    "text": (frozenset({"text"}),),
}
_OPTIONAL: dict[Format, frozenset[str]] = {"instruction": frozenset({"input", "context"})}
# Keys of a message that carry meaning which a plain role and content cannot hold.
_UNSUPPORTED_KEYS = ("tool_calls", "function_call")


@dataclass(frozen=True)
class Message:
    """One turn of a conversation. ``role`` is one of ``ROLES``."""

    role: str
    content: str


@dataclass(frozen=True)
class Chat:
    """A conversation. ``completion_from`` is the index of the first message of its completion,
    where the row told prompt and completion apart (else 0: every answer is part of it)."""

    messages: tuple[Message, ...]
    completion_from: int = 0


@dataclass(frozen=True)
class PromptCompletion:
    """A prompt with its completion.

    ``prompt`` is what a model without a chat template sees, ``user`` what the user says in the
    chat that a model with one sees.
    """

    prompt: str
    completion: str
    user: str


@dataclass(frozen=True)
class Text:
    """Plain text."""

    text: str


@dataclass(frozen=True)
class Dropped:
    """A row that is left out, and why."""

    reason: str


Row = Chat | PromptCompletion | Text


def detect_format(names: Iterable[str], columns: Mapping[str, str], where: str) -> Format:
    """The only format that a row with these columns can have.

    Where columns were renamed, only formats that have one of the renamed columns count. Raises
    ``DataError`` when no format fits, or several do.
    """
    there = {ours for ours in _known() if columns.get(ours, ours) in set(names)}
    fitting = [name for name, sets in _REQUIRED.items() if any(need <= there for need in sets)]
    if columns:
        fitting = [name for name in fitting if _columns_of(name) & set(columns)] or fitting
    if len(fitting) == 1:
        return fitting[0]
    found = ", ".join(sorted(str(name) for name in names)) or "no columns"
    if fitting:
        raise DataError(
            f"{where}: data.format is auto, but the columns ({found}) fit several formats: "
            f"{', '.join(fitting)}. Set data.format to one of them"
        )
    shapes = "; ".join(
        f"{name}: {' or '.join(' + '.join(sorted(need)) for need in sets)}"
        for name, sets in _REQUIRED.items()
    )
    if "conversations" in there:
        raise DataError(
            f"{where}: a conversations column (ShareGPT) is not available in this version: give "
            "messages, a list of {role, content} with the roles system, user and assistant"
        )
    raise DataError(
        f"{where}: no known format has the columns {found}. Known: {shapes}. "
        "Give data.format and rename columns with data.columns"
    )


def parse_row(
    row: Mapping[str, Any], fmt: Format, columns: Mapping[str, str], where: str
) -> Row | Dropped:
    """One row in the shape that its format stands for.

    ``where`` (file and row) starts every message. Raises ``DataError`` for a missing column, a
    wrong type, an unknown role or an empty answer; rows of empty text are ``Dropped``.
    """
    reader = _Reader(row, columns, where)
    if fmt == "messages":
        return _chat(reader)
    if fmt == "prompt_completion":
        return _prompt_completion(reader)
    if fmt == "instruction":
        return _instruction(reader)
    text = reader.text("text", empty=True)
    return Text(text) if text.strip() else Dropped("empty text")


def content_key(row: Row) -> str:
    """Name of a row's content: 32 hex digits of the SHA-256 of its canonical JSON."""
    content: Any
    if isinstance(row, Chat):
        content = [[message.role, message.content] for message in row.messages]
        content = {"messages": content, "completion_from": row.completion_from}
    elif isinstance(row, PromptCompletion):
        content = {"prompt": row.prompt, "completion": row.completion}
    else:
        content = {"text": row.text}
    text = json.dumps(content, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _known() -> set[str]:
    return {name for fmt in _REQUIRED for name in _columns_of(fmt)}


def _columns_of(fmt: Format) -> frozenset[str]:
    return frozenset().union(*_REQUIRED[fmt]) | _OPTIONAL.get(fmt, frozenset())


@dataclass(frozen=True)
class _Reader:
    """A row's columns by our names, with errors that say where, what was expected and found."""

    row: Mapping[str, Any]
    columns: Mapping[str, str]
    where: str

    def name(self, ours: str) -> str:
        return self.columns.get(ours, ours)

    def has(self, ours: str) -> bool:
        return self.row.get(self.name(ours)) is not None

    def value(self, ours: str) -> Any:
        theirs = self.name(ours)
        if theirs not in self.row:
            found = ", ".join(sorted(str(name) for name in self.row)) or "no columns"
            raise DataError(f"{self.where}: expected a column {theirs!r}, found {found}")
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

    def wrong(self, ours: str, expected: str, value: Any) -> DataError:
        return DataError(
            f"{self.where}: column {self.name(ours)!r}: expected {expected}, found {_kind(value)}"
        )

    def unanswered(self, ours: str, messages: tuple[Message, ...]) -> DataError:
        roles = ", ".join(message.role for message in messages)
        return DataError(
            f"{self.where}: column {self.name(ours)!r}: expected at least one assistant message, "
            f"found the roles {roles}"
        )


def _chat(reader: _Reader) -> Chat:
    messages = _messages(reader, "messages")
    if not any(message.role == "assistant" for message in messages):
        raise reader.unanswered("messages", messages)
    return Chat(messages)


def _prompt_completion(reader: _Reader) -> Row:
    prompt, completion = reader.value("prompt"), reader.value("completion")
    if isinstance(prompt, list) or isinstance(completion, list):
        before, after = _messages(reader, "prompt"), _messages(reader, "completion")
        if not any(message.role == "assistant" for message in after):
            raise reader.unanswered("completion", after)
        return Chat(before + after, completion_from=len(before))
    text = reader.text("prompt", empty=False)
    return PromptCompletion(text, reader.text("completion", empty=False), user=text)


def _instruction(reader: _Reader) -> PromptCompletion:
    instruction = reader.text("instruction", empty=False)
    extra = _one_of(reader, "input", "context")
    answer = _one_of(reader, "output", "response")
    context = reader.text(extra, empty=True).strip() if extra else ""
    completion = reader.text(answer or "output", empty=False)
    parts = [f"### Instruction:\n{instruction}"]
    parts += [f"### Input:\n{context}"] if context else []
    return PromptCompletion(
        prompt="\n\n".join([*parts, "### Response:\n"]),
        completion=completion,
        user=f"{instruction}\n\n{context}" if context else instruction,
    )


def _one_of(reader: _Reader, first: str, second: str) -> str | None:
    """Which of two names for the same thing the row has; ``None``: neither."""
    there = [name for name in (first, second) if reader.has(name)]
    if len(there) == 2:
        raise DataError(
            f"{reader.where}: expected one of the columns {reader.name(first)!r} and "
            f"{reader.name(second)!r}, found both: rename the right one with data.columns"
        )
    return there[0] if there else None


def _messages(reader: _Reader, ours: str) -> tuple[Message, ...]:
    value = reader.value(ours)
    if not isinstance(value, list) or not value:
        raise reader.wrong(ours, "a non-empty list of messages", value)
    return tuple(_message(reader, ours, index, item) for index, item in enumerate(value))


def _message(reader: _Reader, ours: str, index: int, item: Any) -> Message:
    def wrong(expected: str, found: Any) -> DataError:
        return reader.wrong(ours, f"message {index} to have {expected}", found)

    if not isinstance(item, Mapping):
        raise wrong("a role and a content", item)
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise wrong(f"a role of {', '.join(ROLES)}", role)
    for key in _UNSUPPORTED_KEYS:
        if item.get(key):
            raise wrong(f"no {key}, which cannot be trained on", item[key])
    if not isinstance(content, str):
        raise wrong("a content that is a string", content)
    if role == "assistant" and not content.strip():
        raise wrong("an answer that is not empty", content)
    return Message(role, content)


def _kind(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    text = value if isinstance(value, str) else repr(value)
    return f"{type(value).__name__} {text[:60]!r}" if text.strip() else "an empty string"
