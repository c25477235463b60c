"""Rows of a source to examples: token ids, with a mark on every token that is trained.

Used by Spark tasks, by the driver's sample and by previews, so that all of them see the same
tokens. Rows are independent of each other: the fault of one never stops the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dbx_llmtrain.errors import ConfigError, DataError, Problem
from dbx_llmtrain.text.chat import ChatCoder
from dbx_llmtrain.text.coding import Coding, Tokens, run_all
from dbx_llmtrain.text.formats import (
    Dropped,
    PromptCompletion,
    Row,
    Text,
    TokenIds,
    content_key,
    parse_rows,
)
from dbx_llmtrain.text.lexer import OtherNames, control_tokens, lexer_of
from dbx_llmtrain.text.plain import PlainCoder
from dbx_llmtrain.text.prepared import Example
from dbx_llmtrain.text.templates import Template, resolve_template
from dbx_llmtrain.text.turns import Chat, Message
from dbx_llmtrain.text.values import kind

Formatter = Callable[[dict[str, Any]], Mapping[str, Any] | None]
"""A user's function that makes a row of a known format of a row of theirs; ``None`` drops it."""

TOO_LONG = "longer than data.max_length"
ANSWER_CUT = "answer cut away by data.max_length"
NOTHING_TRAINED = "no token to train on"
LEFT_OUT = "left out by data.formatter"


@dataclass(frozen=True)
class Rules:
    """Everything of the configuration that decides a row's tokens.

    ``format`` is a ``Format``, ``chat_template`` the text of a template or ``chatml`` (``None``:
    the tokenizer's own), ``vocab_size`` the number of the model's embeddings, which ids of token
    rows are checked against (``None``: the tokenizer's tokens).
    """

    format: str
    columns: Mapping[str, str]
    objective: str
    train_on: str | None
    max_length: int
    overflow: str
    chat_template: str | None = None
    vocab_size: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of one source row.

    ``key`` names its content (32 hex digits). ``examples`` are several where the row was expanded;
    ``dropped`` has the reasons of examples that were left out, ``dropped_tokens`` counts the tokens
    of those, ``truncated`` says that one was cut,
    ``fault`` (which starts with where the row is) why the row cannot be right.
    """

    key: str
    examples: tuple[Example, ...] = ()
    dropped: tuple[str, ...] = ()
    truncated: bool = False
    dropped_tokens: int = 0
    fault: str | None = None


class Encoder:
    """Encodes rows with one tokenizer and one set of rules.

    ``train_on`` unset means answers for rows that have them, all tokens for text and, for token
    rows, their labels. With ``overflow: split`` examples come whole, however long: packing cuts
    them (but for the objective ``mlm``, where they are cut here). ``chat_template`` is the text of
    the template that is used, ``None`` without one.

    Raises ``ConfigError``, with all reasons, where no row can be encoded.
    """

    def __init__(self, tokenizer: Any, rules: Rules, *, formatter: Formatter | None = None) -> None:
        self._rules = rules
        self._formatter = formatter
        given = rules.chat_template
        template = resolve_template(given, tokenizer) if given else None
        has_template = bool(template or getattr(tokenizer, "chat_template", None))
        problems = list(_problems(rules, tokenizer, has_template))
        if problems:
            raise ConfigError(problems)
        self.chat_template = template or _own_template(tokenizer)
        control = control_tokens(tokenizer, self.chat_template)
        lexer = lexer_of(tokenizer, control)
        size = rules.vocab_size or len(tokenizer)
        self._plain = PlainCoder(tokenizer, lexer, control, size)
        self._chat: ChatCoder | None = None
        if has_template:
            self._chat = ChatCoder(
                tokenizer,
                Template(tokenizer, template, lexer),
                lexer,
                OtherNames(tokenizer, control),
                rules.train_on,
            )
            if rules.format not in ("text", "tokens"):
                self._chat.check_template()

    def encode(self, rows: Sequence[Mapping[str, Any]], where: Sequence[str]) -> list[Outcome]:
        """What becomes of every row, in order. ``where`` says for each where it is (file, line).

        Many texts are tokenised at once: give a few hundred rows or more.
        """
        parsed = [self._parsed(row, place) for row, place in zip(rows, where, strict=True)]
        wanted = [(at, row) for at, found in enumerate(parsed) for row in _rows(found)]
        coded: list[list[list[Tokens] | DataError]] = [[] for _ in rows]
        for (at, _), result in zip(
            wanted, run_all(self._coding(row) for _, row in wanted), strict=True
        ):
            coded[at].append(result)
        return [
            self._outcome(row, found, results, place)
            for row, found, results, place in zip(rows, parsed, coded, where, strict=True)
        ]

    def _parsed(self, row: Mapping[str, Any], where: str) -> tuple[Row, ...] | Dropped | DataError:
        """What a row holds, after the user's function."""
        try:
            if self._formatter is not None:
                formatted = apply_formatter(self._formatter, row, where)
                if formatted is None:
                    return Dropped(LEFT_OUT)
                row = formatted
            rules = self._rules
            return parse_rows(row, rules.format, rules.columns, where)  # type: ignore[arg-type]
        except DataError as error:
            return error

    def _coding(self, row: Row) -> Coding:
        objective = self._rules.objective
        if isinstance(row, TokenIds):
            return self._given(row)
        if isinstance(row, Text):
            if objective == "mlm":
                split = self._rules.overflow == "split"
                return self._plain.masked(row, self._rules.max_length, split=split)
            return self._plain.document(row) if objective == "pretrain" else self._plain.text(row)
        if isinstance(row, PromptCompletion):
            if self._chat is None:
                every = self._rules.train_on == "all"
                return self._plain.prompt_completion(row, train_prompt=every)
            turns = (Message("user", row.user), Message("assistant", row.completion))
            row = Chat(turns, completion_from=1)
        assert self._chat is not None
        return self._chat.chat(row)

    def _given(self, row: TokenIds) -> Coding:
        yield from ()
        return self._plain.token_ids(row, masked=self._rules.objective == "mlm")

    def _outcome(
        self,
        row: Mapping[str, Any],
        parsed: tuple[Row, ...] | Dropped | DataError,
        results: Sequence[list[Tokens] | DataError],
        where: str,
    ) -> Outcome:
        if isinstance(parsed, DataError):
            return Outcome(_raw_key(row), fault=str(parsed))
        if isinstance(parsed, Dropped):
            return Outcome(_raw_key(row), dropped=(parsed.reason,))
        key = content_key(*parsed)
        fitted: list[Example | Dropped] = []
        try:
            for result in results:
                if isinstance(result, DataError):
                    raise result
                fitted += [self._fitted(tokens) for tokens in result]
        except DataError as error:
            return Outcome(key, fault=f"{where}: {error}")
        examples = tuple(found for found in fitted if isinstance(found, Example))
        left_out = [found for found in fitted if isinstance(found, Dropped)]
        return Outcome(
            key,
            examples,
            dropped=tuple(found.reason for found in left_out),
            truncated=any(example.cut for example in examples),
            dropped_tokens=sum(found.tokens for found in left_out),
        )

    def _fitted(self, tokens: Tokens) -> Example | Dropped:
        """At most ``max_length`` tokens, or why the example is left out. No end token is added to
        one that is cut. Raises ``DataError`` where ``overflow`` is ``error``."""
        room, overflow = self._rules.max_length, self._rules.overflow
        masked = self._rules.objective == "mlm"
        length = len(tokens.ids)
        cut = 0 if overflow == "split" else max(0, length - room)
        if cut and overflow == "error":
            raise DataError(
                f"the row has {length} tokens, data.max_length is {room} and data.overflow is error"
            )
        if cut and overflow == "drop":
            return Dropped(TOO_LONG, length)
        if cut and masked:
            tokens = self._plain.cut_masked(tokens, room)
        kept = length - cut
        trained = tokens.trained[:kept]
        if not masked and trained:
            trained[0] = False  # nothing predicts it
        if not any(trained):
            return Dropped(ANSWER_CUT if cut else NOTHING_TRAINED, length)
        ends = tuple(end for end in tokens.ends if 0 < end < kept)
        return Example(tokens.ids[:kept], trained, ends, cut)


def _rows(parsed: tuple[Row, ...] | Dropped | DataError) -> tuple[Row, ...]:
    return parsed if isinstance(parsed, tuple) else ()


def apply_formatter(
    formatter: Formatter, row: Mapping[str, Any], where: str
) -> Mapping[str, Any] | None:
    """What the user's function makes of a row; its exceptions are faults of the row."""
    try:
        made = formatter(dict(row))
    except Exception as error:
        raise DataError(
            f"{where}: data.formatter failed with {type(error).__name__}: {error}"
        ) from error
    if made is not None and not isinstance(made, Mapping):
        raise DataError(
            f"{where}: data.formatter has to return a mapping (or None, to leave the row out), "
            f"found {kind(made)}"
        )
    return made


def _raw_key(row: Mapping[str, Any]) -> str:
    """A name for a row whose content could not be read."""
    return hashlib.sha256(repr(sorted(row.items(), key=repr)).encode()).hexdigest()[:32]


def _own_template(tokenizer: Any) -> str | None:
    """The text of the tokenizer's template, also where it has several."""
    own = getattr(tokenizer, "chat_template", None)
    return "\n".join(own.values()) if isinstance(own, dict) else own


def _problems(rules: Rules, tokenizer: Any, has_template: bool) -> Iterator[Problem]:
    """Why no row of this format can be encoded."""
    plain = rules.format in ("text", "tokens")
    if rules.objective == "mlm" and tokenizer.mask_token_id is None:
        yield Problem(
            "data.objective",
            "mlm needs a tokenizer with a mask token, found one without: use the tokenizer of a "
            "masked language model, or another objective",
        )
    ends = rules.objective != "mlm" and rules.format != "tokens"
    if ends and tokenizer.eos_token_id is None:
        yield Problem(
            "model.source",
            "expected a tokenizer with an end-of-sequence token, found none, so that nothing would "
            "teach the model to stop: set eos_token in its tokenizer_config.json",
        )
    if rules.objective != "sft" and not plain:
        yield Problem(
            "data.objective",
            f"{rules.objective} takes rows of text or tokens, found the format {rules.format}",
        )
    if rules.format in ("messages", "sharegpt") and not has_template:
        yield Problem(
            "data.chat_template",
            f"the tokenizer has no chat template, which the format {rules.format} needs: give one "
            "(chatml is built in), use an instruction-tuned model, or give prompts with "
            "completions as strings",
        )
    if rules.format == "text" and rules.train_on not in (None, "all"):
        yield Problem(
            "data.train_on",
            f"rows of the format text have no answers: expected all, found {rules.train_on}",
        )
    if rules.format == "tokens" and rules.train_on is not None:
        yield Problem(
            "data.train_on",
            "rows of the format tokens say themselves what is trained (labels, else all of it): "
            f"expected nothing, found {rules.train_on}",
        )
