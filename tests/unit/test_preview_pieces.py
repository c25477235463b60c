"""Token ids back to text: every token's own part, whatever kind of tokenizer it is."""

from __future__ import annotations

from typing import Any

import pytest

from dbx_llmtrain.text.pieces import Piece, PieceReader
from tests import tiny, words

TEXTS = [
    "the cat sat on the mat",
    "two  spaces, a\ttab\nand a line",
    "\u732b\u304c\u597d\u304d \u2014 caf\u00e9",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "\U0001f469\u200d\U0001f680 and \U0001f600",
]


def read(tokenizer: Any, ids: list[int], trained: list[bool] | None = None) -> list[Piece]:
    return PieceReader(tokenizer).read(ids, trained or [False] * len(ids))


def joined(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [tiny.tokenizer, words.metaspace], ids=["bytes", "metaspace"])
def test_pieces_of_a_text_make_up_the_text(make: Any, text: str) -> None:
    tokenizer = make()
    ids = tokenizer(text)["input_ids"]
    pieces = read(tokenizer, ids)
    assert (pieces[0].text, pieces[0].kind) == ("<s>", "token")
    if make is tiny.tokenizer:
        assert joined(pieces[1:]) == text
    else:  # it writes a space in front of the first word, which the model does see
        assert joined(pieces[1:]).lstrip() == text
    assert sum(piece.tokens for piece in pieces) == len(ids)
    assert all(piece.kind == "text" for piece in pieces[1:])


def test_a_character_of_several_tokens_is_one_piece() -> None:
    tokenizer = tiny.tokenizer()
    ids = tokenizer("a\u732bb", add_special_tokens=False)["input_ids"]
    pieces = read(tokenizer, ids)
    assert [(piece.text, piece.tokens) for piece in pieces] == [("a", 1), ("\u732b", 3), ("b", 1)]


def test_a_part_of_a_character_is_shown_as_bytes() -> None:
    tokenizer = tiny.tokenizer()
    ids = tokenizer("a\u732b", add_special_tokens=False)["input_ids"]
    pieces = read(tokenizer, ids[:-1])
    assert [(piece.text, piece.kind) for piece in pieces] == [
        ("a", "text"),
        ("\\xe7", "bytes"),
        ("\\x8c", "bytes"),
    ]
    pieces = read(tokenizer, ids[2:])
    assert [(piece.text, piece.kind) for piece in pieces] == [
        ("\\x8c", "bytes"),
        ("\\xab", "bytes"),
    ]
    then = tokenizer("x", add_special_tokens=False)["input_ids"]
    assert [piece.text for piece in read(tokenizer, [*ids[:-1], *then])] == [
        "a",
        "\\xe7",
        "\\x8c",
        "x",
    ]


def test_a_character_that_is_trained_in_part_is_not_one_piece() -> None:
    tokenizer = tiny.tokenizer()
    ids = tokenizer("\u732b", add_special_tokens=False)["input_ids"]
    pieces = read(tokenizer, ids, [False, True, True])
    assert [(piece.text, piece.trained) for piece in pieces] == [
        ("\\xe7", False),
        ("\\x8c", True),
        ("\\xab", True),
    ]


def test_the_byte_tokens_of_a_sentencepiece_vocabulary_are_named() -> None:
    tokenizer = words.metaspace()
    ids = tokenizer("\u732b", add_special_tokens=False)["input_ids"]
    pieces = read(tokenizer, ids[:-1])
    assert [piece.text for piece in pieces if piece.text.strip()] == ["<0xE7>", "<0x8C>"]


def test_the_replacement_character_itself_is_not_lost() -> None:
    tokenizer = tiny.tokenizer()
    ids = tokenizer("a\ufffdb", add_special_tokens=False)["input_ids"]
    assert joined(read(tokenizer, ids)) == "a\\xef\\xbf\\xbdb"


def test_a_control_token_and_its_spelling_are_told_apart() -> None:
    tokenizer = tiny.tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    spelt = tokenizer("< |im_end|>".replace(" ", ""), split_special_tokens=True)["input_ids"][1:]
    assert end not in spelt
    pieces = read(tokenizer, [*spelt, end])
    assert pieces[-1] == Piece("<|im_end|>", False, "token")
    assert joined(pieces[:-1]) == "<|im_end|>"
    assert {piece.kind for piece in pieces[:-1]} == {"text"}


def test_added_tokens_that_are_not_special_are_named_and_blank_ones_are_text() -> None:
    tokenizer = words.with_tokens(tiny.tokenizer(), "<think>", special=False)
    tokenizer = words.with_tokens(tokenizer, "    ", special=False)
    ids = tokenizer("<think>a    b", add_special_tokens=False)["input_ids"]
    assert [(piece.text, piece.kind) for piece in read(tokenizer, ids)] == [
        ("<think>", "token"),
        ("a", "text"),
        ("    ", "text"),
        ("b", "text"),
    ]


def test_word_pieces_and_tokenizers_in_python() -> None:
    tokenizer = words.wordpiece()
    ids = tokenizer("the cat sat.")["input_ids"]
    pieces = read(tokenizer, ids)
    assert [pieces[0].text, pieces[-1].text] == ["[CLS]", "[SEP]"]
    assert joined(pieces[1:-1]).strip().startswith("the cat sat")
    slow = words.slow()
    ids = slow("the cat.", add_special_tokens=False)["input_ids"]
    assert [piece.text for piece in read(slow, ids)] == list("the cat.")


def test_ids_that_the_tokenizer_does_not_know_are_numbered() -> None:
    tokenizer = tiny.tokenizer()
    pieces = read(tokenizer, [len(tokenizer) + 7], [True])
    assert pieces == [Piece(f"token {len(tokenizer) + 7}", True, "token")]
