"""What will run and why: pure arithmetic over the configuration, the cluster and the data.

Nothing here reads a file, asks the cluster or imports torch; every number of a plan has a reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.errors import CheckpointError, ConfigError, Problem
from dbx_llmtrain.records import ClusterReport, Decision, ModelInfo, PreparedData, RunPlan

DEFAULT_GLOBAL_BATCH = 32
_AUTO_MICRO_BATCH_TOKENS = 8192
# GPUs whose tensor cores do not compute in bf16 (compute capability below 8.0).
_WITHOUT_BF16 = ("T4", "V100", "P100", "P40", "P4", "K80", "M60", "TITAN", "GTX")


@dataclass(frozen=True)
class Layout:
    """Which processes run where. Decided before anything is staged or launched."""

    processes: int
    local_mode: bool
    use_gpu: bool
    decisions: tuple[Decision, ...]


def choose_layout(cfg: TrainConfig, cluster: ClusterReport) -> Layout:
    """Number of ranks, their machine and device, from the probe.

    Raises ``ConfigError`` where the batch cannot be cut for that many ranks: the earliest moment
    at which that is known.
    """
    local, why_local = _local_mode(cfg, cluster)
    use_gpu, why_gpu = _use_gpu(cfg, cluster, local)
    processes, why_processes = _processes(cfg, cluster, local, use_gpu)
    _, problems = _batch(cfg, processes)
    if problems:
        raise ConfigError(problems)
    decisions = (
        Decision(name="cluster.local_mode", value=local, reason=why_local),
        Decision(name="cluster.use_gpu", value=use_gpu, reason=why_gpu),
        Decision(name="cluster.processes", value=processes, reason=why_processes),
    )
    return Layout(processes, local, use_gpu, decisions)


def checkpoint_dir(cfg: TrainConfig, cluster: ClusterReport, *, on_databricks: bool) -> str:
    """Where run folders lie: as configured, or ``./runs`` where one machine is the whole cluster.

    Raises ``ConfigError`` on a cluster whose nodes would not see the driver's own folder.
    """
    if cfg.checkpoint.dir:
        return cfg.checkpoint.dir
    elsewhere = [node.host for node in cluster.nodes if node.host != cluster.driver.host]
    if not on_databricks and not elsewhere:
        return "runs"
    where = "on Databricks" if on_databricks else f"with workers on {', '.join(elsewhere[:3])}"
    raise ConfigError(
        [
            Problem(
                "checkpoint.dir",
                f"missing: {where} the run folder has to lie on storage that the driver and every "
                "node see; set it to a volume, such as /Volumes/main/default/llm/runs",
            )
        ]
    )


def make_plan(
    cfg: TrainConfig,
    cluster: ClusterReport,
    layout: Layout,
    model: ModelInfo,
    data: PreparedData,
    *,
    attempt: str,
    run_name: str,
    run_dir: str,
    resume_from: str | None = None,
) -> RunPlan:
    """The plan of one run. Raises ``ConfigError`` with everything that cannot work."""
    strategy, why_strategy = _strategy(cfg, layout.processes)
    precision, why_precision = _precision(cfg, cluster, layout)
    batch, problems = _batch(cfg, layout.processes)
    assert not problems, "choose_layout has refused them"
    check_length(cfg, model)
    schedule = _schedule(cfg, data, batch)
    return RunPlan(
        attempt=attempt,
        run_name=run_name,
        run_dir=run_dir,
        config=cfg,
        world_size=layout.processes,
        local_mode=layout.local_mode,
        use_gpu=layout.use_gpu,
        strategy=strategy,
        precision=precision,
        attention=cfg.model.attention,
        global_batch_size=batch.total,
        micro_batch_size=batch.micro,
        accumulation=batch.accumulation,
        examples=data.train_examples,
        steps_per_epoch=schedule.steps_per_epoch,
        total_steps=schedule.total,
        warmup_steps=schedule.warmup,
        local_dir=cfg.cluster.local_dir,
        model=model,
        data=data,
        resume_from=resume_from,
        decisions=(
            *layout.decisions,
            *_code(cfg, model),
            Decision(name="parallel.kind", value=strategy, reason=why_strategy),
            Decision(name="train.precision", value=precision, reason=why_precision),
            *batch.decisions,
            *schedule.decisions,
        ),
    )


def identity(plan: RunPlan) -> dict[str, Any]:
    """What a run that goes on from a checkpoint must have in common with the one that wrote it."""
    order = {"shuffle", "group_by_length", "longest_first", "objective", "mlm_probability"}
    return {
        "model": plan.model.artifact.fingerprint,
        "data": plan.data.artifact.fingerprint,
        "global_batch_size": plan.global_batch_size,
        "seed": plan.config.train.seed,
        **plan.config.data.model_dump(include=order),
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What of ``now`` was another ``before``, in words."""
    return [
        f"{name} was {before.get(name)!r}, is {value!r}"
        for name, value in now.items()
        if before.get(name) != value
    ]


def check_resume(plan: RunPlan, manifest: Mapping[str, Any], folder: str) -> None:
    """Raise ``CheckpointError`` where a plan cannot go on from a checkpoint with this manifest."""
    changed = differences(manifest.get("identity", {}), identity(plan))
    step = manifest.get("state", {}).get("step", 0)
    if step > plan.total_steps:
        changed.append(f"it is after step {step}, the run ends with step {plan.total_steps}")
    if changed:
        raise CheckpointError(
            f"this run cannot go on from {folder}: {'; '.join(changed)}. Undo the change, or start "
            "afresh under another tracking.run_name"
        )


def _local_mode(cfg: TrainConfig, cluster: ClusterReport) -> tuple[bool, str]:
    if cfg.cluster.local_mode != "auto":
        return cfg.cluster.local_mode, "as configured"
    if cluster.local:
        return True, f"Spark runs on this machine alone ({cluster.master})"
    return False, f"{len(cluster.executors)} executors on {len(cluster.nodes)} node(s)"


def _use_gpu(cfg: TrainConfig, cluster: ClusterReport, local: bool) -> tuple[bool, str]:
    if cfg.cluster.use_gpu != "auto":
        return cfg.cluster.use_gpu, "as configured"
    gpus = _gpu_count(cluster, local)
    where = "the driver's machine" if local else "the workers"
    return gpus > 0, f"{gpus} GPU(s) on {where}"


def _gpu_count(cluster: ClusterReport, local: bool) -> int:
    nodes = (cluster.driver,) if local else cluster.nodes
    return sum(len(node.gpus) for node in nodes)


def _processes(
    cfg: TrainConfig, cluster: ClusterReport, local: bool, use_gpu: bool
) -> tuple[int, str]:
    if cfg.cluster.processes != "auto":
        return cfg.cluster.processes, "as configured"
    if cfg.parallel.kind == "single":
        return 1, "parallel.kind is single"
    if use_gpu:
        gpus = _gpu_count(cluster, local)
        count = gpus if local else cluster.slots
        return max(1, count), f"one for every GPU ({gpus} found, {cluster.slots} task slots)"
    if local:
        return 1, "CPU in local mode: one process uses every core"
    return max(1, len(cluster.executors)), "CPU: one for every executor"


def _strategy(cfg: TrainConfig, processes: int) -> tuple[Literal["single", "ddp", "fsdp"], str]:
    kind = cfg.parallel.kind
    if kind != "auto":
        return kind, "as configured"
    if processes == 1:
        return "single", "one process"
    return "fsdp", f"{processes} processes: weights, gradients and optimizer state are sharded"


def _precision(
    cfg: TrainConfig, cluster: ClusterReport, layout: Layout
) -> tuple[Literal["fp32", "bf16"], str]:
    if cfg.train.precision != "auto":
        return cfg.train.precision, "as configured; weights and optimizer state are fp32"
    if not layout.use_gpu:
        return "fp32", "CPU"
    nodes = (cluster.driver,) if layout.local_mode else cluster.nodes
    names = sorted({gpu.name for node in nodes for gpu in node.gpus})
    old = [name for name in names if set(name.replace("-", " ").split()) & set(_WITHOUT_BF16)]
    if old:
        return "fp32", f"{', '.join(old)} does not compute in bf16"
    return "bf16", f"{', '.join(names)}; weights and optimizer state are fp32"


@dataclass(frozen=True)
class _Batch:
    total: int
    micro: int
    accumulation: int
    decisions: tuple[Decision, ...]


def _batch(cfg: TrainConfig, ranks: int) -> tuple[_Batch, list[Problem]]:
    """Global batch, micro-batch and accumulation that agree, or why they cannot."""
    train = cfg.train
    total, micro, steps = (
        train.global_batch_size,
        None if train.micro_batch_size == "auto" else train.micro_batch_size,
        train.gradient_accumulation_steps,
    )
    why_total, why_micro = "as configured", "as configured"
    problems: list[Problem] = []
    if total is None and steps is not None:
        if micro is None:
            micro, why_micro = _auto_micro(cfg, None, ranks)
        total = micro * ranks * steps
        why_total = f"{micro} micro-batch x {ranks} ranks x {steps} accumulation steps"
    elif total is None:
        total, why_total = DEFAULT_GLOBAL_BATCH, "default"
    if micro is None and steps is not None:
        micro = max(1, math.ceil(total / (ranks * steps)))
        why_micro = f"ceil({total} / {ranks} ranks / {steps} accumulation steps)"
    elif micro is None:
        micro, why_micro = _auto_micro(cfg, total, ranks)
    if steps is not None and micro * ranks * steps != total:
        problems.append(
            Problem(
                "train.global_batch_size",
                f"expected micro-batch x ranks x accumulation = {micro} x {ranks} x {steps} = "
                f"{micro * ranks * steps}, found {total}: give one of global_batch_size and "
                "gradient_accumulation_steps",
            )
        )
    share = math.ceil(total / ranks)
    accumulation = math.ceil(share / micro)
    if micro > share:
        why_micro += f"; a rank has at most {share} of a step"
    decisions = (
        Decision(name="train.global_batch_size", value=total, reason=why_total),
        Decision(name="train.micro_batch_size", value=micro, reason=why_micro),
        Decision(
            name="accumulation",
            value=accumulation,
            reason=f"ceil({share} examples on a rank / {micro})",
        ),
    )
    return _Batch(total, micro, accumulation, decisions), problems


def _auto_micro(cfg: TrainConfig, total: int | None, ranks: int) -> tuple[int, str]:
    fits = max(1, _AUTO_MICRO_BATCH_TOKENS // cfg.data.max_length)
    share = fits if total is None else math.ceil(total / ranks)
    reason = f"at most {_AUTO_MICRO_BATCH_TOKENS} tokens at data.max_length {cfg.data.max_length}"
    return (fits, reason) if fits < share else (share, "the whole share of a rank")


def _code(cfg: TrainConfig, model: ModelInfo) -> tuple[Decision, ...]:
    if not cfg.model.trust_remote_code:
        return ()
    files = [entry.path for entry in model.artifact.files if entry.path.endswith(".py")]
    why = f"as configured: runs {', '.join(files)}" if files else "the model has no code of its own"
    return (Decision(name="model.trust_remote_code", value=bool(files), reason=why),)


def check_length(cfg: TrainConfig, model: ModelInfo) -> None:
    """Raise ``ConfigError`` for rows longer than the model has positions. Asked before the rows are
    read, too."""
    if model.max_positions is None or cfg.data.max_length <= model.max_positions:
        return
    raise ConfigError(
        [
            Problem(
                "data.max_length",
                f"expected at most {model.max_positions}, the positions that the model "
                f"({model.model_type}) was built for, found {cfg.data.max_length}",
            )
        ]
    )


@dataclass(frozen=True)
class _Schedule:
    steps_per_epoch: int
    total: int
    warmup: int
    decisions: tuple[Decision, ...]


def _schedule(cfg: TrainConfig, data: PreparedData, batch: _Batch) -> _Schedule:
    kind = "packs" if cfg.data.packing else "rows"
    per_epoch = math.ceil(data.train_examples / batch.total)
    total, why_total = _total_steps(cfg, per_epoch)
    warmup, why_warmup = _warmup(cfg, total)
    decisions = (
        Decision(
            name="steps_per_epoch",
            value=per_epoch,
            reason=f"{data.train_examples} {kind} / {batch.total}, the last step may be short",
        ),
        Decision(name="total_steps", value=total, reason=why_total),
        Decision(name="warmup_steps", value=warmup, reason=why_warmup),
        Decision(
            name="tokens_per_step",
            value=round(data.audit.tokens / per_epoch),
            reason=f"{data.audit.tokens} tokens ({data.audit.trained_tokens} trained) in "
            f"{data.audit.train_rows} rows, {data.train_examples} {kind}",
        ),
    )
    return _Schedule(per_epoch, total, warmup, decisions)


def _total_steps(cfg: TrainConfig, steps_per_epoch: int) -> tuple[int, str]:
    if cfg.train.max_steps is not None:
        epochs = cfg.train.max_steps / steps_per_epoch
        return cfg.train.max_steps, f"train.max_steps ({epochs:.2f} epochs)"
    epochs = 1.0 if cfg.train.epochs is None else cfg.train.epochs
    return math.ceil(epochs * steps_per_epoch), f"{epochs:g} epoch(s) of {steps_per_epoch} steps"


def _warmup(cfg: TrainConfig, total: int) -> tuple[int, str]:
    warmup = cfg.train.warmup
    if warmup < 1:
        steps = math.ceil(warmup * total)
        return steps, f"ceil({warmup:g} x {total} steps)"
    steps = int(warmup)
    if steps > total:
        highest = cfg.train.learning_rate * total / steps
        return steps, f"longer than the run: the learning rate only reaches {highest:.3g}"
    return steps, "as configured"
