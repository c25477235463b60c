"""Loading a model folder: types, missing weights, attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.worker.model import load_model, load_tokenizer, named_weights
from tests import tiny


def _bf16(folder: Path) -> None:
    """Turn a folder's weights, and what its configuration says of them, into bf16."""
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_c52_weights_are_fp32_whatever_the_folder_holds(tmp_path: Path, attention: str) -> None:
    tiny.model_folder(tmp_path, tied=True)
    _bf16(tmp_path)
    model = load_model(tmp_path, attention=attention)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert all(weight.requires_grad for weight in model.parameters())
    assert model.training
    assert model.config.use_cache is False
    assert model.config._attn_implementation == attention


def test_tied_weights_are_one_parameter(tmp_path: Path) -> None:
    model = load_model(tiny.model_folder(tmp_path, tied=True), attention="sdpa")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    names = [name for name, _ in named_weights(model)]
    assert len(names) == len(set(names)) == 20
    assert "lm_head.weight" not in names


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    tiny.model_folder(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(tmp_path, attention="sdpa")


def test_an_extra_weight_is_no_fault_of_a_source(tmp_path: Path) -> None:
    tiny.model_folder(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.old"] = torch.zeros(3)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load_model(tmp_path, attention="sdpa") is not None


def test_the_tokenizer_comes_from_the_folder(tmp_path: Path) -> None:
    tiny.model_folder(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer("the cat")["input_ids"] == tiny.tokenizer()("the cat")["input_ids"]
    assert tokenizer.chat_template == tiny.CHATML
