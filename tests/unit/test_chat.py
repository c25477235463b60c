from __future__ import annotations

from typing import Any

import pytest

from dbx_llmtrain.errors import ConfigError, DataError
from dbx_llmtrain.text.chat import ANSWER_CUT, TOO_LONG, Encoded, Encoder
from dbx_llmtrain.text.formats import Chat, Dropped, Message, PromptCompletion, Text
from tests import tiny

WHERE = "rows.jsonl, line 7"
BOS, EOS = 1, 2

LLAMA3 = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Like Qwen3's: what an earlier answer thought is gone from the history.
STRIPS_HISTORY = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if loop.last %}{{ message['content'] }}"
    "{% else %}{{ message['content'].split('</think>')[-1] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The generation prompt holds an empty thought, which the model does not write itself.
EMPTY_THOUGHT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}<think></think>{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think></think>{% endif %}"
)
NO_END = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
REFUSES = "{{ raise_exception('roles must alternate') }}"


def llama3_tokenizer() -> Any:
    from tokenizers import AddedToken

    tokenizer = tiny.tokenizer(chat_template=LLAMA3)
    names = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    tokenizer.add_tokens([AddedToken(name, special=True) for name in names], special_tokens=True)
    return tokenizer


TOKENIZERS = {
    "chatml": lambda: tiny.tokenizer(chat_template=tiny.CHATML, add_bos=False),
    "chatml_bos": lambda: tiny.tokenizer(chat_template=tiny.CHATML_BOS),
    "llama3": llama3_tokenizer,
}
END_OF_TURN = {"chatml": "<|im_end|>", "chatml_bos": "<|im_end|>", "llama3": "<|eot_id|>"}


def chat(*contents: str, system: str | None = None) -> Chat:
    """User and assistant in turn."""
    turns = [Message("system", system)] if system else []
    roles = ("user", "assistant")
    turns += [Message(roles[i % 2], content) for i, content in enumerate(contents)]
    return Chat(tuple(turns))


TWO_TURNS = chat("hello, how are you?", "the cat sat", "and the dog?", "on the log", system="today")


def encode(tokenizer: Any, row: Any, **settings: Any) -> Encoded:
    encoded = Encoder(tokenizer, **({"max_length": 1000} | settings)).encode(row, WHERE)
    assert isinstance(encoded, Encoded)
    return encoded


def trained_text(tokenizer: Any, encoded: Encoded) -> str:
    ids, marks = encoded.example.input_ids, encoded.example.trained
    return str(tokenizer.decode([id_ for id_, mark in zip(ids, marks, strict=True) if mark]))


def trained_ids(encoded: Encoded) -> list[int]:
    example = encoded.example
    return [id_ for id_, mark in zip(example.input_ids, example.trained, strict=True) if mark]


ROWS = [Text("the cat sat on the mat"), PromptCompletion("the cat", " sat", user="the cat")]


def test_c1_eos_is_trained_although_pad_is_eos() -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    tokenizer.pad_token = tokenizer.eos_token
    encoded = [encode(tokenizer, row) for row in ROWS]
    assert sum(trained_ids(row).count(EOS) for row in encoded) == len(ROWS)


@pytest.mark.parametrize("pad", ["<unk>", "<s>", "</s>"])
def test_c2_pad_changes_nothing_and_the_vocabulary_never_grows(pad: str) -> None:
    plain = tiny.tokenizer()
    padded = tiny.tokenizer()
    padded.pad_token = pad
    size = len(padded)
    for row in (*ROWS, TWO_TURNS):
        assert encode(padded, row) == encode(plain, row)
    assert len(padded) == size


@pytest.mark.parametrize("text", ["the cat", "the cat</s>", "the cat</s></s>"])
@pytest.mark.parametrize("add_bos", [True, False])
def test_c3_one_trained_eos_at_the_end(text: str, add_bos: bool) -> None:
    tokenizer = tiny.tokenizer(chat_template=None, add_bos=add_bos)
    for row in (Text(text), PromptCompletion("hello", text, user="")):
        encoded = encode(tokenizer, row)
        assert encoded.example.input_ids.count(EOS) == 1
        assert encoded.example.input_ids[-1] == EOS
        assert encoded.example.trained[-1]
        assert encoded.end_tokens == (EOS,)


@pytest.mark.parametrize(
    "row",
    [
        Text("the cat"),
        Text("<s>the cat"),
        Text("<s><s>the cat"),
        PromptCompletion("the cat", "sat", user=""),
        PromptCompletion("<s>the cat", "<s>sat", user=""),
    ],
)
def test_c4_one_bos_on_rows_without_a_template(row: Any) -> None:
    ids = encode(tiny.tokenizer(chat_template=None), row).example.input_ids
    assert ids.count(BOS) == 1
    assert ids[0] == BOS


@pytest.mark.parametrize("name", ["chatml_bos", "llama3"])
def test_c4_one_bos_on_chats_whose_template_writes_it(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    assert tokenizer("x")["input_ids"][0] == BOS  # the trap: it adds one, too
    for row in (TWO_TURNS, PromptCompletion("a", "b", user="a")):
        ids = encode(tokenizer, row).example.input_ids
        assert ids.count(BOS) == 1
        assert ids[0] == BOS


def test_c4_no_bos_where_the_tokenizer_adds_none() -> None:
    tokenizer = tiny.tokenizer(chat_template=None, add_bos=False)
    assert BOS not in encode(tokenizer, Text("the cat")).example.input_ids


@pytest.mark.parametrize("name", TOKENIZERS)
def test_c5_training_ids_begin_with_what_the_model_sees_at_inference(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    turns = [{"role": turn.role, "content": turn.content} for turn in TWO_TURNS.messages]
    ids = encode(tokenizer, TWO_TURNS).example.input_ids
    assert ids == tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
    for i, turn in enumerate(turns):
        if turn["role"] == "assistant":
            before = tokenizer.apply_chat_template(
                turns[:i], add_generation_prompt=True, tokenize=True, return_dict=False
            )
            assert ids[: len(before)] == before


def test_c5_a_template_that_rewrites_history_is_refused() -> None:
    tokenizer = tiny.tokenizer(chat_template=STRIPS_HISTORY)
    row = chat("a", "<think>x</think>b", "c", "d")
    with pytest.raises(DataError, match=r"line 7: message 1: with this chat template the conv"):
        encode(tokenizer, row)
    last = encode(tokenizer, row, train_on="last_assistant")
    assert trained_text(tokenizer, last) == "d<|im_end|>"


def test_c5_an_answer_that_the_tokenizer_would_merge_with_its_prompt() -> None:
    tokenizer = merging_tokenizer()
    before = tokenizer("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    joint = tokenizer("<|im_start|>assistant\n\nb")["input_ids"]
    assert joint[: len(before[-3:])] != before[-3:]  # the trap: "\n\n" is one token
    encoded = encode(tokenizer, chat("a", "\nb"))
    assert encoded.example.input_ids[: len(before)] == before
    assert trained_text(tokenizer, encoded) == "\nb<|im_end|>"


def test_c5_two_such_answers_in_a_row_cannot_both_be_right() -> None:
    tokenizer = merging_tokenizer()
    row = chat("a", "\nb", "c", "\nd")
    with pytest.raises(DataError, match="message 1: with this chat template"):
        encode(tokenizer, row)
    last = encode(tokenizer, row, train_on="last_assistant")
    assert trained_text(tokenizer, last) == "\nd<|im_end|>"


def merging_tokenizer() -> Any:
    """ChatML with a token for two line breaks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(["\n\n"] * 10, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = tiny.CHATML
    return tokenizer


def test_c6_prompt_and_completion_are_tokenised_apart() -> None:
    tokenizer = tiny.tokenizer(chat_template=None, add_bos=False)
    prompt, completion = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("the c", "at sat")
    )
    assert tokenizer("the cat sat")["input_ids"] != prompt + completion  # the trap
    encoded = encode(tokenizer, PromptCompletion("the c", "at sat", user=""))
    assert encoded.example.input_ids == [*prompt, *completion, EOS]
    assert encoded.example.trained == [False] * len(prompt) + [True] * (len(completion) + 1)
    assert trained_ids(encoded)[0] == completion[0]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_c7_a_template_without_generation_tags_gives_exact_masks(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    assert "generation %}" not in tokenizer.chat_template
    end = END_OF_TURN[name]
    encoded = encode(tokenizer, chat("what is the answer?", "forty two."))
    assert trained_text(tokenizer, encoded) == f"forty two.{end}"
    assert encoded.end_tokens == (tokenizer.convert_tokens_to_ids(end),)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        (None, "the cat sat{end}on the log{end}"),
        ("assistant", "the cat sat{end}on the log{end}"),
        ("completion", "the cat sat{end}on the log{end}"),
        ("last_assistant", "on the log{end}"),
    ],
)
def test_c10_exactly_the_answers_are_trained(
    name: str, train_on: str | None, expected: str
) -> None:
    tokenizer = TOKENIZERS[name]()
    encoded = encode(tokenizer, TWO_TURNS, train_on=train_on)
    assert trained_text(tokenizer, encoded) == expected.format(end=END_OF_TURN[name])
    assert len(encoded.end_tokens) == expected.count("{end}")


def test_c10_all_trains_every_token_but_the_first() -> None:
    encoded = encode(tiny.tokenizer(), TWO_TURNS, train_on="all")
    assert encoded.example.trained == [False] + [True] * (len(encoded.example.input_ids) - 1)
    assert len(encoded.end_tokens) == 2


def test_completion_messages_train_only_their_own_answers() -> None:
    row = Chat(TWO_TURNS.messages, completion_from=3)
    tokenizer = tiny.tokenizer()
    assert trained_text(tokenizer, encode(tokenizer, row)) == "on the log<|im_end|>"
    both = encode(tokenizer, row, train_on="assistant")
    assert trained_text(tokenizer, both) == "the cat sat<|im_end|>on the log<|im_end|>"


def test_c11_what_the_generation_prompt_supplies_is_not_trained() -> None:
    tokenizer = tiny.tokenizer(chat_template=EMPTY_THOUGHT)
    encoded = encode(tokenizer, chat("a", "b"))
    assert "<think></think>b" in tokenizer.decode(encoded.example.input_ids)
    assert trained_text(tokenizer, encoded) == "b<|im_end|>"


def test_a_prompt_becomes_a_chat_where_there_is_a_template() -> None:
    tokenizer = tiny.tokenizer()
    row = PromptCompletion("### Instruction:\na", "b", user="a")
    assert (
        encode(tokenizer, row).example.input_ids
        == encode(tokenizer, chat("a", "b")).example.input_ids
    )
    assert trained_text(tokenizer, encode(tokenizer, row)) == "b<|im_end|>"


def test_train_on_all_trains_the_prompt_too() -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    encoded = encode(tokenizer, ROWS[1], train_on="all")
    assert encoded.example.trained == [False] + [True] * (len(encoded.example.input_ids) - 1)


def test_c15_rows_whose_answer_is_cut_are_dropped() -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    long = PromptCompletion("the cat sat on the mat and the dog", "yes", user="")
    short = PromptCompletion("a", "yes", user="")
    encoder = Encoder(tokenizer, max_length=6)
    results = [encoder.encode(row, WHERE) for row in [long, short] * 4]
    assert results.count(Dropped(ANSWER_CUT)) == 4
    assert sum(isinstance(result, Encoded) for result in results) == 4


def test_c15_a_row_of_one_token_has_nothing_to_train() -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    encoder = Encoder(tokenizer, max_length=1)
    assert encoder.encode(Text("the cat"), WHERE) == Dropped(ANSWER_CUT)


def test_c16_truncated_rows_get_no_eos() -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    rows = [Text("the cat"), Text("the cat sat on the mat " * 20)] * 2
    encoded = [encode(tokenizer, row, max_length=20) for row in rows]
    assert [row.truncated for row in encoded] == [False, True, False, True]
    assert [len(row.example.input_ids) for row in encoded][1::2] == [20, 20]
    assert sum(trained_ids(row).count(EOS) for row in encoded) == 2
    assert [row.end_tokens for row in encoded] == [(EOS,), (), (EOS,), ()]


def test_c16_a_row_that_misses_by_its_eos_is_truncated() -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    length = len(encode(tokenizer, Text("the cat")).example.input_ids)
    assert not encode(tokenizer, Text("the cat"), max_length=length).truncated
    cut = encode(tokenizer, Text("the cat"), max_length=length - 1)
    assert cut.truncated
    assert EOS not in cut.example.input_ids


def test_c16_a_chat_is_cut_inside_an_answer() -> None:
    tokenizer = tiny.tokenizer()
    whole = encode(tokenizer, TWO_TURNS)
    last = max(i for i, mark in enumerate(whole.example.trained) if mark)
    cut = encode(tokenizer, TWO_TURNS, max_length=last)
    assert cut.example.input_ids == whole.example.input_ids[:last]
    assert len(cut.end_tokens) == 1
    assert trained_text(tokenizer, cut) == "the cat sat<|im_end|>on the log"


def test_overflow_drop_and_error() -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    row = Text("the cat sat on the mat " * 20)
    drop = Encoder(tokenizer, max_length=20, overflow="drop")
    assert drop.encode(row, WHERE) == Dropped(TOO_LONG)
    with pytest.raises(DataError, match=r"line 7: the row has \d+ tokens, data.max_length is 20"):
        Encoder(tokenizer, max_length=20, overflow="error").encode(row, WHERE)


def test_a_tokenizer_without_eos_is_refused() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match=r"model.source: expected a tokenizer with an end-of-seq"):
        Encoder(tokenizer, max_length=20)


def test_a_chat_without_a_template_is_refused() -> None:
    encoder = Encoder(tiny.tokenizer(chat_template=None), max_length=20)
    with pytest.raises(DataError, match="line 7: the tokenizer has no chat template"):
        encoder.encode(TWO_TURNS, WHERE)
    with pytest.raises(ConfigError, match=r"model.source: the tokenizer has no chat template"):
        encoder.check_format("messages")
    encoder.check_format("prompt_completion")


def test_text_has_no_answers_to_train_on() -> None:
    encoder = Encoder(tiny.tokenizer(), max_length=20, train_on="assistant")
    with pytest.raises(DataError, match="line 7: plain text has no answers: expected all"):
        encoder.encode(Text("the cat"), WHERE)
    with pytest.raises(ConfigError, match=r"data.train_on: plain text has no answers"):
        encoder.check_format("text")


def test_a_template_that_never_ends_a_turn_is_refused() -> None:
    with pytest.raises(DataError, match=r"message 1: the chat template ends an answer with 'b\\n'"):
        encode(tiny.tokenizer(chat_template=NO_END), chat("a", "b"))


def test_a_template_that_refuses_the_row_is_quoted() -> None:
    with pytest.raises(DataError, match=r"line 7: the chat template cannot.*roles must alternate"):
        encode(tiny.tokenizer(chat_template=REFUSES), chat("a", "b"))
