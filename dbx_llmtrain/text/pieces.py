"""Token ids back to text, token by token, for people to look at.

What a token says depends on its neighbours: some are a part of a character, some begin with a space
that the tokenizer leaves out at the start of a text. So every piece is what a token (or the tokens
of one character) adds to the text in front of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

_UNDECODABLE = "\ufffd"
_LONGEST_CHARACTER = 8
"""Tokens of one character, at most; more that have no text stand for themselves."""


@dataclass(frozen=True)
class Piece:
    """Some tokens as text. ``text`` of kind ``text`` is what they stand for; ``token`` is one that
    is no text, by its name; ``bytes`` are a part of a character, as ``\\xe2``."""

    text: str
    trained: bool
    kind: Literal["text", "token", "bytes"] = "text"
    tokens: int = 1


class PieceReader:
    """Cuts token ids of one tokenizer into pieces."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._named = _named_tokens(tokenizer)
        self._vocabulary = len(tokenizer)

    def read(self, ids: Sequence[int], trained: Sequence[bool]) -> list[Piece]:
        """The pieces of a document: one of every token, or of the tokens of one character.

        Tokens of which some are trained and some are not are never in one piece.
        """
        pieces: list[Piece] = []
        first, context = 0, 0  # the first token without a piece; where the last piece begins
        for place, token in enumerate(ids):
            named = token in self._named or token >= self._vocabulary
            if first < place and (named or trained[first] != trained[place]):
                pieces += self._singly(ids, trained, first, place)
                first = context = place
            if named:
                name = self._named.get(token, f"token {token}")
                pieces.append(Piece(name, trained[place], "token"))
                first, context = place + 1, place
                continue
            text = self._added(ids, context, first, place + 1)
            if text.endswith(_UNDECODABLE) and place + 1 - first < _LONGEST_CHARACTER:
                continue
            if text and _UNDECODABLE not in text:
                pieces.append(Piece(text, trained[first], tokens=place + 1 - first))
                first, context = place + 1, first
                continue
            pieces += self._singly(ids, trained, first, place + 1)
            # A part of a character spoils the text of those that follow.
            first, context = place + 1, place + (pieces[-1].kind == "bytes")
        return [*pieces, *self._singly(ids, trained, first, len(ids))]

    def _added(self, ids: Sequence[int], context: int, first: int, stop: int) -> str:
        """What the tokens from ``first`` to ``stop`` add to the text of those in front of them."""
        before, after = self._decode(ids[context:first]), self._decode(ids[context:stop])
        # Where the text in front changes too, what is the same in both is left out.
        same = next(
            (at for at, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
            min(len(before), len(after)),
        )
        return after[same:]

    def _decode(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        decoded = self._tokenizer.decode(
            list(ids),
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
            spaces_between_special_tokens=False,
        )
        return str(decoded)

    def _singly(
        self, ids: Sequence[int], trained: Sequence[bool], first: int, stop: int
    ) -> Iterator[Piece]:
        """Tokens without a text of their own, one by one."""
        for place in range(first, stop):
            text = self._added(ids, max(first, place - 1), place, place + 1)
            if text and _UNDECODABLE not in text:
                yield Piece(text, trained[place])
            else:
                yield self._raw(ids[place], trained[place])

    def _raw(self, token: int, trained: bool) -> Piece:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return Piece(f"token {token}", trained, "token")
        table = _byte_characters()
        if all(character in table for character in name):
            shown = "".join(
                chr(table[character])
                if 0x20 <= table[character] < 0x7F
                else f"\\x{table[character]:02x}"
                for character in name
            )
            return Piece(shown, trained, "bytes")
        if name.strip("\u2581") == "":  # how SentencePiece writes a space
            return Piece(name.replace("\u2581", " "), trained)
        return Piece(name, trained, "bytes")


def _named_tokens(tokenizer: Any) -> dict[int, str]:
    """Tokens that are written as one piece whatever is around them, but for mere whitespace."""
    names = {id_: str(token.content) for id_, token in tokenizer.added_tokens_decoder.items()}
    for id_ in tokenizer.all_special_ids:
        names[id_] = str(tokenizer.convert_ids_to_tokens(id_))
    return {id_: name for id_, name in names.items() if name.strip(" \u2581\t\n\r")}


@lru_cache(maxsize=1)
def _byte_characters() -> dict[str, int]:
    """The printable characters by which byte-level tokenizers write bytes in their vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}
