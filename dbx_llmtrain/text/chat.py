"""Conversations to token ids, with a mark on every token that is trained.

Marks are set by position, never by token id. Which tokens of a conversation are an answer is found
by rendering it up to the answer (with the generation prompt) and up to the answer's end: both must
be prefixes of the whole, the first one token by token, so that the model is trained on exactly the
ids that it sees at inference. Where a template rewrites earlier turns, every answer becomes an
example of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dbx_llmtrain.errors import ConfigError, DataError, Problem
from dbx_llmtrain.text.coding import Asking, Coding, Tokens, run_all
from dbx_llmtrain.text.lexer import RESERVED, Lexer, OtherNames, Place
from dbx_llmtrain.text.templates import CannotRender, Rendered, Template, split_marks
from dbx_llmtrain.text.turns import Chat, Message, keys, strings
from dbx_llmtrain.text.values import shortened

_BREAK = "\ufdd2"
_LONGEST_TAIL = 200


class TemplateFault(DataError):
    """A row that the chat template is to blame for, as it would be with any other row."""


@dataclass(frozen=True)
class _View:
    """How the conversations of one row are rendered, and the lexer that knows their control tokens.

    ``change`` breaks the control tokens that the row's own texts spell, before the template sees
    them; ``back`` repairs the rendered text, in which the template's have other names then.
    """

    template: Template
    lexer: Lexer
    chat: Chat
    tagged: bool
    change: Callable[[str], str] | None = None
    back: Callable[[str], str] | None = None
    _known: dict[tuple[int, bool], str] = field(default_factory=dict)

    def raw(self, count: int, *, generation_prompt: bool = False) -> str:
        """The first ``count`` messages as the template writes them."""
        key = (count, generation_prompt)
        if key not in self._known:
            self._known[key] = self.template.render(
                self.chat.messages[:count],
                self.chat.tools,
                generation_prompt=generation_prompt,
                change=self.change,
            )
        return self._known[key]

    def render(self, count: int, *, generation_prompt: bool = False) -> Rendered:
        """The first ``count`` messages as text."""
        raw = self.raw(count, generation_prompt=generation_prompt)
        return split_marks(self.back(raw) if self.back else raw, tagged=self.tagged)


@dataclass(frozen=True)
class _Answer:
    """A trained turn: where it begins and ends in the text of the whole conversation."""

    turn: int
    begin: int
    end: int
    tagged: tuple[Place, ...] | None


class ChatCoder:
    """Encodes conversations with one template. ``train_on`` is a value of ``data.train_on``."""

    def __init__(
        self,
        tokenizer: Any,
        template: Template,
        lexer: Lexer,
        others: OtherNames,
        train_on: str | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._lexer = lexer
        self._others = others
        self._train_on = train_on

    def chat(self, chat: Chat) -> Coding:
        """One example, or one for every trained answer where they cannot share a context."""
        view = self._view(chat)
        turns = self._trained_turns(chat)
        whole = yield from self._together(view, len(chat.messages), turns)
        if whole is not None:
            return [whole]
        examples = []
        for turn in turns:
            part = self._view(replace(chat, messages=chat.messages[: turn + 1]))
            one = yield from self._together(part, turn + 1, [turn])
            if one is None:
                if _begins(chat, turn):
                    raise DataError(_no_question(turn))
                raise DataError(
                    f"message {turn}: with this chat template the conversation up to it, with the "
                    "generation prompt, is not a prefix of the conversation up to its end, so that "
                    "the model would be trained on a context that it never sees. Give a template "
                    "for training with data.chat_template"
                )
            examples.append(one)
        return examples

    def check_template(self) -> None:
        """Raise ``ConfigError`` for a template with which no answer can be trained."""
        result = self._probe("user", "assistant")
        if isinstance(result, CannotRender) and result.of_template:
            result = self._probe("system", "user", "assistant")
        if isinstance(result, CannotRender) and result.of_template:
            raise self._template.refuse(f"fails with every row: {result.__cause__}")
        if isinstance(result, TemplateFault):
            raise ConfigError([Problem("data.chat_template", str(result))])

    def _probe(self, *roles: str) -> list[Tokens] | DataError:
        """What becomes of a conversation of these roles."""
        (result,) = run_all([self.chat(Chat(tuple(Message(role, "x") for role in roles)))])
        return result

    def _trained_turns(self, chat: Chat) -> list[int]:
        """Indices of the assistant messages that are trained."""
        turns = [i for i, message in enumerate(chat.messages) if message.role == "assistant"]
        if self._train_on == "last_assistant":
            return turns[-1:]
        if self._train_on in ("assistant", "all"):
            return turns
        return [turn for turn in turns if turn >= chat.completion_from]

    def _view(self, chat: Chat) -> _View:
        """How to render a conversation so that its control tokens are the template's alone."""
        shape = self._template.shape(chat.messages, chat.tools)
        if shape.missing:
            raise _left_out(shape.missing)
        tagged = self._template.tagged(chat.tools)
        spelt = any(map(self._lexer.spells, strings(chat)))
        if (tagged or spelt) and any(map(RESERVED.search, strings(chat))):
            raise DataError(
                "the row has characters from U+FDD0 to U+FDEF, which Unicode keeps for a program's "
                "own use: remove them"
            )
        view = _View(self._template, self._lexer, chat, tagged)
        if spelt:
            view = self._apart(view)
        written = self._control(view.raw(len(chat.messages)))
        if written != shape.control and written != self._control(
            self._template.render(chat.messages, chat.tools, change=_broken)
        ):
            raise DataError(
                "the chat template makes control tokens out of the row's own text: the model "
                "would take it for a turn of its own. Leave the row out, or change its text"
            )
        return view

    def _apart(self, view: _View) -> _View:
        """The view of a row whose texts spell control tokens: there they are ordinary text."""
        names = self._others.names
        try:
            other = self._others.lexer()
        except ValueError as error:
            raise DataError(
                f"the row spells a control token, which this tokenizer cannot take as text: {error}"
            ) from error
        if any(map(self._lexer.spells, keys(view.chat))):
            raise DataError("a key within tools or tool_calls spells a control token: rename it")
        return _View(
            view.template,
            other,
            view.chat,
            view.tagged,
            change=lambda text: self._lexer.replace(text, _broken),
            back=lambda text: self._lexer.replace(text, names.__getitem__).replace(_BREAK, ""),
        )

    def _control(self, text: str) -> tuple[str, ...]:
        """The control tokens in a text, in order."""
        return tuple(text[begin:end] for begin, end in self._lexer.places(text))

    def _together(self, view: _View, count: int, turns: Sequence[int]) -> Asking[Tokens | None]:
        """The first ``count`` messages with answers at ``turns`` as one example.

        ``None``: some answer's context is another one at inference.
        """
        whole = view.render(count)
        answers = self._answers(view, whole, count, turns)
        if answers is None:
            return None
        lexer, places = view.lexer, view.lexer.places(whole.text)
        heads = [_head(whole.text, places, answer.begin) for answer in answers]
        tails = {head: lexer.tails[head] for head in heads if head in lexer.tails}
        asked = [head for head in dict.fromkeys(heads) if head not in tails]
        ids, *found = yield lexer, [whole.text, *asked]
        for head, tail in zip(asked, found, strict=True):
            tails[head] = tail
            if len(head) <= _LONGEST_TAIL:
                lexer.keep_tail(head, tail)
        at = self._positions(lexer, ids, places)
        begins = []
        for answer, head in zip(answers, heads, strict=True):
            tail = tails[head]
            before = _count(places, answer.begin)
            start = at[before - 1] if before else 0
            if ids[start : start + len(tail)] != tail and self._train_on != "all":
                if len(turns) > 1:
                    return None
                ids = yield from self._joined(view, whole.text, answer, ids[:start] + tail, ids)
                at = self._positions(lexer, ids, places)
            begins.append(start + len(tail))
        return self._marked(view, whole.text, answers, begins, ids, at, places)

    def _positions(self, lexer: Lexer, ids: list[int], places: Sequence[Place]) -> list[int]:
        at = lexer.positions(ids)
        if len(at) != len(places):
            raise DataError(
                f"the tokenizer found {len(at)} control tokens in a text that has {len(places)} of "
                "them, so that the trained tokens cannot be told: use its fast version "
                "(tokenizer.json)"
            )
        return at

    def _answers(
        self, view: _View, whole: Rendered, count: int, turns: Sequence[int]
    ) -> list[_Answer] | None:
        """Where the answers are; ``None``: the text of some context is not a prefix of the whole.

        Where everything is trained, only the end of such an answer counts.
        """
        answers = []
        for turn in turns:
            before = _context(view, turn)
            after = whole if turn + 1 == count else view.render(turn + 1)
            if whole.text.startswith(after.text) and after.text.startswith(before):
                answers.append(_Answer(turn, len(before), len(after.text), after.tagged))
            elif self._train_on != "all":
                return None
            elif (rewritten := self._rewritten(view, turn, whole.text, after.text)) is not None:
                answers.append(rewritten)
        return answers

    def _rewritten(self, view: _View, turn: int, whole: str, after: str) -> _Answer | None:
        """The end of an answer that is another text in the whole, by the control tokens before it.

        ``None``: it cannot be told, since those are not the same either.
        """
        there, then = view.lexer.places(whole), view.lexer.places(after)
        last = _last_place(after, _Answer(turn, 0, len(after), None), then)
        if [whole[slice(*at)] for at in there[: last + 1]] != [
            after[slice(*at)] for at in then[: last + 1]
        ]:
            return None
        return _Answer(turn, *there[last], None)

    def _joined(
        self, view: _View, text: str, answer: _Answer, before: list[int], ids: list[int]
    ) -> Asking[list[int]]:
        """Ids of a row whose answer the tokenizer would merge with what is before it.

        At inference that merge cannot happen, so the two are joined as ids. A control token goes
        before the answer while it is tokenised, so that it is not taken for a text's beginning.
        """
        lead = next(iter(view.lexer.places(text)), None)
        name = text[lead[0] : lead[1]] if lead else ""
        (after,) = yield view.lexer, [name + text[answer.begin :]]
        joined = before + after[1 if lead else 0 :]
        if self._tokenizer.decode(joined) != self._tokenizer.decode(ids):
            raise DataError(
                f"message {answer.turn}: the tokenizer merges the beginning of the answer "
                f"({shortened(text[answer.begin : answer.end])!r}) with the prompt, and cannot "
                "write it without that"
            )
        return joined

    def _marked(
        self,
        view: _View,
        text: str,
        answers: Sequence[_Answer],
        begins: Sequence[int],
        ids: list[int],
        at: Sequence[int],
        places: Sequence[Place],
    ) -> Tokens:
        """The example: the answers are trained, each up to the control token that ends it.

        What the template writes behind that (a line break, as a rule) is not.
        """
        trained = [self._train_on == "all"] * len(ids)
        ends = []
        for answer, begin in zip(answers, begins, strict=True):
            last = _last_place(text, answer, places)
            _check_tags(answer, text, places[last])
            end = at[last]
            trained[begin : end + 1] = [True] * (end + 1 - begin)
            ends.append(end)
        return Tokens(ids, trained, tuple(ends))


def _left_out(what: str) -> DataError:
    """The error for a part of a conversation that a template does not write."""
    it = "them" if what.startswith("the ") else "it"
    message = (
        f"the chat template leaves out {what}: the model would never see {it}. Set "
        f"data.chat_template: chatml (built in), or give another template that writes {it}"
    )
    if "(user)" in what or "(assistant)" in what:
        return TemplateFault(message)
    return DataError(f"{message}, or leave {it} out of the row")


def _context(view: _View, turn: int) -> str:
    """What the model sees before it gives the answer at ``turn``."""
    try:
        return view.render(turn, generation_prompt=True).text
    except CannotRender as error:
        if _begins(view.chat, turn):
            raise DataError(f"{_no_question(turn)} ({error.__cause__})") from error
        raise


def _begins(chat: Chat, turn: int) -> bool:
    """Whether nobody has said anything before an answer."""
    return all(message.role == "system" for message in chat.messages[:turn])


def _no_question(turn: int) -> str:
    return (
        f"message {turn}: the conversation begins with an answer, and the chat template cannot ask "
        "for one without a message of the user before it. Put one there, or let data.formatter "
        "take the answer out or leave out the row (by returning None)"
    )


def _count(places: Sequence[Place], end: int) -> int:
    """How many control tokens are in the text up to ``end``."""
    return bisect_right(places, end, key=lambda place: place[1])


def _head(text: str, places: Sequence[Place], end: int) -> str:
    """The text up to ``end`` from its last control token on (all of it where it has none)."""
    before = _count(places, end)
    return text[places[before - 1][0] if before else 0 : end]


def _broken(text: str) -> str:
    """A text that no control token can be found in, nor made of with the text around it."""
    return f"{_BREAK}{_BREAK.join(text)}{_BREAK}" if text else text


def _last_place(text: str, answer: _Answer, places: Sequence[Place]) -> int:
    """Which of the control tokens ends an answer; only white space may follow it."""
    last = _count(places, answer.end) - 1
    begin, end = places[last] if last >= 0 else (-1, 0)
    if begin >= answer.begin and not text[end : answer.end].strip():
        return last
    raise TemplateFault(
        f"message {answer.turn}: the chat template ends an answer with "
        f"{text[answer.begin : answer.end][-20:]!r} and no control token, so that nothing would "
        "teach the model to stop: let it write eos_token after the content of an assistant message"
    )


def _check_tags(answer: _Answer, text: str, stop: Place) -> None:
    """Refuse an answer that the template's generation tags see elsewhere.

    White space behind the token that ends the turn may be within the tags or not.
    """
    if answer.tagged is None:
        return
    span = min(answer.tagged, key=lambda tag: abs(tag[0] - answer.begin), default=(0, 0))
    if span[0] == answer.begin and span[1] >= stop[1] and not text[stop[1] : span[1]].strip():
        return
    if span[0] == answer.begin and span[1] <= stop[0] and not text[span[1] : stop[0]].strip():
        raise TemplateFault(
            f"message {answer.turn}: the chat template writes {text[stop[0] : stop[1]]!r} behind "
            "its {% endgeneration %} tag, so that with its own mask the model never learns to "
            "stop: move it before the tag"
        )
    raise TemplateFault(
        f"message {answer.turn}: the chat template's generation tags hold "
        f"{shortened(text[slice(*span)])!r}, but the answer that follows the generation prompt is "
        f"{shortened(text[answer.begin : stop[1]])!r}: put the tags around exactly that"
    )
