from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dbx_llmtrain import config, config_checks
from dbx_llmtrain.config import TrainConfig, field_paths
from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.sections import SECTIONS

MINIMAL: dict[str, Any] = {"model": {"source": "org/model"}, "data": {"train": "rows.jsonl"}}

EVERYTHING = """
model: {source: org/model, revision: main, attention: sdpa}
data:
  train:
  - {path: /Volumes/a/b/c/train-*.jsonl, max_rows: 1000, weight: 0.5}
  - {path: org/rows, name: main, split: 'train[:5%]', revision: v1}
  - {path: 'table:main.ml.rows', version: 3}
  - rows.parquet
  eval: {math: math.jsonl, code: {path: code.jsonl, max_rows: 10}}
  test: 0.05
  format: instruction
  columns: {instruction: question, output: answer}
  formatter: my_module.formats:to_chat
  objective: sft
  mlm_probability: 0.15
  train_on: completion
  max_length: 1024
  overflow: split
  packing: false
  shuffle: true
  group_by_length: true
  longest_first: true
  chat_template: chatml
  cache_dir: /Volumes/a/b/c/cache
parallel: {kind: fsdp, shard: full}
train:
  max_steps: 100
  global_batch_size: 64
  micro_batch_size: 4
  learning_rate: 1.0e-5
  schedule: linear
  warmup: 10
  min_learning_rate: 1.0e-6
  optimizer: adamw
  weight_decay: 0.1
  betas: [0.9, 0.95]
  max_grad_norm: 0
  precision: bf16
  seed: 7
  eval_every: 10
  log_every: 2
checkpoint: {dir: /Volumes/a/b/c/runs, every: 50, export: true, resume: never}
tracking: {experiment: /Users/me/x, run_name: first, tags: {team: a}, log_checkpoints: true}
cluster: {processes: 8, use_gpu: true, local_mode: false, local_dir: /local_disk0/x, env: {A: b}}
"""


def problems(values: Any, *overrides: str) -> dict[str, str]:
    """The faults of a configuration: path to message."""
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_dict(values, *overrides)
    return {problem.path: problem.message for problem in caught.value.problems}


def with_field(path: str, value: Any) -> dict[str, Any]:
    section, _, field = path.partition(".")
    return MINIMAL | {section: {**MINIMAL.get(section, {}), field: value}}


def test_defaults() -> None:
    cfg = TrainConfig(**MINIMAL)
    assert cfg.train.learning_rate == 2e-5
    assert cfg.parallel.kind == "auto"
    assert cfg.data.packing
    assert cfg.to_dict() == MINIMAL


def test_every_section_round_trips_through_yaml() -> None:
    cfg = TrainConfig.from_yaml(EVERYTHING)
    assert TrainConfig.from_yaml(cfg.to_yaml()) == cfg
    assert cfg.to_dict() == yaml.safe_load(EVERYTHING)
    assert TrainConfig.model_validate_json(cfg.model_dump_json()) == cfg


def test_reads_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    assert TrainConfig.from_yaml(path) == TrainConfig.from_yaml(str(path)) == TrainConfig(**MINIMAL)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("missing.yaml", "no file missing.yaml (looked in"),
        ("a: [\n", "is not valid YAML"),
        ("# nothing\n", "is empty: expected model and data sections"),
        ("- a\n- b\n", "expected sections model, data,"),
    ],
)
def test_files_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="1 problem") as caught:
        TrainConfig.from_yaml(text)
    assert message in str(caught.value)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        TrainConfig.from_yaml(path)


def test_it_is_frozen() -> None:
    cfg = TrainConfig(**MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        cfg.train.seed = 1  # type: ignore[misc]


def test_overrides() -> None:
    cfg = TrainConfig.from_dict(
        MINIMAL,
        "train.learning_rate=1e-5",
        "tracking.tags.team=a",
        "data.packing=false",
        "data.eval=0.1",
    )
    assert cfg.train.learning_rate == 1e-5
    assert cfg.tracking.tags == {"team": "a"}
    assert cfg.data.packing is False
    assert cfg.data.eval == 0.1
    again = cfg.override("train.betas=[0.8, 0.9]", "model.source=other")
    assert again.train.betas == (0.8, 0.9)
    assert again.model.source == "other"
    assert cfg.model.source == "org/model"
    assert MINIMAL["model"] == {"source": "org/model"}


def test_overrides_of_section_objects() -> None:
    cfg = TrainConfig(**MINIMAL)
    sections = {"model": cfg.model, "data": cfg.data}
    changed = TrainConfig.from_dict(sections, "model.revision=v1")
    assert changed.model.revision == "v1"
    assert changed.model.source == "org/model"


def test_bad_overrides_are_reported_together() -> None:
    found = problems(MINIMAL, "nonsense", "=1", "a..b=2", "train.seed=[")
    assert len(found) == 2
    assert "expected key.path=value" in found[""]
    assert "not valid YAML" in found["train.seed"]


def test_every_fault_is_reported_at_once() -> None:
    found = problems(
        {
            "model": {"sauce": "x"},
            "data": {"train": "t", "max_length": 0, "packing": "maybe"},
            "train": {"epochs": 1, "max_steps": 5, "learning_rate": "high"},
            "cluster": ["a"],
            "optimizer": {},
        }
    )
    assert found["model.sauce"] == "unknown key: did you mean model.source?"
    assert found["model.source"] == "missing: it has no default"
    assert found["data.max_length"] == "expected greater than 0, found 0"
    assert "data.packing" in found
    assert "expected" in found["train.learning_rate"]
    assert "'high'" in found["train.learning_rate"]
    assert found["cluster"] == "expected a mapping of fields, found list \"['a']\""
    assert "optimizer" in found


def test_missing_sections_are_named() -> None:
    assert set(problems({})) == {"model.source"}
    assert "found nothing" in problems(MINIMAL | {"train": None})["train"]
    assert "found TrainConfig" in problems(MINIMAL | {"train": TrainConfig(**MINIMAL)})["train"]


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("train.micro_batch_size", "big", "valid integer"),
        ("train.micro_batch_size", 0, "greater than 0"),
        ("train.betas", [0.9], "two numbers in [0, 1)"),
        ("data.eval", 1.5, "less than 1"),
        ("data.eval", {"max_rows": 3}, "a value for path"),
        ("data.train", {"path": "x", "colour": "red"}, "unknown key colour: expected path"),
        ("model.tokenizer", {"sorce": "x"}, "unknown key sorce: did you mean source?"),
        ("train.early_stopping", {"patince": 3}, "unknown key patince: did you mean patience?"),
        ("train.early_stopping", {"x": 3}, "unknown key x: expected patience, min_delta"),
        ("train.early_stopping", {"min_delta": 3}, "a mapping of patience and min_delta, found {"),
        ("parallel.config", 7, "expected a mapping or the path of a JSON file, found 7"),
        ("parallel.config", [1], "expected a mapping or the path of a JSON file, found [1]"),
        ("model.config", 3, "expected a mapping, found 3"),
        ("checkpoint.every", "often", "'never'"),
        ("parallel.kind", "dp", "'auto', 'single', 'ddp', 'fsdp' or 'deepspeed'"),
        ("tracking.tags", "a=1", "expected a mapping, found 'a=1'"),
    ],
)
def test_types_are_told_in_one_problem(path: str, value: Any, expected: str) -> None:
    found = problems(with_field(path, value))
    assert list(found) == [path]
    assert expected in found[path]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("train.warmup", 2.5, "expected whole steps, or a share below 1"),
        ("train.min_learning_rate", 1.0, "expected at most train.learning_rate"),
        ("train.betas", [0.9, 1.0], "expected two numbers in [0, 1)"),
        ("data.columns", {"trained": "q"}, "unknown name: Expected one of"),
        ("cluster.env", {"HF_TOKEN": "hf_secret"}, "looks like a secret"),
        ("checkpoint.dir", "s3://bucket/x", "expected a path that every node can open"),
    ],
)
def test_what_types_cannot_say(path: str, value: Any, message: str) -> None:
    found = problems(with_field(path, value))
    assert any(message in text for text in found.values()), found
    assert "hf_secret" not in str(found)


def test_combinations_between_sections() -> None:
    found = problems(MINIMAL | {"parallel": {"kind": "single"}, "cluster": {"processes": 2}})
    assert "use ddp or fsdp" in found["parallel.kind"]
    found = problems(MINIMAL | {"train": {"epochs": 1, "max_steps": 2}})
    assert "contradict each other" in found["train.max_steps"]


def test_betas_are_told_together_with_other_faults() -> None:
    found = problems(MINIMAL | {"train": {"betas": [0.9, 1.5], "epochs": -1}})
    assert found.keys() == {"train.betas", "train.epochs"}
    assert found["train.betas"] == "expected two numbers in [0, 1), found 1.5"


def test_secrets_are_not_repeated() -> None:
    found = problems(with_field("cluster.env", {"HF_TOKEN": ["hf_secret"]}))
    assert "hf_secret" not in str(found)


@pytest.mark.parametrize("key", config_checks._LATER)
def test_what_a_later_version_builds_is_refused_by_name(key: str) -> None:
    path, _, value = key.partition("=")
    found = problems(with_field(path, value or "anything"))
    assert "is not available in this version: " in found[path]


def test_registered_models_have_an_alias_or_a_version() -> None:
    for source in ("models:/main.ml.name@champion", "models:/name/3"):
        assert TrainConfig(**with_field("model.source", source)).model.source == source
    found = problems(with_field("model.source", "models:/name"))
    assert found["model.source"].startswith("expected models:/NAME@ALIAS or models:/NAME/VERSION")
    both = {"source": "models:/name/3", "revision": "main"}
    assert "a registered model's version" in problems(MINIMAL | {"model": both})["model.revision"]


@pytest.mark.parametrize(
    ("data", "path", "message"),
    [
        ({"objective": "mlm", "train_on": "all"}, "data.train_on", "predicts the masked tokens"),
        ({"objective": "pretrain", "train_on": "completion"}, "data.train_on", "every token"),
        ({"mlm_probability": 0.2}, "data.mlm_probability", "is for data.objective: mlm"),
        ({"format": "text", "chat_template": "chatml"}, "data.chat_template", "text has none"),
        ({"objective": "mlm", "chat_template": "chatml"}, "data.chat_template", "mlm has none"),
        ({"packing": "concat"}, "data.packing", "only data.objective: pretrain allows, found sft"),
        (
            {"packing": "concat", "objective": "pretrain", "overflow": "drop"},
            "data.overflow",
            "has no effect with data.packing: concat",
        ),
        ({"group_by_length": True}, "data.group_by_length", "has no effect with data.packing"),
        ({"longest_first": True, "shuffle": False}, "data.longest_first", "changes the order"),
        ({"eval": 0.5, "test": 0.5}, "data.test", "are 0.5 + 0.5: nothing is left to train on"),
        (
            {"eval": {"path": "e", "weight": 2}},
            "data.eval",
            "weight 2.0 is for training sources: held-out rows are read once",
        ),
        (
            {"train": [{"path": "t.jsonl", "split": "a", "name": "b"}]},
            "data.train.0",
            "name, split are for data sets of the hub, t.jsonl is a file",
        ),
        ({"eval": {"a": {"path": "table:x", "split": "a"}}}, "data.eval.a", "table:x is a table"),
        ({"test": {"path": "a.csv", "version": 3}}, "data.test", "version is for Delta tables"),
        ({"test": {"path": "a/b", "version": 3, "name": "x"}}, "data.test", "give one"),
        ({"eval": {"a b": "x.jsonl"}}, "data.eval", "expected names of letters, digits, dots"),
        ({"eval": {"ab": 3}}, "data.eval", "expected text or a mapping of fields (ab), found 3"),
        ({"train": []}, "data.train", "at least 1 item"),
        ({"train": 3}, "data.train", "expected text, a mapping of fields or a list of sources"),
        ({"train": 0.5}, "data.train", "expected text, a mapping of fields or a list of sources"),
        ({"test": {"a": "b"}}, "data.test", "unknown key a: expected path, name, split, revision"),
        ({"train": {"pat": "b", "x": 1}}, "data.train", "mean path?; unknown key x: expected path"),
        ({"train": {"pth": "b"}}, "data.train", "unknown key pth: did you mean path?"),
        ({"train": [{"path": "t", "maxrows": 2}]}, "data.train", "did you mean max_rows?"),
        ({"eval": {"a": {"path": "t", "versoin": 2}}}, "data.eval", "versoin: did you mean vers"),
        ({"eval": 0}, "data.eval", "(leave it out to hold no rows out), found 0"),
        ({"test": 0.0}, "data.test", "(leave it out to hold no rows out), found 0.0"),
        ({"packing": "maybe"}, "data.packing", "expected true, false or 'concat', found 'maybe'"),
        (
            {"columns": {"promt": "q"}},
            "data.columns.promt",
            "unknown name: did you mean prompt? Expected one of answer, attention_mask,",
        ),
        (
            {"columns": {"question_text": "prompt"}},
            "data.columns.question_text",
            "unknown name: did you mean {prompt: question_text}? Expected one of",
        ),
        ({"eval": True}, "data.eval", "or a mapping of names to sources), found True"),
        ({"formatter": "no_function"}, "data.formatter", "expected module:function, such as"),
        ({"train": {"path": "x", "weight": 0}}, "data.train", "greater than 0 (weight), found 0"),
    ],
)
def test_data_that_makes_no_sense(data: dict[str, Any], path: str, message: str) -> None:
    found = problems(MINIMAL | {"data": MINIMAL["data"] | data})
    assert list(found) == [path]
    assert message in found[path]


def test_field_paths_follow_the_sections() -> None:
    assert [path.split(".")[0] for path in field_paths() if path.endswith(".kind")] == ["parallel"]
    assert list(dict.fromkeys(path.split(".")[0] for path in field_paths())) == list(SECTIONS)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        (" a", "starts or ends with a space"),
        (".", "starts with a dot"),
        ("..", "starts with a dot"),
        (".cache", "starts with a dot"),
        ("../up", "starts with a dot"),
        ("a/b", "has a character"),
        ("a\\b", "has a character"),
        ("a\nb", "has a character"),
        ("x" * 201, "is longer than 200 bytes"),
        ("mlflow.db", "is the name of the tracking store"),
        ("mlartifacts", "is the name of the tracking store"),
    ],
)
def test_a_run_name_is_the_name_of_a_folder(name: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong) as caught:
        TrainConfig(model={"source": "m"}, data={"train": "d"}, tracking={"run_name": name})
    assert [problem.path for problem in caught.value.problems] == ["tracking.run_name"]


def test_a_run_name_may_be_in_any_language() -> None:
    cfg = TrainConfig(model={"source": "m"}, data={"train": "d"}, tracking={"run_name": "試し, 2"})
    assert cfg.tracking.run_name == "試し, 2"


@pytest.mark.parametrize(
    "name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID"]
)
def test_what_the_launcher_sets_cannot_be_given(name: str) -> None:
    with pytest.raises(ConfigError, match=f"cluster.env.{name}: is set by the launcher"):
        TrainConfig(model={"source": "m"}, data={"train": "d"}, cluster={"env": {name: "1"}})


def test_faults_of_overrides_and_values_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_dict(
            {"model": {"source": "m"}, "data": {"train": "d"}}, "foo", "train.lr=3", "trian.x=1"
        )
    assert [problem.path for problem in caught.value.problems] == ["", "trian", "train.lr"]


def test_types_are_told_in_plain_words() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_dict(
            {"model": {"source": "m"}, "data": {"train": "d", "eval": 1},
             "tracking": {"run_name": 123}, "cluster": {"env": {"A": 1}}}
        )  # fmt: skip
    assert {problem.path: problem.message for problem in caught.value.problems} == {
        "data.eval": "expected a share of the rows above 0 and less than 1, or a source, found 1",
        "tracking.run_name": "expected text (in quotes), found 123",
        "cluster.env.A": "expected text (in quotes), found a value of type int",
    }


def test_only_a_configuration_is_taken_for_one() -> None:
    cfg = TrainConfig(model={"source": "m"}, data={"train": "d"})
    assert config.require(cfg) is cfg
    with pytest.raises(ConfigError, match=r"found dict .*: use TrainConfig.from_dict"):
        config.require({"model": {}})
    with pytest.raises(ConfigError, match=r"found str .*: use TrainConfig.from_yaml"):
        config.require("config.yaml")


MESSAGE = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        ({"train": {"early_stopping": 2}}, "train.eval_every", "train.early_stopping can only do"),
        ({"checkpoint": {"keep_best": 1}}, "train.eval_every", "checkpoint.keep_best can only do"),
        (
            {"train": {"early_stopping": {"patience": 1}}, "checkpoint": {"keep_best": 1}},
            "train.eval_every",
            "missing: train.early_stopping and checkpoint.keep_best can only do something between",
        ),
        ({"train": {"max_time": "00:00:00:00"}}, "train.max_time", "more than 0 seconds"),
        ({"train": {"max_time": "00:24:00:00"}}, "train.max_time", "less than 24 hours"),
        ({"train": {"max_time": "8h"}}, "train.max_time", "expected"),
        ({"train": {"sample_prompts": [" "]}}, "train.sample_prompts.0", "is empty"),
        (
            {"train": {"sample_prompts": ["a", []]}},
            "train.sample_prompts.1",
            "expected messages with role and content",
        ),
        (
            {"train": {"sample_prompts": [[{"role": "user", "text": "hi"}]]}},
            "train.sample_prompts.0",
            "expected messages with role and content, found one with role, text",
        ),
        (
            {"train": {"sample_prompts": [[MESSAGE | {"role": "human"}]]}},
            "train.sample_prompts.0",
            "expected the roles system, user, assistant, tool, found 'human'",
        ),
        (
            {"train": {"sample_prompts": [[MESSAGE, MESSAGE | {"role": "assistant"}]]}},
            "train.sample_prompts.0",
            "ends with an answer",
        ),
        (
            {"train": {"sample_prompts": ["a"]}, "data": {"objective": "mlm"}},
            "train.sample_prompts",
            "mlm writes no answers",
        ),
        ({"tracking": {"register_as": "a.b.c.d"}}, "tracking.register_as", "catalog.schema.model"),
        ({"tracking": {"register_as": "a..c"}}, "tracking.register_as", "found 'a..c'"),
        ({"tracking": {"register_as": "a@"}}, "tracking.register_as", "found 'a@'"),
        ({"tracking": {"register_as": "a@v2"}}, "tracking.register_as", "not a version such as v1"),
        ({"tracking": {"register_as": "a@latest"}}, "tracking.register_as", "nor latest"),
        ({"tracking": {"register_as": "a/b"}}, "tracking.register_as", "found 'a/b'"),
        (
            {"tracking": {"register_as": "a", "log_model": "none"}},
            "tracking.register_as",
            "set log_model=final",
        ),
        ({"tracking": {"log_model": "best"}}, "tracking.log_model", "needs checkpoint.keep_best"),
        (
            {"tracking": {"log_model": "final"}, "checkpoint": {"export": False}},
            "tracking.log_model",
            "what is logged is the export",
        ),
        (
            {"tracking": {"register_as": "a"}, "checkpoint": {"export": False}},
            "tracking.register_as",
            "set checkpoint.export=true",
        ),
        ({"checkpoint": {"resume": " "}}, "checkpoint.resume", "is empty: expected auto, never or"),
        ({"checkpoint": {"every": "never ever"}}, "checkpoint.every", "'epoch' or 'never'"),
        ({"checkpoint": {"every_minutes": 0}}, "checkpoint.every_minutes", "greater than 0"),
        ({"checkpoint": {"keep_last": 0}}, "checkpoint.keep_last", "expected"),
        ({"checkpoint": {"metric": "a b"}}, "checkpoint.metric", "expected"),
    ],
)
def test_what_is_evaluated_kept_and_logged_has_to_agree(
    changes: dict[str, dict[str, Any]], path: str, message: str
) -> None:
    values = {name: MINIMAL.get(name, {}) | fields for name, fields in changes.items()}
    found = problems(MINIMAL | values)
    assert list(found) == [path]
    assert message in found[path]


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"early_stopping": 2, "eval_every": 5}, "checkpoint": {"keep_best": 2}},
        {"train": {"early_stopping": {"patience": 2, "min_delta": 0.1}, "eval_every": "epoch"}},
        {"train": {"max_time": "01:23:59:59", "sample_prompts": ["a", [MESSAGE]]}},
        {"checkpoint": {"every": "epoch", "every_minutes": 10, "keep_last": "all"}},
        {"tracking": {"register_as": "main.ml.my model@champion"}},
        {"tracking": {"register_as": "my-model_2@v2x", "log_model": "final"}},
        {
            "tracking": {"log_model": "best"},
            "checkpoint": {"keep_best": 1},
            "train": {"eval_every": 2},
        },
    ],
)
def test_what_agrees_survives_the_wire(changes: dict[str, dict[str, Any]]) -> None:
    values = {name: MINIMAL.get(name, {}) | fields for name, fields in changes.items()}
    cfg = TrainConfig.from_dict(MINIMAL | values)
    assert TrainConfig.model_validate_json(cfg.model_dump_json()) == cfg
    assert TrainConfig.from_yaml(cfg.to_yaml()) == cfg
