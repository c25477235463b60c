"""YAML with faults: told by line, and nothing is kept of a key that is there twice."""

from __future__ import annotations

import pytest

from dbx_llmtrain import yaml_text
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.errors import ConfigError

GOOD = "model: {source: m}\ndata: {train: d}\n"


def faults(text: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_yaml(text)
    return {problem.path: problem.message for problem in caught.value.problems}


def test_a_key_that_is_there_twice_is_refused_with_its_lines() -> None:
    text = (
        GOOD + "train:\n  epochs: 1\n  seed: 2\n  epochs: 3\n"
        "tracking: {tags: {a: 1, a: 2}}\ntrain:\n  seed: 1\n"
    )
    assert faults(text) == {
        "train": "given 2 times, in lines 3 and 8: keep one of them",
        "train.epochs": "given 2 times, in lines 4 and 6: keep one of them",
        "tracking.tags.a": "given 2 times, in line 7: keep one of them",
    }


def test_within_lists_and_overrides_too() -> None:
    listed = "model: {source: m}\ndata:\n  train:\n  - path: a\n    path: b\n"
    assert list(faults(listed)) == ["data.train.0.path"]
    with pytest.raises(ConfigError, match=r"data\.train\.path: given 2 times, in line 1"):
        TrainConfig.from_yaml(GOOD, "data.train={path: a, path: b}")


def test_a_merged_key_may_be_given_again() -> None:
    text = GOOD.replace("data: {train: d}", "data: {train: {<<: {path: a, max_rows: 3}, path: b}}")
    source = TrainConfig.from_yaml(text).data.train
    assert (source.path, source.max_rows) == ("b", 3)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model: {source: m\ndata: 1\n", "line 2, column 5: "),
        ("model:\n  source: !!python/object:os.x {}\n", "line 2, column 11: could not determine"),
        ("model: {[a]: b}\n", "line 1, column 9: found unhashable key"),
        ("model: 2024-13-45\n", "month must be in 1..12"),
        ("model: \x07\n", "special characters are not allowed"),
        ("a: *nowhere\n", "line 1, column 4: found undefined alias"),
    ],
)
def test_a_fault_says_where_and_repeats_no_line(text: str, told: str) -> None:
    found = faults(text)[""]
    assert found.startswith("the configuration is not valid YAML: ")
    assert told in found
    assert "<unicode string>" not in found


def test_a_broken_line_is_not_shown() -> None:
    _, problems = yaml_text.read("model: {token: hf_abc: [\n", "config.yaml")
    assert "hf_abc" not in str(problems)


def test_keys_that_are_no_text_are_unknown_keys() -> None:
    assert "unknown key" in faults(GOOD + "1: {}\n")["1"]
