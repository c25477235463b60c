"""Chat templates: which one is used, what it renders, and what it writes by itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dbx_llmtrain.errors import ConfigError, DataError, Problem
from dbx_llmtrain.storage import local_path
from dbx_llmtrain.text.lexer import Lexer
from dbx_llmtrain.text.turns import Message
from dbx_llmtrain.text.values import with_strings

CHATML = """\
{%- macro calls(message) %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- if not loop.last %}{{ '\\n' }}{% endif %}
{%- endfor %}
{%- endmacro %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages and messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- 'Tools that can be called, one JSON description a line:\\n<tools>\\n' }}
{%- for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}
{{- '</tools>\\nA call is a JSON object with the keys name and arguments within ' }}
{{- '<tool_call></tool_call>; its result comes within <tool_response></tool_response>.' }}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- if message.content and message.tool_calls %}{{ '\\n' }}{% endif %}
{{- calls(message) + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""The built-in template for base models: ChatML, with tools as JSON within tags."""

_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_OPEN}{_CLOSE}]")
_SHAPES_KEPT = 10_000


class CannotRender(DataError):
    """A conversation that a template fails on; ``of_template``: its own code is wrong, whatever
    the conversation (a syntax error, a name that is nowhere defined)."""

    def __init__(self, message: str, *, of_template: bool = False) -> None:
        super().__init__(message)
        self.of_template = of_template


def resolve_template(given: str, tokenizer: Any) -> str:
    """The text of the template that ``data.chat_template`` names: ``chatml``, a file, or the text.

    Raises ``ConfigError`` for a file that cannot be read, and for ``chatml`` with a tokenizer that
    has no tokens for it.
    """
    if given.strip() == "chatml":
        return _chatml(tokenizer)
    if "{{" in given or "{%" in given:
        return given
    try:
        return local_path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _refuse(
            f"expected chatml, the text of a template or a file that has it, found {given!r}: "
            f"{error}"
        ) from error


def _chatml(tokenizer: Any) -> str:
    missing = [name for name in _CHATML_TOKENS if not _is_token(tokenizer, name)]
    if missing:
        raise _refuse(
            f"chatml needs the tokens {' and '.join(missing)}, which the vocabulary does not have "
            "as single tokens. Adding tokens (model.new_tokens) is not available in this version: "
            "use a model whose tokenizer has them, or a template with tokens that it has"
        )
    bos = tokenizer.bos_token_id
    starts = list(tokenizer("a")["input_ids"])[:1]
    return ("{{- bos_token }}" if bos is not None and starts == [bos] else "") + CHATML


def _is_token(tokenizer: Any, name: str) -> bool:
    return name in tokenizer.get_vocab() and len(_bare(tokenizer, name)) == 1


def _bare(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _refuse(message: str) -> ConfigError:
    return ConfigError([Problem("data.chat_template", message)])


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the parts of it within ``{% generation %}`` tags (``None``: the
    template has no such tags)."""

    text: str
    tagged: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class Shape:
    """What a template makes of all conversations with the same roles and keys.

    ``control`` are the control tokens that it writes by itself (``None``: it could not be found
    out), ``missing`` says what of such a conversation it leaves out: one thing, or several of them.
    """

    control: tuple[str, ...] | None
    missing: str | None = None


class Template:
    """A chat template of a tokenizer; ``text`` in place of the tokenizer's own where given."""

    def __init__(self, tokenizer: Any, text: str | None, lexer: Lexer) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._lexer = lexer
        self._marked: dict[bool, tuple[str, bool]] = {}
        self._shapes: dict[Any, Shape] = {}

    def refuse(self, message: str) -> ConfigError:
        """The error for a template that no row can be rendered with."""
        if self._text is not None:
            return _refuse(f"the template {message}")
        return ConfigError(
            [
                Problem(
                    "model.source",
                    f"the tokenizer's chat template {message}. Give another one with "
                    "data.chat_template",
                )
            ]
        )

    def tagged(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the template says with tags which part of it is generated."""
        return self._source(tools)[1]

    def _source(self, tools: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
        """The template's text, its tags replaced by characters that are found again."""
        known = self._marked.get(bool(tools))
        if known is None:
            text = self._text or self._own(tools)
            known = (_TAG.sub(_mark, text), _TAG.search(text) is not None)
            self._marked[bool(tools)] = known
        return known

    def _own(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The tokenizer's template, which may be another one where there are tools."""
        try:
            return str(self._tokenizer.get_chat_template(None, list(tools) or None))
        except ValueError as error:
            raise _refuse(
                f"expected one of the tokenizer's templates, found none: {error}"
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generation_prompt: bool = False,
        change: Callable[[str], str] | None = None,
    ) -> str:
        """The text, with marks where tags were. Every string of the conversation goes through
        ``change``. Raises ``CannotRender`` with what the template says about the conversation."""
        from jinja2 import TemplateError

        turns: Any = [message.for_template() for message in messages]
        schemas: Any = list(tools) or None
        if change is not None:
            turns = [with_strings(turn, change) | {"role": turn["role"]} for turn in turns]
            schemas = with_strings(schemas, change)
        try:
            # Of an empty conversation transformers asks the first message, but not of a list of
            # such.
            rendered = self._tokenizer.apply_chat_template(
                turns or [turns],
                tools=schemas,
                chat_template=self._source(tools)[0],
                tokenize=False,
                add_generation_prompt=generation_prompt,
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
            roles = ", ".join(message.role for message in messages) or "no message"
            raise CannotRender(
                f"the chat template cannot render the conversation up to message {len(messages)} "
                f"({roles}): {error}",
                of_template=_of_template(error),
            ) from error
        return str(rendered if turns else rendered[0])

    def shape(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Shape:
        """What the template makes of such a conversation, found out with one of neutral texts."""
        key = (tuple(_form(message) for message in messages), len(tools))
        known = self._shapes.get(key)
        if known is None:
            if len(self._shapes) >= _SHAPES_KEPT:
                self._shapes.clear()
            known = self._shapes[key] = self._found_out(messages, tools)
        return known

    def _found_out(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Shape:
        neutral = [_neutral(message, number) for number, message in enumerate(messages)]
        schemas = [_neutral_tool(number) for number in range(len(tools))]
        try:
            text = self.render(neutral, schemas)
        except DataError:
            return Shape(None)
        missing = [what for what, word in _words(neutral, schemas) if word not in text]
        control = tuple(text[begin:end] for begin, end in self._lexer.places(text))
        return Shape(control, missing[0] if missing else None)


def _of_template(error: Exception) -> bool:
    """Whether the template fails on every conversation: not where it refuses one by itself, nor
    where it misses a key of a message."""
    from jinja2 import TemplateSyntaxError, UndefinedError

    if isinstance(error, UndefinedError):
        return str(error).endswith(" is undefined")
    return isinstance(error, TemplateSyntaxError)


def split_marks(text: str, *, tagged: bool) -> Rendered:
    """A rendered text without marks, and the parts that were between them."""
    if not tagged:
        return Rendered(text)
    spans, begin, removed = [], 0, 0
    for match in _MARKS.finditer(text):
        at = match.start() - removed
        removed += 1
        if match.group() == _OPEN:
            begin = at
        else:
            spans.append((begin, at))
    return Rendered(_MARKS.sub("", text), tuple(spans))


def _mark(match: re.Match[str]) -> str:
    """A tag's replacement: it writes a mark, and strips the white space that the tag strips."""
    left, end, right = match.groups()
    return f"{{%{left} if true %}}{_CLOSE if end else _OPEN}{{% endif {right}%}}"


def _form(message: Message) -> Any:
    """What of a message decides what a template writes, apart from the texts."""
    calls = message.extra.get("tool_calls", ())
    return message.role, bool(message.content), tuple(sorted(message.extra)), len(calls)


def _neutral(message: Message, number: int) -> Message:
    """The message with texts that say nothing and are found again."""
    extra = {
        key: "x" if isinstance(value, str) and not key.endswith("id") else value
        for key, value in message.extra.items()
    }
    if "tool_calls" in extra:
        extra["tool_calls"] = [
            call
            | {"function": {"name": f"f{number}x{at}f", "arguments": {"a": f"v{number}x{at}v"}}}
            for at, call in enumerate(extra["tool_calls"])
        ]
    return Message(message.role, f"m{number}m" if message.content else "", extra)


def _neutral_tool(number: int) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "description": "x"}}}
    function = {"name": f"t{number}t", "description": "x", "parameters": parameters}
    return {"type": "function", "function": function}


def _words(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """What a rendered conversation of neutral texts has to show, each with its word in the text."""
    words = [("the tools", tool["function"]["name"]) for tool in tools]
    for number, message in enumerate(messages):
        words.append((f"message {number} ({message.role})", message.content))
        for call in message.extra.get("tool_calls", ()):
            function = call["function"]
            what = f"the tool calls of message {number}"
            words += [(what, function["name"]), (what, function["arguments"]["a"])]
    return words
