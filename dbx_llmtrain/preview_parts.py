"""What the text and the HTML of a preview have in common: words, and the characters to be seen."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dbx_llmtrain.display import number, row_counts, tokens_left_out
from dbx_llmtrain.previewing import DocumentPreview, ExamplePreview, Preview
from dbx_llmtrain.text.pieces import Piece

Kind = Literal["text", "space", "tab", "line", "code", "token", "bytes"]

# Joiners, which scripts and emoji need within a word, and the visible signs of Arabic and Syriac.
_SEEN = {0x200C, 0x200D, 0x06DD, 0x070F, 0x0890, 0x0891, 0x08E2, *range(0x0600, 0x0606)}
_WIDE_SPACE = "\u3000"
_HIDDEN_KINDS = ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs")


@dataclass(frozen=True)
class Mark:
    """A part of a piece. ``space`` is one that would be overlooked, ``code`` a character that shows
    nothing or changes how the text around it is shown: ``U+202E``."""

    text: str
    kind: Kind
    trained: bool


def marks(pieces: Sequence[Piece]) -> Iterator[list[Mark]]:
    """The parts of every piece."""
    for place, piece in enumerate(pieces):
        if piece.kind != "text":
            yield [Mark(piece.text, piece.kind, piece.trained)]
            continue
        before = _edge(pieces[place - 1], -1) if place else ""
        after = _edge(pieces[place + 1], 0) if place + 1 < len(pieces) else ""
        yield list(_parts(piece, before, after))


def _edge(piece: Piece, place: int) -> str:
    """The character of a neighbour that touches; none where it is no text."""
    return piece.text[place] if piece.kind == "text" else ""


def _parts(piece: Piece, before: str, after: str) -> Iterator[Mark]:
    text = piece.text
    plain = ""
    for place, character in enumerate(text):
        kind = _kind(
            character,
            text[place - 1] if place else before,
            text[place + 1] if place + 1 < len(text) else after,
        )
        if kind == "text":
            plain += character
            continue
        if plain:
            yield Mark(plain, "text", piece.trained)
            plain = ""
        shown = f"U+{ord(character):04X}" if kind == "code" else character
        yield Mark(shown, kind, piece.trained)
    if plain:
        yield Mark(plain, "text", piece.trained)


def _kind(character: str, before: str, after: str) -> Kind:
    if character == " ":
        alone = before not in ("", " ", "\n", "\t") and after not in ("", " ", "\n", "\t")
        return "text" if alone else "space"
    if character in "\n\t":
        return "line" if character == "\n" else "tab"
    hidden = unicodedata.category(character) in _HIDDEN_KINDS
    seen = ord(character) in _SEEN or character == _WIDE_SPACE
    return "code" if hidden and not seen else "text"


def readable(text: str) -> str:
    """A name or path on one line, without characters that show nothing."""
    return "".join(
        character if _kind(character, "x", "x") == "text" else f"U+{ord(character):04X}"
        for character in text
    )


def words(preview: Preview) -> tuple[str, str]:
    """What the marked tokens and the others are called."""
    if preview.objective == "mlm":
        return "may be masked", "never masked"
    return "trained", "not trained"


def legend(preview: Preview) -> str:
    """What the marks mean, in a sentence."""
    if preview.objective == "mlm":
        share = f"{preview.mlm_probability:.0%}"
        return f"{share} of the tokens that may be masked are predicted, others every epoch."
    return "The loss is of the trained tokens; the others are context that the model reads."


def title(preview: Preview) -> str:
    """The headline."""
    shown = len(preview.examples)
    first = "the first" if shown == 1 else f"the first {number(shown)}"
    which = f"{first} of {number(preview.count)}"
    if shown == preview.count:
        which = "the only one" if shown == 1 else f"all {number(shown)}"
    return f"Examples of {preview.split}: {which}, in the order of training"


def example_title(preview: Preview, example: ExamplePreview) -> str:
    """An example's name and counts."""
    counts = count_words(preview, example.tokens, example.trained, example.trained_ends)
    documents = len(example.documents) + example.hidden
    packed = f"{number(documents)} documents, " if documents > 1 else ""
    return f"Example {example.number + 1} of {number(preview.count)}: {packed}{counts}"


def document_title(preview: Preview, document: DocumentPreview, place: int, count: int) -> str:
    """A document's number in its example, its row and its counts."""
    counts = count_words(preview, document.tokens, document.trained, document.trained_ends)
    start = f" from token {number(document.start)} on" if document.start else ""
    return f"document {place} of {count}, row {document.row[:8]}{start}: {counts}"


def count_words(preview: Preview, tokens: int, trained: int, ends: int) -> str:
    """``57 tokens, 21 trained, 1 end token trained``."""
    text = f"{_many(tokens, 'token')}, {number(trained)} {words(preview)[0]}"
    if preview.objective != "mlm":
        text += f", {_many(ends, 'end token')} trained"
    return text


def hidden_tokens(count: int) -> str:
    """What stands for the middle of a long document."""
    return f"{_many(count, 'token')} not shown here"


def hidden_documents(count: int) -> str:
    """What stands for the last documents of a pack."""
    return f"{_many(count, 'more document')} in this example"


def facts(preview: Preview) -> list[tuple[str, str]]:
    """Where the data is from and what became of it."""
    audit = preview.audit
    share = audit.trained_tokens / audit.tokens if audit.tokens else 0.0
    rows = [(role, source) for role, source in preview.sources.items()]
    rows += [("format", preview.format), ("model", preview.model)]
    rows += row_counts(audit)
    told = f"{number(audit.tokens)}, of them {number(audit.trained_tokens)} ({share:.1%})"
    rows.append(("tokens", f"{told} {'to mask' if preview.objective == 'mlm' else 'trained'}"))
    rows.append(("tokens left out", tokens_left_out(audit)))
    if preview.objective != "mlm":
        rows.append(("end tokens trained", number(audit.trained_end_tokens)))
    packs = ", ".join(f"{number(count)} {name}" for name, count in preview.packs.items())
    rows.append(("examples", f"{packs}; train is {audit.packing_efficiency:.0%} filled"))
    rows += _of_split(preview)
    rows.append(("prepared data", preview.folder))
    rows.append(("this page", preview.page or f"not kept: {preview.problem}"))
    return [(name, readable(value)) for name, value in rows]


def _of_split(preview: Preview) -> list[tuple[str, str]]:
    """The counts of held-out rows that are shown: the audit's tokens are those of training."""
    info = preview.info
    if preview.split == "train" or info is None:
        return []
    rows = f"{number(info.rows)}, of them {number(info.truncated_rows)} truncated"
    if info.rows_in_train:
        rows += f"; {number(info.rows_in_train)} are training rows too"
    share = info.trained / info.tokens if info.tokens else 0.0
    tokens = f"{number(info.tokens)}, of them {number(info.trained)} ({share:.1%}) "
    tokens += f"{words(preview)[0]}; {number(info.cut_tokens)} cut away, "
    tokens += f"{number(info.dropped_tokens)} of what was dropped"
    return [(f"{preview.split} rows", rows), (f"{preview.split} tokens", tokens)]


def histogram(lengths: Sequence[int]) -> list[tuple[str, int, float]]:
    """Lengths in tokens, how many rows have them, and that count's share of the largest one."""
    filled = [place for place, count in enumerate(lengths) if count]
    if not filled:
        return []
    most = max(lengths)
    return [
        (_span(place), lengths[place], lengths[place] / most)
        for place in range(filled[0], filled[-1] + 1)
    ]


def _span(place: int) -> str:
    first, last = 2**place, 2 ** (place + 1) - 1
    return number(first) if first == last else f"{number(first)} to {number(last)}"


def _many(count: int, noun: str) -> str:
    return f"{number(count)} {noun}{'' if count == 1 else 's'}"


def same_style(parts: Iterable[list[Mark]]) -> Iterator[Mark]:
    """Parts of all pieces, with neighbours that are shown alike in one."""
    last: Mark | None = None
    for part in (mark for piece in parts for mark in piece):
        if last and last.kind == part.kind == "text" and last.trained == part.trained:
            last = Mark(last.text + part.text, "text", part.trained)
            continue
        if last:
            yield last
        last = part
    if last:
        yield last
