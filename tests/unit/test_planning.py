"""The plan is arithmetic: every number against a value worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dbx_llmtrain import planning
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.errors import CheckpointError, ConfigError
from dbx_llmtrain.records import (
    Artifact,
    Audit,
    ClusterReport,
    FileEntry,
    GpuInfo,
    ModelInfo,
    NodeReport,
    PreparedData,
    RunPlan,
    SplitInfo,
)

GIB = 2**30


def node(name: str, gpus: int = 0, gpu: str = "NVIDIA A100-SXM4-80GB") -> NodeReport:
    return NodeReport(
        node=name,
        host=name,
        gpus=tuple(
            GpuInfo(
                index=i, uuid=f"GPU-{name}-{i}", name=gpu, memory_total=80 * GIB, memory_used=0,
                driver="550.1",
            )
            for i in range(gpus)
        ),
        cpus=8,
        memory_total=64 * GIB,
        memory_available=60 * GIB,
        local_dir="/tmp/x",
        disk_free=100 * GIB,
        python="3.12.3",
    )  # fmt: skip


def cluster(
    nodes: int = 0, gpus: int = 0, gpu: str = "NVIDIA A100-SXM4-80GB", slots: int | None = None
) -> ClusterReport:
    """``nodes`` workers with ``gpus`` each; 0 workers: a driver alone."""
    names = [f"w{i}" for i in range(nodes)]
    driver = node("driver", 0 if nodes else gpus, gpu)
    return ClusterReport(
        master="spark://m:7077" if nodes else "local[2]",
        spark_version="4.0.0",
        local=not nodes,
        executors=tuple(names),
        slots=slots if slots is not None else max(1, nodes * max(gpus, 1)),
        driver=driver,
        nodes=tuple(node(name, gpus, gpu) for name in names) or (driver,),
    )


def config(**sections: Any) -> TrainConfig:
    base: dict[str, Any] = {"model": {"source": "m"}, "data": {"train": "a.jsonl"}}
    for name, fields in sections.items():
        base[name] = {**base.get(name, {}), **fields}
    return TrainConfig(**base)


def plan(
    cfg: TrainConfig,
    where: ClusterReport,
    examples: int = 100,
    positions: int | None = 4096,
    files: tuple[FileEntry, ...] = (),
) -> RunPlan:
    folder = {"source": "/s", "fingerprint": "f"}
    audit = Audit(
        read_rows=examples, train_rows=examples, eval_rows=0, tokens=1000, trained_tokens=400,
        packs=examples, packing_efficiency=1.0,
    )  # fmt: skip
    data = PreparedData(
        artifact=Artifact(kind="data", files=(), **folder), audit=audit, format="text",
        splits={"train": SplitInfo(examples=examples, rows=examples, tokens=1000, trained=400)},
        sources={"train": "a.jsonl"},
    )  # fmt: skip
    model = ModelInfo(
        artifact=Artifact(kind="models", files=files, **folder), source="m", model_type="llama",
        vocab_size=97, max_positions=positions,
    )  # fmt: skip
    return planning.make_plan(
        cfg, where, planning.choose_layout(cfg, where), model, data,
        attempt="a", run_name="r", run_dir="/r",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (cluster(), (1, True, False)),
        (cluster(gpus=4), (4, True, True)),
        (cluster(nodes=2), (2, False, False)),
        (cluster(nodes=2, gpus=4), (8, False, True)),
        (cluster(nodes=2, gpus=4, slots=6), (6, False, True)),
    ],
)
def test_layout_is_taken_from_the_probe(
    where: ClusterReport, expected: tuple[int, bool, bool]
) -> None:
    layout = planning.choose_layout(config(), where)
    assert (layout.processes, layout.local_mode, layout.use_gpu) == expected
    assert all(decision.reason for decision in layout.decisions)


def test_single_runs_one_process() -> None:
    chosen = plan(config(parallel={"kind": "single"}), cluster(nodes=2, gpus=4))
    assert (chosen.world_size, chosen.strategy) == (1, "single")


@pytest.mark.parametrize(
    ("where", "strategy", "precision"),
    [
        (cluster(), "single", "fp32"),
        (cluster(nodes=2), "fsdp", "fp32"),
        (cluster(nodes=1, gpus=2), "fsdp", "bf16"),
        (cluster(nodes=1, gpus=2, gpu="Tesla T4"), "fsdp", "fp32"),
        (cluster(nodes=1, gpus=2, gpu="Tesla V100-SXM2-16GB"), "fsdp", "fp32"),
        (cluster(nodes=1, gpus=2, gpu="NVIDIA H200"), "fsdp", "bf16"),
    ],
)
def test_strategy_and_precision_have_reasons(
    where: ClusterReport, strategy: str, precision: str
) -> None:
    chosen = plan(config(), where)
    assert (chosen.strategy, chosen.precision) == (strategy, precision)
    assert all(decision.reason for decision in chosen.decisions)


@pytest.mark.parametrize(
    ("train", "total", "micro", "accumulation"),
    [
        # 2 ranks, data.max_length 2048: at most 4 examples fit a micro-batch by default.
        ({}, 32, 4, 4),
        ({"global_batch_size": 2}, 2, 1, 1),
        ({"global_batch_size": 10, "micro_batch_size": 2}, 10, 2, 3),
        ({"gradient_accumulation_steps": 3, "micro_batch_size": 2}, 12, 2, 3),
        ({"gradient_accumulation_steps": 3, "global_batch_size": 12}, 12, 2, 3),
        ({"global_batch_size": 7, "micro_batch_size": 1}, 7, 1, 4),
    ],
)
def test_batch_arithmetic(train: dict[str, int], total: int, micro: int, accumulation: int) -> None:
    chosen = plan(config(train=train), cluster(nodes=2))
    found = (chosen.global_batch_size, chosen.micro_batch_size, chosen.accumulation)
    assert found == (total, micro, accumulation)


@pytest.mark.parametrize(
    ("train", "micro", "accumulation"),
    [
        ({"global_batch_size": 10, "micro_batch_size": 2}, "as configured", "ceil(5 examples"),
        ({"global_batch_size": 8, "micro_batch_size": 16},
         "as configured; a rank has at most 4 of a step", "ceil(4 examples on a rank / 16)"),
    ],
)  # fmt: skip
def test_the_reasons_of_a_batch_are_true(
    train: dict[str, int], micro: str, accumulation: str
) -> None:
    chosen = plan(config(train=train), cluster(nodes=2))
    reasons = {decision.name: decision.reason for decision in chosen.decisions}
    assert reasons["train.micro_batch_size"] == micro
    assert reasons["accumulation"].startswith(accumulation)


def test_contradicting_batch_numbers_are_refused_with_the_product() -> None:
    train = {"global_batch_size": 10, "micro_batch_size": 2, "gradient_accumulation_steps": 3}
    with pytest.raises(ConfigError, match=r"2 x 2 x 3 = 12, found 10") as caught:
        planning.choose_layout(config(train=train), cluster(nodes=2))
    assert caught.value.problems[0].path == "train.global_batch_size"


@pytest.mark.parametrize(
    ("positions", "length", "refused"),
    [(128, 129, True), (128, 128, False), (None, 129, False), (None, 1_000_000, False)],
)
def test_c81_rows_longer_than_the_models_positions_are_refused(
    positions: int | None, length: int, refused: bool
) -> None:
    cfg = config(data={"max_length": length})
    if not refused:
        assert plan(cfg, cluster(nodes=2), positions=positions).config == cfg
        return
    with pytest.raises(ConfigError) as caught:
        plan(cfg, cluster(nodes=2), positions=positions)
    (problem,) = caught.value.problems
    assert str(problem) == (
        "data.max_length: expected at most 128, the positions that the model (llama) was built "
        "for, found 129"
    )


def test_a_plan_names_the_code_that_it_runs() -> None:
    def told(trusted: bool, *names: str) -> list[tuple[Any, str]]:
        cfg = config(model={"trust_remote_code": trusted})
        files = tuple(FileEntry(path=name, size=1, sha256="0") for name in names)
        found = plan(cfg, cluster(), files=files).decisions
        return [(d.value, d.reason) for d in found if d.name == "model.trust_remote_code"]

    assert told(False, "config.json") == []
    assert told(True, "config.json") == [(False, "the model has no code of its own")]
    assert told(True, "a.py", "config.json", "b/c.py") == [
        (True, "as configured: runs a.py, b/c.py")
    ]


@pytest.mark.parametrize(
    ("train", "examples", "per_epoch", "total"),
    [
        ({"global_batch_size": 3}, 7, 3, 3),
        ({"global_batch_size": 3, "epochs": 2}, 7, 3, 6),
        ({"global_batch_size": 3, "epochs": 0.5}, 7, 3, 2),
        ({"global_batch_size": 3, "max_steps": 10}, 7, 3, 10),
    ],
)
def test_steps_count_the_short_last_one(
    train: dict[str, Any], examples: int, per_epoch: int, total: int
) -> None:
    chosen = plan(config(train=train), cluster(nodes=2), examples)
    assert (chosen.steps_per_epoch, chosen.total_steps) == (per_epoch, total)


@pytest.mark.parametrize(("warmup", "steps"), [(0.1, 1), (0, 0), (2, 2), (0.5, 4)])
def test_c62_warmup_share_rounds_up(warmup: float, steps: int) -> None:
    chosen = plan(config(train={"warmup": warmup, "max_steps": 7}), cluster(nodes=2), examples=1000)
    assert chosen.warmup_steps == steps
    assert steps == (math.ceil(warmup * 7) if warmup < 1 else warmup)
    assert steps <= chosen.total_steps == 7
    reason = next(d.reason for d in chosen.decisions if d.name == "warmup_steps")
    assert reason == (f"ceil({warmup:g} x 7 steps)" if warmup < 1 else "as configured")


def test_warmup_longer_than_the_run_says_how_high_the_rate_gets() -> None:
    chosen = plan(
        config(train={"warmup": 14, "max_steps": 7, "learning_rate": 1e-4}), cluster(nodes=2)
    )
    reason = next(d.reason for d in chosen.decisions if d.name == "warmup_steps")
    assert "only reaches 5e-05" in reason


def test_run_folder_defaults_to_the_driver_only_on_one_machine() -> None:
    assert planning.checkpoint_dir(config(), cluster(), on_databricks=False) == "runs"
    with pytest.raises(ConfigError, match="/Volumes/") as caught:
        planning.checkpoint_dir(config(), cluster(nodes=2), on_databricks=False)
    assert caught.value.problems[0].path == "checkpoint.dir"
    with pytest.raises(ConfigError, match="on Databricks"):
        planning.checkpoint_dir(config(), cluster(), on_databricks=True)
    cfg = config(checkpoint={"dir": "/Volumes/a/b/c"})
    assert planning.checkpoint_dir(cfg, cluster(nodes=2), on_databricks=True) == "/Volumes/a/b/c"


def test_a_plan_survives_its_wire_format() -> None:
    chosen = plan(config(train={"learning_rate": 3e-4}), cluster(nodes=2))
    assert RunPlan.model_validate_json(chosen.model_dump_json()) == chosen


def test_a_plan_that_goes_on_has_the_same_rows_and_model() -> None:
    chosen = plan(config(train={"max_steps": 5}), cluster())
    manifest = {"identity": planning.identity(chosen), "state": {"step": 5}}
    planning.check_resume(chosen, manifest, "/r/step-5")
    other = plan(config(train={"max_steps": 4, "seed": 9}), cluster())
    with pytest.raises(CheckpointError) as caught:
        planning.check_resume(other, manifest, "/r/step-5")
    assert "seed was 0, is 9; it is after step 5, the run ends with step 4" in str(caught.value)
    assert "another tracking.run_name" in str(caught.value)
