"""The plan is arithmetic: every number against a value worked out by hand."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest

from dbx_llmtrain import display, layout, planning, resuming
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.errors import CheckpointError, ConfigError
from dbx_llmtrain.estimates import LinearShape, ModelShape
from dbx_llmtrain.records import (
    Artifact,
    Audit,
    FileEntry,
    ModelInfo,
    PreparedData,
    RunPlan,
    SplitInfo,
)
from dbx_llmtrain.reports import ClusterReport, GpuInfo, NodeCopy, NodeReport

GIB = 2**30


# A 7B Llama: 32 blocks of 202,383,360 parameters, embedding and head of 131,072,000 each.
SEVEN = ModelShape(
    model_type="llama", parameters=6_738_415_616, embedding_parameters=131_072_000,
    head_parameters=131_072_000, tied=False, blocks=32, block_parameters=202_383_360,
    blocks_parameters=32 * 202_383_360, hidden=4096, intermediate=11008, heads=32, kv_heads=32,
    head_dim=128, vocab=32000,
    linears=(LinearShape(name="q_proj", inputs=4096, outputs=4096, count=32),),
)  # fmt: skip
TINY = SEVEN.model_copy(
    update={
        "parameters": 200_000, "embedding_parameters": 10_000, "head_parameters": 0, "tied": True,
        "blocks": 2, "block_parameters": 95_000, "blocks_parameters": 190_000, "hidden": 64,
        "intermediate": 128, "heads": 4, "kv_heads": 4, "head_dim": 16, "vocab": 97,
    }
)  # fmt: skip


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
        packages={"deepspeed": "0.19.8"},
        tools=("g++", "ninja"),
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
    shape: ModelShape | None = None,
    *,
    eval_split: SplitInfo | None = None,
    **options: Any,
) -> RunPlan:
    folder = {"source": "/s", "fingerprint": "f"}
    audit = Audit(
        read_rows=examples, train_rows=examples, eval_rows=0, tokens=1000, trained_tokens=400,
        packs=examples, packing_efficiency=1.0,
    )  # fmt: skip
    data = PreparedData(
        artifact=Artifact(kind="data", files=(), **folder), audit=audit, format="text",
        splits={"train": SplitInfo(examples=examples, rows=examples, tokens=1000, trained=400)}
        | ({"eval": eval_split} if eval_split else {}),
        sources={"train": "a.jsonl"},
    )  # fmt: skip
    model = ModelInfo(
        artifact=Artifact(kind="models", files=files, **folder), source="m", model_type="llama",
        vocab_size=97, max_positions=positions, shape=shape,
    )  # fmt: skip
    return planning.make_plan(
        cfg, where, layout.choose_layout(cfg, where), model, data,
        attempt="a", run_name="r", run_dir="/r", **options,
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
    chosen = layout.choose_layout(config(), where)
    assert (chosen.processes, chosen.local_mode, chosen.use_gpu) == expected
    assert all(decision.reason for decision in chosen.decisions)


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
        layout.choose_layout(config(train=train), cluster(nodes=2))
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
    assert layout.checkpoint_dir(config(), cluster(), on_databricks=False) == "runs"
    with pytest.raises(ConfigError, match="/Volumes/") as caught:
        layout.checkpoint_dir(config(), cluster(nodes=2), on_databricks=False)
    assert caught.value.problems[0].path == "checkpoint.dir"
    with pytest.raises(ConfigError, match="on Databricks"):
        layout.checkpoint_dir(config(), cluster(), on_databricks=True)
    cfg = config(checkpoint={"dir": "/Volumes/a/b/c"})
    assert layout.checkpoint_dir(cfg, cluster(nodes=2), on_databricks=True) == "/Volumes/a/b/c"


def test_a_plan_survives_its_wire_format() -> None:
    chosen = plan(config(train={"learning_rate": 3e-4}), cluster(nodes=2))
    assert RunPlan.model_validate_json(chosen.model_dump_json()) == chosen


def reason(chosen: RunPlan, name: str) -> str:
    return next(d.reason for d in chosen.decisions if d.name == name)


@pytest.mark.parametrize(
    ("where", "shape", "strategy", "again"),
    [
        (cluster(), TINY, "single", 0),
        (cluster(nodes=2), TINY, "ddp", 0),
        (cluster(gpus=2), TINY, "ddp", 0),
        # 107.8 GB of DDP do not fit; an eighth and the gathered parameters do.
        (cluster(nodes=1, gpus=8), SEVEN, "fsdp", 0),
    ],
)
def test_auto_takes_what_fits_on_the_probed_cluster(
    where: ClusterReport, shape: ModelShape, strategy: str, again: int
) -> None:
    chosen = plan(config(), where, shape=shape)
    assert (chosen.strategy, chosen.parallel.kind) == (strategy, strategy)
    assert chosen.gradient_checkpointing == again
    assert sum(row.chosen for row in chosen.strategies) == 1
    assert chosen.memory is not None
    text = str(chosen)
    assert "fsdp full, cpu_offload" in text
    assert RunPlan.model_validate_json(chosen.model_dump_json()) == chosen
    assert "<td" in chosen._repr_html_()


def test_the_time_of_a_run_on_gpus_of_known_speed() -> None:
    chosen = plan(config(train={"max_steps": 50}), cluster(nodes=1, gpus=8), shape=SEVEN)
    assert chosen.time is not None
    # 1,000 tokens in 100 rows of which a step has 32: 250 tokens a step.
    assert chosen.time.tokens == 50 * 250
    assert chosen.time.seconds == pytest.approx(12_500 / (chosen.time.tokens_per_second or 1))
    assert "by estimate" in str(chosen)
    cpu = plan(config(), cluster(nodes=2), shape=TINY)
    assert cpu.time is not None
    assert cpu.time.seconds is None
    assert "not known: CPUs; the first steps will tell" in str(cpu)


def test_where_nothing_fits_the_plan_is_refused_with_what_would() -> None:
    where = cluster(nodes=1, gpus=1)  # 60 GiB of host memory: offloading does not fit either
    with pytest.raises(ConfigError) as caught:
        plan(config(), where, shape=SEVEN)
    (problem,) = caught.value.problems
    assert problem.path == "parallel.kind"
    assert problem.message.startswith("no strategy fits: 6,738,415,616 parameters on 1 rank(s): ")
    assert "GPU" in problem.message or "host memory" in problem.message
    assert "What would: 2 nodes like these instead of 1 (fsdp " in problem.message
    assert "LoRA: model.lora={} (" in problem.message


def test_a_strategy_that_is_far_too_large_is_refused_by_its_numbers() -> None:
    where = cluster(nodes=1, gpus=8)
    with pytest.raises(ConfigError, match=r"ddp does not fit \(GPU .* GiB short\)") as caught:
        plan(config(parallel={"kind": "ddp"}), where, shape=SEVEN)
    assert "What would: parallel.kind=auto (fsdp grad_op takes" in str(caught.value)
    fits = plan(config(parallel={"kind": "fsdp"}), where, shape=SEVEN)
    assert reason(fits, "parallel.kind").startswith("as configured; fits: ")


def test_a_strategy_within_the_estimates_tolerance_is_only_warned_of() -> None:
    where = cluster(nodes=1, gpus=8)
    gpu = where.nodes[0].gpus[0]
    found = plan(config(parallel={"kind": "ddp"}), _with_memory(where, gpu, 108), shape=SEVEN)
    assert found.strategy == "ddp"
    assert reason(found, "parallel.kind").startswith("Warning: may run out of memory: no: GPU ")


def test_host_memory_that_others_use_now_is_only_warned_of() -> None:
    """Two ranks of a tiny model take 0.9 GB of a node with 64 GiB, of which 0.5 are free."""
    where = cluster(nodes=2)

    def on(free: float, total: float) -> RunPlan:
        sizes = {"memory_available": int(free * GIB), "memory_total": int(total * GIB)}
        nodes = tuple(node.model_copy(update=sizes) for node in where.nodes)
        return plan(config(), where.model_copy(update={"nodes": nodes}), shape=TINY)

    found = on(0.4, 64)
    assert found.memory is not None
    assert reason(found, "parallel.kind").startswith("Warning: may run out of memory: no: host ")
    with pytest.raises(ConfigError, match=r"no strategy fits: .*host memory .* short"):
        on(0.1, 0.4)


def test_a_disk_that_is_too_small_is_refused() -> None:
    where = cluster(nodes=1, gpus=8)
    nodes = tuple(node.model_copy(update={"disk_free": GIB}) for node in where.nodes)
    with pytest.raises(ConfigError, match=r"disk .* short.*cluster\.local_dir on a bigger disk"):
        plan(config(), where.model_copy(update={"nodes": nodes}), shape=SEVEN)


def _artifact(kind: Literal["models", "data"], gibibytes: int) -> Artifact:
    file = FileEntry(path="file", size=gibibytes * GIB, sha256="0")
    return Artifact(kind=kind, source=f"/shared/{kind}", fingerprint=kind[0], files=(file,))


def test_copies_that_do_not_fit_a_nodes_disk_are_refused_with_both_figures() -> None:
    wanted = (_artifact("models", 20), _artifact("data", 4))
    old = NodeCopy(name="models/old", size=8 * GIB, in_use=False)
    kept = NodeCopy(name="models/kept", size=50 * GIB, in_use=True)
    mine = NodeCopy(name="models/m", size=20 * GIB, in_use=True)

    def check(free: int, *copies: NodeCopy) -> None:
        where = cluster(nodes=2)
        found = {"disk_free": free * GIB, "copies": copies}
        nodes = (where.nodes[0], where.nodes[1].model_copy(update=found))
        where = where.model_copy(update={"nodes": nodes})
        layout.check_disks(layout.choose_layout(config(), where), where, wanted)

    check(24)
    check(16, old, kept)  # what nobody uses makes room
    check(4, mine)  # what is there already takes none
    with pytest.raises(ConfigError) as caught:
        check(10, old, kept)
    (problem,) = caught.value.problems
    assert problem.path == "cluster.local_dir"
    assert "every node needs 24.0 GiB of its own disk" in problem.message
    assert "(20.0 GiB of models and 4.0 GiB of data)" in problem.message
    assert "has 18.0 GiB for them in " in problem.message
    assert "(10.0 GiB free, 8.0 GiB in copies that can be removed" in problem.message
    assert "use nodes with bigger disks, set it to a folder on a bigger one" in problem.message


def test_a_plan_is_refused_where_the_copies_do_not_fit() -> None:
    """Also of a model whose shape, and with it its strategy, nobody knows."""
    where = cluster(nodes=2)
    nodes = tuple(node.model_copy(update={"disk_free": 1000}) for node in where.nodes)
    with pytest.raises(ConfigError, match=r"cluster\.local_dir: every node needs"):
        plan(
            config(),
            where.model_copy(update={"nodes": nodes}),
            files=(FileEntry(path="model.safetensors", size=10**6, sha256="0"),),
        )


def _with_memory(where: ClusterReport, gpu: GpuInfo, gibibytes: int) -> ClusterReport:
    gpus = (gpu.model_copy(update={"memory_total": gibibytes * GIB}),) * 8
    nodes = tuple(node.model_copy(update={"gpus": gpus}) for node in where.nodes)
    return where.model_copy(update={"nodes": nodes})


@pytest.mark.parametrize(
    ("parallel", "changes", "path", "told"),
    [
        ({"kind": "fsdp", "shard": "hybrid"}, {}, "parallel.shard", "all ranks are on one host"),
        ({"kind": "deepspeed"}, {"packages": {}}, "parallel.kind", "deepspeed is not installed"),
        ({"kind": "deepspeed", "offload_optimizer": "cpu"}, {"tools": ("g++",)}, "parallel.kind",
         "nodes lack ninja"),
        ({"kind": "deepspeed", "stage": 3, "offload_optimizer": "nvme"}, {}, "parallel.kind",
         "nodes lack libaio"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", [SEVEN])
def test_a_strategy_that_the_cluster_cannot_run_is_refused_with_the_line_to_change(
    parallel: dict[str, Any], changes: dict[str, Any], path: str, told: str, shape: ModelShape
) -> None:
    where = cluster(nodes=1, gpus=8)
    nodes = tuple(node.model_copy(update=changes) for node in where.nodes)
    with pytest.raises(ConfigError) as caught:
        plan(config(parallel=parallel), where.model_copy(update={"nodes": nodes}), shape=shape)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert told in problem.message
    assert "use ddp, fsdp or auto" in problem.message or "parallel.shard=full" in problem.message


def test_hybrid_on_one_host_is_refused_for_a_model_of_unknown_shape_too() -> None:
    cfg = config(parallel={"kind": "fsdp", "shard": "hybrid"})
    with pytest.raises(ConfigError, match="all ranks are on one host"):
        plan(cfg, cluster(nodes=1, gpus=2))
    assert plan(cfg, cluster(nodes=2, gpus=2)).parallel.shard == "hybrid"


def test_memory_that_nobody_knows_is_sharded() -> None:
    where = cluster(nodes=2)
    blind = {"memory_available": 0, "memory_total": 0}
    nodes = tuple(node.model_copy(update=blind) for node in where.nodes)
    chosen = plan(config(), where.model_copy(update={"nodes": nodes}), shape=TINY)
    assert (chosen.strategy, chosen.parallel.shard) == ("fsdp", "full")
    assert "not known" in reason(chosen, "parallel.kind")


def test_how_ranks_lie_on_hosts() -> None:
    def place(processes: int, *gpus: int) -> layout.Place:
        where = cluster(nodes=len(gpus), gpus=1)
        nodes = tuple(node(f"w{i}", count) for i, count in enumerate(gpus))
        where = where.model_copy(update={"nodes": nodes, "slots": sum(gpus)})
        return layout.find_place(layout.Layout(processes, False, True, ()), where)

    even = place(8, 4, 4)
    assert (even.per_node, even.certain, even.uneven(), even.nodes) == ((4, 4), True, "", 2)
    assert place(6, 4, 2).uneven() == "the hosts have uneven numbers of ranks (4, 2)"
    assert place(4, 4).uneven() == "all ranks are on one host"
    some = place(6, 4, 4)
    assert (some.ranks, some.busiest, some.certain) == (6, 4, False)
    assert "not known before the launch" in some.uneven()
    assert place(9, 4, 4).ranks == 9, "more than GPUs were found: the checks refuse it"


def test_decay_steps_are_whole_steps() -> None:
    def decay(**train: Any) -> tuple[int | None, str]:
        chosen = plan(config(train={"max_steps": 100, "warmup": 10, **train}), cluster())
        return chosen.decay_steps, reason(chosen, "decay_steps")

    assert decay() == (90, "all after the warm-up; cosine down to 0")
    assert decay(schedule="constant") == (None, "train.schedule is constant")
    assert decay(schedule="wsd") == (10, "the last tenth of 100 steps (wsd); wsd down to 0")
    assert decay(decay_steps=0.255) == (26, "ceil(0.255 x 100 steps); cosine down to 0")
    steps, why = decay(decay_steps=95, min_learning_rate=1e-6)
    assert steps == 95
    assert why.startswith("Warning: only 90 steps are left after the warm-up: as configured")


def test_what_a_checkpoint_has_in_common_with_the_run_that_goes_on() -> None:
    base = resuming.identity(plan(config(), cluster(nodes=2), shape=TINY))
    same = resuming.identity(
        plan(config(parallel={"kind": "fsdp"}, train={"micro_batch_size": 1}), cluster(nodes=4))
    )
    assert resuming.differences(base, same) == [], "the strategy changes no number"
    later = {"learning_rate": 0.5, "warmup": 3, "epochs": 3, "eval_every": 2, "weight_decay": 0.1}
    changed = config(
        train=later, data={"cache_dir": "/c"}, checkpoint={"every": 2}, tracking={"run_name": "x"}
    )
    assert resuming.differences(base, resuming.identity(plan(changed, cluster(nodes=2)))) == []


def _of(found: RunPlan, part: str, **changes: Any) -> RunPlan:
    """A plan with another artifact of its ``model`` or ``data``."""
    record = getattr(found, part)
    artifact = record.artifact.model_copy(update=changes)
    return found.model_copy(update={part: record.model_copy(update={"artifact": artifact})})


TOKENIZER = (FileEntry(path="tokenizer.json", size=1, sha256="b" * 64),)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("rows", "data.train: 39 rows then, 41 now (of a.jsonl then, of b.jsonl now)"),
        ("others", "data.train: 39 rows as then, but others, in another order or with other toke"),
        (
            "share",
            "data.train: 39 rows then, 38 now; their share that is held out is another, "
            "data.eval: 0.1 then, 0.2 now",
        ),
        (
            "template",
            "data.chat_template: differs, first difference at line 3: "
            "'{{ m.content }}' then, '{{ m.role }}' now",
        ),
        ("no template", "data.chat_template: a text of 4 lines then, not set now"),
        ("length", "data.max_length: 2048 then, 1024 now"),
        ("packing", "data.packing: true then, false now"),
        ("train_on", "data.train_on: not set then, all now"),
        ("tokenizer", "the tokenizer: tokenizer.json is not as then"),
        ("files", "the model: the files of m at v1 (weights, config.json) are others than then"),
        ("model", "the model: m at v1 then, other now"),
        ("optimizer", "train.optimizer: adamw then, sgd now"),
        ("lora", "model.lora: not set then, r=4, "),
        ("batch", "train.global_batch_size: 32 then, 16 now"),
        ("seed", "train.seed: 0 then, 9 now"),
        ("order", "data.longest_first: false then, true now"),
    ],
)
def test_c86_what_changed_is_refused_by_its_name(what: str, told: str) -> None:
    before = goes_on()
    rows = before.data.splits["train"].model_copy(update={"rows": 41, "digest": "more"})
    other = rows.model_copy(update={"rows": 39, "digest": "others"})
    fewer = rows.model_copy(update={"rows": 38})
    template = TEMPLATE.replace("content", "role")
    after = {
        "rows": lambda: _data(before, splits={"train": rows}, sources={"train": "b.jsonl"}),
        "others": lambda: _data(before, splits={"train": other}),
        "share": lambda: _data(goes_on(data={"eval": 0.2}), splits={"train": fewer}),
        "template": lambda: _data(before, splits={"train": other}, chat_template=template),
        "no template": lambda: _data(before, splits={"train": other}, chat_template=None),
        "length": lambda: _data(goes_on(data={"max_length": 1024}), splits={"train": other}),
        "packing": lambda: goes_on(data={"packing": False}),
        "train_on": lambda: goes_on(data={"train_on": "all"}),
        "tokenizer": lambda: _of(before, "model", files=TOKENIZER),
        "files": lambda: _of(before, "model", fingerprint="other"),
        "model": lambda: _of(_model(before, source="other", revision=None), "model",
                             fingerprint="other"),
        "optimizer": lambda: goes_on(train={"optimizer": "sgd"}),
        "lora": lambda: goes_on(model={"lora": {"r": 4}}),
        "batch": lambda: goes_on(train={"global_batch_size": 16}),
        "seed": lambda: goes_on(train={"seed": 9}),
        "order": lambda: goes_on(data={"longest_first": True}),
    }[what]()  # fmt: skip
    manifest = {"identity": resuming.identity(before), "state": {"step": 1}}
    resuming.check_resume(before, manifest, "/r/step-1")
    with pytest.raises(CheckpointError) as caught:
        resuming.check_resume(after, manifest, "/r/step-1")
    text = str(caught.value)
    assert text.startswith(f"this run cannot go on from /r/step-1: {told}")
    assert text.count("; ") == (what == "share"), "nothing else is blamed"
    advice = "Undo the change, or start afresh under another tracking.run_name"
    others = after.data.splits["train"].digest != before.data.splits["train"].digest
    assert text.endswith(advice) is not others
    assert (f"{advice} (to train the same model further on other rows: " in text) is others


TEMPLATE = "{% for m in messages %}\n<\n{{ m.content }}\n{% endfor %}"


def goes_on(**sections: Any) -> RunPlan:
    """A plan of 39 rows in a.jsonl, of a model at a revision."""
    sections = {"data": {"eval": 0.1} | sections.pop("data", {})} | sections
    split = SplitInfo(examples=10, rows=10, tokens=100, trained=40)
    found = plan(config(**sections), cluster(nodes=2), eval_split=split)
    train = found.data.splits["train"].model_copy(update={"rows": 39, "digest": "some"})
    found = _data(found, splits={"train": train}, chat_template=TEMPLATE)
    return _model(found, source="m", revision="v1")


def _data(found: RunPlan, **changes: Any) -> RunPlan:
    changes["splits"] = found.data.splits | changes.get("splits", {})
    return found.model_copy(update={"data": found.data.model_copy(update=changes)})


def _model(found: RunPlan, **changes: Any) -> RunPlan:
    return found.model_copy(update={"model": found.model.model_copy(update=changes)})


def test_nested_settings_are_told_one_by_one_and_long_ones_shortened() -> None:
    before = resuming.identity(goes_on(model={"lora": {"r": 4, "alpha": 8}}))
    after = resuming.identity(goes_on(model={"lora": {"r": 16, "alpha": 8}}))
    assert resuming.differences(before, after) == ["model.lora.r: 4 then, 16 now"]
    one, other = "{{ a }}" * 40, "{{ a }}" * 20 + "{{ b }}" * 20
    text = "; ".join(resuming.differences({"chat_template": one}, {"chat_template": other}))
    assert text.startswith("data.chat_template: differs, first difference at line 1: '")
    assert "{{ a }}{{ b }}" in text
    assert len(text) < 250
    assert resuming.differences({}, {"lora": {"x": "y" * 900}})[0].endswith("yyy... now")


def test_a_checkpoint_of_another_version_is_refused_in_words() -> None:
    manifest = {"identity": {"model": "f00d", "data": "f00d"}, "state": {"step": 1}}
    with pytest.raises(CheckpointError, match="s-1: it was written by another version of dbx_llm"):
        resuming.check_resume(goes_on(), manifest, "/r/s-1")
    assert resuming.judged_by_other_rows(goes_on(), manifest) == ""


def test_held_out_rows_may_change_and_the_plan_says_so() -> None:
    before = goes_on(train={"eval_max_rows": 5})
    state = {"step": 1, "held_out": resuming.held_out(before)}
    manifest = {"identity": resuming.identity(before), "state": state}
    assert resuming.starting_point(before, manifest, f"{before.run_dir}/checkpoints/step-1") == ()

    def told(after: RunPlan) -> str:
        resuming.check_resume(after, manifest, "/r/step-1")
        found = resuming.starting_point(after, manifest, f"{before.run_dir}/checkpoints/step-1")
        assert [(one.name, one.value) for one in found] == [("held-out rows", "changed")]
        return found[0].reason

    split = before.data.splits["eval"]
    more = split.model_copy(update={"rows": 12, "digest": "x"})
    assert told(_data(before, splits={"eval": more})) == (
        "held-out rows changed since step 1 (data.eval: 10 then, 12 now): eval metrics before and "
        "after are of different rows, so that the best so far counts no more"
    )
    other = split.model_copy(update={"digest": "x"})
    assert "(data.eval: 10 as then, but others)" in told(_data(before, splits={"eval": other}))
    named = {"train": before.data.splits["train"], "eval-new": split}
    renamed = before.data.model_copy(update={"splits": named})
    assert "(data.eval: 10 then, none now; data.eval.new: none then, 10 now)" in told(
        before.model_copy(update={"data": renamed})
    )
    assert "(data.eval: 5 examples between the steps then, 10 now)" in told(goes_on())
    tested = _data(before, splits={"test": other})
    assert resuming.starting_point(tested, manifest, f"{before.run_dir}/checkpoints/step-1") == ()


@pytest.mark.parametrize("export", [True, False])
def test_a_plan_without_a_step_to_train_says_so(export: bool) -> None:
    found = plan(config(train={"max_steps": 5}, checkpoint={"export": export}), cluster())
    manifest = {"identity": resuming.identity(found), "state": {"step": 5}}
    place = f"{found.run_dir}/checkpoints/step-00000005"
    (none_left,) = resuming.starting_point(found, manifest, place)
    done = "evaluated and exported" if export else "evaluated"
    assert (none_left.name, none_left.value, none_left.reason) == (
        "steps to train", 0,
        f"nothing is left to train: all 5 are done in {place}; its model is {done}",
    )  # fmt: skip
    first, foreign = resuming.starting_point(found, manifest, "/other/checkpoints/step-00000005")
    assert first.value == 0
    assert (foreign.name, foreign.value) == ("resumes from", "step 5")
    assert foreign.reason.startswith("another run: times, losses before and the best so far are")


def test_a_plan_that_goes_on_has_the_same_rows_and_model() -> None:
    chosen = plan(config(train={"max_steps": 5}), cluster())
    manifest = {"identity": resuming.identity(chosen), "state": {"step": 5}}
    resuming.check_resume(chosen, manifest, "/r/step-5")
    other = plan(config(train={"max_steps": 4, "seed": 9}), cluster())
    with pytest.raises(CheckpointError) as caught:
        resuming.check_resume(other, manifest, "/r/step-5")
    assert "seed: 0 then, 9 now; it is after step 5, the run ends with step 4" in str(caught.value)
    assert "another tracking.run_name" in str(caught.value)


def held_out(cfg: TrainConfig, began: float | None = None, free: int | None = None) -> RunPlan:
    """A plan of 100 steps (10 an epoch) with held-out rows, of a model of 200,000 parameters."""
    split = SplitInfo(examples=10, rows=10, tokens=100, trained=40)
    return plan(
        cfg, cluster(nodes=2), shape=TINY, eval_split=split, began=began, free=free,
        files=(FileEntry(path="model.safetensors", size=400_000, sha256="0"),),
    )  # fmt: skip


STEPS = {"max_steps": 100, "global_batch_size": 10}


def decided(found: RunPlan) -> dict[str, tuple[Any, str]]:
    return {one.name: (one.value, one.reason) for one in found.decisions}


@pytest.mark.parametrize(
    ("checkpoint", "value", "reason"),
    [
        ({}, "at the end", "the last 2 stay"),
        ({"every": 20, "keep_last": "all"}, "every 20 steps, at the end", "all stay"),
        ({"every": "epoch"}, "every epoch (10 steps), at the end", "the last 2 stay"),
        ({"every_minutes": 7.5}, "every 7.5 minutes, at the end", "the last 2 stay"),
        (
            {"keep_best": 3, "keep_last": 1},
            "after an evaluation that makes the list of the best, at the end",
            "the last 1 stay, and the best 3 by eval_loss (less is better)",
        ),
        (
            {"keep_best": 1, "metric": "accuracy"},
            "after an evaluation that makes the list of the best, at the end",
            "the last 2 stay, and the best 1 by accuracy (more is better)",
        ),
    ],
)
def test_the_plan_says_which_checkpoints_there_will_be(
    checkpoint: dict[str, Any], value: str, reason: str
) -> None:
    found = held_out(config(train=STEPS | {"eval_every": 10}, checkpoint=checkpoint))
    assert decided(found)["checkpoints"] == (value, reason)


def test_the_plan_says_when_a_run_may_end_early() -> None:
    train = STEPS | {"eval_every": 10, "max_time": "01:00:00:01", "early_stopping": 3}
    found = decided(held_out(config(train=train), began=0.0))
    assert found["train.max_time"] == (
        "01:00:00:01",
        "of the whole call, with the last evaluation, checkpoint and export: ends by 1970-01-02 "
        "00:00:01 UTC",
    )
    assert found["train.early_stopping"] == (
        3, "ends after 3 evaluation(s) in a row without a better eval_loss (less is better)",
    )  # fmt: skip
    train["early_stopping"] = {"patience": 1, "min_delta": 0.5}
    found = decided(held_out(config(train=train)))
    assert found["train.early_stopping"][1].endswith("(less is better) by more than 0.5")
    assert "ends by" not in found["train.max_time"][1]


# A checkpoint is 200,000 x 12 bytes = 2.3 MiB, the export 391 KiB.
@pytest.mark.parametrize(
    ("sections", "total", "reason"),
    [
        ({}, 2_800_000, "1 x 2.3 MiB (as many as are written) + 1 x 391 KiB export"),
        (
            {"checkpoint": {"every": 10}},
            7_600_000,
            "3 x 2.3 MiB (checkpoint.keep_last 2 + 1 that is being written) + 1 x 391 KiB export",
        ),
        (
            {"checkpoint": {"every": 10, "keep_best": 2, "export": False}},
            12_000_000,
            "5 x 2.3 MiB (checkpoint.keep_last 2 + checkpoint.keep_best 2 + 1 that is being",
        ),
        (
            {"checkpoint": {"keep_best": 1}},
            4 * 2_400_000 + 800_000,
            "4 x 2.3 MiB (checkpoint.keep_last 2 + checkpoint.keep_best 1 + 1 that is being",
        ),
        ({"checkpoint": {"every": 10, "keep_last": "all"}}, 24_400_000, "10 x 2.3 MiB (all of"),
        ({"checkpoint": {"every_minutes": 1}}, 7_600_000, "3 x 2.3 MiB (checkpoint.keep_last 2"),
        ({"checkpoint": {"every": 60}}, 5_200_000, "2 x 2.3 MiB (as many as are written)"),
        ({"checkpoint": {"every": "epoch", "keep_last": 20}}, 24_400_000, "10 x 2.3 MiB (as many"),
    ],
)
def test_the_room_for_checkpoints_is_planned_and_checked(
    sections: dict[str, Any], total: int, reason: str
) -> None:
    cfg = config(train=STEPS | {"eval_every": 10}, **sections)
    size, why = decided(held_out(cfg, free=total))["checkpoint space"]
    assert why.startswith(reason)
    assert why.endswith(f", of {display.size(total)} that are free")
    assert size == display.size(total)
    with pytest.raises(CheckpointError) as caught:
        held_out(cfg, free=total - 1)
    assert str(caught.value).startswith(
        f"checkpoint.dir: the run needs {display.size(total)} for checkpoints and export ({reason}"
    )
    assert "lower checkpoint.keep_last and checkpoint.keep_best" in str(caught.value)
    assert "free" not in decided(held_out(cfg))["checkpoint space"][1], "it is not known"


def test_the_room_is_not_told_where_no_size_is_known() -> None:
    assert "checkpoint space" not in decided(plan(config(), cluster(nodes=2), free=0))


def test_what_needs_evaluations_is_refused_where_no_rows_are_left_for_them() -> None:
    """A share of the rows may come to none of them."""
    settings: dict[str, Any] = {
        "train": {"eval_every": 1, "early_stopping": 1},
        "checkpoint": {"keep_best": 1},
    }
    with pytest.raises(ConfigError, match="needs held-out rows") as caught:
        plan(config(data={"eval": 0.01}, **settings), cluster(nodes=2))
    assert [problem.path for problem in caught.value.problems] == [
        "train.early_stopping", "checkpoint.keep_best", "train.eval_every",
    ]  # fmt: skip
    # Where none were asked for, a metric of the user's own may be what decides.
    assert "metrics of your own before the first step, every 1 steps" in str(
        plan(config(**settings), cluster(nodes=2))
    )
    asked = config(train={"eval_every": "epoch", "sample_prompts": ["x"]})
    assert "answers before the first step, every epoch and after" in str(
        plan(asked, cluster(nodes=2))
    )
