"""``train(cfg)`` with DeepSpeed: the same launcher, no hostfile, no other way into the nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import dbx_llmtrain as llm
from tests import tiny


@pytest.mark.slow
def test_train_with_zero_3_on_two_executors(
    spark: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny.model_folder(tmp_path / "model")
    rows = [{"text": f"the answer to question {i} is forty two"} for i in range(24)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    # As people have it from Hugging Face.
    own = tmp_path / "ds.json"
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": "auto"}
    own.write_text(json.dumps({"zero_optimization": zero, "train_batch_size": "auto"}))
    cfg = llm.TrainConfig(
        model={"source": str(tmp_path / "model")},
        data={"train": str(tmp_path / "train.jsonl"), "eval": 0.2, "max_length": 64},
        train={"max_steps": 3, "global_batch_size": 4, "learning_rate": 1e-2},
        parallel={"kind": "deepspeed", "stage": 3, "config": str(own)},
        checkpoint={"dir": str(tmp_path / "runs")},
        cluster={
            "use_gpu": False,
            "local_dir": str(tmp_path / "local"),
            "env": {"GLOO_SOCKET_IFNAME": "lo"},
        },
    )
    result = llm.train(cfg, spark=spark)
    capfd.readouterr()
    assert result.steps == 3
    assert result.metrics["eval_loss"] < result.metrics["initial_eval_loss"]
    plan = json.loads((Path(result.run_dir) / "plan.json").read_text())
    assert plan["strategy"] == "deepspeed"
    assert plan["world_size"] == 2
    # Nodes do not see the driver's file.
    assert plan["parallel"]["config"]["zero_optimization"] == zero
    exported = load_file(Path(str(result.model_path)) / "model.safetensors")
    assert exported.keys() == load_file(tmp_path / "model" / "model.safetensors").keys()
