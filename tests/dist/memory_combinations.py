"""The combinations of model, strategy and settings whose memory is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dbx_llmtrain.estimates import ModelShape
from dbx_llmtrain.memory import Adapters, Setup

MODELS: dict[str, dict[str, Any]] = {
    # 87M parameters, tied: blocks count most.
    "llama-87m": {
        "model_type": "llama", "hidden_size": 768, "intermediate_size": 2048,
        "num_hidden_layers": 10, "num_attention_heads": 12, "num_key_value_heads": 4,
        "vocab_size": 32000, "tie_word_embeddings": True,
    },
    # SmolLM2-135M: thin and deep.
    "smollm2-135m": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "vocab_size": 49152, "tie_word_embeddings": True,
    },
    # 147M parameters, 98M of them in a big vocabulary, head of its own.
    "llama-147m": {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408,
        "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
        "vocab_size": 128256, "tie_word_embeddings": False,
    },
    # GPT-2 small: LayerNorm, GELU, dropout, biases.
    "gpt2-124m": {"model_type": "gpt2"},
}  # fmt: skip


@dataclass(frozen=True)
class Combination:
    """A model of ``MODELS`` and how it is trained."""

    model: str
    setup: Setup


def _cpu(kind: Any, precision: Any = "fp32", **settings: Any) -> Setup:
    """256 tokens a rank, packed, unless said otherwise; two ranks but for ``single``."""
    common: dict[str, Any] = {
        "kind": kind, "precision": precision, "ranks": 1 if kind == "single" else 2,
        "length": 256, "device": "cpu",
    }  # fmt: skip
    return Setup(**(common | settings))


COMBINATIONS: dict[str, Combination] = {
    "single, 87M": Combination("llama-87m", _cpu("single")),
    "single, 87M, 2 x 256 tokens": Combination("llama-87m", _cpu("single", micro_batch=2)),
    "single, 87M, 1024 tokens, eager": Combination(
        "llama-87m", _cpu("single", length=1024, attention="eager")
    ),
    "single, 87M, bf16": Combination("llama-87m", _cpu("single", "bf16")),
    "single, 87M, checkpointing": Combination(
        "llama-87m", _cpu("single", gradient_checkpointing=1)
    ),
    "single, 87M, sgd, padded": Combination(
        "llama-87m", _cpu("single", optimizer="sgd", packed=False)
    ),
    "single, 87M, adafactor": Combination("llama-87m", _cpu("single", optimizer="adafactor")),
    "single, 87M, accumulation": Combination("llama-87m", _cpu("single", accumulation=2)),
    "single, 135M": Combination("smollm2-135m", _cpu("single")),
    "single, 135M, checkpointing": Combination(
        "smollm2-135m", _cpu("single", gradient_checkpointing=1)
    ),
    "single, 147M, big vocabulary": Combination("llama-147m", _cpu("single")),
    "single, GPT-2 124M": Combination("gpt2-124m", _cpu("single")),
    "single, 135M, LoRA": Combination("smollm2-135m", _cpu("single", lora=Adapters(16))),
    "fsdp full, 87M, LoRA, bf16": Combination("llama-87m", _cpu("fsdp", "bf16", lora=Adapters(16))),
    "ddp, 87M": Combination("llama-87m", _cpu("ddp")),
    "ddp, 135M, checkpointing": Combination("smollm2-135m", _cpu("ddp", gradient_checkpointing=1)),
    "ddp, 147M, bf16": Combination("llama-147m", _cpu("ddp", "bf16")),
    "fsdp full, 87M": Combination("llama-87m", _cpu("fsdp")),
    "fsdp full, 87M, bf16, checkpointing": Combination(
        "llama-87m", _cpu("fsdp", "bf16", gradient_checkpointing=1)
    ),
    "fsdp full, 87M, accumulation": Combination("llama-87m", _cpu("fsdp", accumulation=2)),
    "fsdp full, 135M": Combination("smollm2-135m", _cpu("fsdp")),
    "fsdp full, 147M": Combination("llama-147m", _cpu("fsdp")),
    "fsdp full, 147M, bf16": Combination("llama-147m", _cpu("fsdp", "bf16")),
    "fsdp grad_op, 87M": Combination("llama-87m", _cpu("fsdp", shard="grad_op")),
    "fsdp grad_op, 135M, bf16": Combination("smollm2-135m", _cpu("fsdp", "bf16", shard="grad_op")),
    "fsdp cpu_offload, 87M": Combination("llama-87m", _cpu("fsdp", cpu_offload=True)),
    "zero 1, 87M": Combination("llama-87m", _cpu("deepspeed", stage=1)),
    "zero 2, 87M": Combination("llama-87m", _cpu("deepspeed", stage=2)),
    "zero 2, 147M, bf16": Combination("llama-147m", _cpu("deepspeed", "bf16", stage=2)),
    "zero 3, 87M": Combination("llama-87m", _cpu("deepspeed", stage=3)),
    "zero 3, 135M, bf16, checkpointing": Combination(
        "smollm2-135m", _cpu("deepspeed", "bf16", stage=3, gradient_checkpointing=1)
    ),
}


def build_config(name: str) -> Any:
    """The Hugging Face configuration of a model of ``MODELS``."""
    from transformers import AutoConfig

    settings = dict(MODELS[name])
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def shape_of(name: str) -> ModelShape:
    """Its shape, as the plan gets it."""
    import transformers

    from dbx_llmtrain.shapes import model_shape

    config = build_config(name)
    return model_shape(config, transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
