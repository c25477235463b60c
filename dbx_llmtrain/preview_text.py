"""A preview in a terminal: with colours, or with brackets around what is trained. Pure.

Characters of a row that a terminal would obey are shown as their code points.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator

from dbx_llmtrain import preview_parts as parts
from dbx_llmtrain.preview_parts import Mark
from dbx_llmtrain.previewing import DocumentPreview, ExamplePreview, Preview

_WIDTH = 100
_BAR = 40
_OPEN, _CLOSE = "\u27e6", "\u27e7"  # around what is trained
_TOKEN_OPEN, _TOKEN_CLOSE = "\u27e8", "\u27e9"  # around a token that is no text
_SIGNS = {"space": "\u00b7", "tab": "\u2192\t", "line": "\u21b5\n"}
# What a row may spell, too: there it is shown as code points, so that no row can write a mark.
_OURS = re.compile("[\u00b7\u2192\u21b5\u27e6-\u27e9]")
_RESET = "\x1b[0m"
_TRAINED, _OTHER, _BOXED = "\x1b[1;4;36m", "\x1b[90m", "\x1b[7m"


def preview_text(preview: Preview, *, colour: bool) -> str:
    """The preview as text, with ANSI colours or without."""
    blocks = [_underlined(parts.title(preview)), _legend(preview, colour)]
    for example in preview.examples:
        blocks.append("\n".join(_example(preview, example, colour)))
    blocks.append(_facts(preview))
    bars = parts.histogram(preview.audit.lengths)
    if bars:
        blocks.append(_histogram(bars))
    return "\n\n".join(blocks)


def _underlined(text: str) -> str:
    return f"{text}\n{'-' * len(text)}"


def _legend(preview: Preview, colour: bool) -> str:
    trained, other = parts.words(preview)
    if colour:
        named = f"{_TRAINED}{trained}{_RESET}, {_OTHER}{other}{_RESET}, {_BOXED}token{_RESET}"
    else:
        named = f"{_OPEN}{trained}{_CLOSE}, {other}, {_TOKEN_OPEN}token{_TOKEN_CLOSE}"
    signs = "\u00b7 space, \u2192 tab, \u21b5 line break"
    return f"{named} by its name; {signs}\n{parts.legend(preview)}"


def _example(preview: Preview, example: ExamplePreview, colour: bool) -> Iterator[str]:
    yield f"=== {parts.example_title(preview, example)}"
    count = len(example.documents) + example.hidden
    for place, document in enumerate(example.documents, 1):
        if count > 1:
            yield f"--- {parts.document_title(preview, document, place, count)}"
        yield _document(document, colour)
    if example.hidden:
        yield f"--- {parts.hidden_documents(example.hidden)}"


def _document(document: DocumentPreview, colour: bool) -> str:
    show = _coloured if colour else _bracketed
    shown = show(parts.same_style(parts.marks(document.pieces)))
    if document.hidden:
        shown += f"\n... {parts.hidden_tokens(document.hidden)} ...\n"
        shown += show(parts.same_style(parts.marks(document.tail)))
    return shown


def _coloured(marks: Iterable[Mark]) -> str:
    """Every part with its own colours, which end before a line does."""
    shown = []
    for mark in marks:
        style = _TRAINED if mark.trained else _OTHER
        style += _BOXED if mark.kind in ("token", "bytes", "code") else ""
        text = _SIGNS.get(mark.kind, _visible(mark))
        if mark.kind == "text":
            text = _OURS.sub(_boxed(style), text)
        body = text.removesuffix("\n")
        shown.append(f"{style}{body}{_RESET}{text[len(body) :]}")
    return "".join(shown)


def _boxed(style: str) -> Callable[[re.Match[str]], str]:
    return lambda sign: f"{_RESET}{style}{_BOXED}{_code(sign)}{_RESET}{style}"


def _bracketed(marks: Iterable[Mark]) -> str:
    shown, inside = "", False
    for mark in marks:
        if mark.trained != inside:
            shown += _OPEN if mark.trained else _CLOSE
            inside = mark.trained
        text = _SIGNS.get(mark.kind, _visible(mark))
        if mark.kind == "text":
            text = _OURS.sub(lambda sign: f"{_TOKEN_OPEN}{_code(sign)}{_TOKEN_CLOSE}", text)
        boxed = mark.kind in ("token", "bytes", "code")
        shown += f"{_TOKEN_OPEN}{text}{_TOKEN_CLOSE}" if boxed else text
    return shown + (_CLOSE if inside else "")


def _visible(mark: Mark) -> str:
    """A token's name may hold anything, as a row may."""
    if mark.kind not in ("token", "bytes"):
        return mark.text
    return _OURS.sub(_code, parts.readable(mark.text))


def _code(sign: re.Match[str]) -> str:
    return f"U+{ord(sign[0]):04X}"


def _facts(preview: Preview) -> str:
    rows = parts.facts(preview)
    left = max(len(name) for name, _ in rows) + 2
    lines = []
    for name, value in rows:
        wrapped = textwrap.wrap(
            value, _WIDTH - left, break_long_words=False, break_on_hyphens=False
        ) or [""]
        lines += [f"{name:<{left}}{wrapped[0]}", *(" " * left + more for more in wrapped[1:])]
    return "\n".join(lines)


def _histogram(bars: list[tuple[str, int, float]]) -> str:
    width = max(len(label) for label, _, _ in bars)
    counts = max(len(f"{count:,}") for _, count, _ in bars)
    lines = [
        f"{label:>{width}}  {count:>{counts},}  {'#' * round(_BAR * share)}".rstrip()
        for label, count, share in bars
    ]
    return "\n".join(["tokens of a training document", *lines])
