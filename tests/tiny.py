"""Tiny models, a tiny tokenizer and tiny prepared data: what the tests train on.

Everything is made from a seed, in fp32, in well under a second. The vocabulary of the models is
odd (97), so that shards are uneven.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dbx_llmtrain.records import PreparedData
    from dbx_llmtrain.text.prepared import Example

VOCAB = 97

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML without BOS and without generation tags."""

CHATML_BOS = "{{ bos_token }}" + CHATML
"""ChatML that renders the BOS token itself (a trap for whoever tokenizes its text again)."""

_CORPUS = [
    "the cat sat on the mat and the dog sat on the log",
    "what is the answer? the answer is forty two.",
    "user assistant system hello world, how are you today?",
    "a question and an answer, one after the other",
]


def llama(*, tied: bool = False, seed: int = 0, **changes: Any) -> Any:
    """The standard fixture: a two-layer Llama, 32 wide, 4 heads of which 2 hold keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).float()


def gpt2(*, seed: int = 0, **changes: Any) -> Any:
    """A two-layer GPT-2: absolute positions, biases everywhere, tied embeddings, no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(**(settings | changes))).float()


def mistral(*, sliding_window: int | None = 8, seed: int = 0, **changes: Any) -> Any:
    """A two-layer Mistral: every layer attends to ``sliding_window`` tokens only."""
    from transformers import MistralConfig, MistralForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "sliding_window": sliding_window,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(seed)
    return MistralForCausalLM(MistralConfig(**(settings | changes))).float()


def examples(
    lengths: Sequence[int] = (3, 40, 5, 30, 4, 25, 6, 9), *, seed: int = 0, vocab: int = VOCAB
) -> list[Example]:
    """One row of each length; about a third of a row's head is not trained, as a prompt is not.

    Rows therefore have unequal numbers of trained tokens. Ids 0 to 2 are left out.
    """
    from dbx_llmtrain.text.prepared import Example

    draw = random.Random(seed)
    rows = []
    for number, length in enumerate(lengths):
        ids = [draw.randrange(3, vocab) for _ in range(length)]
        prompt = min(max(1, draw.randrange(0, length // 2 + 1)), length - 1)
        rows.append(
            Example(
                input_ids=ids,
                trained=[False] * prompt + [True] * (length - prompt),
                key=f"row-{number:04d}",
            )
        )
    return rows


def prepared(
    folder: Path,
    *,
    train: Sequence[Example] | None = None,
    held_out: Sequence[Example] | None = None,
    max_length: int = 64,
    packing: bool = True,
) -> PreparedData:
    """Write a prepared data set as the driver does, manifest last, and return its record.

    By default 8 rows to train on and 7 held out.
    """
    from dbx_llmtrain import storage
    from dbx_llmtrain.records import Artifact, Audit, PreparedData
    from dbx_llmtrain.text.prepared import write_split

    train = examples() if train is None else train
    held_out = examples((3, 40, 5, 30, 4, 25, 6), seed=1) if held_out is None else held_out
    stats = write_split(folder / "train", train, max_length=max_length, packing=packing)
    eval_examples = 0
    if held_out:
        eval_stats = write_split(folder / "eval", held_out, max_length=max_length, packing=packing)
        eval_examples = eval_stats.examples
    files = storage.entries(folder)
    audit = Audit(
        read_rows=len(train) + len(held_out),
        train_rows=stats.rows,
        eval_rows=len(held_out),
        tokens=stats.tokens,
        trained_tokens=stats.trained,
        packs=stats.examples,
        packing_efficiency=stats.tokens / max(1, stats.examples * max_length),
    )
    record = PreparedData(
        artifact=Artifact(kind="data", source=str(folder), fingerprint=folder.name, files=files),
        audit=audit,
        format="text",
        train_examples=stats.examples,
        eval_examples=eval_examples,
        eval_rows=len(held_out),
        sources={"train": "tiny"},
    )
    storage.write_manifest(
        folder,
        {
            "files": [entry.model_dump() for entry in files],
            "prepared": record.model_dump(mode="json", exclude={"artifact"}),
        },
    )
    return record


def tokenizer(*, chat_template: str | None = CHATML, add_bos: bool = True, size: int = 320) -> Any:
    """A byte-level BPE trained on a few lines: BOS ``<s>`` (1), EOS ``</s>`` (2), ChatML tokens.

    ``add_bos``: the post-processor puts BOS in front, as Llama's does. There is no pad token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(_CORPUS, trainer)
    if add_bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    built = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    built.chat_template = chat_template
    return built


def model_folder(
    folder: Path, *, tied: bool = False, chat_template: str | None = CHATML, seed: int = 0
) -> Path:
    """A Hugging Face folder with a tiny Llama and the tiny tokenizer that fits it."""
    words = tokenizer(chat_template=chat_template)
    model = llama(tied=tied, seed=seed, vocab_size=len(words))
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
