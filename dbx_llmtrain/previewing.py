"""What ``preview`` returns: examples of the prepared data as the model sees them. Data only."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from dbx_llmtrain.records import Audit, SplitInfo
from dbx_llmtrain.reports import Record
from dbx_llmtrain.text.pieces import Piece


class DocumentPreview(Record):
    """A row, or a slice of one, with what is trained of it.

    ``row`` is the content id of the row it is taken from, ``start`` its first token's place there.
    ``tokens``, ``trained`` and ``trained_ends`` (the end tokens among the trained ones) count the
    whole document; of a long one ``pieces`` and ``tail`` show its two ends, ``hidden`` tokens are
    between them.
    """

    row: str
    start: int
    tokens: int
    trained: int
    trained_ends: int
    pieces: tuple[Piece, ...]
    hidden: int = 0
    tail: tuple[Piece, ...] = ()


class ExamplePreview(Record):
    """An example of a step: a pack of documents that do not see each other.

    ``number`` is its place in the split, from 0. Counts are of all its documents, of which
    ``hidden`` are not shown.
    """

    number: int
    tokens: int
    trained: int
    trained_ends: int
    documents: tuple[DocumentPreview, ...]
    hidden: int = 0


class Preview(Record):
    """Some examples of a split, in the order in which training takes them, and the data's audit.

    ``page`` is the HTML page of it beside the prepared data; ``None`` where it could not be
    written, which ``problem`` then explains.
    """

    model: str
    split: str
    objective: str
    mlm_probability: float
    max_length: int
    format: str
    sources: dict[str, str]
    folder: str
    count: int
    """Examples of the split, of which ``examples`` are shown."""
    examples: tuple[ExamplePreview, ...]
    audit: Audit
    info: SplitInfo | None = None
    """Counts of the split."""
    packs: dict[str, int] = Field(default_factory=dict)
    """Examples of every split."""
    page: str | None = None
    problem: str = ""

    def __repr__(self) -> str:
        from dbx_llmtrain.preview_text import preview_text

        return preview_text(self, colour=wants_colour(sys.stdout, os.environ))

    __str__ = __repr__

    def _repr_html_(self) -> str:
        from dbx_llmtrain.preview_html import preview_html

        return preview_html(self)


def wants_colour(stream: Any, environ: Mapping[str, str]) -> bool:
    """Whether a stream is a terminal that shows colours, and the user has not said no
    (``NO_COLOR``, https://no-color.org)."""
    if environ.get("NO_COLOR") or environ.get("TERM") == "dumb":
        return False
    isatty = getattr(stream, "isatty", None)
    return bool(isatty and isatty())
