"""``train(cfg)`` of a model that comes with its own code, on real executors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dbx_llmtrain as llm
from dbx_llmtrain.custom_code import load_from, private_modules
from dbx_llmtrain.driver.prepare import prepare_data
from dbx_llmtrain.driver.sources import resolve_model
from tests import tiny
from tests.unit.test_custom_code import own_tokenizer


def test_rows_are_prepared_on_executors_by_a_tokenizer_with_code(
    spark: Any, tmp_path: Path
) -> None:
    folder = own_tokenizer(tmp_path / "model.v1")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"cat {n} sat"}) + "\n" for n in range(8)))
    local = tmp_path / "local"
    cfg = llm.TrainConfig(
        model={"source": str(folder), "trust_remote_code": True},
        data={"train": str(rows), "max_length": 64, "cache_dir": str(tmp_path / "cache")},
        cluster={"local_dir": str(local)},
    )
    data = llm.prepare(cfg, spark=spark)
    assert data.audit.train_rows == 8
    (staged,) = (local / "tokenizers").glob("[0-9a-f]*")
    assert {path.name for path in staged.glob("*.py")} == {"tokenization_tiny.py", "tiny_words.py"}
    assert not list((local / "parts").iterdir())
    # The same without executors.
    model = resolve_model(cfg.model, tmp_path / "alone")
    assert prepare_data(cfg, model, tmp_path / "alone").audit == data.audit


@pytest.mark.slow
def test_a_model_with_code_is_trained_on_two_executors(spark: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = tiny.custom_folder(tmp_path / "model.v1")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"text": f"the cat sat on {n} mats"}) + "\n" for n in range(8))
    )
    cfg = llm.TrainConfig(
        model={"source": str(source), "trust_remote_code": True},
        data={"train": str(rows), "max_length": 64},
        train={"max_steps": 2, "global_batch_size": 2, "learning_rate": 1e-2},
        checkpoint={"dir": str(tmp_path / "runs")},
        tracking={"run_name": "first"},
        cluster={
            "use_gpu": False,
            "local_dir": str(tmp_path / "local"),
            "env": {"GLOO_SOCKET_IFNAME": "lo", "HF_HOME": str(tmp_path / "home")},
        },
    )
    result = llm.train(cfg, spark=spark)
    assert result.steps == 2
    target = Path(result.model_path or "")
    code = {path.name: path.read_bytes() for path in source.glob("*.py")}
    assert {path.name: path.read_bytes() for path in target.glob("*.py")} == code
    (staged,) = (tmp_path / "local" / "models").glob("[0-9a-f]*")
    assert {path.name: path.read_bytes() for path in staged.glob("*.py")} == code
    assert not list((tmp_path / "local" / "scratch").iterdir())
    assert not (tmp_path / "home" / "modules").exists()
    with private_modules(tmp_path, wanted=True):
        model = AutoModelForCausalLM.from_pretrained(**load_from(target, trusted=True))
        assert torch.isfinite(model(input_ids=torch.arange(3, 9)[None]).logits).all()
