"""Rows without turns: text, a prompt with its completion as strings, and token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dbx_llmtrain.errors import DataError
from dbx_llmtrain.text.coding import Asking, Coding, Tokens
from dbx_llmtrain.text.formats import PromptCompletion, Text, TokenIds
from dbx_llmtrain.text.lexer import Lexer, OtherNames


class PlainCoder:
    """Encodes rows that no chat template touches, with the tokens that a tokenizer adds itself.

    ``size``: ids have to be below it.
    """

    def __init__(self, tokenizer: Any, lexer: Lexer, control: dict[str, int], size: int) -> None:
        self._lexer = lexer
        self._size = size
        self._eos: int | None = tokenizer.eos_token_id
        self._start, self._stop = _added_ids(tokenizer)
        self._special = frozenset(tokenizer.all_special_ids) | lexer.control
        bounds = {self._eos, tokenizer.bos_token_id, *self._start}
        edges = {name: id_ for name, id_ in control.items() if id_ in bounds}
        self._edges = Lexer(lexer.ids, edges)
        self._others = OtherNames(tokenizer, control)
        self._other_edges = OtherNames(tokenizer, edges)
        ends = [name for name, id_ in control.items() if id_ == self._eos]
        self._eos_text = ends[0] if ends else ""
        starts = [name for name, id_ in control.items() if [id_] == self._start]
        self._start_text = starts[0] if starts else ""

    def text(self, row: Text) -> Coding:
        """A text as it is written, control tokens included, with one end token."""
        (ids,) = yield self._lexer, [row.text]
        ids = self._ended(self._started(ids))
        return [Tokens(ids, [True] * len(ids), (len(ids) - 1,))]

    def document(self, row: Text) -> Coding:
        """A text of a corpus: it begins and ends once, whatever it spells."""
        text = row.text
        while self._eos_text and text.endswith(self._eos_text):
            text = text.removesuffix(self._eos_text)
        while self._start_text and text.startswith(self._start_text):
            text = text.removeprefix(self._start_text)
        ids = yield from _ordinary(self._edges, self._other_edges, text)
        ids = self._ended(self._start + ids)
        return [Tokens(ids, [True] * len(ids), (len(ids) - 1,))]

    def masked(self, row: Text, room: int, *, split: bool) -> Coding:
        """A text for a model that fills in masked tokens: the tokens that its tokenizer adds around
        it are not to be masked. ``split`` makes an example of every ``room`` tokens."""
        ids = yield from _ordinary(self._lexer, self._others, row.text)
        inside = room - len(self._start) - len(self._stop)
        if inside < 1:
            raise DataError(
                f"data.max_length is {room}, and the tokenizer adds "
                f"{len(self._start) + len(self._stop)} tokens to every row: give a larger one"
            )
        size = inside if split else max(1, len(ids))
        pieces = [ids[at : at + size] for at in range(0, len(ids), size)]
        return [self._surrounded(piece) for piece in pieces]

    def _surrounded(self, ids: list[int]) -> Tokens:
        trained = [id_ not in self._special for id_ in ids]
        begin, end = [False] * len(self._start), [False] * len(self._stop)
        return Tokens([*self._start, *ids, *self._stop], begin + trained + end)

    def cut_masked(self, tokens: Tokens, room: int) -> Tokens:
        """At most ``room`` tokens of a ``masked`` row, with what ends it."""
        kept = room - len(self._stop)
        end = len(tokens.ids) - len(self._stop)
        return Tokens(
            tokens.ids[:kept] + tokens.ids[end:], tokens.trained[:kept] + tokens.trained[end:]
        )

    def prompt_completion(self, row: PromptCompletion, *, train_prompt: bool) -> Coding:
        """Prompt and completion, each tokenised by itself so that no merge crosses over."""
        texts = [row.prompt, row.completion]
        if row.control or not any(map(self._lexer.spells, texts)):
            before, after = yield self._lexer, texts
        else:
            before, after = yield _lexer_of(self._others), texts
        prompt = self._started(before)
        completion = self._ended(_without_start(after, self._start))
        ids = prompt + completion
        trained = [train_prompt] * len(prompt) + [True] * len(completion)
        return [Tokens(ids, trained, (len(ids) - 1,))]

    def token_ids(self, row: TokenIds, *, masked: bool) -> list[Tokens]:
        """A row of ids as it is. Raises ``DataError`` for an id that the model has no row for."""
        highest = max(row.ids)
        if min(row.ids) < 0 or highest >= self._size:
            wrong = next(at for at, id_ in enumerate(row.ids) if not 0 <= id_ < self._size)
            raise DataError(
                f"input_ids: expected ids from 0 to {self._size - 1} (the model's embeddings), "
                f"found {row.ids[wrong]} at position {wrong}"
            )
        ids = list(row.ids)
        if masked:
            if row.labels is not None:
                raise DataError(
                    "labels: expected none with data.objective mlm, which chooses the tokens to "
                    "mask in every epoch anew: leave the column out"
                )
            return [Tokens(ids, [id_ not in self._special for id_ in ids])]
        trained = (
            [True] * len(ids) if row.labels is None else [label != -100 for label in row.labels]
        )
        ends = (at for at, id_ in enumerate(ids) if id_ == self._eos and trained[at])
        return [Tokens(ids, trained, tuple(ends))]

    def _started(self, ids: list[int]) -> list[int]:
        """With the tokens that the tokenizer itself puts in front, once."""
        return self._start + _without_start(ids, self._start)

    def _ended(self, ids: list[int]) -> list[int]:
        """With exactly one end token, also where the text has spelt some out."""
        assert self._eos is not None
        end = len(ids)
        while end and ids[end - 1] == self._eos:
            end -= 1
        return [*ids[:end], self._eos]


def _ordinary(lexer: Lexer, others: OtherNames, text: str) -> Asking[list[int]]:
    """Ids of a text in which control tokens of ``lexer`` that it spells are ordinary text."""
    (ids,) = yield (_lexer_of(others) if lexer.spells(text) else lexer), [text]
    return ids


def _lexer_of(others: OtherNames) -> Lexer:
    try:
        return others.lexer()
    except ValueError as error:
        raise DataError(
            f"the text spells a control token, which this tokenizer cannot take as text: {error}"
        ) from error


def _added_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts in front of a text and behind it."""
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a")["input_ids"])
    for begin in range(len(whole) - len(bare) + 1):
        if whole[begin : begin + len(bare)] == bare:
            return whole[:begin], whole[begin + len(bare) :]
    return [], []


def _without_start(ids: Sequence[int], start: list[int]) -> list[int]:
    """``ids`` without the start tokens that the text itself has spelt out."""
    ids = list(ids)
    while start and ids[: len(start)] == start:
        ids = ids[len(start) :]
    return ids
