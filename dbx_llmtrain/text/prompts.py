"""Prompts that a model answers, as it was taught to see them.

A list of messages is written by the chat template, up to where the answer begins. A text is taken
for a user's message where the model was trained on chats (or on prompts with completions, which a
template makes chats of), else it is the beginning of a text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dbx_llmtrain.errors import ConfigError, Problem

_CHATS = frozenset({"messages", "sharegpt", "prompt_completion", "instruction"})

Given = str | Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Prompt:
    """What the model reads, and how it is shown to people."""

    shown: str
    ids: tuple[int, ...]


def from_chats(formats: str, tokenizer: Any) -> bool:
    """Whether a text is a user's message. ``formats`` are those of the data, with commas."""
    known = _CHATS.intersection(formats.split(", "))
    return bool(known) and bool(getattr(tokenizer, "chat_template", None))


def encode(
    tokenizer: Any,
    prompts: Sequence[Given],
    *,
    chats: bool,
    positions: int | None = None,
    path: str = "train.sample_prompts",
) -> tuple[Prompt, ...]:
    """The prompts as ids. ``chats``: see ``from_chats``; ``positions``: of the model.

    Raises ``ConfigError`` with every prompt that cannot be rendered or leaves no room for an
    answer.
    """
    found, problems = [], []
    for number, given in enumerate(prompts):
        where = f"{path}[{number}]"
        try:
            ids = _ids(tokenizer, given, chats=chats)
        except ConfigError as error:
            problems += [Problem(where, each.message) for each in error.problems]
            continue
        if not ids:
            problems.append(Problem(where, "has no token: expected a text that is not empty"))
        if positions is not None and len(ids) >= positions:
            problems.append(
                Problem(
                    where,
                    f"has {len(ids)} tokens, the model has {positions} positions for prompt and "
                    "answer: shorten it",
                )
            )
        found.append(Prompt(shown(given), tuple(ids)))
    if problems:
        raise ConfigError(problems)
    return tuple(found)


def shown(given: Given) -> str:
    """A prompt as people read it; of several messages each begins with its role."""
    if isinstance(given, str):
        return given
    return "\n".join(f"{turn.get('role', '')}: {turn.get('content', '')}" for turn in given)


def _ids(tokenizer: Any, given: Given, *, chats: bool) -> list[int]:
    if isinstance(given, str) and not chats:
        return _begun(tokenizer, given)
    turns = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
    text = _rendered(tokenizer, turns)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _begun(tokenizer: Any, text: str) -> list[int]:
    """A text with what the tokenizer puts in front of it, but without the end that some add."""
    ids = list(tokenizer(text)["input_ids"])
    bare = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    while len(ids) > bare and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    return ids


def _rendered(tokenizer: Any, turns: Sequence[Mapping[str, str]]) -> str:
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        raise _refuse(
            "is a list of messages, and the tokenizer has no chat template: give a text, or a "
            "template with data.chat_template"
        )
    lacking = [turn for turn in turns if not {"role", "content"} <= turn.keys()]
    if lacking or not turns:
        found = f"found one of {', '.join(lacking[0]) or 'nothing'}" if lacking else "found none"
        raise _refuse(f"expected messages of role and content, {found}")
    try:
        text = tokenizer.apply_chat_template(
            [dict(turn) for turn in turns], tokenize=False, add_generation_prompt=True
        )
    except (
        TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise _refuse(f"the chat template cannot render it: {error}") from error
    return str(text)


def _refuse(message: str) -> ConfigError:
    return ConfigError([Problem("", message)])
