"""The options of optimizers, checked before anything is started and without torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import BaseModel

from dbx_llmtrain import optimizers
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.model_sections import OptimConfig
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.tracking_params import flat_params
from tests import sample

BASE = {"model": {"source": "m"}, "data": {"train": "t"}}


def told(train: dict[str, Any], **sections: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_dict(BASE | {"train": train} | sections)
    return {problem.path: problem.message for problem in caught.value.problems}


VALID = [
    *optimizers.OPTIMIZERS,
    {"name": "adamw", "eps": 1e-6, "amsgrad": True},
    {"eps": 1e-6},
    {"name": "adamw_8bit", "min_8bit_size": 16384},
    {"name": "sgd", "momentum": 0.9, "nesterov": True},
    {"name": "sgd", "momentum": 0, "dampening": 0.5},
    {"name": "adafactor", "eps": [None, 1e-3], "beta2_decay": -0.5, "d": 2},
]


def fields_set(value: Any) -> Any:
    """The names of the fields that were set, of a section and of all within it."""
    if isinstance(value, BaseModel):
        return {name: fields_set(getattr(value, name)) for name in value.model_fields_set}
    return [fields_set(item) for item in value] if isinstance(value, tuple | list) else None


@pytest.mark.parametrize("optimizer", VALID, ids=str)
def test_a_plan_takes_every_optimizer_to_the_ranks(optimizer: Any) -> None:
    """A default that travels is still none that was set, or ``train.betas`` would be refused."""
    cfg = TrainConfig.from_dict(
        {
            "model": {"source": "m", "tokenizer": {"source": "t"}, "lora": {"r": 4}},
            "data": {"train": [{"path": "a", "weight": 2}, "b"], "eval": {"x": "c"}},
            "train": {"optimizer": optimizer, "max_steps": 3},
        }
    )
    plan = sample.run_plan(config=cfg)
    arrived = RunPlan.model_validate_json(plan.model_dump_json())
    assert arrived == plan
    assert fields_set(arrived.config) == fields_set(cfg)
    assert arrived.config.train.model_fields_set == {"optimizer", "max_steps"}
    assert RunPlan.model_validate(plan.model_dump()) == plan
    assert flat_params(arrived)["train.seed"] == str(cfg.train.seed), "defaults are tracked"


@pytest.mark.parametrize("optimizer", VALID, ids=str)
def test_optimizers_that_make_sense(optimizer: Any) -> None:
    cfg = TrainConfig.from_dict(BASE | {"train": {"optimizer": optimizer}})
    assert TrainConfig.from_yaml(cfg.to_yaml()) == cfg
    assert cfg.to_dict()["train"]["optimizer"] == optimizer
    given = {} if isinstance(optimizer, str) else dict(optimizer)
    name = given.pop("name", optimizer if isinstance(optimizer, str) else "adamw")
    assert optimizers.name_of(cfg.train.optimizer) == name
    options = optimizers.options_of(cfg.train.optimizer)
    assert options.keys() == optimizers.OPTIMIZERS[name].options.keys()
    assert given.items() <= options.items()


@pytest.mark.parametrize(
    ("optimizer", "path", "message"),
    [
        ("adamm", "", "expected 'adamw', 'adamw_8bit', 'sgd' or 'adafactor' or a mapping"),
        ({"name": "adamm", "eps": 1}, "", "expected 'adamw', 'adamw_8bit', 'sgd' or 'adafactor'"),
        ({"nme": "sgd"}, ".nme", "unknown key: did you mean name? adamw takes"),
        ({"name": "sgd", "momentumm": 1}, ".momentumm", "did you mean momentum? sgd takes dampen"),
        ({"name": "sgd", "eps": 1e-8}, ".eps", "unknown key: sgd takes dampening, momentum, nest"),
        ({"name": "adamw", "lr": 1}, ".lr", "unknown key: give train.learning_rate"),
        ({"name": "adamw", "betas": [0, 0]}, ".betas", "unknown key: give train.betas"),
        ({"name": "sgd", "weight_decay": 1}, ".weight_decay", "give train.weight_decay"),
        ({"name": "adamw", "fused": True}, ".fused", "it is chosen by itself"),
        ({"name": "adamw", "eps": 0}, ".eps", "expected a number above 0, found 0"),
        ({"name": "adamw", "eps": "x"}, ".eps", "expected a number above 0, found 'x'"),
        ({"name": "adamw", "eps": True}, ".eps", "expected a number above 0, found True"),
        ({"name": "adamw", "amsgrad": 1}, ".amsgrad", "expected true or false, found 1"),
        ({"name": "adamw_8bit", "min_8bit_size": 0.5}, ".min_8bit_size", "a whole number of elem"),
        ({"name": "sgd", "momentum": 1}, ".momentum", "expected a number from 0 up to, but not, 1"),
        ({"name": "sgd", "dampening": -1}, ".dampening", "found -1"),
        ({"name": "sgd", "nesterov": "yes"}, ".nesterov", "expected true or false"),
        ({"name": "sgd", "nesterov": True}, ".nesterov", "needs a momentum above 0 and no damp"),
        ({"name": "adafactor", "d": 0}, ".d", "expected a number above 0, found 0"),
        ({"name": "adafactor", "eps": 1e-3}, ".eps", "expected a pair of numbers of which"),
        ({"name": "adafactor", "eps": [0, 1e-3]}, ".eps", "expected a pair of numbers of which"),
        ({"name": "adafactor", "beta2_decay": 0.8}, ".beta2_decay", "expected a number below 0"),
        ({"type": "AdamW", "params": {}}, ".type", "DeepSpeed's name for train.optimizer"),
    ],
    ids=str,
)  # fmt: skip
def test_options_that_make_no_sense(optimizer: Any, path: str, message: str) -> None:
    found = told({"optimizer": optimizer})
    assert message in found[f"train.optimizer{path}"], found


@pytest.mark.parametrize("name", ["sgd", "adafactor"])
def test_betas_are_adamws_alone(name: str) -> None:
    found = told({"optimizer": name, "betas": [0.9, 0.95]})
    message = f"{name} has none, only adamw and adamw_8bit have: remove it"
    assert found == {"train.betas": message}


@pytest.mark.parametrize("name", ["adafactor", "adamw_8bit"])
@pytest.mark.parametrize("kind", ["fsdp", "deepspeed"])
def test_some_cannot_run_with_every_strategy(name: str, kind: str) -> None:
    found = told({"optimizer": name}, parallel={"kind": kind})
    assert found["train.optimizer"].startswith(f"{name} does not work with parallel.kind={kind}: ")
    assert found["train.optimizer"].endswith("Use adamw, or parallel.kind=ddp")
    for other in ("auto", "single", "ddp"):
        TrainConfig.from_dict(BASE | {"train": {"optimizer": name}, "parallel": {"kind": other}})


def test_eight_bits_need_a_gpu() -> None:
    train = OptimConfig(optimizer="adamw_8bit")
    assert optimizers.strategy_problems(train, "ddp", use_gpu=True) == []
    (problem,) = optimizers.strategy_problems(train, "ddp", use_gpu=False)
    assert "adamw_8bit needs GPUs, and this run has none" in problem.message
    assert "install it" in optimizers.missing_package("No module named x").message


def test_a_constant_rate_has_no_use_for_a_fall() -> None:
    found = told({"schedule": "constant", "decay_steps": 3, "min_learning_rate": 1e-6})
    assert set(found) == {"train.decay_steps", "train.min_learning_rate"}
    assert "has no effect with train.schedule: constant" in found["train.decay_steps"]


@pytest.mark.parametrize(
    ("value", "message"),
    [(0, "greater than 0"), (1.5, "valid integer"), (True, "a number"), (-0.1, "greater than 0")],
)
def test_decay_steps_are_steps_or_a_share(value: Any, message: str) -> None:
    assert message in told({"decay_steps": value})["train.decay_steps"]


def test_nothing_of_it_imports_torch() -> None:
    code = (
        "import sys; from dbx_llmtrain.config import TrainConfig as T;"
        "T.from_dict({'model': {'source': 'm'}, 'data': {'train': 't'},"
        " 'train': {'optimizer': {'name': 'sgd', 'momentum': 0.9}}});"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
