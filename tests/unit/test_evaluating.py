"""``evaluate(cfg, model)``: which model is meant, and what is refused before the start."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain import resuming, storage
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver import evaluating
from dbx_llmtrain.driver.run_folder import RunFolder
from dbx_llmtrain.driver.survey import Survey
from dbx_llmtrain.errors import CheckpointError, ConfigError
from dbx_llmtrain.events import EventLog
from dbx_llmtrain.layout import choose_layout
from dbx_llmtrain.outcomes import RankResult, Sample
from tests import sample

ADAPTER = {
    "base_model_name_or_path": "org/base",
    "revision": "abc",
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
    "use_rslora": True,
    "init_lora_weights": True,
    "inference_mode": True,
}


def config(**sections: Any) -> TrainConfig:
    model = {"source": "org/model", "trust_remote_code": True, "new_tokens": ["<x>"]}
    return sample.config(**({"model": model} | sections))


def checkpoint(run_dir: Path, step: int = 4, **identity: Any) -> Path:
    """A folder that looks like a checkpoint, of a run with this identity."""
    folder = storage.checkpoint_folder(run_dir, step)
    folder.mkdir(parents=True)
    (folder / "data").write_text(str(step))
    found = resuming.identity(sample.run_plan(run_dir, config=config()))
    entries = [entry.model_dump() for entry in storage.entries(folder)]
    content = {"files": entries, "state": {}, "world_size": 2, "identity": found | identity}
    storage.write_manifest(folder, content)
    return folder


def export(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    entries = [entry.model_dump() for entry in storage.entries(folder)]
    storage.write_manifest(folder, {"files": entries, "kind": "export"})
    return folder


def test_without_a_model_it_is_the_configured_one() -> None:
    found = evaluating.find(config(), None)
    assert (found.told, found.weights) == ("org/model", None)
    assert found.cfg == config()


def test_a_checkpoint_goes_with_the_configuration_of_its_run(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "run")
    checkpoint(tmp_path / "run", 2)
    result = sample.result(tmp_path / "run", checkpoint=str(folder))
    for given in (folder, str(folder), tmp_path / "run", result):
        found = evaluating.find(config(), given)
        assert (found.told, found.weights) == (str(folder), folder)
        assert found.cfg == config()
    copy = tmp_path / "copied"
    folder.rename(copy)
    assert evaluating.find(config(), copy).weights == copy, "whatever its folder is called"


def test_another_model_takes_the_place_of_the_configured_one(tmp_path: Path) -> None:
    folder = export(tmp_path / "run" / "export")
    checkpointless = sample.result(tmp_path / "run", checkpoint=None, model_path=str(folder))
    for given in (folder, tmp_path / "run", checkpointless):
        found = evaluating.find(config(), given)
        assert found.cfg.model.source == str(folder)
        assert found.weights is None
        assert found.cfg.model.new_tokens == []
        assert found.cfg.model.trust_remote_code
        assert found.cfg.data == config().data
    assert evaluating.find(config(), "org/other").cfg.model.source == "org/other"


def test_an_adapter_is_put_on_the_base_that_it_names(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))
    found = evaluating.find(config(), folder)
    assert found.weights == folder
    assert (found.cfg.model.source, found.cfg.model.revision) == ("org/base", "abc")
    lora = found.cfg.model.lora
    assert lora is not None
    assert lora.model_dump() == {
        "r": 4, "alpha": 8, "dropout": 0.0, "target_modules": ["q_proj", "v_proj"],
        "use_rslora": True,
    }  # fmt: skip
    own = evaluating.find(config(model={"source": "org/base", "new_tokens": ["<x>"]}), folder)
    assert own.cfg.model.new_tokens == ["<x>"], "the model is the configured one"
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"adapter_config.json cannot be read: KeyError"):
        evaluating.find(config(), folder)
    gone = json.dumps(ADAPTER | {"base_model_name_or_path": "/no/such/base"})
    (folder / "adapter_config.json").write_text(gone)
    with pytest.raises(ConfigError, match=r"model: no folder, \.gguf file or hub model /no/such"):
        evaluating.find(config(), folder)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "model: expected a TrainResult, a folder or a hub id, found ''"),
        (3, "found 3"),
        ("s3://bucket/model", "model: .*s3"),
        ("nosuch", r"model: there is no folder .*/nosuch, and 'nosuch' is no hub id, which has"),
        ("/no/such/folder", r"model: no folder, \.gguf file or hub model /no/such/folder"),
        ("README.md", r"README\.md is a file: expected a folder, a \.gguf file or a hub id"),
    ],
)
def test_what_is_no_model_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluating.find(config(), given)


def test_a_hub_id_that_cannot_be_had_is_told_before_anything_is_started(tmp_path: Path) -> None:
    target = evaluating.find(config(), "org/none")
    with pytest.raises(ConfigError, match=r"model: no folder org/none, and the Hugging Face hub"):
        evaluating.reach(target, "org/none")
    evaluating.reach(evaluating.find(config(), None), None)  # it may lie in the run's cache
    there = str(export(tmp_path / "there"))
    evaluating.reach(evaluating.find(config(), there), there)


def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no model: expected a checkpoint \(step-NNNNNNNN\)"):
        evaluating.find(config(), tmp_path)
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has left no complete checkpoint and no export"):
        evaluating.find(config(), tmp_path)
    nothing = sample.result(tmp_path, checkpoint="/gone", model_path=None)
    with pytest.raises(CheckpointError, match=r"neither a checkpoint nor an export .*/gone"):
        evaluating.find(config(), nothing)


def test_a_checkpoint_that_is_torn_or_of_another_model_is_refused(tmp_path: Path) -> None:
    other = checkpoint(tmp_path / "other", lora={"r": 4})
    with pytest.raises(
        CheckpointError,
        match=r"of another model than .*: model\.lora: r=4 then, not set now\. Give",
    ):
        evaluating.find(config(), other)
    torn = checkpoint(tmp_path / "torn")
    (torn / "data").unlink()
    with pytest.raises(CheckpointError, match="is not a complete checkpoint: it has no valid"):
        evaluating.find(config(), torn)
    other_base = {"fingerprint": "another", "source": "org/base", "revision": None}
    found = evaluating.find(config(), checkpoint(tmp_path / "base", model=other_base))
    with pytest.raises(CheckpointError, match="the model: org/base then, "):
        make_plan(found, tmp_path)


def test_without_held_out_rows_there_is_nothing_to_do(tmp_path: Path) -> None:
    evaluating.require_rows(config(data={"train": "t", "eval": "e"}), None)
    evaluating.require_rows(config(data={"train": "t", "test": 0.1}), None)
    with pytest.raises(ConfigError, match=r"data\.eval: missing: there is nothing to evaluate on"):
        evaluating.require_rows(config(), None)
    none = sample.data().model_copy(update={"splits": {"train": sample.data().splits["train"]}})
    with pytest.raises(ConfigError, match="no row is left to evaluate"):
        make_plan(evaluating.find(config(), None), tmp_path, data=none)


def make_plan(
    target: evaluating.Target, folder: Path, *, data: Any = None, parameters: int = 1000
) -> Any:
    report = sample.cluster()
    layout = choose_layout(target.cfg, report)
    case = Survey(report, layout, RunFolder("run", folder / "run", folder / ".cache", "a1"), 0.0)
    own = evaluating.own_folder(target.cfg, case.folder, datetime.datetime(2026, 1, 2, 3, 4, 5))
    model = sample.run_plan(folder).model.model_copy(update={"parameters": parameters})
    return evaluating.make_plan(target, case, own, model, data or sample.data())


def test_the_plan_has_ranks_and_rows_and_no_steps(tmp_path: Path) -> None:
    train = {"eval_micro_batch_size": 3}
    target = evaluating.find(config(train=train), checkpoint(tmp_path / "run"))
    plan = make_plan(target, tmp_path)
    assert plan.purpose == "evaluate"
    assert (plan.world_size, plan.strategy, plan.micro_batch_size) == (4, "ddp", 3)
    assert (plan.total_steps, plan.weights_from) == (0, str(target.weights))
    assert Path(plan.run_dir) == tmp_path / "evaluation-20260102-030405-a1"
    named = make_plan(evaluating.find(config(tracking={"run_name": "first"}), None), tmp_path)
    assert named.run_name == "first-evaluation-20260102-030405-a1"
    assert "evaluating org/model on 10 rows (eval): 4 rank(s), ddp" in evaluating.begin_text(
        named, evaluating.find(config(), None)
    )
    assert evaluating.ship(plan) is plan, "a checkpoint lies where every rank sees it"


@pytest.mark.parametrize(
    ("parallel", "parameters", "expected"),
    [
        ({}, 10**9, "ddp"),
        ({}, 10**11, "fsdp"),
        ({"kind": "ddp"}, 10**11, "ddp"),
        ({"kind": "fsdp", "shard": "grad_op"}, 10, "fsdp"),
        ({"kind": "fsdp", "shard": "hybrid"}, 10, "fsdp"),
        ({"kind": "deepspeed", "stage": 3, "offload_params": "cpu"}, 10, "ddp"),
    ],
)
def test_the_strategy_needs_no_room_for_training(
    tmp_path: Path, parallel: dict[str, Any], parameters: int, expected: str
) -> None:
    target = evaluating.find(config(parallel=parallel), None)
    plan = make_plan(target, tmp_path, parameters=parameters)
    assert plan.strategy == expected
    assert plan.parallel.shard == ("grad_op" if parallel.get("shard") == "grad_op" else "full")


def test_an_adapters_files_come_to_the_run_folder(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    plan = evaluating.ship(make_plan(evaluating.find(config(), folder), tmp_path))
    there = Path(plan.run_dir) / "adapter"
    assert plan.weights_from == str(there)
    assert {path.name for path in there.iterdir()} == {path.name for path in folder.iterdir()}


def test_the_result_has_metrics_counts_and_answers(tmp_path: Path) -> None:
    target = evaluating.find(config(), None)
    plan = make_plan(target, tmp_path)
    run_dir = Path(plan.run_dir)
    run_dir.mkdir()
    answer = Sample(prompt="p", text="t", tokens=2, stopped=True)
    log = EventLog(tmp_path / "local", run_dir / "events.jsonl", plan.attempt, 0)
    log.emit("samples", 0, samples=[answer.model_dump()])
    log.close()
    metrics = {"eval_loss": 2.0, "accuracy": 0.5, "evaluated_rows": 7, "evaluated_tokens": 97}
    outcome = RankResult(steps=0, metrics=metrics, checkpoint=None, model_path=None)
    found = evaluating.write_result(plan, target, outcome)
    assert found.metrics == {"eval_loss": 2.0, "accuracy": 0.5}
    assert (found.rows, found.trained_tokens, found.samples) == (7, 97, (answer,))
    assert json.loads((run_dir / "evaluation.json").read_text())["model"] == "org/model"
    assert evaluating.tags(target)["dbx_llmtrain.evaluated"] == "org/model"
