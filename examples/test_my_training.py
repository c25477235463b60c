"""A test of a training run, to copy into your own project and change.

The YAML that trains on the cluster also trains here, in a plain Spark of two threads without a GPU:
the model is replaced by a tiny one of the same kind, the rows by a few of the same shape, and a few
steps are made. A copy runs as it is; then let ``CONFIG`` be your own file. ::

    pytest test_my_training.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dbx_llmtrain as llm

# Your own instead: CONFIG = Path(__file__).parent / "config.yaml"
CONFIG: Path | str = """
model:
  source: HuggingFaceTB/SmolLM2-135M-Instruct
data:
  train: train.jsonl
  max_length: 512
train:
  epochs: 1
  global_batch_size: 4
"""


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """The session of the project, or one of this machine alone."""
    from pyspark.sql import SparkSession

    there = SparkSession.getActiveSession()
    builder = SparkSession.builder.master("local[2]").config("spark.driver.host", "127.0.0.1")
    builder = builder.config("spark.driver.bindAddress", "127.0.0.1")
    session = there or builder.config("spark.ui.enabled", "false").getOrCreate()
    yield session
    if there is None:
        session.stop()


def tiny_model(folder: Path) -> Path:
    """A two-layer model with a tokenizer of single bytes and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=1024, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_configuration_trains(spark: Any, tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {i} plus {i}?"},
                {"role": "assistant", "content": f"It is {2 * i}."},
            ]
        }
        for i in range(30)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    cfg = llm.TrainConfig.from_yaml(
        CONFIG,
        f"model.source={tiny_model(tmp_path / 'model')}",
        f"data.train={data}",
        "data.eval=0.3",
        "train.max_steps=4",
        "train.learning_rate=0.01",
        f"checkpoint.dir={tmp_path / 'runs'}",
        "cluster.local_mode=true",
    )
    result = llm.train(cfg, spark=spark)
    assert result.steps == 4
    assert result.audit.dropped == {}
    assert result.metrics["eval_loss"] < result.metrics["initial_eval_loss"]
    assert result.model_path is not None
