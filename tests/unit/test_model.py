"""Loading a model folder: types, missing weights, attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.custom_code import private_modules
from dbx_llmtrain.driver.sources import resolve_model
from dbx_llmtrain.errors import CheckpointError, ConfigError
from dbx_llmtrain.model_sections import ModelConfig
from dbx_llmtrain.worker.model import attention_of, load_model, load_tokenizer, named_weights
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


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_c80_eager_and_sdpa_give_the_same_logits(tmp_path: Path, family: str) -> None:
    {"llama": tiny.llama, "gpt2": tiny.gpt2}[family]().save_pretrained(tmp_path)
    logits = []
    for attention in ("eager", "sdpa"):
        model = load_model(tmp_path, attention=attention).eval()
        assert attention_of(model) == attention
        with torch.no_grad():
            logits.append(model(input_ids=torch.arange(3, 40)[None]).logits)
    assert float((logits[0] - logits[1]).abs().max()) < 1e-5


def test_c80_auto_is_sdpa_where_the_model_has_it(tmp_path: Path) -> None:
    assert attention_of(load_model(tiny.model_folder(tmp_path), attention="auto")) == "sdpa"


@pytest.mark.parametrize("asked", ["flash_attention_2", "flex_attention", "paged|sdpa"])
def test_c80_what_is_not_offered_is_refused_by_the_configuration(asked: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(model={"source": "x", "attention": asked}, data={"train": "y"})
    (problem,) = caught.value.problems
    assert str(problem) == (f"model.attention: expected 'auto', 'sdpa' or 'eager', found '{asked}'")


def test_c80_a_model_without_the_implementation_is_refused_on_the_driver(tmp_path: Path) -> None:
    folder = tiny.custom_folder(tmp_path / "model")
    path = folder / "modeling_tiny.py"
    path.write_text(path.read_text().replace("_supports_sdpa = True", "_supports_sdpa = False"))
    for attention in ("auto", "eager"):
        config = ModelConfig(source=str(folder), attention=attention, trust_remote_code=True)
        assert resolve_model(config, tmp_path / "cache").model_type == "tiny_of_our_own"
    config = ModelConfig(source=str(folder), attention="sdpa", trust_remote_code=True)
    with pytest.raises(ConfigError, match=r"model\.attention: .*has no sdpa attention: use auto"):
        resolve_model(config, tmp_path / "cache")


def test_c80_a_model_that_runs_with_another_one_is_refused(tmp_path: Path) -> None:
    folder = tiny.custom_folder(tmp_path / "model")
    path = folder / "modeling_tiny.py"
    stubborn = "self.post_init()\n        config._attn_implementation = 'eager'\n"
    path.write_text(path.read_text().replace("self.post_init()\n", stubborn))
    with private_modules(tmp_path, wanted=True):
        assert load_model(folder, attention="eager", trusted=True) is not None
        with pytest.raises(CheckpointError, match="runs with eager attention, the plan says sdpa"):
            load_model(folder, attention="sdpa", trusted=True)


def test_a_model_that_is_not_in_fp32_after_all_is_refused(tmp_path: Path) -> None:
    folder = tiny.custom_folder(tmp_path / "model")
    path = folder / "modeling_tiny.py"
    change = "    def eval(self):\n        self.lm_head.to(torch.bfloat16)\n"
    path.write_text(path.read_text() + change + "        return super().eval()\n")
    with (
        private_modules(tmp_path, wanted=True),
        pytest.raises(CheckpointError, match=r"lm_head\.weight was loaded as torch\.bfloat16, not"),
    ):
        load_model(folder, attention="auto", trusted=True)
