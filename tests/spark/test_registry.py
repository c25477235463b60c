"""Registered models answer on Spark's executors, and a run registers its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dbx_llmtrain as llm
from dbx_llmtrain.driver import registry
from tests import tiny
from tests.unit.test_registry import finished_run

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*type hint is inferred as AnyType:UserWarning"),
]

CHOICES = "choices array<struct<finish_reason string, message struct<role string, content string>>>"
TURNS = "messages array<struct<role string, content string>>"


@pytest.fixture(autouse=True)
def mlflow_as_new() -> Iterator[None]:
    import mlflow

    yield
    mlflow.set_tracking_uri(None)


@pytest.mark.parametrize("limit", [None, 0], ids=["loaded", "disk"])
def test_spark_udf_answers_chats(spark: Any, tmp_path: Path, limit: int | None) -> None:
    import mlflow
    from pyspark.sql import functions

    export = tiny.model_folder(tmp_path / "messages", chat_template=tiny.CHATML_BOS)
    plan, result = finished_run(tmp_path / "runs", export)
    found = registry.register(result, "answers", limit=limit)
    mlflow.set_tracking_uri(plan.tracking.uri)
    chats = [[{"role": "user", "content": f"what is {number}?"}] for number in range(3)]
    expected = llm.generate(result, chats, max_new_tokens=5).texts
    ask = mlflow.pyfunc.spark_udf(spark, found.uri, env_manager="local", result_type=CHOICES)
    table = spark.createDataFrame([(turns, 5) for turns in chats], f"{TURNS}, max_tokens long")
    rows = table.select(ask(functions.struct("messages", "max_tokens")).alias("answer")).collect()
    assert [row.answer.choices[0].message.content for row in rows] == expected
    assert {row.answer.choices[0].finish_reason for row in rows} == {"length"}


def test_spark_udf_goes_on_with_texts(spark: Any, tmp_path: Path) -> None:
    import mlflow

    export = tiny.model_folder(tmp_path / "text", chat_template=None)
    plan, result = finished_run(tmp_path / "runs", export)
    found = registry.register(result, "texts")
    mlflow.set_tracking_uri(plan.tracking.uri)
    prompts = ["the cat sat", "what is", "a question"]
    expected = llm.generate(result, prompts, max_new_tokens=5).texts
    follow = mlflow.pyfunc.spark_udf(
        spark, found.uri, env_manager="local", params={"max_tokens": 5}
    )
    rows = spark.createDataFrame([(text,) for text in prompts], "prompt string").select(
        follow("prompt").alias("answer")
    )
    assert [row.answer for row in rows.collect()] == expected


@pytest.mark.slow
def test_a_run_registers_its_own_model(
    spark: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run as a user makes it, and what is left of it when the registry refuses the name."""
    import mlflow

    tiny.model_folder(tmp_path / "model")
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "how are you"}]
    rows = "\n".join([json.dumps({"messages": turns})] * 8)
    (tmp_path / "train.jsonl").write_text(rows, encoding="utf-8")
    cfg = llm.TrainConfig(
        model={"source": str(tmp_path / "model")},
        data={"train": str(tmp_path / "train.jsonl"), "max_length": 96},
        train={"max_steps": 1, "global_batch_size": 4},
        checkpoint={"dir": str(tmp_path / "runs")},
        tracking={"run_name": "first", "register_as": "answers@champion"},
        cluster={
            "use_gpu": False,
            "local_dir": str(tmp_path / "local"),
            "env": {"GLOO_SOCKET_IFNAME": "lo"},
        },
    )
    result = llm.train(cfg, spark=spark)
    assert result.registered == "models:/answers/1"
    assert result == llm.load(result.run_dir)
    plan = json.loads((Path(result.run_dir) / "plan.json").read_text())
    mlflow.set_tracking_uri(plan["tracking"]["uri"])
    client = mlflow.MlflowClient()
    assert client.get_run(result.run_id).info.status == "FINISHED"
    version = client.get_model_version_by_alias("answers", "champion")
    assert version.tags["dbx_llmtrain_checkpoint"] == result.checkpoint
    assert version.tags["dbx_llmtrain_run_id"] == result.run_id
    expected = llm.generate(result, [turns[:1]], max_new_tokens=4)[0]
    model = mlflow.pyfunc.load_model("models:/answers@champion")
    (answer,) = model.predict({"messages": turns[:1], "max_tokens": 4})
    assert answer["choices"][0]["message"]["content"] == expected
    assert "Traceback" not in capfd.readouterr().err
