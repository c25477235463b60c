"""What is found before anything is started is told together, each fault by its field."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dbx_llmtrain as llm
from dbx_llmtrain import cli
from dbx_llmtrain.driver import checks
from dbx_llmtrain.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    Finding,
    LlmTrainError,
    Problem,
    together,
)
from dbx_llmtrain.reports import ClusterReport, NodeReport
from tests import tiny


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and rows that are right."""
    folder = tmp_path_factory.mktemp("good")
    tiny.model_folder(folder / "model")
    (folder / "rows.jsonl").write_text('{"text": "the cat sat"}\n')
    return folder


def config(good: Path, **changes: dict[str, Any]) -> llm.TrainConfig:
    base: dict[str, dict[str, Any]] = {
        "model": {"source": str(good / "model")},
        "data": {"train": str(good / "rows.jsonl"), "max_length": 64},
    }
    for name, fields in changes.items():
        base[name] = base.get(name, {}) | fields
    return llm.TrainConfig(**base)


def caught(cfg: llm.TrainConfig, **options: Any) -> LlmTrainError:
    with pytest.raises(LlmTrainError) as found:
        checks.require(cfg, **{"purpose": "train"} | options)
    return found.value


def test_what_is_right_passes(good: Path) -> None:
    cfg = config(good)
    assert checks.require(cfg, purpose="train") is cfg
    assert checks.require(cfg, purpose="prepare", shown=(3, "train")) is cfg


def test_a_single_fault_is_raised_as_it_is(good: Path, tmp_path: Path) -> None:
    error = caught(config(good, data={"eval": f"{tmp_path}/none.jsonl"}))
    assert type(error) is DataError
    assert str(error).startswith(f"data.eval: no file {tmp_path}/none.jsonl")
    assert type(caught(config(good, data={"max_length": 999}))) is ConfigError
    assert type(caught(config(good, checkpoint={"resume": str(tmp_path)}))) is CheckpointError


def test_faults_of_every_kind_are_told_together(good: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cfg = config(
        good,
        model={"source": f"{tmp_path}/no-model"},
        data={
            "train": [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"],
            "eval": {"one": f"{tmp_path}/c.jsonl"},
            "formatter": "no_such_module:function",
            "cache_dir": f"{tmp_path}/file/cache",
        },
        checkpoint={"dir": f"{tmp_path}/runs", "resume": f"{tmp_path}/step-1"},
    )
    error = caught(cfg, purpose="prepare", shown=(0, "test"))
    assert isinstance(error, ConfigError)
    assert [problem.path for problem in error.problems] == [
        "data.train", "data.train", "data.eval.one", "data.formatter", "model.source",
        "data.cache_dir", "n", "split",
    ]  # fmt: skip
    assert str(error).startswith("8 problems in the configuration:")
    assert not (tmp_path / "runs").exists()


def test_a_model_folder_is_looked_at_for_its_purpose(good: Path, tmp_path: Path) -> None:
    model = tiny.model_folder(tmp_path / "model")
    (model / "model.safetensors").unlink()
    cfg = config(good, model={"source": str(model)})
    checks.require(cfg, purpose="prepare")
    assert "has no model.safetensors" in str(caught(cfg))
    bert = tiny.bert()
    bert.save_pretrained(tmp_path / "bert")
    tiny.tokenizer().save_pretrained(tmp_path / "bert")
    masked = config(good, model={"source": f"{tmp_path}/bert"}, data={"eval": "none.jsonl"})
    error = caught(masked)
    assert isinstance(error, ConfigError)
    assert [problem.path for problem in error.problems] == ["data.eval", "model.source"]
    assert "expected a causal language model" in str(error)


def test_a_models_own_code_is_not_run(good: Path, tmp_path: Path) -> None:
    folder = tiny.custom_folder(tmp_path / "model")
    code = next(folder.glob("modeling_*.py"))
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + code.read_text())
    cfg = config(good, model={"source": str(folder), "trust_remote_code": True})
    checks.require(cfg, purpose="train")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"lora": {"target_modules": ["q_prj"]}}, "model.lora.target_modules: no layer"),
        ({"tokenizer": "/no/such/folder"}, "model.tokenizer: no folder or hub tokenizer"),
        pytest.param(
            {"config": {"attention_dropout": "some"}},
            "model.config: @: transformers cannot read its config.json with these fields",
            marks=tiny.TYPES_ARE_CHECKED,
        ),
        ({"config": {"num_hidden_layer": 3}}, "model.config.num_hidden_layer: llama has no such"),
        (
            {"config": {"attention_dropout": 0.1}, "lora": {"layers_to_transform": 9}},
            "model.lora.layers_to_transform: the model has 2 blocks",
        ),
    ],
)
def test_faults_of_a_model_of_parts_need_no_session(
    good: Path, model: dict[str, Any], message: str
) -> None:
    found = caught(config(good, model=model))
    assert isinstance(found, ConfigError)
    (problem,) = found.problems
    assert str(problem).startswith(message.replace("@", str(good / "model")))


def test_faults_of_tokenizer_and_adapters_are_told_together(good: Path) -> None:
    model = {"tokenizer": "/no/such/folder", "lora": {"target_modules": ["q_prj"]}}
    found = caught(config(good, model=model))
    assert isinstance(found, ConfigError)
    assert [problem.path for problem in found.problems] == [
        "model.lora.target_modules", "model.tokenizer",
    ]  # fmt: skip


def test_a_json_file_of_deepspeed_is_read_before_anything_starts(
    good: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.json"
    cfg = config(good, parallel={"kind": "deepspeed", "config": str(own)})
    assert "parallel.config: the file cannot be read" in str(caught(cfg))
    own.write_text('{"zero_optimization": {"overlap_com": true}}')
    assert "parallel.config.zero_optimization.overlap_com: unknown key: did you mean" in str(
        caught(cfg)
    )
    own.write_text('{"zero_optimization": {"overlap_comm": true}}')
    assert checks.require(cfg, purpose="train") is cfg


@pytest.mark.parametrize("field", ["checkpoint.dir", "data.cache_dir"])
def test_a_file_in_the_way_is_told_by_the_field(good: Path, tmp_path: Path, field: str) -> None:
    (tmp_path / "file").write_text("")
    section, _, name = field.partition(".")
    error = caught(config(good, **{section: {name: f"{tmp_path}/file/deep/er"}}))
    assert isinstance(error, CheckpointError)
    assert str(error).startswith(f"{field}: {tmp_path}/file/deep/er cannot be made ")
    assert f"{tmp_path}/file is a file" in str(error)


def test_the_shell_tells_it_without_starting_spark(tmp_path: Path) -> None:
    """Without Java there would be another error, if Spark were asked first."""
    (tmp_path / "c.yaml").write_text("model: {source: ./no-model}\ndata: {train: none.jsonl}\n")
    env = {"PATH": str(tmp_path), "PYTHONPATH": str(Path(llm.__file__).parents[1])}
    for command in ("train", "plan", "prepare", "preview"):
        done = subprocess.run(
            [sys.executable, "-m", "dbx_llmtrain", command, "c.yaml"],
            cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("error: 2 problems in the configuration:\n  - data.train: no")
        assert "  - model.source: no folder, .gguf file or hub model ./no-model" in done.stderr


def test_a_session_that_is_missing_is_told_with_the_rest(good: Path) -> None:
    connect = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    with pytest.raises(ConfigError) as found:
        llm.prepare(config(good, data={"train": "none.jsonl"}), spark=connect)
    paths = [problem.path for problem in found.value.problems]
    assert paths == ["data.train", "cluster (spark session)"]


def test_one_error_for_several() -> None:
    slots = ClusterError([Finding("error", "task slots", "a"), Finding("warning", "disk", "b")])
    settings = ClusterError([Finding("error", "encryption", "c")])
    assert together([slots]) is slots
    both = together([slots, settings])
    assert isinstance(both, ClusterError)
    assert [finding.message for finding in both.findings] == ["a", "b", "c"]
    mixed = together(
        [
            slots,
            settings,
            ConfigError([Problem("x.y", "d"), Problem("x.y", "d")]),
            DataError("e: f"),
            DataError("g", [Problem("data.train", "h")]),
            CheckpointError("checkpoint.resume: i"),
        ]
    )
    assert isinstance(mixed, ConfigError)
    assert [str(problem) for problem in mixed.problems] == [
        "cluster.processes: a", "cluster (encryption): c", "x.y: d", "e: f", "data.train: h",
        "checkpoint.resume: i",
    ]  # fmt: skip
    assert cli.exit_code(mixed) == 2


def report(**changes: Any) -> ClusterReport:
    driver = NodeReport.model_validate(
        {"node": "d", "host": "d", "cpus": 2, "memory_total": 1, "memory_available": 1,
         "local_dir": "/x", "disk_free": 1, "python": "3"}
    )  # fmt: skip
    base = {"master": "spark://h:1", "spark_version": "3.5.0", "local": False, "executors": ("a",),
            "slots": 2, "driver": driver, "nodes": ()}  # fmt: skip
    return ClusterReport.model_validate(base | changes)


@pytest.mark.parametrize(
    ("cluster", "changes", "expected"),
    [
        ({"processes": 3}, {}, (3, False, False)),
        ({"processes": 3}, {"task_gpus": "2"}, (3, False, True)),
        ({"processes": 3}, {"slots": 0}, (0, False, False)),
        ({}, {"task_gpus": "1"}, (0, False, True)),
        ({"processes": 3}, {"local": True}, (3, True, False)),
        ({"processes": 3, "local_mode": True, "use_gpu": True}, {}, (3, True, True)),
    ],
)
def test_only_what_is_known_is_held_against_the_slots(
    good: Path, cluster: dict[str, Any], changes: dict[str, Any], expected: tuple[int, bool, bool]
) -> None:
    layout = checks._layout(config(good, cluster=cluster), report(**changes))
    assert (layout.processes, layout.local_mode, layout.use_gpu) == expected


NEEDS = {
    "train.early_stopping": "held-out rows: give data.eval, or metrics= to judge by",
    "checkpoint.keep_best": "held-out rows: give data.eval, or metrics= to judge by",
    "train.eval_every": "held-out rows: give data.eval (or train.sample_prompts, or metrics=)",
    "train.eval_max_rows": "held-out rows: give data.eval",
    "train.eval_micro_batch_size": "held-out rows: give data.eval",
}


def own(model: Any, tokenizer: Any) -> dict[str, float]:
    """A user's metric."""
    return {"mine": 1.0}


@pytest.mark.parametrize(
    ("changes", "paths", "with_own"),
    [
        (
            {"train": {"early_stopping": 1, "eval_every": 2}},
            ["train.early_stopping", "train.eval_every"],
            [],
        ),
        (
            {"checkpoint": {"keep_best": 1}, "train": {"eval_every": 2}},
            ["checkpoint.keep_best", "train.eval_every"],
            [],
        ),
        ({"train": {"eval_every": "epoch"}}, ["train.eval_every"], []),
        (
            {"train": {"eval_max_rows": 4}},
            ["train.eval_max_rows"],
            ["train.eval_max_rows"],
        ),
        (
            {"train": {"eval_micro_batch_size": 4}},
            ["train.eval_micro_batch_size"],
            ["train.eval_micro_batch_size"],
        ),
        ({"train": {"eval_every": 2, "sample_prompts": ["x"]}}, [], []),
        ({"train": {"sample_prompts": ["x"]}}, [], []),
    ],
)
def test_what_only_evaluations_can_do_needs_held_out_rows(
    good: Path, changes: dict[str, dict[str, Any]], paths: list[str], with_own: list[str]
) -> None:
    def told(metrics: Any) -> list[str]:
        cfg = config(good, **changes)
        found = checks._faults(cfg, None, None, "train", None, metrics)
        assert all(isinstance(error, ConfigError) for error in found)
        return [str(one) for error in found for one in error.problems]  # type: ignore[attr-defined]

    assert told(None) == [f"{path}: needs {NEEDS[path]}, or remove it" for path in paths]
    assert told(own) == [f"{path}: needs {NEEDS[path]}, or remove it" for path in with_own]
    checks.require(config(good, **changes), purpose="prepare")
    checks.require(config(good, data={"eval": 0.5}, **changes), purpose="train")


def test_a_metric_that_no_evaluation_has_is_refused(good: Path) -> None:
    def cfg(metric: str, **eval_sets: str) -> llm.TrainConfig:
        sets: Any = {name: str(good / "rows.jsonl") for name in eval_sets} or 0.5
        return config(
            good, data={"eval": sets}, checkpoint={"keep_best": 1, "metric": metric},
            train={"eval_every": 1},
        )  # fmt: skip

    message = str(caught(cfg("eval_math_los", math="", code="")))
    assert "checkpoint.metric: expected a metric of the evaluations (eval_loss, " in message
    assert "eval_math_loss, eval_math_perplexity, eval_code_loss" in message
    assert "found eval_math_los" in message
    assert "found test_loss" in str(caught(cfg("test_loss")))
    for right in (cfg("eval_math_loss", math=""), cfg("eval_perplexity")):
        checks.require(right, purpose="train")
    unused = config(good, data={"eval": 0.5}, checkpoint={"metric": "accuracy"})
    checks.require(unused, purpose="train")
    own = cfg("accuracy")
    assert checks._faults(own, None, None, "train", None, lambda model, tokenizer: {}) == []


def test_a_model_that_could_not_be_registered_is_told_before_the_run(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "databricks-uc")
    cfg = config(good, tracking={"register_as": "answers"})
    error = caught(cfg)
    assert isinstance(error, ConfigError)
    assert [problem.path for problem in error.problems] == ["tracking.register_as"]
    checks.require(cfg, purpose="prepare")
