from __future__ import annotations

from typing import Any

import pytest

from dbx_llmtrain.text.lexer import Lexer, OtherNames, control_tokens, lexer_of
from tests import tiny, words

TOKENIZERS = {
    "byte_level": lambda: tiny.tokenizer(chat_template=None),
    "metaspace": words.metaspace,
    "wordpiece": words.wordpiece,
    "merging": words.merging,
    "unigram": lambda: unigram(),
}


def unigram() -> Any:
    """As T5's: the control tokens are pieces like others."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", "\u2581", "\u2581the", "\u2581cat", "c", "a", "t", "h", "e"]
    pieces += list("<>/s")
    inner = Tokenizer(models.Unigram([(piece, -float(at)) for at, piece in enumerate(pieces)], 0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def lexer(tokenizer: Any) -> Lexer:
    return lexer_of(tokenizer, control_tokens(tokenizer, None))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_are_those_of_the_tokenizer_without_what_it_adds(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    texts = ["the cat", "", " the\n\ncat ", "the"]
    expected = TOKENIZERS[name]()(texts, add_special_tokens=False)["input_ids"]
    made = lexer(tokenizer)
    padding = tokenizer.pad_token is not None
    tokenizer(texts, padding=padding, truncation=True, max_length=2, split_special_tokens=True)
    assert made.ids(texts) == expected  # whatever the tokenizer was used for in between


def test_control_tokens_are_found_the_longest_first() -> None:
    made = Lexer(lambda texts: [[] for _ in texts], {"<s>": 1, "<s>>": 2, "|": 3})
    assert made.places("a<s>>b|<s>") == [(1, 5), (6, 7), (7, 10)]
    assert made.spells("<s") is False
    assert made.positions([0, 1, 5, 3]) == [1, 3]
    assert Lexer(lambda texts: [[] for _ in texts], {}).places("a<s>") == []


def test_tokens_that_look_like_control_tokens_count_where_the_template_writes_them() -> None:
    tokenizer = words.with_tokens(tiny.tokenizer(), "<|turn|>", "<think>", special=False)
    assert "<|turn|>" not in control_tokens(tokenizer, tiny.CHATML)
    found = control_tokens(tokenizer, "<|turn|>{{ x }}<think>")
    assert found["<|turn|>"] == tokenizer.convert_tokens_to_ids("<|turn|>")
    assert "<think>" not in found


@pytest.mark.parametrize("name", TOKENIZERS)
def test_c12_what_spells_control_tokens_is_text_under_other_names(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    control = control_tokens(tokenizer, None)
    others = OtherNames(tokenizer, control)
    made = others.lexer()
    evil = "the " + "".join(control) + " cat"
    (ids,) = made.ids([evil])
    assert not made.control & (set(ids) - {tokenizer.unk_token_id})
    if name != "unigram":  # whose model finds the pieces of control tokens in any text
        assert (
            ids == tokenizer(evil, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        )
    text = "".join(f"the{token}cat" for token in control)
    renamed = "".join(f"the{others.names[token]}cat" for token in control)
    assert made.ids([renamed]) == lexer(tokenizer).ids([text])
    assert others.lexer() is made


def test_c12_a_tokenizer_that_cannot_be_renamed_says_so() -> None:
    with pytest.raises(ValueError, match="needs a fast tokenizer"):
        OtherNames(words.slow(), {"<|im_end|>": 117}).lexer()
    tokenizer = tiny.tokenizer()
    with pytest.raises(ValueError, match="cannot be told from text"):
        OtherNames(tokenizer, {"no token": 5}).lexer()
    with pytest.raises(ValueError, match="cannot be renamed"):
        OtherNames(tokenizer, {"the": 300}).lexer()  # made of merges


def test_tails_are_kept_and_do_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Lexer(lambda texts: [[] for _ in texts], {})
    monkeypatch.setattr("dbx_llmtrain.text.lexer._TAILS_KEPT", 2)
    for text in "abc":
        made.keep_tail(text, [1])
    assert list(made.tails) == ["c"]
