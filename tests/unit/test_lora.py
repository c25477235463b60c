"""Adapters on one process: their injection, names, first values and types; what is refused."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dbx_llmtrain import lora_fields
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver import adapters as driver_adapters
from dbx_llmtrain.driver.sources import look, resolve_model
from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import four_bit, lora
from dbx_llmtrain.worker.checkpoint import _kept
from dbx_llmtrain.worker.loss import LossModule
from dbx_llmtrain.worker.parallel.fsdp import transformer_blocks
from tests import sample, tiny
from tests.pages import ROOT


def plan(precision: str = "fp32", model: dict[str, Any] | None = None, **fields: Any) -> RunPlan:
    """A plan with adapters; fields of ``model.lora``."""
    settings = {"source": "m", "lora": fields} | (model or {})
    return sample.run_plan(config=sample.config(model=settings), precision=precision)


def adapted(model: Any, precision: str = "fp32", **fields: Any) -> Any:
    """The model with adapters that have their first values."""
    lora.adapt(model, plan(precision, **fields))
    lora.initialise(model, 0)
    return model


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def test_without_lora_the_model_is_as_it_was() -> None:
    model = tiny.llama()
    before = list(model.named_parameters())
    assert lora.adapt(model, sample.run_plan()) is model
    assert list(model.named_parameters()) == before
    assert lora.notes(model) == []
    lora.initialise(model, 0)
    assert not lora.is_adapted(model)
    assert len(dict(_kept(model))) == 21


def test_every_linear_layer_but_the_head_has_an_adapter() -> None:
    model = adapted(tiny.llama())
    assert len(trained(model)) == 2 * 7 * 2
    assert not any("lm_head" in name or "embed" in name for name in trained(model))
    assert lora.notes(model) == [
        "adapters on down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj: 16,384 "
        "parameters are trained"
    ]
    assert dict(_kept(model)).keys() == trained(model).keys()


def test_the_model_stays_what_the_rest_of_the_package_knows() -> None:
    plain, model = tiny.llama(), adapted(tiny.llama(), modules_to_save=["lm_head"])
    module = LossModule(model)
    assert type(model) is type(plain)
    assert len(transformer_blocks(model)) == 2
    assert module.decoder is model.model
    ids = torch.arange(3, 19)[None]
    labels, weight = ids.clone(), model.get_output_embeddings().weight
    assert weight.requires_grad
    loss = module(ids, labels=labels)
    own = LossModule(plain)(ids, labels=labels)
    assert torch.equal(loss, own)  # B is 0
    loss.backward()
    assert all(parameter.grad is not None for parameter in trained(model).values())


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_on_the_head_or_the_embeddings_is_in_the_loss(target: str) -> None:
    model = adapted(tiny.llama(), target_modules=[target])
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.add_(0.1)
    ids = torch.arange(3, 19)[None]
    logits = model(ids).logits[0, :-1]
    expected = nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
    loss = LossModule(model)(ids, labels=ids)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    loss.backward()
    assert all(parameter.grad is not None for parameter in trained(model).values())


def test_first_values_are_distributed_as_peft_has_them() -> None:
    """Against peft's own, which are drawn from torch's generator."""
    from peft import LoraConfig, inject_adapter_in_model

    for start in (True, "gaussian", False):
        ours = adapted(tiny.llama(hidden_size=256), r=64, init_lora_weights=start)
        config = LoraConfig(r=64, target_modules="all-linear", init_lora_weights=start)
        theirs = inject_adapter_in_model(config, tiny.llama(hidden_size=256))
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                mine, parameter = ours.get_parameter(name).detach(), parameter.detach()
                assert mine.shape == parameter.shape
                assert float(mine.std()) == pytest.approx(float(parameter.std()), rel=0.05)
                most = pytest.approx(float(parameter.abs().max()), rel=0.3)
                assert float(mine.abs().max()) == most


def test_first_values_depend_on_the_seed_and_the_name_only() -> None:
    torch.manual_seed(1)
    first = trained(adapted(tiny.llama()))
    torch.manual_seed(2)
    second = trained(adapted(tiny.llama(), target_modules=["q_proj", "k_proj"]))
    other = tiny.llama()
    lora.adapt(other, plan())
    lora.initialise(other, 1)
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert torch.equal(first[name], second[name])
    assert not torch.equal(first[name], trained(other)[name])
    assert not torch.equal(first[name], first[name.replace("layers.0", "layers.1")])
    bound = math.sqrt(1 / 32)  # Kaiming, a = sqrt(5): sqrt(6 / ((1 + 5) * fan_in))
    assert 0.95 * bound < float(first[name].detach().max()) < bound
    assert not first[name.replace("lora_A", "lora_B")].any()


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2], ids=["llama", "gpt2"])
def test_doras_magnitudes_are_the_norms_that_peft_computes(build: Any) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    model = adapted(build(), use_dora=True)
    config = LoraConfig(target_modules="all-linear", use_dora=True, fan_in_fan_out=True)
    config.fan_in_fan_out = build is tiny.gpt2
    theirs = inject_adapter_in_model(config, build())
    names = [name for name in trained(model) if "magnitude" in name]
    assert len(names) == {tiny.llama: 14, tiny.gpt2: 8}[build]
    for name in names:
        assert torch.allclose(model.get_parameter(name), theirs.get_parameter(name), rtol=1e-6)


@pytest.mark.parametrize(
    ("precision", "base"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_adapters_are_fp32_over_a_base_in_the_type_of_the_run(
    precision: str, base: torch.dtype
) -> None:
    model = adapted(tiny.llama(), precision, modules_to_save=["norm"], bias="all")
    for parameter in model.parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else base)


def test_a_model_without_storage_takes_adapters() -> None:
    with torch.device("meta"):
        model = tiny.llama(tied=True)
    lora.adapt(model, plan(modules_to_save=["embed_tokens"], use_dora=True))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_names_lead_to_those_of_the_weight_files() -> None:
    model = adapted(
        tiny.llama(tied=True), use_dora=True, modules_to_save=["embed_tokens", "model.norm"]
    )
    plain = {name for name, _ in tiny.llama(tied=True).named_parameters()}
    names = {name: lora.original_name(name) for name, _ in model.named_parameters()}
    assert {name for name in names.values() if name} == plain
    assert {name.split(".")[-2 if "lora_m" not in name else -3] for name, original in names.items()
            if original is None} == {"default", "lora_magnitude_vector"}  # fmt: skip
    wrapped = "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight"
    assert lora.original_name(wrapped) == "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("tied", [False, True])
def test_c75_new_tokens_train_embeddings_and_head(tied: bool) -> None:
    model = tiny.llama(tied=tied)
    lora.adapt(model, plan(model={"new_tokens": ["<a>", "<b>"]}))
    saved = [name for name in trained(model) if "modules_to_save" in name]
    assert saved == ["model.embed_tokens.modules_to_save.default.weight"] + (
        [] if tied else ["lm_head.modules_to_save.default.weight"]
    )
    assert lora.notes(model)[1] == (
        "trained as a whole and saved with the adapter: lm_head, model.embed_tokens"
    )
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied


def test_layers_can_be_chosen_with_all_linear() -> None:
    model = adapted(tiny.llama(), layers_to_transform=[1])
    assert {name.split(".")[2] for name in trained(model)} == {"1"}
    assert len(trained(model)) == 14


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (tiny.llama, {"target_modules": ["q_proj", "query"]}, "no layer .* name query of target_mod"),
    (tiny.llama, {"target_modules": "nothing"}, "peft .* refuses it: Target modules nothing"),
    (tiny.llama, {"modules_to_save": ["wte"]}, "no layer .* the name wte of modules_to_save"),
    (tiny.llama, {"rank_pattern": {"wq": 3}}, "rank_pattern keys did not match .*wq"),
    (tiny.llama, {"exclude_modules": ["nope"]}, "no modules were excluded"),
    (tiny.llama, {"lora_bias": True}, "q_proj has no bias that the adapter's could be merged"),
    (tiny.llama, {"no_such_field": 1}, "refuses it: .*no_such_field"),
    (
        lambda: tiny.llama(tied=True),
        {"target_modules": ["lm_head"]},
        "lm_head shares its weights with another layer, .*: name it in model.lora.modules_to_save",
    ),
    (
        tiny.bert,
        {"modules_to_save": ["word_embeddings"]},
        "would lose the head's bias",
    ),
]


@pytest.mark.parametrize(("build", "fields", "message"), REFUSED)
def test_what_peft_cannot_do_or_would_pass_over_is_refused(
    build: Any, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        lora.adapt(build(), plan(**fields))
    assert caught.value.problems[0].path == "model.lora"


def test_parameters_that_nobody_initialises_are_refused() -> None:
    model = adapted(tiny.llama())
    layer = model.model.layers[0].mlp.up_proj
    layer.lora_new = nn.ModuleDict({"default": nn.Linear(2, 2)})
    with pytest.raises(ConfigError, match=r"cannot initialise: .*lora_new\.default\.weight"):
        lora._check_layers(model, model.peft_config["default"], [])


def test_ends_that_peft_parts_are_refused() -> None:
    model = adapted(tiny.llama(), modules_to_save=["embed_tokens"])
    ends = ["model.embed_tokens", "lm_head"]
    with pytest.raises(
        ConfigError, match=r"cannot train model\.embed_tokens together with lm_head"
    ):
        lora._check_layers(model, model.peft_config["default"], ends)


def test_the_example_is_within_the_budget_of_the_quickstart() -> None:
    cfg = TrainConfig.from_yaml(ROOT / "examples" / "lora.yaml")
    quick = TrainConfig.from_yaml(ROOT / "examples" / "quickstart.yaml")
    assert cfg.model.lora is not None
    driver_adapters.check(cfg)
    assert cfg.model.source == quick.model.source
    assert cfg.data == quick.data
    assert cfg.train.max_steps == quick.train.max_steps
    assert cfg.train.global_batch_size == quick.train.global_batch_size


def test_a_peft_that_cannot_tie_what_is_trained_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import peft

    @dataclasses.dataclass
    class Old:
        r: int = 8

    monkeypatch.setattr(peft, "LoraConfig", Old)
    with pytest.raises(ConfigError, match=r"needs a newer peft than .*: install 0\.18 or newer"):
        lora.adapt(tiny.llama(tied=True), plan(modules_to_save=["embed_tokens"]))


def test_without_peft_adapters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"peft cannot be imported on this node .*pip install"):
        lora.adapt(tiny.llama(), plan())


def test_four_bits_need_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    model = adapted(tiny.llama())
    with pytest.raises(ConfigError, match="bitsandbytes cannot be used on this node"):
        four_bit.choose(model, "cuda:0")
    four_bit.mark(model)
    with pytest.raises(ConfigError, match="install it on every node"):
        four_bit.quantise(model, torch.device("cpu"))


def test_four_bits_need_a_gpu_and_layers() -> None:
    with pytest.raises(ConfigError, match="needs a GPU, and this rank has none"):
        lora.adapt(tiny.llama(), plan(model={"load_in_4bit": True}, r=4))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no linear layers to keep in 4"):
        four_bit.mark(adapted(tiny.gpt2()))
    model = adapted(tiny.llama())
    assert four_bit.mark(model) == four_bit.count(model) == 14
    assert "14 layers of the frozen base are kept in 4 bits (NF4)" in lora.notes(model)


# What the configuration and the driver refuse


@pytest.mark.parametrize(
    ("model", "path", "message"),
    [
        ({"lora": {"target_modules": []}}, "model.lora.target_modules", "is empty: name layers"),
        (
            {"lora": {"init_lora_weights": "pissa"}},
            "model.lora.init_lora_weights",
            "expected true, false or gaussian, found 'pissa'",
        ),
        (
            {"lora": {"target_modules": "all_linear"}},
            "model.lora.target_modules",
            "did you mean all-linear?",
        ),
        (
            {"lora": {"bias": "sometimes"}},
            "model.lora.bias",
            "expected none or all or lora_only, found 'sometimes'",
        ),
        ({"lora": {"modules_to_save": "lm_head"}}, "model.lora.modules_to_save", "a list of names"),
        ({"lora": {"target_parameters": 1}}, "model.lora.target_parameters", "a list of names"),
        ({"lora": {"exclude_modules": 1}}, "model.lora.exclude_modules", "names of layers"),
        ({"lora": {"layers_pattern": 1}}, "model.lora.layers_pattern", "the list of blocks"),
        ({"lora": {"layers_to_transform": [-1]}}, "model.lora.layers_to_transform", "numbers of"),
        ({"lora": {"rank_pattern": {"q": 0}}}, "model.lora.rank_pattern", "names of layers to"),
        ({"lora": {"alpha_pattern": {"q": "x"}}}, "model.lora.alpha_pattern", "names of layers to"),
        ({"lora": {"use_dora": "perhaps"}}, "model.lora.use_dora", "expected true or false"),
        ({"lora": {"megatron_config": {}}}, "model.lora.megatron_config", "not available in this"),
        ({"lora": {"auto_mapping": {}}}, "model.lora.auto_mapping", "is set by us"),
        ({"load_in_4bit": True}, "model.load_in_4bit", "train adapters over them with model.lora"),
        (
            {"load_in_4bit": True, "lora": {}, "init": "random"},
            "model.load_in_4bit",
            "has no weights to keep in 4 bits",
        ),
    ],
)
def test_the_configuration_refuses(model: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sample.config(model={"source": "m"} | model)
    assert [(problem.path, message in problem.message) for problem in caught.value.problems] == [
        (path, True)
    ]


@pytest.mark.parametrize("kind", ["fsdp", "deepspeed"])
def test_four_bits_are_not_available_yet_where_weights_are_cut_up(kind: str) -> None:
    model = {"source": "m", "lora": {}, "load_in_4bit": True}
    with pytest.raises(
        ConfigError, match=f"not available yet with parallel.kind: {kind}: use sing"
    ):
        sample.config(model=model, parallel={"kind": kind})
    for other in ("auto", "single", "ddp"):
        assert sample.config(model=model, parallel={"kind": other}).model.load_in_4bit


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"modules_to_sav": ["norm"]}, "unknown key: did you mean model.lora.modules_to_save?"),
        ({"rr": 8}, "unknown key: did you mean model.lora.r?"),
        ({"zzzzzz": 8}, "unknown key: expected a field of peft's LoraConfig (r, alpha, dropout, "),
    ],
)
@pytest.mark.parametrize("installed", [True, False])
def test_the_driver_refuses_unknown_fields_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str, installed: bool
) -> None:
    if not installed:
        monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError) as caught:
        driver_adapters.check(sample.config(model={"source": "m", "lora": fields}))
    (problem,) = caught.value.problems
    assert problem.path == f"model.lora.{next(iter(fields))}"
    assert message in problem.message


def test_the_driver_takes_what_peft_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    good: list[dict[str, Any]] = [{}, {"use_dora": True}, {"layers_to_transform": [1]}]
    for fields in good:
        driver_adapters.check(sample.config(model={"source": "m", "lora": fields}))
    driver_adapters.check(sample.config())
    bad = sample.config(model={"source": "m", "lora": {"bias": "none", "layers_pattern": "h"}})
    with pytest.raises(ConfigError, match=r"peft refuses it: .*layers_to_transform"):
        driver_adapters.check(bad)
    monkeypatch.setitem(sys.modules, "peft", None)
    driver_adapters.check(bad)


@pytest.mark.parametrize(
    ("fields", "path", "message"),
    [
        ({"target_modules": ["q_prj"]}, "target_modules", "name q_prj: did you mean q_proj?"),
        ({"target_modules": ["proj"]}, "target_modules", "no layer of the model has the name proj"),
        ({"target_modules": "q_proj"}, "target_modules", "give a list, [q_proj]"),
        ({"target_modules": ".*query"}, "target_modules", "has a name like '.*query'"),
        ({"target_modules": "("}, "target_modules", "'(' is no pattern"),
        ({"modules_to_save": ["lm_hed"]}, "modules_to_save", "name lm_hed: did you mean lm_head?"),
        ({"target_parameters": ["wieght"]}, "target_parameters", "did you mean weight?"),
        ({"layers_to_transform": [0, 99]}, "layers_to_transform", "2 blocks, 0 to 1: found 99"),
        ({"layers_to_transform": 2}, "layers_to_transform", "2 blocks, 0 to 1: found 2"),
    ],
)
def test_the_driver_refuses_layers_that_the_model_does_not_have(
    tmp_path: Path, fields: dict[str, Any], path: str, message: str
) -> None:
    source = tiny.model_folder(tmp_path / "model")
    cfg = sample.config(model={"source": str(source), "lora": fields})
    with pytest.raises(ConfigError) as caught:
        driver_adapters.check_model(cfg.model, source)
    (problem,) = caught.value.problems
    assert problem.path == f"model.lora.{path}"
    assert message in problem.message
    with pytest.raises(ConfigError, match=f"model.lora.{path}"):
        look(cfg.model)
    with pytest.raises(ConfigError, match=f"model.lora.{path}"):
        resolve_model(cfg.model, tmp_path / "cache")


def test_the_driver_takes_layers_that_the_model_has(tmp_path: Path) -> None:
    source = tiny.model_folder(tmp_path / "model")
    good: list[dict[str, Any]] = [
        {},
        {"target_modules": ["q_proj", "self_attn.v_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": r".*\.(q|v)_proj"},
        {"layers_to_transform": [0, 1]},
        {"layers_to_transform": [0], "layers_pattern": "layers"},
    ]
    for fields in good:
        cfg = sample.config(model={"source": str(source), "lora": fields})
        driver_adapters.check_model(cfg.model, source)
        lora.adapt(tiny.llama(), plan(**fields))


def test_every_field_of_peft_is_passed_on_or_refused() -> None:
    """A new release of peft has new fields: each is a decision."""
    from peft import LoraConfig

    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    ours = {"r", "target_modules", *lora_fields.OURS.values()}
    assert fields - ours == lora_fields.PASSED_ON | set(lora_fields.REFUSED)
