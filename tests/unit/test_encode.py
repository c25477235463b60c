"""Rows that no chat template touches, lengths, faults, and a user's own function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest

from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.text.encode import (
    ANSWER_CUT,
    LEFT_OUT,
    NOTHING_TRAINED,
    TOO_LONG,
    Encoder,
    Outcome,
    Rules,
)
from dbx_llmtrain.text.plain import _added_ids
from tests import tiny, words
from tests.words import (
    BOS,
    EOS,
    chat,
    encode,
    encode_all,
    end_ids,
    fault,
    outcome,
    trained_ids,
    trained_text,
)

TEXT = {"text": "the cat sat on the mat"}
ASKED = {"prompt": "the cat", "completion": " sat"}
LONG = {"text": "the cat sat on the mat " * 20}
FORMATS = [(TEXT, "text"), (ASKED, "prompt_completion")]


def test_c1_eos_is_trained_although_pad_is_eos() -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    tokenizer.pad_token = tokenizer.eos_token
    examples = [encode(tokenizer, row, fmt) for row, fmt in FORMATS]
    assert sum(trained_ids(example).count(EOS) for example in examples) == len(FORMATS)


@pytest.mark.parametrize("pad", ["<unk>", "<s>", "</s>", "<|im_end|>"])
def test_c2_pad_changes_nothing_and_the_vocabulary_never_grows(pad: str) -> None:
    plain = tiny.tokenizer()
    padded = tiny.tokenizer()
    padded.pad_token = pad
    size = len(padded)
    for row, fmt in (*FORMATS, (chat("a", "b", "c", "d"), "messages")):
        assert encode(padded, row, fmt) == encode(plain, row, fmt)
    assert len(padded) == size


@pytest.mark.parametrize("text", ["the cat", "the cat</s>", "the cat</s></s>"])
@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("objective", ["sft", "pretrain"])
def test_c3_one_trained_eos_at_the_end(text: str, add_bos: bool, objective: str) -> None:
    tokenizer = tiny.tokenizer(chat_template=None, add_bos=add_bos)
    rows: list[tuple[Mapping[str, Any], str]] = [({"text": text}, "text")]
    if objective == "sft":
        rows.append(({"prompt": "hello", "completion": text}, "prompt_completion"))
    for row, fmt in rows:
        example = encode(tokenizer, row, fmt, objective=objective)
        assert list(example.input_ids).count(EOS) == 1
        assert example.input_ids[-1] == EOS
        assert example.trained[-1]
        assert end_ids(example) == [EOS]


@pytest.mark.parametrize("objective", ["sft", "pretrain"])
@pytest.mark.parametrize("text", ["the cat", "<s>the cat", "<s><s>the cat"])
def test_c4_one_bos_on_text(text: str, objective: str) -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    ids = list(encode(tokenizer, {"text": text}, "text", objective=objective).input_ids)
    assert ids.count(BOS) == 1
    assert ids[0] == BOS


@pytest.mark.parametrize("mark", ["", "<s>"])
def test_c4_one_bos_on_prompts_without_a_template(mark: str) -> None:
    row = {"prompt": f"{mark}the cat", "completion": f"{mark}sat"}
    tokenizer = tiny.tokenizer(chat_template=None)
    ids = list(encode(tokenizer, row, "prompt_completion").input_ids)
    assert ids.count(BOS) == 1
    assert ids[0] == BOS


def test_c4_no_bos_where_the_tokenizer_adds_none() -> None:
    tokenizer = tiny.tokenizer(chat_template=None, add_bos=False)
    assert BOS not in encode(tokenizer, TEXT, "text").input_ids


def test_c6_prompt_and_completion_are_tokenised_apart() -> None:
    tokenizer = tiny.tokenizer(chat_template=None, add_bos=False)
    prompt, completion = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("the c", "at sat")
    )
    assert tokenizer("the cat sat")["input_ids"] != prompt + completion  # the trap
    row = {"prompt": "the c", "completion": "at sat"}
    example = encode(tokenizer, row, "prompt_completion")
    assert example.input_ids == [*prompt, *completion, EOS]
    assert example.trained == [False] * len(prompt) + [True] * (len(completion) + 1)
    assert trained_ids(example)[0] == completion[0]


def test_c12_a_layout_of_ours_holds_a_rows_text_as_text() -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    row = {"instruction": "say</s>", "input": "<s>", "output": "a</s>b"}
    example = encode(tokenizer, row, "instruction")
    assert list(example.input_ids).count(EOS) == 1
    assert list(example.input_ids).count(BOS) == 1
    assert trained_text(tokenizer, example) == "a</s>b</s>"
    given = {"prompt": "a</s>", "completion": "b"}  # the row's own layout: it is as it is written
    assert list(encode(tokenizer, given, "prompt_completion").input_ids).count(EOS) == 2


def test_c12_a_document_begins_and_ends_once_whatever_it_spells() -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    row = {"text": "<s>the</s>cat<s>and<|im_start|></s>"}
    example = encode(tokenizer, row, "text", objective="pretrain")
    ids = list(example.input_ids)
    assert (ids.count(BOS), ids.count(EOS)) == (1, 1)
    assert tokenizer.decode(ids) == "<s>the</s>cat<s>and<|im_start|></s>"
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") in ids  # no boundary of documents
    written = encode(tokenizer, row, "text")  # a text to fine-tune on is as it is written
    assert list(written.input_ids).count(EOS) == 2


def test_c12_a_slow_tokenizer_refuses_a_document_that_spells_its_bounds() -> None:
    tokenizer = words.slow()
    assert encode(tokenizer, {"text": "a<|im_end|>"}, "text", objective="pretrain")
    message = fault(tokenizer, {"text": "a<|im_end|>b"}, "text", objective="pretrain")
    assert message.startswith("the text spells a control token, which this tokenizer cannot take")


def test_c14_the_first_token_is_never_a_label() -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    for row, fmt, settings in (
        (TEXT, "text", {}),
        (TEXT, "text", {"objective": "pretrain"}),
        (ASKED, "prompt_completion", {"train_on": "all"}),
        ({"input_ids": [5, 6, 7]}, "tokens", {}),
        ({"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, "tokens", {}),
    ):
        example = encode(tokenizer, row, fmt, **settings)
        assert example.trained == [False] + [True] * (len(example.input_ids) - 1)


def test_c15_rows_whose_answer_is_cut_are_dropped_and_counted() -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    long = {"prompt": "the cat sat on the mat and the dog", "completion": "yes"}
    short = {"prompt": "a", "completion": "yes"}
    rows = [long, short] * 4
    found = words.encoder(tokenizer, "prompt_completion", max_length=6).encode(rows, [""] * 8)
    assert [one.dropped for one in found] == [(ANSWER_CUT,), ()] * 4
    assert sum(len(one.examples) for one in found) == 4
    assert len(rows) == sum(bool(one.examples) + bool(one.dropped) for one in found)


def test_c15_a_row_of_one_token_has_nothing_to_train() -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    assert outcome(tokenizer, TEXT, "text", max_length=1).dropped == (ANSWER_CUT,)
    assert outcome(tokenizer, {"input_ids": [5]}, "tokens").dropped == (NOTHING_TRAINED,)


def test_c16_truncated_rows_get_no_eos() -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    encoder = words.encoder(tokenizer, "text", max_length=20)
    found = encoder.encode([{"text": "the cat"}, LONG] * 2, [""] * 4)
    examples = [one.examples[0] for one in found]
    assert [one.truncated for one in found] == [False, True, False, True]
    assert [len(example.input_ids) for example in examples][1::2] == [20, 20]
    assert sum(trained_ids(example).count(EOS) for example in examples) == 2
    assert [end_ids(example) for example in examples] == [[EOS], [], [EOS], []]
    whole = encode(tokenizer, LONG, "text")
    assert examples[1].cut == len(whole.input_ids) - 20


def test_c16_a_row_that_misses_by_its_eos_is_truncated() -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    row = {"text": "the cat"}
    length = len(encode(tokenizer, row, "text").input_ids)
    assert not outcome(tokenizer, row, "text", max_length=length).truncated
    cut = outcome(tokenizer, row, "text", max_length=length - 1)
    assert cut.truncated
    assert EOS not in cut.examples[0].input_ids


def test_c16_a_chat_is_cut_inside_an_answer() -> None:
    tokenizer = tiny.tokenizer()
    row = chat("hello", "the cat sat", "and the dog?", "on the log")
    whole = encode(tokenizer, row)
    last = max(i for i, mark in enumerate(whole.trained) if mark)
    cut = encode(tokenizer, row, max_length=last)
    assert cut.input_ids == whole.input_ids[:last]
    assert len(cut.ends) == 1
    assert trained_text(tokenizer, cut) == "the cat sat<|im_end|>on the log"


def test_c16_every_example_of_a_row_is_cut_or_dropped_by_itself() -> None:
    tokenizer = tiny.tokenizer(chat_template=words.STRIPS_HISTORY)
    row = chat("a", "<think>x</think>b", "c " * 50, "<think>y</think>d")
    first = encode_all(tokenizer, row)[0]
    found = outcome(tokenizer, row, max_length=len(first.input_ids))
    assert found.examples == (first,)
    assert found.dropped == (ANSWER_CUT,)
    assert not found.truncated


def test_c17_labels_that_train_nothing_drop_the_row() -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    row = {"input_ids": [5, 6], "labels": [-100, -100]}
    assert outcome(tokenizer, row, "tokens").dropped == (NOTHING_TRAINED,)
    only_first = {"input_ids": [5, 6], "labels": [5, -100]}
    assert outcome(tokenizer, only_first, "tokens").dropped == (NOTHING_TRAINED,)


@pytest.mark.parametrize(("size", "bad"), [(97, 97), (97, -1), (None, 320)])
def test_c18_an_id_without_an_embedding_is_refused(size: int | None, bad: int) -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    assert len(tokenizer) == 320
    message = fault(tokenizer, {"input_ids": [5, bad]}, "tokens", vocab_size=size)
    assert message == (
        f"input_ids: expected ids from 0 to {(size or 320) - 1} (the model's embeddings), "
        f"found {bad} at position 1"
    )
    assert encode(tokenizer, {"input_ids": [5, (size or 320) - 1]}, "tokens", vocab_size=size)


def test_token_rows_are_taken_as_they_are() -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    row = {
        "input_ids": [0, 9, 8, EOS, 7, EOS, 0, 0],
        "labels": [-100, -100, 8, EOS, -100, EOS, -100, -100],
        "attention_mask": [0, 1, 1, 1, 1, 1, 0, 0],
    }
    example = encode(tokenizer, row, "tokens")
    assert example.input_ids == [9, 8, EOS, 7, EOS]
    assert example.trained == [False, True, True, False, True]
    assert end_ids(example) == [EOS, EOS]
    empty = {"input_ids": [3, 3], "attention_mask": [0, 0]}
    assert outcome(tokenizer, empty, "tokens").dropped == ("no tokens",)


def test_overflow_drop_error_and_split() -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    assert outcome(tokenizer, LONG, "text", max_length=20, overflow="drop").dropped == (TOO_LONG,)
    message = fault(tokenizer, LONG, "text", max_length=20, overflow="error")
    assert message.startswith("the row has ")
    assert "tokens, data.max_length is 20 and data.overflow is error" in message
    found = outcome(tokenizer, LONG, "text", max_length=20, overflow="split")
    assert found.examples == (encode(tokenizer, LONG, "text"),)
    assert not found.truncated


def test_masked_rows_have_the_tokens_that_their_encoder_expects() -> None:
    tokenizer = words.wordpiece()
    example = encode(tokenizer, TEXT, "text", objective="mlm")
    assert example.input_ids == tokenizer(TEXT["text"])["input_ids"]
    assert example.trained == [False] + [True] * (len(example.input_ids) - 2) + [False]
    assert example.ends == ()


def test_masked_rows_are_cut_within_those_tokens() -> None:
    tokenizer = words.wordpiece()
    whole = encode(tokenizer, LONG, "text", objective="mlm").input_ids
    found = outcome(tokenizer, LONG, "text", objective="mlm", max_length=10)
    assert found.truncated
    assert found.examples[0].input_ids == [*whole[:9], whole[-1]]
    assert found.examples[0].trained == [False] + [True] * 8 + [False]
    pieces = outcome(tokenizer, LONG, "text", objective="mlm", max_length=10, overflow="split")
    assert [id_ for piece in pieces.examples for id_ in piece.input_ids[1:-1]] == whole[1:-1]
    assert all(len(piece.input_ids) <= 10 for piece in pieces.examples)
    assert {(p.input_ids[0], p.input_ids[-1]) for p in pieces.examples} == {(2, 3)}
    assert "adds 2 tokens to every row" in fault(
        tokenizer, LONG, "text", objective="mlm", max_length=2
    )


def test_masked_rows_do_not_let_a_text_spell_a_mask() -> None:
    tokenizer = words.wordpiece()
    example = encode(tokenizer, {"text": "the [MASK] sat"}, "text", objective="mlm")
    assert tokenizer.mask_token_id not in example.input_ids
    assert tokenizer.decode(example.input_ids[1:-1]) == "the [ mask ] sat"


def test_masked_token_rows() -> None:
    tokenizer = words.wordpiece()
    ids = tokenizer("the cat")["input_ids"]
    example = encode(tokenizer, {"input_ids": ids}, "tokens", objective="mlm")
    assert example.trained == [False, True, True, False]
    row = {"input_ids": ids, "labels": ids}
    assert fault(tokenizer, row, "tokens", objective="mlm").startswith("labels: expected none")


@pytest.mark.parametrize(
    ("fmt", "settings", "problem"),
    [
        ("messages", {"objective": "pretrain"}, "data.objective: pretrain takes rows of text or"),
        ("instruction", {"objective": "mlm"}, "data.objective: mlm takes rows of text or tokens"),
        ("text", {"objective": "mlm"}, "data.objective: mlm needs a tokenizer with a mask token"),
        ("messages", {}, "data.chat_template: the tokenizer has no chat template, which the fo"),
        ("sharegpt", {}, "data.chat_template: the tokenizer has no chat template, which the fo"),
        ("text", {"train_on": "assistant"}, "data.train_on: rows of the format text have no ans"),
        ("tokens", {"train_on": "completion"}, "data.train_on: rows of the format tokens say"),
        ("tokens", {"train_on": "all"}, "expected nothing, found all"),
    ],
)
def test_what_no_row_can_be_encoded_with_is_refused(
    fmt: str, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        words.encoder(tiny.tokenizer(chat_template=None), fmt, **settings)
    assert problem in str(caught.value)


def test_a_tokenizer_without_eos_is_refused() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match=r"model.source: expected a tokenizer with an end-of-seq"):
        words.encoder(tokenizer, "text")
    assert encode(tokenizer, {"input_ids": [5, 6]}, "tokens").ends == ()


def test_a_users_function_makes_rows_of_a_known_format() -> None:
    tokenizer = tiny.tokenizer(chat_template=None)

    def formatter(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
        if row["n"] == 2:
            return None
        if row["n"] == 3:
            return "the cat"  # type: ignore[return-value]
        return {"body": f"the cat {10 // row['n']}"}

    encoder = words.encoder(tokenizer, "text", columns={"text": "body"}, formatter=formatter)
    rows = [{"n": n} for n in (1, 2, 3, 0)]
    found = encoder.encode(rows, [f"line {row['n']}" for row in rows])
    assert trained_text(tokenizer, found[0].examples[0]) == "the cat 10</s>"
    assert found[1].dropped == (LEFT_OUT,)
    assert found[2].fault == (
        "line 3: data.formatter has to return a mapping (or None, to leave the row out), found "
        "str 'the cat'"
    )
    assert found[3].fault == (
        "line 0: data.formatter failed with ZeroDivisionError: integer division or modulo by zero"
    )
    assert len({one.key for one in found}) == 4


def test_instances_of_one_instruction_are_examples_of_their_own() -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    row = {
        "instruction": "Add.",
        "instances": [{"input": "1 1", "output": "2"}, {"input": "", "output": "0"}],
    }
    examples = encode_all(tokenizer, row, "instruction")
    assert [trained_text(tokenizer, example) for example in examples] == ["2</s>", "0</s>"]
    row["instances"][1]["output"] = " "  # type: ignore[index]
    found = outcome(tokenizer, row, "instruction")
    assert not found.examples
    assert found.fault == (
        f"{words.WHERE}, instance 1: column 'output': expected a non-empty string, found an empty "
        "string"
    )


def test_a_tokenizer_whose_additions_cannot_be_told_adds_nothing() -> None:
    def odd(text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1, 9] if add_special_tokens else [8]}

    assert _added_ids(odd) == ([], [])


def test_the_key_is_the_contents_and_rules_are_plain_data() -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    renamed = {"body": TEXT["text"], "id": 5}
    keys = [
        outcome(tokenizer, TEXT, "text").key,
        outcome(tokenizer, renamed, "text", columns={"text": "body"}).key,
        outcome(tokenizer, {"text": "x"}, "text").key,
        outcome(tokenizer, {"text": " "}, "text").key,
        outcome(tokenizer, {"text": 5}, "text").key,
    ]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4
    assert all(len(key) == 32 and int(key, 16) >= 0 for key in keys)
    rules = Rules("text", {"text": "body"}, "sft", None, 20, "truncate")
    assert Rules(**asdict(rules)) == rules
    assert Encoder(tokenizer, replace(rules, columns={})).encode([], []) == []


def test_c51_a_row_has_the_same_marks_in_train_and_in_eval() -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    found = words.encoder(tokenizer, "text", max_length=20).encode([LONG, TEXT, LONG], ["", "", ""])
    assert found[0] == found[2]
    assert found[1] == Outcome(found[1].key, (encode(tokenizer, TEXT, "text"),))
