"""How the encoding of a row asks for token ids, so that many rows share one tokenizer call.

The encoding of a row is a generator: it yields the texts that it needs the ids of, and is sent
those ids. ``run_all`` runs many of them together.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dbx_llmtrain.errors import DataError
from dbx_llmtrain.text.lexer import Lexer


@dataclass(frozen=True)
class Tokens:
    """Ids of an example, a mark for each (it is a label), and the positions of the trained tokens
    that end an answer or a text."""

    ids: list[int]
    trained: list[bool]
    ends: tuple[int, ...] = ()


T = TypeVar("T")
Request = tuple[Lexer, list[str]]
Asking = Generator[Request, list[list[int]], T]
"""Yields texts, is sent their ids, returns ``T``."""

Coding = Asking[list[Tokens]]


def run_all(codings: Iterable[Coding]) -> list[list[Tokens] | DataError]:
    """The result of every coding, or the ``DataError`` that it raised."""
    results: list[list[Tokens] | DataError] = []
    waiting: list[tuple[int, Coding, Request]] = []

    def step(at: int, coding: Coding, ids: list[list[int]] | None) -> None:
        try:
            request = next(coding) if ids is None else coding.send(ids)
        except StopIteration as done:
            results[at] = done.value
        except DataError as error:
            results[at] = error
        else:
            waiting.append((at, coding, request))

    for at, coding in enumerate(codings):
        results.append([])
        step(at, coding, None)
    while waiting:
        now, waiting = waiting, []
        answers = _tokenized([request for _, _, request in now])
        for (at, coding, _), ids in zip(now, answers, strict=True):
            step(at, coding, ids)
    return results


def _tokenized(requests: Sequence[Request]) -> list[list[list[int]]]:
    """The ids of every request's texts: one call for each lexer, each text once."""
    known: dict[Lexer, dict[str, list[int]]] = {}
    for lexer, texts in requests:
        known.setdefault(lexer, {}).update({text: [] for text in texts})
    for lexer, found in known.items():
        texts = list(found)
        found.update(zip(texts, lexer.ids(texts), strict=True))
    return [[known[lexer][text] for text in texts] for lexer, texts in requests]
