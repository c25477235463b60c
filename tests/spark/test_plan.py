"""``plan(cfg)`` on real executors: what the probe found decides, before anything costs GPU time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dbx_llmtrain as llm
from dbx_llmtrain.errors import ClusterError
from tests import tiny
from tests.spark import spark_env


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    tiny.model_folder(folder / "model")
    rows = [json.dumps({"text": f"the cat sat on mat {i}"}) for i in range(40)]
    (folder / "train.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return folder


def config(model: Path, folder: Path, **sections: dict[str, Any]) -> llm.TrainConfig:
    base: dict[str, dict[str, Any]] = {
        "model": {"source": str(model / "model")},
        "data": {"train": str(model / "train.jsonl"), "max_length": 64},
        "train": {"max_steps": 4, "global_batch_size": 4},
        "checkpoint": {"dir": str(folder / "runs")},
        "cluster": {"local_dir": str(folder / "local")},
    }
    for name, fields in sections.items():
        base[name] = base.get(name, {}) | fields
    return llm.TrainConfig(**base)


def test_a_plan_has_the_row_of_every_strategy(
    spark: Any, fake_gpus: Callable[[str], None], model: Path, tmp_path: Path
) -> None:
    """Two executors of one node, with one (fake) GPU each."""
    fake_gpus(spark_env.gpu_lines(["GPU-1", "GPU-2"]))
    plan = llm.plan(config(model, tmp_path), spark=spark)
    assert (plan.world_size, plan.strategy, plan.precision) == (2, "ddp", "bf16")
    rows = {row.name: row for row in plan.strategies}
    assert rows["ddp"].chosen
    assert rows["fsdp full"].fits
    assert rows["fsdp hybrid"].why == "no: all ranks are on one host"
    assert plan.memory is not None
    assert "GPUs of unknown speed; the first steps will tell" in str(plan)
    assert "95% of 79.6 GiB (NVIDIA Fake)" in str(plan)


def test_what_the_nodes_cannot_run_is_refused_together(
    spark: Any, fake_gpus: Callable[[str], None], model: Path, tmp_path: Path
) -> None:
    fake_gpus(spark_env.gpu_lines(["GPU-1", "GPU-2"]))
    nvme = {"kind": "deepspeed", "stage": 3, "offload_params": "nvme"}
    shard = {"kind": "fsdp", "shard": "hybrid"}
    with pytest.raises(ClusterError, match=r"all ranks are on one host: set parallel\.shard"):
        llm.plan(config(model, tmp_path, parallel=shard), spark=spark)
    if not Path("/usr/include/libaio.h").exists():
        with pytest.raises(ClusterError, match="cannot build without libaio"):
            llm.plan(config(model, tmp_path, parallel=nvme), spark=spark)
