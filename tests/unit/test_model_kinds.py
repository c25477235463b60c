"""Which kinds of model an objective takes, by their configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain.driver.sources import resolve_model
from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.model_sections import ModelConfig
from dbx_llmtrain.records import ModelInfo
from tests import tiny


def resolve(folder: Path, model: Any, objective: str, **config: Any) -> ModelInfo:
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return resolve_model(ModelConfig(source=str(folder)), folder / "cache", objective=objective)


@pytest.mark.parametrize("build", [tiny.bert, tiny.roberta, tiny.modernbert])
def test_models_for_masked_tokens(tmp_path: Path, build: Any) -> None:
    info = resolve(tmp_path, build(), "mlm")
    # RoBERTa has 130 positions, of which the first two are for padding.
    assert (info.max_positions, info.vocab_size) == (128, 97)


def test_a_causal_model_is_none_for_masked_tokens(tmp_path: Path) -> None:
    message = r"is of type llama: data\.objective mlm needs a model for masked tokens"
    with pytest.raises(ConfigError, match=message):
        resolve(tmp_path, tiny.llama(), "mlm")


@pytest.mark.parametrize("objective", ["sft", "pretrain"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"architectures": None},
        {"architectures": None, "is_decoder": False},
        {"architectures": ["BertForPreTraining"]},
        {"architectures": ["BertLMHeadModel"]},
        {"architectures": ["SomethingElse"], "is_decoder": False},
    ],
)
def test_an_encoder_is_no_causal_model(
    tmp_path: Path, objective: str, config: dict[str, Any]
) -> None:
    message = (
        r"type bert and its config\.json does not say is_decoder: true: expected a causal language "
        r"model, or data\.objective: mlm"
    )
    with pytest.raises(ConfigError, match=message):
        resolve(tmp_path / "a", tiny.bert(), objective, **config)
    assert resolve(tmp_path / "b", tiny.bert(), "mlm", **config).model_type == "bert"


def test_models_for_masked_tokens_alone(tmp_path: Path) -> None:
    message = r"type modernbert: expected a causal language model, or data\.objective: mlm"
    with pytest.raises(ConfigError, match=message):
        resolve(tmp_path, tiny.modernbert(), "sft")


@pytest.mark.parametrize("architectures", [["BertLMHeadModel"], ["BertForMaskedLM"], None])
def test_a_decoder_of_a_family_that_has_both_is_causal(
    tmp_path: Path, architectures: list[str] | None
) -> None:
    decoder = {"is_decoder": True, "architectures": architectures}
    assert resolve(tmp_path / "a", tiny.bert(), "sft", **decoder).model_type == "bert"
    with pytest.raises(
        ConfigError, match=r"bert as a decoder: data\.objective mlm needs a model for"
    ):
        resolve(tmp_path / "b", tiny.bert(), "mlm", **decoder)


@pytest.mark.parametrize("objective", ["sft", "mlm"])
def test_an_encoder_with_a_decoder_is_neither(tmp_path: Path, objective: str) -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    settings = {"vocab_size": tiny.VOCAB, "d_model": 32, "max_position_embeddings": 64}
    sizes = {"layers": 1, "ffn_dim": 32, "attention_heads": 2}
    settings |= {
        f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in sizes.items()
    }
    model = BartForConditionalGeneration(BartConfig(**settings))
    with pytest.raises(
        ConfigError, match=r"type bart: expected .* found an encoder with a decoder"
    ):
        resolve(tmp_path, model, objective)
