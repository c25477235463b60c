"""Tiny models, a tiny tokenizer and tiny prepared data: what the tests train on.

Everything is made from a seed, in fp32, in well under a second. The vocabulary of the models is
odd (97), so that shards are uneven.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dbx_llmtrain import compat

if TYPE_CHECKING:
    from dbx_llmtrain.records import PreparedData
    from dbx_llmtrain.text.prepared import Example

VOCAB = 97

TYPES_ARE_CHECKED = pytest.mark.skipif(
    not compat.at_least("transformers", "5"),
    reason="configurations of transformers 4 take values of any type",
)

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


def mixtral(*, seed: int = 0, **changes: Any) -> Any:
    """A two-layer Mixtral: 4 experts, 2 for each token; no router loss unless it is asked for."""
    from transformers import MixtralConfig, MixtralForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.1,
        "max_position_embeddings": 128,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(seed)
    return MixtralForCausalLM(MixtralConfig(**(settings | changes))).float()


def bert(*, seed: int = 0, **changes: Any) -> Any:
    """A two-layer BERT for masked tokens: absolute positions, segments, no dropout."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(seed)
    return BertForMaskedLM(BertConfig(**(_ENCODER | changes))).float()


def roberta(*, seed: int = 0, **changes: Any) -> Any:
    """A two-layer RoBERTa: its first position is 2, the one behind its padding token's id."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    settings = {"pad_token_id": 1, "bos_token_id": 0, "max_position_embeddings": 130}
    torch.manual_seed(seed)
    return RobertaForMaskedLM(RobertaConfig(**(_ENCODER | settings | changes))).float()


def modernbert(*, seed: int = 0, **changes: Any) -> Any:
    """A three-layer ModernBERT: rotary positions, the first layer sees everything and the others
    4 tokens to either side."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    settings: dict[str, Any] = {
        "num_hidden_layers": 3,
        "local_attention": 8,
        "global_attn_every_n_layers": 3,
        "pad_token_id": 0,
        "reference_compile": False,
        "attn_implementation": "sdpa",
    }
    settings |= {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = ModernBertConfig(**({**_ENCODER, **settings} | changes))
    torch.manual_seed(seed)
    return ModernBertForMaskedLM(config).float()


_ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def examples(
    lengths: Sequence[int] = (3, 40, 5, 30, 4, 25, 6, 9), *, seed: int = 0, vocab: int = VOCAB
) -> list[Example]:
    """One row of each length; about a third of a row's head is not trained, as a prompt is not.

    Rows therefore have unequal numbers of trained tokens. Ids 0 to 2 are left out.
    """
    from dbx_llmtrain.text.prepared import Example

    draw = random.Random(seed)
    rows = []
    for length in lengths:
        ids = [draw.randrange(3, vocab) for _ in range(length)]
        prompt = min(max(1, draw.randrange(0, length // 2 + 1)), length - 1)
        rows.append(
            Example(
                input_ids=ids,
                trained=[False] * prompt + [True] * (length - prompt),
            )
        )
    return rows


def prepared(
    folder: Path,
    *,
    train: Sequence[Example] | None = None,
    held_out: Sequence[Example] | None = None,
    more: Mapping[str, Sequence[Example]] | None = None,
    max_length: int = 64,
    packing: bool = True,
) -> PreparedData:
    """Write a prepared data set as the driver does, manifest last, and return its record.

    By default 8 rows to train on and 7 held out; ``more`` are further splits by their names.
    """
    from dbx_llmtrain import storage
    from dbx_llmtrain.records import Artifact, Audit, PreparedData, SplitInfo
    from dbx_llmtrain.text.prepared import write_split

    train = examples() if train is None else train
    held_out = examples((3, 40, 5, 30, 4, 25, 6), seed=1) if held_out is None else held_out
    rows = {"train": train} | ({"eval": held_out} if held_out else {}) | dict(more or {})
    stats = {
        name: write_split(folder, part, max_length=max_length, packing=packing, split=name)
        for name, part in rows.items()
    }
    files = storage.entries(folder)
    tokens, packs = stats["train"].tokens, stats["train"].examples
    audit = Audit(
        read_rows=sum(map(len, rows.values())),
        train_rows=stats["train"].rows,
        eval_rows=sum(len(part) for name, part in rows.items() if name.startswith("eval")),
        test_rows=len(rows.get("test", ())),
        tokens=tokens,
        trained_tokens=stats["train"].trained,
        packs=packs,
        packing_efficiency=tokens / max(1, packs * max_length),
    )
    record = PreparedData(
        artifact=Artifact(kind="data", source=str(folder), fingerprint=folder.name, files=files),
        audit=audit,
        format="text",
        splits={
            name: SplitInfo(
                examples=found.examples,
                rows=found.rows,
                tokens=found.tokens,
                trained=found.trained,
                digest=found.digest,
            )
            for name, found in stats.items()
        },
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
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

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
    return finished(inner, chat_template=chat_template, add_bos=add_bos)


def finished(inner: Any, *, chat_template: str | None, add_bos: bool = True) -> Any:
    """The tokenizer around ``inner``, which has BOS ``<s>`` (1), EOS ``</s>`` and ``<unk>``."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

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


CUSTOM_CONFIG = """
from transformers import PretrainedConfig


class TinyConfig(PretrainedConfig):
    model_type = "tiny_of_our_own"

    def __init__(self, vocab_size=97, hidden_size=32, num_hidden_layers=2, **rest):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**rest)
"""

CUSTOM_BLOCK = """
import torch

from .tiny_numbers import SCALE


class Block(torch.nn.Module):
    # Causal: every token sees the mean of those up to it, of its own document.
    def __init__(self, width):
        super().__init__()
        self.mix = torch.nn.Linear(width, width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)

    def forward(self, hidden, weights):
        return hidden + self.out(torch.nn.functional.silu(self.mix(weights @ hidden))) * SCALE
"""

CUSTOM_MODEL = """
import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_tiny import TinyConfig
from .tiny_block import Block


class TinyModel(PreTrainedModel):
    config_class = TinyConfig
    base_model_prefix = "model"
    _no_split_modules = ["Block"]
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = torch.nn.ModuleList(
            Block(config.hidden_size) for _ in range(config.num_hidden_layers)
        )
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **rest):
        hidden = self.embed_tokens(input_ids)
        length = input_ids.shape[1]
        seen = torch.ones(length, length, device=hidden.device).tril().bool()
        if attention_mask is not None and attention_mask.dim() == 4:
            seen = seen & (attention_mask[:, 0] > -1)
        elif attention_mask is not None:
            seen = seen & attention_mask[:, None, :].bool()
        weights = seen.to(hidden.dtype)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1)
        for layer in self.layers:
            hidden = layer(hidden, weights)
        return BaseModelOutputWithPast(last_hidden_state=hidden)


class TinyForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TinyConfig
    base_model_prefix = "model"
    _no_split_modules = ["Block"]
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.model = TinyModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids=None, labels=None, **rest):
        logits = self.lm_head(self.model(input_ids=input_ids, **rest).last_hidden_state)
        loss = None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits)
"""


def custom_folder(folder: Path, *, seed: int = 0, scale: float = 1.0, masked: bool = False) -> Path:
    """A Hugging Face folder of an architecture that transformers does not have, with its code: a
    configuration, a model, and what the model imports, which imports more. ``masked``: it predicts
    masked tokens, and every token sees every other."""
    import json

    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    words, code, kind = tokenizer(), CUSTOM_MODEL, "CausalLM"
    if masked:
        words.add_special_tokens({"mask_token": "<mask>", "pad_token": "<pad>"})
        kind = "MaskedLM"
        code = code.replace("TinyForCausalLM", "TinyForMaskedLM").replace(".tril()", "")
        code = code.replace("logits[:, :-1]", "logits").replace("labels[:, 1:]", "labels")
    words.save_pretrained(folder)
    (folder / "configuration_tiny.py").write_text(CUSTOM_CONFIG)
    (folder / "modeling_tiny.py").write_text(code)
    (folder / "tiny_block.py").write_text(CUSTOM_BLOCK)
    (folder / "tiny_numbers.py").write_text(f"SCALE = {scale}\n")
    config = {
        "model_type": "tiny_of_our_own",
        "architectures": [f"TinyFor{kind}"],
        "auto_map": {
            "AutoConfig": "configuration_tiny.TinyConfig",
            f"AutoModelFor{kind}": f"modeling_tiny.TinyFor{kind}",
        },
        "vocab_size": len(words),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    draw = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (len(words), 32), "lm_head.weight": (len(words), 32)}
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.{name}.weight": (32, 32) for name in ("mix", "out")}
    weights = {name: torch.randn(shape, generator=draw) * 0.2 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
