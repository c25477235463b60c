"""Turns of a conversation: lists of messages in the two ways they are written.

OpenAI's ``{"role", "content"}`` with ``tool_calls`` and the role ``tool``, and ShareGPT's
``{"from", "value"}`` with ``function_call`` and ``observation``, become the same messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from dbx_llmtrain.errors import DataError
from dbx_llmtrain.text.values import as_list, from_json, without_nulls

ROLES = ("system", "user", "assistant", "tool")
# ShareGPT's names of the roles; function_call is an answer that calls a tool.
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}

Wrong = Callable[[str, Any], DataError]
"""Makes the error for what was expected and what was found."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation. ``role`` is one of ``ROLES``; ``extra`` has the message's other
    keys for the template (``tool_calls``, ``name``, ``reasoning_content``, ...)."""

    role: str
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        return {"role": self.role, "content": self.content, **self.extra}


@dataclass(frozen=True)
class Chat:
    """A conversation, and the JSON schemas of the tools that it may call.

    ``completion_from`` is the index of the first message of its completion, where the row told
    prompt and completion apart (else 0: every answer is part of it).
    """

    messages: tuple[Message, ...]
    completion_from: int = 0
    tools: tuple[Mapping[str, Any], ...] = ()


def messages(value: Any, wrong: Wrong) -> tuple[Message, ...]:
    """A list of ``{"role", "content", ...}``. Raises what ``wrong`` makes."""
    items = _items(value, wrong)
    return tuple(_message(item, index, wrong) for index, item in enumerate(items))


def sharegpt(value: Any, wrong: Wrong) -> tuple[Message, ...]:
    """A list of ``{"from", "value"}``. Raises what ``wrong`` makes."""
    items = _items(value, wrong)
    return tuple(_turn(item, index, wrong) for index, item in enumerate(items))


def tools(value: Any, wrong: Wrong) -> tuple[Mapping[str, Any], ...]:
    """The JSON schemas of a ``tools`` column: a list, or the same as a string of JSON."""
    try:
        given = from_json(value) if value not in (None, "") else []
        given = [given] if isinstance(given, Mapping) else as_list(given)
        schemas = None if given is None else [from_json(tool) for tool in given]
    except ValueError as error:
        raise wrong(f"JSON schemas of tools ({error})", value) from error
    if schemas is None:
        raise wrong("a list of tools, or such a list as JSON", value)
    return tuple(_schema(tool, wrong) for tool in schemas)


def two_answers(messages_: Sequence[Message]) -> int | None:
    """The index of an answer that another one follows; none where one of them calls a tool."""
    for at, (one, other) in enumerate(pairwise(messages_)):
        calls = "tool_calls" in one.extra or "tool_calls" in other.extra
        if one.role == other.role == "assistant" and not calls:
            return at
    return None


def _schema(tool: Any, wrong: Wrong) -> Mapping[str, Any]:
    tool = without_nulls(tool)
    if isinstance(tool, Mapping) and "function" not in tool and "name" in tool:
        tool = {"type": "function", "function": tool}
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise wrong("tools that have a function with a name", tool)
    return dict(tool)


def _items(value: Any, wrong: Wrong) -> list[Any]:
    items = as_list(value)
    if not items:
        raise wrong("a non-empty list of messages", value)
    return items


def _at(index: int, wrong: Wrong) -> Wrong:
    return lambda expected, found: wrong(f"message {index} to have {expected}", found)


def _message(item: Any, index: int, wrong: Wrong) -> Message:
    wrong = _at(index, wrong)
    if not isinstance(item, Mapping):
        raise wrong("a role and a content", item)
    role = item.get("role")
    if role not in ROLES:
        raise wrong(f"a role of {', '.join(ROLES)}", role)
    _check_keys(item, wrong)
    skip = ("role", "content", "tool_calls", "function_call", "weight")
    extra = {
        key: without_nulls(item[key]) for key in item if key not in skip and item[key] is not None
    }
    calls = _tool_calls(item.get("tool_calls"), wrong)
    if calls:
        if role != "assistant":
            raise wrong(f"no tool_calls in a message of role {role}", item["tool_calls"])
        extra["tool_calls"] = calls
    content = _content(item.get("content"), bool(calls), wrong)
    return _checked(Message(role, content, extra), wrong)


def _check_keys(item: Mapping[str, Any], wrong: Wrong) -> None:
    """Refuse keys whose meaning would be lost."""
    if item.get("function_call"):
        raise wrong("tool_calls in place of function_call", item["function_call"])
    if item.get("weight") not in (None, 1):
        raise wrong("no weight other than 1 (data.train_on says what is trained)", item["weight"])


def _content(content: Any, calls: bool, wrong: Wrong) -> str:
    """The text of a message, also where it is given as a list of text parts."""
    if content is None and calls:
        return ""
    parts = as_list(content)
    if parts is not None:
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
        others = [part for part, text in zip(parts, texts, strict=True) if type(text) is not str]
        if others or not parts:
            raise wrong("a content of text parts", others[0] if others else content)
        content = "".join(str(text) for text in texts)
    if not isinstance(content, str):
        raise wrong("a content that is a string", content)
    return content


def _checked(message: Message, wrong: Wrong) -> Message:
    """The message, refused where it is empty and must not be."""
    if message.content.strip() or "tool_calls" in message.extra:
        return message
    if message.role == "assistant":
        raise wrong("an answer that is not empty", message.content)
    if message.role == "user":
        raise wrong("a content that is not empty", message.content)
    return message


def _tool_calls(value: Any, wrong: Wrong) -> list[dict[str, Any]]:
    if value in (None, ""):
        return []
    try:
        given = from_json(value)
    except ValueError as error:
        raise wrong(f"tool_calls that are a list or JSON ({error})", value) from error
    calls = as_list(given)
    if calls is None:
        raise wrong("a list of tool_calls", value)
    return [_tool_call(call, wrong) for call in calls]


def _tool_call(call: Any, wrong: Wrong) -> dict[str, Any]:
    """A call as templates expect it: its arguments are a mapping, not a string of JSON."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise wrong("tool calls with the name of a function", call)
    given = function.get("arguments")
    try:
        arguments = from_json(given) if given not in (None, "") else {}
    except ValueError as error:
        raise wrong(f"arguments of a tool call that are JSON ({error})", given) from error
    if not isinstance(arguments, Mapping):
        raise wrong("arguments of a tool call that are an object", given)
    if not isinstance(given, str):
        arguments = without_nulls(dict(arguments))
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str):
        made["id"] = call["id"]
    return made


def _turn(item: Any, index: int, wrong: Wrong) -> Message:
    if isinstance(item, Mapping) and item.get("from") is None and "role" in item:
        return _message(item, index, wrong)
    wrong = _at(index, wrong)
    if not isinstance(item, Mapping):
        raise wrong("a from and a value", item)
    speaker, value = item.get("from"), item.get("value")
    role = SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise wrong(f"a from of {', '.join(SHAREGPT_ROLES)}", speaker)
    if not isinstance(value, str):
        raise wrong("a value that is a string", value)
    if speaker != "function_call":
        return _checked(Message(role, value), wrong)
    try:
        given = from_json(value)
    except ValueError as error:
        raise wrong(f"a function_call that is JSON ({error})", value) from error
    calls = [_tool_call(call, wrong) for call in as_list(given) or [given]]
    return Message("assistant", "", {"tool_calls": calls})


def strings(chat: Chat) -> Iterator[str]:
    """Every text of a conversation that comes from the row."""
    for message in chat.messages:
        yield message.content
        if message.extra:
            yield from _nested(dict(message.extra))
    for tool in chat.tools:
        yield from _nested(dict(tool))


def _nested(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _nested(item)
    elif isinstance(value, list):
        for item in value:
            yield from _nested(item)


def keys(chat: Chat) -> Iterator[str]:
    """Every name of a field within the tools and the messages' other keys."""
    nested: list[Any] = [*chat.tools, *(message.extra for message in chat.messages)]
    while nested:
        value = nested.pop()
        if isinstance(value, dict):
            yield from value
            nested.extend(value.values())
        elif isinstance(value, list):
            nested.extend(value)
