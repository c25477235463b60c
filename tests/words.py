"""Tokenizers and chat templates of the kinds that there are, and rows encoded with them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dbx_llmtrain.text.encode import Encoder, Outcome, Rules
from dbx_llmtrain.text.prepared import Example
from tests import tiny

WHERE = "rows.jsonl, line 7"
BOS, EOS = 1, 2

LLAMA3 = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA2 = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
# Like Qwen3's: what an earlier answer thought is gone from the history.
STRIPS_HISTORY = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if loop.last %}{{ message['content'] }}"
    "{% else %}{{ message['content'].split('</think>')[-1] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The last answer begins with an empty thought, which is gone once it is history.
THINKS_LAST = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if loop.last and message['role'] == 'assistant' and '<think>' not in message['content'] %}"
    "<think>\n\n</think>\n\n{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The generation prompt holds an empty thought, which the model does not write itself.
EMPTY_THOUGHT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}<think></think>{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think></think>{% endif %}"
)
# The generation prompt opens a thought that the rendered answer does not have.
OPEN_THOUGHT = tiny.CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
TAGGED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGGED_WITHOUT_END = TAGGED.replace(
    "<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"
)
NO_END = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Alpaca's layout, with the end token alone to end an answer.
ALPACA = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}### Instruction:\n{{ message['content'] }}\n\n"
    "{% elif message['role'] == 'assistant' %}"
    "### Response:\n{{ message['content'] }}{{ eos_token }}\n\n"
    "{% else %}{{ message['content'] }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Response:\n{% endif %}"
)
NO_SYSTEM = (
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Puts the two halves of a user's text together without the dots between them.
ASSEMBLES = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'].replace('..', '') }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}"
    "[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_tokens(tokenizer: Any, *names: str, special: bool = True) -> Any:
    """The tokenizer with more tokens."""
    from tokenizers import AddedToken

    tokens = [AddedToken(name, special=special, normalized=False) for name in names]
    tokenizer.add_tokens(tokens, special_tokens=special)
    return tokenizer


def llama3() -> Any:
    tokenizer = tiny.tokenizer(chat_template=LLAMA3)
    return with_tokens(tokenizer, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def metaspace(
    chat_template: str | None = None, *, byte_fallback: bool = True, every_piece: bool = False
) -> Any:
    """As SentencePiece: a word begins with a mark, and a text with a space that is not in it.

    Without ``byte_fallback`` characters that it has not been trained on are unknown. With
    ``every_piece`` what follows a control token begins with such a space, too.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=byte_fallback, fuse_unk=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="always" if every_piece else "first", split=True
    )
    special = ["<unk>", "<s>", "</s>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special + pieces, show_progress=False
    )
    lines = ["the cat sat on the mat [INST] [/INST] user assistant hello world [/INST]yes"]
    inner.train_from_iterator(lines, trainer)
    state = json.loads(inner.to_str())
    state["added_tokens"] = state["added_tokens"][: len(special)]  # bytes are no control tokens
    inner = Tokenizer.from_str(json.dumps(state))
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tiny.finished(inner, chat_template=chat_template)


def wordpiece() -> Any:
    """As BERT's: ``[CLS]`` in front, ``[SEP]`` behind, lower case."""
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    inner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    inner.train_from_iterator(["the cat sat on the mat [ mask ] dog log answer"], trainer)
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = ("pad", "unk", "cls", "sep", "mask")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        **{f"{name}_token": token for name, token in zip(names, special, strict=True)},
    )


def merging(chat_template: str = tiny.CHATML) -> Any:
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
    tokenizer.chat_template = chat_template
    return tokenizer


def slow() -> Any:
    """A token for every character, by a tokenizer that is written in Python."""
    from transformers import PreTrainedTokenizer

    class Characters(PreTrainedTokenizer):
        def __init__(self, **settings: Any) -> None:
            self.letters = {chr(code): code - 10 for code in range(10, 127)}
            super().__init__(**settings)

        @property
        def vocab_size(self) -> int:
            return len(self.letters)

        def get_vocab(self) -> dict[str, int]:
            return self.letters | self.added_tokens_encoder

        def _tokenize(self, text: str, **_: Any) -> list[str]:
            return list(text)

        def _convert_token_to_id(self, token: str) -> int:
            return self.letters[token]

        def _convert_id_to_token(self, index: int) -> str:
            return chr(index + 10)

        def convert_tokens_to_string(self, tokens: list[str]) -> str:
            return "".join(tokens)

    tokenizer = Characters(eos_token="<|im_end|>", clean_up_tokenization_spaces=False)
    with_tokens(tokenizer, "<|im_start|>")
    tokenizer.chat_template = tiny.CHATML
    return tokenizer


TOKENIZERS = {
    "chatml": lambda: tiny.tokenizer(chat_template=tiny.CHATML, add_bos=False),
    "chatml_bos": lambda: tiny.tokenizer(chat_template=tiny.CHATML_BOS),
    "llama3": llama3,
    "tagged": lambda: tiny.tokenizer(chat_template=TAGGED, add_bos=False),
}
END_OF_TURN = {
    "chatml": "<|im_end|>",
    "chatml_bos": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "tagged": "<|im_end|>",
}


def chat(*contents: str, system: str | None = None) -> dict[str, Any]:
    """A row of messages: user and assistant in turn."""
    turns = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    turns += [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return {"messages": turns}


def encoder(tokenizer: Any, fmt: str = "messages", **changes: Any) -> Encoder:
    """An encoder with the usual rules, but for ``changes``; ``formatter`` is the user's."""
    settings: dict[str, Any] = {
        "format": fmt,
        "columns": {},
        "objective": "sft",
        "train_on": None,
        "max_length": 1000,
        "overflow": "truncate",
    }
    formatter = changes.pop("formatter", None)
    return Encoder(tokenizer, Rules(**(settings | changes)), formatter=formatter)


def outcome(
    tokenizer: Any, row: Mapping[str, Any], fmt: str = "messages", **changes: Any
) -> Outcome:
    """What becomes of one row."""
    (found,) = encoder(tokenizer, fmt, **changes).encode([row], [WHERE])
    return found


def encode_all(
    tokenizer: Any, row: Mapping[str, Any], fmt: str = "messages", **changes: Any
) -> tuple[Example, ...]:
    """The examples of a row that has no fault."""
    found = outcome(tokenizer, row, fmt, **changes)
    assert found.fault is None, found.fault
    assert found.examples, found.dropped
    return found.examples


def encode(
    tokenizer: Any, row: Mapping[str, Any], fmt: str = "messages", **changes: Any
) -> Example:
    """The one example of a row."""
    (example,) = encode_all(tokenizer, row, fmt, **changes)
    return example


def fault(tokenizer: Any, row: Mapping[str, Any], fmt: str = "messages", **changes: Any) -> str:
    """Why a row cannot be right, without the place."""
    found = outcome(tokenizer, row, fmt, **changes)
    assert found.fault is not None, found
    assert not found.examples
    assert found.fault.startswith(f"{WHERE}"), found.fault
    return found.fault.removeprefix(f"{WHERE}: ")


def trained_ids(example: Example) -> list[int]:
    return [id_ for id_, mark in zip(example.input_ids, example.trained, strict=True) if mark]


def trained_text(tokenizer: Any, example: Example) -> str:
    return str(tokenizer.decode(trained_ids(example)))


def end_ids(example: Example) -> list[int]:
    return [example.input_ids[end] for end in example.ends]


def at_inference(tokenizer: Any, turns: Sequence[Mapping[str, Any]], **given: Any) -> list[int]:
    """The ids that the model sees when it is to answer."""
    found = tokenizer.apply_chat_template(
        list(turns), add_generation_prompt=True, tokenize=True, return_dict=False, **given
    )
    return list(found)
