from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.text.lexer import control_tokens, lexer_of
from dbx_llmtrain.text.templates import CHATML, Template, resolve_template, split_marks
from dbx_llmtrain.text.turns import Message
from tests import tiny, words

CHAT = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]


def template(text: str, tokenizer: Any = None) -> Template:
    tokenizer = tokenizer or tiny.tokenizer(chat_template=None)
    return Template(tokenizer, text, lexer_of(tokenizer, control_tokens(tokenizer, text)))


def test_a_template_is_given_as_text_or_file(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer(chat_template=None)
    assert resolve_template(tiny.CHATML, tokenizer) == tiny.CHATML
    file = tmp_path / "chat.jinja"
    file.write_text(words.TOOLS, encoding="utf-8")
    assert resolve_template(str(file), tokenizer) == words.TOOLS
    with pytest.raises(ConfigError, match=r"data.chat_template: expected chatml, the text of a te"):
        resolve_template(str(tmp_path / "none.jinja"), tokenizer)


def test_chatml_needs_its_tokens_in_the_vocabulary() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_template("chatml", words.metaspace())
    message = str(caught.value)
    assert "data.chat_template: chatml needs the tokens <|im_start|> and <|im_end|>" in message
    assert "model.new_tokens" in message
    assert "not available in this version" in message


def test_chatml_begins_as_the_tokenizers_texts_do() -> None:
    assert resolve_template("chatml", tiny.tokenizer(add_bos=False)) == CHATML
    tokenizer = tiny.tokenizer(chat_template=None)
    example = words.encode(tokenizer, words.chat("a", "b"), chat_template="chatml")
    assert tokenizer.decode(example.input_ids) == (
        "<s><|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    )
    assert words.trained_text(tokenizer, example) == "b<|im_end|>"


def test_chatml_writes_what_plain_chatml_writes() -> None:
    built_in, plain = template(CHATML), template(tiny.CHATML)
    system = [Message("system", "Be brief."), *CHAT]
    for messages in (CHAT, system):
        for prompt in (True, False):
            ours = built_in.render(messages, generation_prompt=prompt)
            assert ours == plain.render(messages, generation_prompt=prompt)


@pytest.mark.parametrize(
    "tags",
    [
        ("{% generation %}", "{% endgeneration %}"),
        ("{%- generation -%}", "{%- endgeneration -%}"),
        ("{%generation%}", "{%endgeneration%}"),
        ("{%- generation %}\n", "\n{%- endgeneration %}\n"),
    ],
)
def test_tags_change_no_text_and_are_found(tags: tuple[str, str]) -> None:
    text = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.role == 'assistant' %}  BEGIN\n  {{ message.content }}<|im_end|>  END\n"
        "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    )
    tagged = text.replace("BEGIN", tags[0]).replace("END", tags[1])
    tokenizer = tiny.tokenizer(chat_template=tagged)
    turns = [message.for_template() for message in CHAT]
    made = template(tagged, tokenizer)
    assert made.tagged([])
    rendered = split_marks(made.render(CHAT), tagged=True)
    assert rendered.text == tokenizer.apply_chat_template(turns, tokenize=False)
    assert rendered.tagged is not None
    (span,) = rendered.tagged
    assert rendered.text[slice(*span)].strip() == "b<|im_end|>"


def test_a_template_without_tags() -> None:
    made = template(tiny.CHATML)
    assert not made.tagged([])
    assert split_marks(made.render(CHAT), tagged=False).tagged is None


def test_the_shape_of_a_conversation() -> None:
    made = template(words.NO_SYSTEM)
    shape = made.shape(CHAT, [])
    assert shape.missing is None
    assert shape.control == ("<|im_start|>", "<|im_end|>") * 3
    assert made.shape([Message("user", "x"), *CHAT[1:]], []) is shape  # found out once
    assert made.shape([Message("system", "x"), *CHAT], []).missing == "message 0 (system)"
    assert template("{{ raise_exception('no') }}").shape(CHAT, []).control is None
