"""``evaluate(cfg, model)`` as a user calls it: on real executors, of what a run has left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dbx_llmtrain as llm
from tests import tiny

PROMPT = "what is train 1?"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer, 24 chats to train on, 9 to evaluate, 5 to test."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny.model_folder(folder / "model")
    for name, count in (("train", 24), ("eval", 9), ("test", 5)):
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"what is {name} {i}?"},
                    {"role": "assistant", "content": "the answer is " + "two " * (i % 4 + 1)},
                ]
            }
            for i in range(count)
        ]
        text = "\n".join(json.dumps(row) for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


def config(inputs: Path, folder: Path, **sections: dict[str, Any]) -> llm.TrainConfig:
    base: dict[str, dict[str, Any]] = {
        "model": {"source": str(inputs / "model")},
        "data": {name: str(inputs / f"{name}.jsonl") for name in ("train", "eval", "test")}
        | {"max_length": 96},
        "train": {
            "max_steps": 2, "global_batch_size": 4, "learning_rate": 1e-2, "eval_max_rows": 1,
            "sample_prompts": [PROMPT],
        },
        "checkpoint": {"dir": str(folder / "runs"), "every": 2},
        "tracking": {"run_name": "first"},
        "cluster": {
            "use_gpu": False,
            "local_dir": str(folder / "local"),
            "env": {"GLOO_SOCKET_IFNAME": "lo"},
        },
    }  # fmt: skip
    for name, fields in sections.items():
        base[name] = base.get(name, {}) | fields
    return llm.TrainConfig(**base)


def letters(model: Any, tokenizer: Any) -> dict[str, float]:
    """A user's own metric, of a module that no executor can import."""
    import torch

    ids = torch.tensor([tokenizer("what")["input_ids"]])
    return {"letters": float(len(PROMPT)), "mean_logit": model(input_ids=ids).logits.mean()}


def tracked(folder: Path, run_id: str | None) -> Any:
    from mlflow import MlflowClient

    assert run_id is not None
    return MlflowClient(f"sqlite:///{folder}/runs/mlflow.db").get_run(run_id)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_is_evaluated_again_by_what_it_has_left(
    spark: Any, inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cfg = config(inputs, tmp_path)
    result = llm.train(cfg, metrics=letters, spark=spark)
    assert result.metrics["letters"] == len(PROMPT)
    assert result.metrics["test_loss"] > 0
    run = tracked(tmp_path, result.run_id)
    assert run.data.metrics["mean_logit"] == pytest.approx(result.metrics["mean_logit"], abs=1e-6)
    (table,) = (tmp_path / "runs" / "mlartifacts").rglob("samples.json")
    rows = json.loads(table.read_text())["data"]
    assert [(row[0], row[1]) for row in rows] == [(0, PROMPT), (2, PROMPT)]
    before = sorted(path.name for path in Path(result.run_dir).rglob("*"))
    capfd.readouterr()

    evaluated = llm.evaluate(cfg, result, metrics=letters, spark=spark)
    exported = llm.evaluate(cfg, result.model_path, spark=spark)
    base = llm.evaluate(cfg, spark=spark)

    printed = capfd.readouterr().out
    assert f"evaluating {result.checkpoint} on 14 rows (eval, test): 2 rank(s), ddp" in printed
    for found in (evaluated, exported):
        for name in ("eval_loss", "test_loss"):
            assert found.metrics[name] == pytest.approx(result.metrics[name], abs=1e-6)
        assert (found.rows, found.samples[0].text) == (9, rows[-1][2])
    assert evaluated.metrics["mean_logit"] == pytest.approx(result.metrics["mean_logit"], abs=1e-6)
    assert "letters" not in exported.metrics
    assert exported.model == result.model_path
    assert base.metrics["eval_loss"] > result.metrics["eval_loss"]
    assert sorted(path.name for path in Path(result.run_dir).rglob("*")) == before
    check_tracking(tmp_path, evaluated)


def check_tracking(folder: Path, evaluated: llm.Evaluation) -> None:
    """An evaluation is an MLflow run of its own, and has a folder of its own."""
    run = tracked(folder, evaluated.run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name.startswith("first-evaluation-")
    assert run.data.tags["dbx_llmtrain.purpose"] == "evaluate"
    assert run.data.tags["dbx_llmtrain.evaluated"] == evaluated.model
    assert run.data.metrics["eval_loss"] == pytest.approx(evaluated.metrics["eval_loss"])
    written = folder / "runs" / run.info.run_name / "evaluation.json"
    assert json.loads(written.read_text())["metrics"] == evaluated.metrics
    assert (written.parent / "plan.json").is_file()


def test_what_cannot_be_evaluated_is_refused_before_anything_is_made(
    spark: Any, inputs: Path, tmp_path: Path
) -> None:
    cfg = config(inputs, tmp_path)
    with pytest.raises(
        llm.ConfigError, match=r"model: no folder, \.gguf file or hub model /no/mod"
    ):
        llm.evaluate(cfg, "/no/model", spark=spark)
    with pytest.raises(llm.ConfigError, match="metrics: expected a function of the model"):
        llm.evaluate(cfg, metrics=3, spark=spark)  # type: ignore[arg-type]
    nothing = config(inputs, tmp_path, data={"eval": None, "test": None})
    with pytest.raises(llm.ConfigError, match=r"data\.eval: missing: there is nothing to evaluate"):
        llm.evaluate(nothing, spark=spark)
    prompts = config(inputs, tmp_path, train={"sample_prompts": ["x " * 200]})
    with pytest.raises(llm.ConfigError, match=r"train\.sample_prompts\[0\]: has \d+ tokens"):
        llm.evaluate(prompts, spark=spark)
    assert not list((tmp_path / "runs").glob("*evaluation*"))
