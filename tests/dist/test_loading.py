"""Every strategy fills a model without storage with the same weights, and reads them once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dbx_llmtrain.compat import dtype_argument
from dbx_llmtrain.driver.sources import resolve_model
from dbx_llmtrain.events import read_events
from dbx_llmtrain.model_sections import ModelConfig
from dbx_llmtrain.outcomes import RankResult
from dbx_llmtrain.records import ModelInfo
from dbx_llmtrain.worker.main import run
from dbx_llmtrain.worker.staged import stage
from tests import tiny
from tests.dist import plans
from tests.dist.launch import launch

pytestmark = pytest.mark.dist

LAUNCHES = [("single", 1, 1), ("ddp,fsdp,zero2", 2, 1), ("zero3", 2, 1), ("fsdp,hybrid", 4, 2)]
"""Strategies, number of ranks and of nodes."""
RUNS = [(name, size) for names, size, _ in LAUNCHES for name in names.split(",")]

Results = dict[str, Any]


def sources(folder: Path) -> None:
    """Model folders of every kind, and broken ones."""
    models = {
        "llama": tiny.llama(),
        "tied": tiny.llama(tied=True),
        "bf16": tiny.llama(seed=3).to(torch.bfloat16),
        "gpt2": tiny.gpt2(),
        "bert": tiny.bert(),
        "mixtral": tiny.mixtral(),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        model.config.save_pretrained(folder / f"{name}-config")
    for name, source, lost in (
        ("missing", "llama", "model.layers.1.mlp.up_proj.weight"),
        ("mixtral-missing", "mixtral", "model.norm.weight"),
    ):
        models[source].save_pretrained(folder / name)
        weights = load_file(folder / name / "model.safetensors")
        del weights[lost]
        save_file(weights, folder / name / "model.safetensors", metadata={"format": "pt"})
    models["tied"].save_pretrained(folder / "untied")
    weights = load_file(folder / "untied" / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, folder / "untied" / "model.safetensors", metadata={"format": "pt"})


def word_tokenizer(size: int) -> Any:
    """A tokenizer of that many words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"word{i}": i for i in range(3, size)}
    inner = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return tiny.finished(inner, chat_template=None)


def grow(folder: Path) -> None:
    """Models with 97 rows and 97 words, 8 of them new, or with words for rows that are unused."""
    settings = {}
    for name, known, model in (
        ("untied", 97, tiny.llama()),
        ("tied", 97, tiny.llama(tied=True)),
        ("unused", 90, tiny.llama()),
    ):
        source = folder / f"grown-{name}"
        model.save_pretrained(source)
        word_tokenizer(known).save_pretrained(source)
        config: dict[str, Any] = {
            "source": str(source),
            "new_tokens": [f"<new-{i}>" for i in range(8)],
            "tokenizer": {"pad_vocab_to_multiple_of": 8},
        }
        if name == "unused":
            config["tokenizer"] = {"pad_vocab_to_multiple_of": 112}
        info = resolve_model(ModelConfig(**config), folder / "cache")
        assert info.vocab_size == 112
        staged = stage(info.artifact.model_dump(), str(folder / "local"))
        settings[name] = config | {"folder": str(staged)}
    (folder / "grown.json").write_text(json.dumps(settings))


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Results]:
    """Results of a strategy and a number of ranks."""
    launched: dict[tuple[str, int], Results] = {}

    def of(strategy: str, size: int) -> Results:
        if (strategy, size) not in launched:
            names, _, nodes = next(
                one for one in LAUNCHES if one[1] == size and strategy in one[0].split(",")
            )
            folder = tmp_path_factory.mktemp(f"loading-{size}")
            sources(folder)
            grow(folder)
            found = launch(names, size, folder, "tests.dist.loading_cases", nodes)
            found = found if "," in names else {names: found}
            launched.update({(name, size): found[name] for name in names.split(",")})
        return launched[strategy, size]

    return of


@pytest.fixture(
    params=[
        pytest.param(run, marks=pytest.mark.slow if run[1] == 4 else (), id=f"{run[0]}-{run[1]}")
        for run in RUNS
    ]
)
def results(request: pytest.FixtureRequest, loaded: Callable[[str, int], Results]) -> Results:
    """Of one of ``RUNS``."""
    strategy, size = request.param
    return loaded(strategy, size) | {"size": size, "strategy": strategy}


def test_parameters_are_those_that_transformers_loads(results: Results) -> None:
    for name, found in results["from_files"].items():
        assert all(found["same"]), name
        assert found["use_cache"] is False


def test_c67_tied_weights_are_one_parameter_after_wrapping_and_filling(results: Results) -> None:
    tied, untied = (results["from_files"][name] for name in ("tied", "llama"))
    assert (tied["tied"], tied["parameters"]) == (True, 20)
    assert (untied["tied"], untied["parameters"]) == (False, 21)
    assert results["from_files"]["gpt2"]["tied"] is True
    limit = 5e-5 if results["strategy"].startswith("zero") else 1e-6
    assert results["gradient"]["difference"] < limit


def test_c70_buffers_are_those_of_a_normal_build(results: Results) -> None:
    counts = {}
    for name, found in results["from_files"].items():
        for buffers in found["buffers"]:
            assert all(same for _, same in buffers), name
            counts[name] = len(buffers)
    assert counts["llama"] >= 1
    assert counts["bert"] >= 1


def test_c71_floating_buffers_are_fp32_whatever_the_files_hold(results: Results) -> None:
    for found in results["from_files"].values():
        for buffers in found["buffers"]:
            assert {kind for kind, _ in buffers} <= {"torch.float32", "torch.int64", "torch.bool"}


def test_c72_ranks_together_ask_for_the_model_once(results: Results) -> None:
    replicas = 2 if results["strategy"] == "hybrid" else 1  # one for each node
    for name, found in results["from_files"].items():
        assert found["notes"] == []
        # (Of models this small a rank of ZeRO-3 asks for whole rows at both ends of its part.)
        more = 0.5 if results["strategy"] == "zero3" else 0.1
        assert 0.5 < found["asked"] <= replicas * (1 + more), name


def test_c72_a_rank_that_shards_never_has_it_whole(results: Results) -> None:
    whole = results["strategy"] in ("single", "ddp", "zero2")
    assert results["from_files"]["llama"]["whole_on_rank"] is whole


def test_random_weights_are_the_same_for_every_strategy_and_number_of_ranks(
    results: Results, loaded: Callable[[str, int], Results]
) -> None:
    one = loaded("single", 1)["random"]
    for name, digests in results["random"].items():
        if name.endswith(("-1", "-2")):
            assert set(digests) == set(one[name]), name
    assert one["llama-1"] != one["llama-2"]
    assert {results["random"][f"{name}-1-read"] for name in ("llama", "gpt2")} == {0}


def test_random_weights_are_distributed_as_the_architecture_says(
    loaded: Callable[[str, int], Results],
) -> None:
    random = loaded("single", 1)["random"]
    for name in ("llama", "tied", "mixtral"):
        mean, std = random[f"{name}-std"]["model.embed_tokens.weight"]
        assert abs(mean) < 0.002
        assert std == pytest.approx(0.02, rel=0.05)
        assert random[f"{name}-std"]["model.norm.weight"] == [1.0, 0.0]
    gpt2 = random["gpt2-std"]
    assert gpt2["transformer.h.1.mlp.c_fc.weight"][1] == pytest.approx(0.02, rel=0.05)
    assert gpt2["transformer.h.1.mlp.c_proj.weight"][1] == pytest.approx(0.01, rel=0.05)  # 2 blocks
    assert gpt2["transformer.h.1.mlp.c_proj.bias"] == [0.0, 0.0]


def test_c68_rows_of_new_tokens_are_the_mean_of_the_others_on_every_rank(
    results: Results, loaded: Callable[[str, int], Results]
) -> None:
    for name, found in results["grown"].items():
        one = loaded("single", 1)["grown"][name]
        assert set(found["digests"]) == set(one["digests"])
        assert found["vocab"] == 112
        model = tiny.llama(tied=name == "tied")
        old = dict(model.named_parameters())
        first = 90 if name == "unused" else 97
        ends = 98 if name == "unused" else 112
        assert len(found["rows"]) == (1 if name == "tied" else 2)
        for key, rows in found["rows"].items():
            before, after = old[key].detach(), torch.tensor(rows)
            kept = torch.cat([before[:first], before[ends:]])
            assert torch.equal(torch.cat([after[:first], after[ends:97]]), kept)
            mean = kept.double().mean(dim=0).float()
            new = torch.cat([after[first:ends], after[97:]])
            assert torch.equal(new, mean.expand_as(new))
        told = f"{22 if name == 'unused' else 15} of the vocabulary's 112 rows are new"
        assert told in found["notes"][0]


def test_adapters_start_alike_over_the_base_of_the_files(
    results: Results, loaded: Callable[[str, int], Results]
) -> None:
    found, one = results["adapted"], loaded("single", 1)["adapted"]
    assert found["base"]
    assert found["count"] == 28
    assert set(found["adapters"]) == set(one["adapters"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "missing: model.layers.1.mlp.up_proj.weight"),
        ("mixtral-missing", "missing: model.norm.weight"),
        ("untied", "model.embed_tokens.weight and lm_head.weight differ in the weight files"),
    ],
)
def test_what_is_wrong_with_the_files_is_told_by_every_rank(
    results: Results, name: str, message: str
) -> None:
    assert len(results["refused"][name]) == results["size"]
    assert all(message in error for error in results["refused"][name])


# A model of some size


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What four ranks take and ask for with FSDP and with DDP, and how large the model is."""
    folder = tmp_path_factory.mktemp("loading-large")
    model = tiny.llama(
        vocab_size=12001,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=12,
    )
    model.save_pretrained(folder / "model")
    size = sum(parameter.numel() for parameter in model.parameters()) * 4
    found = launch("fsdp,ddp", 4, folder, "tests.dist.loading_memory_cases")
    return found | {"size": size}


@pytest.mark.slow
@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_c72_a_rank_takes_little_more_memory_than_its_shard(
    large: dict[str, Any], init: str
) -> None:
    size = large["size"]
    assert size > 250e6
    limit = 0.35 * size + 300e6
    assert all(0.2 * size < taken < limit for taken in large["fsdp"][init]["taken"])
    # (Enough to tell it from a rank that has the whole model, twice while it is read.)
    assert max(large["fsdp"][init]["taken"]) < 0.75 * size


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_c72_a_large_model_is_read_once(large: dict[str, Any], strategy: str) -> None:
    asked = large[strategy]["pretrained"]["asked"]
    assert sum(asked) <= 1.1 * large["size"]
    assert large[strategy]["random"]["asked"] == [0, 0, 0, 0]
    assert (asked[1:] == [0, 0, 0]) is (strategy == "ddp")


# A whole run


def run_of(folder: Path, info: ModelInfo, model: dict[str, Any]) -> RankResult:
    """Two steps with a model that the driver has composed, and an export."""
    plan = plans.plan(folder, "run", train={"max_steps": 2}, rows=tiny.examples(vocab=90))
    config = plan.config.model_copy(update={"model": ModelConfig(**model)})
    return run(plan.model_copy(update={"model": info, "config": config, "total_steps": 2}))


def logits_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, **dtype_argument(torch.float32)).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.arange(3, 40)[None]).logits
    return logits


def test_a_model_that_is_defined_by_fields_is_trained_and_exported(tmp_path: Path) -> None:
    word_tokenizer(97).save_pretrained(tmp_path / "words")
    model = {
        "config": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4},
        "init": "random",
        "tokenizer": {"source": str(tmp_path / "words"), "pad_vocab_to_multiple_of": 16},
    }
    info = resolve_model(ModelConfig(**model), tmp_path / "cache")
    result = run_of(tmp_path, info, model)
    export = Path(result.model_path or "")
    config = AutoConfig.from_pretrained(export)
    assert (config.model_type, config.vocab_size, config.n_layer) == ("gpt2", 112, 2)
    assert config.architectures == ["GPT2LMHeadModel"]
    assert len(AutoTokenizer.from_pretrained(export)) == 97
    assert logits_of(export).shape == (1, 37, 112)
    assert result.metrics["eval_loss"] < result.metrics["initial_eval_loss"] < 5.5


def test_c68_new_tokens_and_changed_fields_are_in_the_export(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny.llama().save_pretrained(source)
    word_tokenizer(97).save_pretrained(source)
    model = {
        "source": str(source),
        "config": {"attention_dropout": 0.25},
        "new_tokens": [f"<new-{i}>" for i in range(8)],
        "tokenizer": {"pad_vocab_to_multiple_of": 8},
    }
    info = resolve_model(ModelConfig(**model), tmp_path / "cache")
    result = run_of(tmp_path, info, model)
    export = Path(result.model_path or "")
    config = AutoConfig.from_pretrained(export)
    weights = load_file(export / "model.safetensors")
    assert config.vocab_size == len(weights["model.embed_tokens.weight"]) == 112
    assert config.attention_dropout == 0.25
    assert config.use_cache is True
    words = AutoTokenizer.from_pretrained(export)
    assert words.convert_tokens_to_ids("<new-7>") == 104
    assert logits_of(export).shape[-1] == 112
    events = read_events(Path(result.checkpoint or "").parents[1] / "events.jsonl")
    assert any("15 of the vocabulary's 112 rows are new" in str(event.data) for event in events)
