"""Export of adapters on one process: merged, and by themselves in peft's format."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dbx_llmtrain import storage
from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import adapters, lora
from dbx_llmtrain.worker.export import Collected, Place, collect, write_adapter, write_export
from dbx_llmtrain.worker.generation import check_generation_config
from dbx_llmtrain.worker.loss import LossModule
from dbx_llmtrain.worker.model import load_tokenizer
from dbx_llmtrain.worker.parallel.common import materialise
from dbx_llmtrain.worker.weights import Fill
from dbx_llmtrain.worker.world import World
from tests import sample, tiny
from tests.pages import ROOT, blocks

WORLD = World(
    rank=0, size=1, local_rank=0, node="n", host="h", device="cpu", ranks_on_host=1
)  # fmt: skip
IDS = torch.arange(3, 19)[None]


def plan(precision: str = "fp32", model: dict[str, Any] | None = None, **fields: Any) -> RunPlan:
    settings = {"source": "m", "lora": {"r": 4} | fields} | (model or {})
    config = sample.config(model=settings)
    return sample.run_plan(config=config, precision=precision, attention="sdpa")


def trained(source: Path, run: RunPlan) -> tuple[Any, Collected]:
    """The folder's model with adapters that are no longer at their start, and what is exported."""
    fill = Fill(run, source, WORLD)
    model: Any = lora.adapt(fill.build(), run)
    module = LossModule(model)
    materialise(module, "cpu")
    fill(model)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    collected = collect(module, model, source, WORLD)
    assert collected is not None
    return model.eval(), collected


def export(source: Path, collected: Collected) -> Path:
    return write_export(
        source.parent / "export",
        collected=collected,
        place=Place(source, source.parent / "scratch"),
        generation=check_generation_config(source, ()),
    )


def save(source: Path, collected: Collected, target: Path | None = None) -> Path | None:
    return write_adapter(
        target or source.parent / "adapter",
        collected=collected,
        place=Place(source, source.parent / "scratch"),
        generation=check_generation_config(source, (4,)),
        base="hub/model",
        revision="abc",
    )


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


def largest(difference: Tensor) -> float:
    return float(difference.abs().max())


def grown(original: Path, folder: Path, *tokens: str) -> Path:
    """A copy of a model folder with more tokens, as the driver stages it: its weights have no rows
    for them."""
    shutil.copytree(original, folder)
    words = load_tokenizer(folder)
    words.add_tokens(list(tokens))
    words.save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    content["vocab_size"] = len(words)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_c75_an_adapter_with_two_new_tokens_on_a_fresh_base(tmp_path: Path, tied: bool) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    original = tiny.model_folder(tmp_path / "original", tied=tied)
    source = grown(original, tmp_path / "source", "<new-one>", "<new-two>")
    model, collected = trained(source, plan(model={"new_tokens": ["<new-one>", "<new-two>"]}))
    merged = export(source, collected)
    adapter = save(source, collected)
    assert adapter is not None
    base = AutoModelForCausalLM.from_pretrained(original)
    words = load_tokenizer(adapter)
    assert len(words) == base.config.vocab_size + 2
    base.resize_token_embeddings(len(words))
    opened = PeftModel.from_pretrained(base, adapter).eval()
    assert largest(logits(opened) - logits(model)) == 0.0
    other = AutoModelForCausalLM.from_pretrained(merged).eval()
    assert largest(logits(other) - logits(model)) < 1e-5
    names = [
        name for name in load_file(adapter / "adapter_model.safetensors") if "lora" not in name
    ]
    assert sorted(names) == [
        "base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight",
    ]  # fmt: skip
    assert (other.get_output_embeddings().weight is other.get_input_embeddings().weight) is tied


FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (tiny.llama, {}),
    "tied": (lambda: tiny.llama(tied=True), {"modules_to_save": ["embed_tokens"]}),
    "dora": (tiny.llama, {"use_dora": True, "use_rslora": True}),
    "ranks": (tiny.llama, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 5}}),
    "bias": (tiny.gpt2, {"bias": "all"}),
    "gpt2": (tiny.gpt2, {"lora_bias": True, "modules_to_save": ["wte"]}),
    "ends": (tiny.llama, {"target_modules": ["lm_head", "embed_tokens", "q_proj"]}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_c102_and_c94_every_kind_is_merged_and_saved(tmp_path: Path, family: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    build, fields = FAMILIES[family]
    source = tiny.model_folder(tmp_path / "source")
    (source / "model.safetensors").unlink()
    build().save_pretrained(source)
    model, collected = trained(source, plan(**fields))
    adapter = save(source, collected)
    assert adapter is not None
    merged = export(source, collected)
    opened, report = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert largest(logits(opened.eval()) - logits(model)) < 1e-5
    fresh = AutoModelForCausalLM.from_pretrained(source).eval()
    assert largest(logits(fresh) - logits(model)) > 1e-3
    assert largest(logits(PeftModel.from_pretrained(fresh, adapter)) - logits(model)) == 0.0
    assert storage.read_manifest(adapter) is not None
    assert not any((tmp_path / "scratch").iterdir())


def test_c102_merged_in_fp32_and_cast_afterwards(tmp_path: Path) -> None:
    """A delta far below the resolution of a bf16 weight moves those that lie near a boundary."""
    source = tiny.model_folder(tmp_path / "source")
    tiny.llama(vocab_size=320).bfloat16().save_pretrained(source)
    base = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert base[name].dtype == torch.bfloat16
    for precision in ("fp32", "bf16"):
        model, collected = trained(source, plan(precision))
        layer = model.model.layers[0].mlp.up_proj
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        expected = (base[name].float() + (b @ a).detach() * 8).to(torch.bfloat16)
        assert torch.equal(collected.weights[name], expected)
        lossy = base[name] + (b @ a).detach().to(torch.bfloat16) * 8
        assert not torch.equal(collected.weights[name], lossy)
        assert {tensor.dtype for tensor in collected.weights.values()} == {torch.bfloat16}


def test_a_base_that_was_rounded_is_taken_from_the_folder(tmp_path: Path) -> None:
    source = tiny.model_folder(tmp_path / "source")
    base = load_file(source / "model.safetensors")
    _, collected = trained(source, plan("bf16", target_modules=["q_proj"]))
    for name, tensor in base.items():
        assert torch.equal(collected.weights[name], tensor) is ("q_proj" not in name), name
    export(source, collected)


def test_the_adapters_own_files(tmp_path: Path) -> None:
    source = tiny.model_folder(tmp_path / "source")
    _, collected = trained(source, plan(alpha=24, dropout=0.25))
    adapter = save(source, collected)
    assert adapter is not None
    # (transformers 4 writes the tokenizer into other files.)
    words = {path.name for path in source.iterdir()} - {
        "config.json", "generation_config.json", "model.safetensors", "README.md"
    }  # fmt: skip
    own = {"adapter_config.json", "adapter_model.safetensors", "manifest.json"}
    own |= {"generation_config.json"}  # without it nobody would know the end of an answer
    assert {path.name for path in adapter.iterdir()} == words | own
    content = json.loads((adapter / "adapter_config.json").read_text())
    generation = json.loads((adapter / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 4]
    assert content["base_model_name_or_path"] == "hub/model"
    assert content["revision"] == "abc"
    assert (content["r"], content["lora_alpha"], content["lora_dropout"]) == (4, 24, 0.25)
    assert content["inference_mode"]
    assert content["target_modules"] == sorted(content["target_modules"])
    assert len(content["target_modules"]) == 14
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert len(tensors) == 28
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert all(name.startswith("base_model.model.model.layers.") for name in tensors)


def test_an_adapter_that_does_not_give_the_running_models_logits_is_refused(
    tmp_path: Path,
) -> None:
    source = tiny.model_folder(tmp_path / "source")
    _, collected = trained(source, plan())
    assert collected.adapter is not None
    collected.adapter.config.lora_alpha = 31
    with pytest.raises(CheckpointError, match=r"the adapter's logits are .* off the running"):
        save(source, collected)
    assert not (tmp_path / "adapter").exists()
    assert not any((tmp_path / "scratch").iterdir())


def test_an_adapter_with_a_tensor_that_peft_does_not_load_is_refused(tmp_path: Path) -> None:
    source = tiny.model_folder(tmp_path / "source")
    _, collected = trained(source, plan())
    assert collected.adapter is not None
    tensors = dict(collected.adapter.tensors)
    name = next(name for name in tensors if "q_proj.lora_B" in name)
    tensors[f"{name}.old"] = tensors.pop(name)
    other = replace(collected, adapter=replace(collected.adapter, tensors=tensors))
    with pytest.raises(CheckpointError, match=r"not hold what was trained: .*q_proj\.lora_B"):
        save(source, other)


def test_an_adapter_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    source = tiny.model_folder(tmp_path / "source")
    _, collected = trained(source, plan())
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"the adapter .*file/adapter cannot be written"):
        save(source, collected, tmp_path / "file" / "adapter")


def test_an_adapter_over_random_weights_and_a_model_without_one_are_not_saved(
    tmp_path: Path,
) -> None:
    source = tiny.model_folder(tmp_path / "source")
    (source / "model.safetensors").unlink()
    _, collected = trained(source, plan(model={"init": "random"}))
    assert collected.adapter is not None
    assert not adapters.has_weights(source)
    assert save(source, collected) is None
    export(source, collected)
    assert save(source, replace(collected, adapter=None)) is None


@pytest.mark.parametrize("tokens", [(), ("<new>",)])
def test_what_the_page_shows_opens_an_adapter(tmp_path: Path, tokens: tuple[str, ...]) -> None:
    original = tiny.model_folder(tmp_path / "original")
    source = grown(original, tmp_path / "source", *tokens)
    model, collected = trained(source, plan(model={"new_tokens": list(tokens)}))
    adapter = save(source, collected)
    (code,) = blocks("python", ROOT / "docs" / "lora.md")
    places = {
        "/Volumes/main/ml/runs/first/adapter": str(adapter),
        "HuggingFaceTB/SmolLM2-1.7B-Instruct": str(original),
    }
    for shown, place in places.items():
        assert shown in code
        code = code.replace(shown, place)
    names: dict[str, Any] = {}
    exec(compile(code, "lora.md", "exec"), names)
    assert largest(logits(names["model"].eval()) - logits(model)) == 0.0
