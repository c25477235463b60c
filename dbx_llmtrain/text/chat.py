"""Rows to token ids, with a mark on every token that is trained.

Marks are set by position, never by token id. A row is tokenised exactly as it is at inference: a
prompt by itself (so that no merge crosses into the answer), a chat by the tokenizer's own template.
Which tokens of a chat are an answer is found by rendering the conversation up to it (with the
generation prompt) and up to its end; both must be prefixes, token by token, of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dbx_llmtrain.errors import ConfigError, DataError, Problem
from dbx_llmtrain.text.formats import (
    Chat,
    Dropped,
    Format,
    Message,
    PromptCompletion,
    Row,
    Text,
    content_key,
)
from dbx_llmtrain.text.prepared import Example

TrainOn = Literal["completion", "assistant", "last_assistant", "all"]
Overflow = Literal["truncate", "drop", "error"]

TOO_LONG = "longer than data.max_length"
ANSWER_CUT = "answer cut away by data.max_length"
_NO_TEMPLATE = (
    "the tokenizer has no chat template, which conversations need (use an instruction-tuned model, "
    "put a chat_template.jinja beside its tokenizer, or give prompts with completions as strings)"
)


@dataclass(frozen=True)
class Encoded:
    """A tokenised row. ``end_tokens`` are the trained tokens that end an answer or a text, in
    order: the ids at which generation has to stop."""

    example: Example
    truncated: bool
    end_tokens: tuple[int, ...]


@dataclass(frozen=True)
class _Tokens:
    """Ids of a whole row, a mark for each, and the positions of the tokens that end an answer."""

    ids: list[int]
    trained: list[bool]
    ends: tuple[int, ...]


class Encoder:
    """Encodes rows with one tokenizer and one set of rules.

    ``train_on`` unset means answers for rows that have them, all tokens for plain text. Raises
    ``ConfigError`` for a tokenizer that cannot end a row.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        train_on: TrainOn | None = None,
        max_length: int,
        overflow: Overflow = "truncate",
    ) -> None:
        self._tokenizer = tokenizer
        self._train_on = train_on
        self._max_length = max_length
        self._overflow = overflow
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                [
                    Problem(
                        "model.source",
                        "expected a tokenizer with an end-of-sequence token, found none, so that "
                        "nothing would teach the model to stop: set eos_token in its "
                        "tokenizer_config.json",
                    )
                ]
            )
        self._eos: int = tokenizer.eos_token_id
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._start = _start_ids(tokenizer)
        self._control = _control_ids(tokenizer)

    def check_format(self, fmt: Format) -> None:
        """Raise ``ConfigError`` where no row of this format can be encoded."""
        if fmt == "messages" and not self._has_template:
            raise ConfigError([Problem("model.source", f"{_NO_TEMPLATE}: data.format is messages")])
        if fmt == "text" and self._train_on not in (None, "all"):
            raise ConfigError([Problem("data.train_on", _no_answers(self._train_on))])

    def encode(self, row: Row, where: str) -> Encoded | Dropped:
        """Token ids and marks of a row, at most ``max_length`` of them.

        A row that is cut gets no end token. Raises ``DataError`` (which starts with ``where``) for
        a row that the template cannot render or that its answers cannot be found in, and for a
        row that is too long where ``overflow`` is ``error``.
        """
        tokens = self._tokens(row, where)
        length = len(tokens.ids)
        truncated = length > self._max_length
        if truncated and self._overflow == "error":
            raise DataError(
                f"{where}: the row has {length} tokens, data.max_length is {self._max_length} and "
                "data.overflow is error"
            )
        if truncated and self._overflow == "drop":
            return Dropped(TOO_LONG)
        trained = [False, *tokens.trained[1 : self._max_length]]
        if not any(trained):
            return Dropped(ANSWER_CUT if truncated else "no token to train on")
        example = Example(tokens.ids[: self._max_length], trained, content_key(row))
        ends = tuple(tokens.ids[end] for end in tokens.ends if end < self._max_length)
        return Encoded(example, truncated, ends)

    def _tokens(self, row: Row, where: str) -> _Tokens:
        if isinstance(row, Text):
            return self._text(row, where)
        if isinstance(row, PromptCompletion):
            if not self._has_template:
                return self._prompt_completion(row)
            row = Chat(
                (Message("user", row.user), Message("assistant", row.completion)),
                completion_from=1,
            )
        return self._chat(row, where)

    def _text(self, row: Text, where: str) -> _Tokens:
        if self._train_on not in (None, "all"):
            raise DataError(f"{where}: {_no_answers(self._train_on)}")
        ids = self._started(self._ids(row.text))
        ids = self._ended(ids)
        return _Tokens(ids, [True] * len(ids), (len(ids) - 1,))

    def _prompt_completion(self, row: PromptCompletion) -> _Tokens:
        prompt = self._started(self._ids(row.prompt))
        completion = self._ended(_without_start(self._ids(row.completion), self._start))
        ids = prompt + completion
        mark_prompt = self._train_on == "all"
        trained = [mark_prompt] * len(prompt) + [True] * len(completion)
        return _Tokens(ids, trained, (len(ids) - 1,))

    def _started(self, ids: list[int]) -> list[int]:
        """With the tokens that the tokenizer itself puts in front, once."""
        return self._start + _without_start(ids, self._start)

    def _ended(self, ids: list[int]) -> list[int]:
        """With exactly one end token, also where the text has spelt some out."""
        end = len(ids)
        while end and ids[end - 1] == self._eos:
            end -= 1
        return [*ids[:end], self._eos]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _chat(self, row: Chat, where: str) -> _Tokens:
        if not self._has_template:
            raise DataError(f"{where}: {_NO_TEMPLATE}: the row is a conversation")
        ids, answers = self._answers(row, where)
        spans = []
        for turn, before, after in answers:
            if ids[: len(before)] != before:
                raise self._not_a_prefix(where, turn, "the conversation up to it")
            if ids[: len(after)] != after:
                raise self._not_a_prefix(where, turn, "the conversation up to its end")
            spans.append((len(before), self._end_of_turn(after, len(before), where, turn)))
        everything = self._train_on == "all"
        trained = [everything] * len(ids)
        for begin, end in spans:
            trained[begin:end] = [True] * (end - begin)
        return _Tokens(ids, trained, tuple(end - 1 for _, end in spans))

    def _trained_turns(self, row: Chat) -> list[int]:
        """Indices of the assistant messages that are trained."""
        turns = [i for i, message in enumerate(row.messages) if message.role == "assistant"]
        if self._train_on == "last_assistant":
            return turns[-1:]
        if self._train_on in ("assistant", "all"):
            return turns
        return [turn for turn in turns if turn >= row.completion_from]

    def _answers(
        self, row: Chat, where: str
    ) -> tuple[list[int], list[tuple[int, list[int], list[int]]]]:
        """The ids of the whole row; for every trained answer its message's index, the ids of the
        conversation up to it, as they are at inference, and the ids up to its end.

        Where the tokenizer merges the beginning of an answer with the end of its prompt, the two
        are joined as ids instead: at inference that merge cannot happen. This is right for one
        answer of a row only, so all prefixes have to be compared with the ids returned.
        """
        text = self._render(row.messages, where)
        ids = self._ids(text)
        answers = []
        for turn in self._trained_turns(row):
            last = turn + 1 == len(row.messages)
            before_text = self._render(row.messages[:turn], where, generation_prompt=True)
            after_text = text if last else self._render(row.messages[: turn + 1], where)
            if not (text.startswith(before_text) and after_text.startswith(before_text)):
                raise self._not_a_prefix(where, turn, "the conversation up to it")
            before = self._ids(before_text)
            if ids[: len(before)] == before:
                after = ids if last else self._ids(after_text)
            else:
                ids = before + self._ids(text[len(before_text) :])
                after = before + self._ids(after_text[len(before_text) :])
            answers.append((turn, before, after))
        return ids, answers

    def _end_of_turn(self, ids: list[int], begin: int, where: str, turn: int) -> int:
        """The position after the control token that ends the turn.

        What the template writes behind it (a line break, as a rule) is not trained.
        """
        end = len(ids)
        while end > begin and ids[end - 1] not in self._control:
            end -= 1
        rest = self._tokenizer.decode(ids[max(end, begin) :])
        if end == begin or rest.strip():
            raise DataError(
                f"{where}: message {turn}: the chat template ends an answer with {rest[-20:]!r} "
                "and no control token, so that nothing would teach the model to stop: let it "
                "write eos_token after the content of an assistant message"
            )
        return end

    def _render(
        self, messages: Sequence[Message], where: str, *, generation_prompt: bool = False
    ) -> str:
        from jinja2 import TemplateError

        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            rendered = self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=generation_prompt
            )
        except (TemplateError, ValueError, TypeError, IndexError, KeyError) as error:
            roles = ", ".join(message.role for message in messages) or "no message"
            raise DataError(
                f"{where}: the chat template cannot render the conversation up to message "
                f"{len(messages)} ({roles}): {error}"
            ) from error
        return str(rendered)

    def _not_a_prefix(self, where: str, turn: int, what: str) -> DataError:
        return DataError(
            f"{where}: message {turn}: with this chat template {what} is not a prefix of the "
            "whole row, so that the model would be trained on a context that it never sees. "
            "data.train_on: last_assistant trains the last answer only, which most templates "
            "that rewrite earlier turns allow; or give one row per answer"
        )


def _no_answers(train_on: str | None) -> str:
    return f"plain text has no answers: expected all, found {train_on}"


def _start_ids(tokenizer: Any) -> list[int]:
    """The ids that the tokenizer puts in front of a text: one BOS, nothing, or what it has."""
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a")["input_ids"])
    for begin in range(len(whole) - len(bare) + 1):
        if whole[begin : begin + len(bare)] == bare:
            return whole[:begin]
    return []


def _without_start(ids: list[int], start: list[int]) -> list[int]:
    """``ids`` without the start tokens that the text itself has spelt out."""
    while start and ids[: len(start)] == start:
        ids = ids[len(start) :]
    return ids


def _control_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens that text cannot spell: the named special ones and the template's."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {id_ for id_, token in added if token.special}
