"""Prompts as the model was taught to see them, and those that it cannot answer."""

from __future__ import annotations

from typing import Any

import pytest

from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.text import prompts
from tests import tiny

MESSAGES = ({"role": "system", "content": "be short"}, {"role": "user", "content": "what is it?"})


@pytest.fixture(scope="module")
def words() -> Any:
    return tiny.tokenizer()


def test_messages_are_written_up_to_where_the_answer_begins(words: Any) -> None:
    (found,) = prompts.encode(words, [MESSAGES], chats=False)
    assert words.decode(found.ids) == (
        "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nwhat is it?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert found.shown == "system: be short\nuser: what is it?"


def test_a_text_is_a_users_message_where_the_data_were_chats(words: Any) -> None:
    (chat,) = prompts.encode(words, ["what is it?"], chats=True)
    (same,) = prompts.encode(words, [[{"role": "user", "content": "what is it?"}]], chats=False)
    assert chat.ids == same.ids
    assert chat.shown == "what is it?"
    (plain,) = prompts.encode(words, ["what is it?"], chats=False)
    assert plain.ids == tuple(words("what is it?")["input_ids"])
    assert plain.ids[0] == words.bos_token_id


def test_a_text_does_not_end_before_it_is_answered() -> None:
    from tokenizers import processors

    words = tiny.tokenizer()
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    (found,) = prompts.encode(words, ["what"], chats=False)
    assert found.ids == (1, *words("what", add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("formats", "template", "expected"),
    [
        ("messages", True, True),
        ("text, sharegpt", True, True),
        ("prompt_completion", True, True),
        ("prompt_completion", False, False),
        ("text", True, False),
        ("text, tokens", True, False),
    ],
)
def test_which_data_are_chats(formats: str, template: bool, expected: bool) -> None:
    words = tiny.tokenizer(chat_template=tiny.CHATML if template else None)
    assert prompts.from_chats(formats, words) is expected


def test_every_prompt_that_cannot_be_answered_is_named(words: Any) -> None:
    refusing = tiny.tokenizer(chat_template="{{ raise_exception('no system message') }}")
    with pytest.raises(ConfigError) as caught:
        prompts.encode(words, ["", "x", [{"role": "user"}], [], "y " * 9], chats=False, positions=8)
    assert [(p.path, p.message.partition(":")[0]) for p in caught.value.problems] == [
        ("train.sample_prompts[2]", "expected messages of role and content, found one of role"),
        ("train.sample_prompts[3]", "expected messages of role and content, found none"),
        (
            "train.sample_prompts[4]",
            "has 19 tokens, the model has 8 positions for prompt and answer",
        ),
    ]
    with pytest.raises(ConfigError, match=r"cannot render it: no system message"):
        prompts.encode(refusing, ["x"], chats=True)
    bare = tiny.tokenizer(chat_template=None, add_bos=False)
    with pytest.raises(ConfigError, match=r"prompts\[0\]: is a list of messages, and the tokenize"):
        prompts.encode(bare, [MESSAGES], chats=True, path="prompts")
    with pytest.raises(ConfigError, match="has no token"):
        prompts.encode(bare, [""], chats=False)
