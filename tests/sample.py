"""Small whole records, for tests that show, log or send them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.events import Event
from dbx_llmtrain.forecasts import Decision
from dbx_llmtrain.records import (
    Artifact,
    Audit,
    FileEntry,
    ModelInfo,
    PreparedData,
    RunPlan,
    SplitInfo,
    TrainResult,
)
from dbx_llmtrain.reports import ClusterReport, GpuInfo, NodeReport

GIB = 2**30


def config(**sections: Any) -> TrainConfig:
    """A valid configuration; sections as keyword arguments."""
    base = {"model": {"source": "/models/tiny"}, "data": {"train": "/data/train.jsonl"}}
    return TrainConfig(**(base | sections))


def audit() -> Audit:
    return Audit(
        read_rows=110,
        train_rows=90,
        eval_rows=10,
        dropped={"no trained token": 10},
        truncated_rows=3,
        tokens=9000,
        trained_tokens=4000,
        trained_end_tokens=90,
        packs=12,
        packing_efficiency=0.92,
    )


def artifact(kind: Any) -> Artifact:
    files = (FileEntry(path="model.safetensors", size=GIB, sha256="0" * 64),)
    return Artifact(kind=kind, source="/shared/x", fingerprint="f00d" * 8, files=files)


def data() -> PreparedData:
    return PreparedData(
        artifact=artifact("data"),
        audit=audit(),
        format="messages",
        splits={
            "train": SplitInfo(examples=12, rows=90, tokens=9000, trained=4000),
            "eval": SplitInfo(examples=2, rows=10, tokens=1000, trained=450),
        },
        sources={"train": "/data/train.jsonl", "eval": "/data/eval.jsonl"},
    )


def run_plan(folder: Path | str = "/shared/runs/first", **changes: Any) -> RunPlan:
    """A plan for two ranks; fields as keyword arguments."""
    values: dict[str, Any] = {
        "attempt": "a1",
        "run_name": Path(folder).name,
        "run_dir": str(folder),
        "config": config(),
        "world_size": 2,
        "local_mode": False,
        "use_gpu": False,
        "strategy": "fsdp",
        "precision": "fp32",
        "attention": "sdpa",
        "global_batch_size": 32,
        "micro_batch_size": 8,
        "accumulation": 2,
        "examples": 12,
        "steps_per_epoch": 1,
        "total_steps": 3,
        "warmup_steps": 1,
        "local_dir": None,
        "model": ModelInfo(
            artifact=artifact("models"),
            source="/models/tiny",
            model_type="llama",
            parameters=134_515_008,
            vocab_size=97,
            max_positions=128,
        ),
        "data": data(),
        "decisions": (
            Decision(name="parallel.kind", value="fsdp", reason="2 ranks <share> the model"),
            Decision(name="train.micro_batch_size", value=8, reason="8 x 128 tokens a forward"),
        ),
    }
    return RunPlan(**(values | changes))


def node(name: str, *, gpus: int = 0, problem: str = "") -> NodeReport:
    return NodeReport(
        node=name,
        host=name,
        addresses=("10.0.0.1",),
        gpus=tuple(
            GpuInfo(
                index=i,
                uuid=f"GPU-{name}-{i}",
                name="NVIDIA H100 80GB HBM3",
                memory_total=80 * GIB,
                memory_used=GIB,
                driver="550.54",
            )
            for i in range(gpus)
        ),
        cpus=8,
        memory_total=64 * GIB,
        memory_available=60 * GIB,
        local_dir="/local_disk0/dbx_llmtrain",
        disk_free=500 * GIB,
        python="3.12.3",
        packages={"torch": "2.7.0", "transformers": "4.51.3"},
        problem=problem,
    )


def cluster(*nodes: NodeReport, **changes: Any) -> ClusterReport:
    """Two workers with two GPUs each, or ``nodes``."""
    workers = nodes or (node("worker-1", gpus=2), node("worker-2", gpus=2))
    values: dict[str, Any] = {
        "master": "spark://driver:7077",
        "spark_version": "3.5.2",
        "local": False,
        "executors": tuple(worker.host for worker in workers),
        "slots": 4,
        "task_gpus": "1",
        "driver": node("driver"),
        "nodes": workers,
    }
    return ClusterReport(**(values | changes))


def result(folder: Path | str = "/shared/runs/first", **changes: Any) -> TrainResult:
    """A finished run."""
    values: dict[str, Any] = {
        "run_id": "run1",
        "run_dir": str(folder),
        "run_name": Path(folder).name,
        "checkpoint": f"{folder}/checkpoints/step-00000003",
        "model_path": f"{folder}/export",
        "steps": 3,
        "audit": audit(),
        "metrics": {
            "train_loss": 2.5,
            "initial_eval_loss": 4.24,
            "eval_loss": 2.7,
            "tokens_per_second": 1234.5,
            "peak_memory_bytes": 2.0 * GIB,
            "seconds_to_first_step": 12.3,
        },
    }
    return TrainResult(**(values | changes))


def event(kind: Any = "step", step: int = 1, **metrics: float) -> Event:
    """An event of rank 0; metrics as keyword arguments."""
    return Event(attempt="a1", rank=0, kind=kind, time=1.8e9 + step, step=step, metrics=metrics)
