"""A configuration used in a way that is not its own: settings assigned, the wrong constructor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.errors import ConfigError

VALUES: dict[str, Any] = {"model": {"source": "m"}, "data": {"train": "d"}}


def test_a_setting_cannot_be_assigned() -> None:
    cfg = TrainConfig(**VALUES)
    advice = r"train\.epochs: .*frozen: use cfg = cfg\.override\('train\.epochs=\.\.\.'\)"
    with pytest.raises(ConfigError, match=advice):
        cfg.train.epochs = 3  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"override\('model=\.\.\.'\)"):
        cfg.model = None  # type: ignore[assignment,misc]
    assert cfg == TrainConfig(**VALUES)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: TrainConfig("config.yaml"), "found str 'config.yaml': use TrainConfig.from_yaml("),
        (lambda: TrainConfig(VALUES), "use TrainConfig.from_dict("),
        (lambda: TrainConfig.from_yaml(VALUES), "use TrainConfig.from_dict("),  # type: ignore[arg-type]
        (lambda: TrainConfig.from_yaml(None), "found nothing: use TrainConfig.from_yaml(path) or"),  # type: ignore[arg-type]
        (lambda: TrainConfig.from_yaml(TrainConfig(**VALUES)), "a TrainConfig already"),  # type: ignore[arg-type]
        (lambda: TrainConfig.from_dict("c.yaml"), "use TrainConfig.from_yaml("),  # type: ignore[arg-type]
        (lambda: TrainConfig.from_dict(Path("c.yaml")), "use TrainConfig.from_yaml("),  # type: ignore[arg-type]
    ],
)
def test_the_wrong_constructor_names_the_right_one(make: Any, told: str) -> None:
    with pytest.raises(ConfigError, match="1 problem") as caught:
        make()
    assert told in str(caught.value)


def test_an_override_of_the_length_replaces_the_other_one() -> None:
    by_epochs = VALUES | {"train": {"epochs": 2, "seed": 1}}
    cfg = TrainConfig.from_dict(by_epochs, "train.max_steps=5")
    assert (cfg.train.epochs, cfg.train.max_steps, cfg.train.seed) == (None, 5, 1)
    back = cfg.override("train.epochs=3")
    assert (back.train.epochs, back.train.max_steps) == (3, None)
    assert TrainConfig.from_dict(VALUES, "train.max_steps=5").train.max_steps == 5
    kept = cfg.override("train.epochs=null")
    assert (kept.train.epochs, kept.train.max_steps) == (None, 5)
    objects = {"model": cfg.model, "data": cfg.data, "train": cfg.train}
    assert TrainConfig.from_dict(objects, "train.epochs=1").train.max_steps is None


@pytest.mark.parametrize(
    ("values", "overrides"),
    [
        ({"epochs": 2, "max_steps": 5}, []),
        ({}, ["train.epochs=2", "train.max_steps=5"]),
        ({"epochs": 1}, ["train.epochs=2", "train.max_steps=5"]),
    ],
)
def test_both_together_contradict_each_other(values: dict[str, Any], overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"5 steps and train\.epochs=2 contradict") as caught:
        TrainConfig.from_dict(VALUES | {"train": values}, *overrides)
    assert "train.epochs=null" in str(caught.value)


@pytest.mark.parametrize(
    "path",
    ["train.seed", "train.epochs", "train.learning_rate", "train.micro_batch_size", "train.warmup",
     "cluster.processes", "checkpoint.every", "data.max_length", "data.mlm_probability"],
)  # fmt: skip
@pytest.mark.parametrize("value", ["true", "false"])
def test_true_is_no_number(path: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{path}: expected .*a number") as caught:
        TrainConfig.from_dict(VALUES, f"{path}={value}")
    assert f"found {value.title()}" in str(caught.value)
    assert [problem.path for problem in caught.value.problems] == [path]


@pytest.mark.parametrize(
    "override",
    ["train.betas=[true, 0.9]", "data.train={path: x, max_rows: true}",
     "data.train={path: x, weight: true}", "data.train={path: x, version: true}"],
)  # fmt: skip
def test_nor_is_it_within_a_value(override: str) -> None:
    with pytest.raises(ConfigError, match=r"expected .*(a number|two numbers)"):
        TrainConfig.from_dict(VALUES, override)


@pytest.mark.parametrize("path", ["model.source", "data.train", "data.eval", "data.test"])
@pytest.mark.parametrize("value", ["''", "'  '"])
def test_what_is_empty_is_said_to_be(path: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{path}: is empty: expected") as caught:
        TrainConfig.from_dict(VALUES, f"{path}={value}")
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(("path", "value"), [("data.eval", "3"), ("data.test", "2")])
def test_a_share_that_is_none(path: str, value: str) -> None:
    told = (
        f"{path}: expected a share of the rows above 0 and less than 1, or a source, found {value}"
    )
    with pytest.raises(ConfigError, match=told):
        TrainConfig.from_dict(VALUES, f"{path}={value}")
