"""What will run and why: pure arithmetic over the configuration, the cluster and the data.

Nothing here reads a file, asks the cluster or imports torch; every number of a plan has a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dbx_llmtrain import batches, choosing, hardware, milestones, timing, zero_config
from dbx_llmtrain.advice import (
    nearest,
    nothing_fits,
    refusals,
    refused,
    what_would_fit,
    without_offloading,
)
from dbx_llmtrain.choosing import Case, Choice
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.errors import ConfigError, Problem
from dbx_llmtrain.estimates import ModelShape
from dbx_llmtrain.forecasts import Decision, Forecast, StrategyRow, TimeEstimate, strategy_name
from dbx_llmtrain.layout import (
    Layout,
    Place,
    check_disks,
    choose_layout,
    choose_precision,
    find_place,
    gpus_of,
    memory_decision,
)
from dbx_llmtrain.model_sections import ParallelConfig
from dbx_llmtrain.records import ModelInfo, PreparedData, RunPlan
from dbx_llmtrain.reports import ClusterReport, GpuInfo

_TOLERANCE = 0.15
"""Of an estimate of memory: a strategy that was asked for is only refused where it lacks more."""


@dataclass(frozen=True)
class _Picked:
    """The strategy, micro-batch and checkpointing of a run, with what led to them."""

    parallel: ParallelConfig
    micro: int
    again: int
    why_micro: str
    decisions: tuple[Decision, ...]
    rows: tuple[StrategyRow, ...] = ()


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
    began: float | None = None,
    free: int | None = None,
) -> RunPlan:
    """The plan of one run. Raises ``ConfigError`` with everything that cannot work, and
    ``CheckpointError`` where the ``free`` bytes of the run folder's storage do not suffice."""
    precision, why = choose_precision(cfg, cluster, layout)
    check_length(cfg, model)
    if cfg.data.eval is not None or any(role.startswith("eval") for role in data.sources):
        milestones.check_held_out(cfg, data.eval_splits)  # no row may be left of them
    artifacts = (model.artifact, data.artifact)
    check_disks(layout, cluster, artifacts)
    place, gpus = find_place(layout, cluster, artifacts), gpus_of(layout, cluster)
    case = _case(cfg, model, data, place, precision)
    picked = _pick(cfg, place, case)
    batch = batches.cut_batch(cfg, layout.processes, picked.micro, picked.why_micro)
    steps = batches.count_steps(cfg, data, batch)
    tokens = round(steps.total * data.audit.tokens / steps.per_epoch)
    space = milestones.plan_space(cfg, model, _checkpoint_bytes(picked, model), steps, free)
    names: dict[str, Any] = {"attempt": attempt, "run_name": run_name, "run_dir": run_dir}
    return RunPlan(
        **names,
        config=cfg,
        world_size=layout.processes,
        local_mode=layout.local_mode,
        use_gpu=layout.use_gpu,
        strategy=_kind(picked.parallel),
        precision=precision,
        parallel=_parallel(cfg, layout, picked, batch, precision),
        gradient_checkpointing=picked.again,
        attention=cfg.model.attention,
        global_batch_size=batch.total,
        micro_batch_size=batch.micro,
        accumulation=batch.accumulation,
        examples=data.train_examples,
        steps_per_epoch=steps.per_epoch,
        total_steps=steps.total,
        warmup_steps=steps.warmup,
        decay_steps=steps.decay,
        local_dir=cfg.cluster.local_dir,
        model=model,
        data=data,
        resume_from=resume_from,
        began=began,
        decisions=(
            *layout.decisions,
            *_code(cfg, model),
            *_device(place, gpus, precision, why),
            *[each for part in (picked, batch, steps) for each in part.decisions],
            *milestones.plan_milestones(cfg, steps, began),
            *space,
        ),
        strategies=picked.rows,
        time=_time(case, picked.rows, gpus, tokens) if case else None,
    )


def forecast(
    cfg: TrainConfig, told: str, cluster: ClusterReport, shape: ModelShape, *, model: str
) -> Forecast:
    """What would run on a ``cluster`` that was ``told`` in words. Unlike a plan it is also made
    where nothing fits. Raises ``ConfigError`` for a batch that cannot be cut, a strategy that such
    a cluster cannot run, and a DeepSpeed configuration that contradicts the rest."""
    layout = choose_layout(cfg, cluster)
    precision, why = choose_precision(cfg, cluster, layout)
    place = find_place(layout, cluster, told=True)
    # Weights lie on every node's disk in bf16, as most models come.
    case = Case(cfg, shape, place, precision, cfg.data.max_length, 2 * shape.parameters)
    choice = choosing.choose(case)
    row = _asked_for(case, choice)
    if row is None:
        raise ConfigError([Problem("parallel.kind", refusals(choice))])
    fits = choice.chosen is not None and choice.chosen.fits is not False
    rows = tuple(
        each.model_copy(update={"chosen": True}) if each.name == row.name else each
        for each in choice.rows
    )
    picked = _picked(case, row.model_copy(update={"chosen": True}), choice.reason, rows)
    batch = batches.cut_batch(cfg, layout.processes, picked.micro, picked.why_micro)
    steps = cfg.train.max_steps
    tokens = steps * batch.total * cfg.data.max_length if steps else None
    gpus = gpus_of(layout, cluster)
    return Forecast(
        cluster=told,
        config=cfg,
        model=model,
        shape=shape,
        world_size=layout.processes,
        nodes=len(place.per_node),
        parallel=_parallel(cfg, layout, picked, batch, precision),
        precision=precision,
        gradient_checkpointing=picked.again,
        global_batch_size=batch.total,
        micro_batch_size=batch.micro,
        accumulation=batch.accumulation,
        total_steps=steps,
        fits=fits,
        advice=() if row.fits else tuple(what_would_fit(case)),
        decisions=(
            *_configured(cfg, layout),
            *_device(place, gpus, precision, why),
            *picked.decisions,
            *batch.decisions,
        ),
        strategies=rows,
        time=_estimated(case, row, gpus, tokens),
    )


def _checkpoint_bytes(picked: _Picked, model: ModelInfo) -> int | None:
    """Of one checkpoint: by the estimate, or where the shape is not known weights and AdamW's two
    numbers in fp32."""
    row = next((row for row in picked.rows if row.chosen), None)
    if row is not None and row.estimate is not None:
        return row.estimate.checkpoint
    return 12 * model.parameters if model.parameters else None


def _configured(cfg: TrainConfig, layout: Layout) -> list[Decision]:
    """The number of ranks where it is not that of the GPUs that were told."""
    asked = cfg.cluster.processes != "auto" or cfg.parallel.kind == "single"
    return [each for each in layout.decisions if asked and each.name == "cluster.processes"]


def _parallel(
    cfg: TrainConfig,
    layout: Layout,
    picked: _Picked,
    batch: batches.Batch,
    precision: hardware.Precision,
) -> ParallelConfig:
    """The strategy with DeepSpeed's configuration, where there is one, read and checked."""
    found: ParallelConfig = zero_config.planned(
        picked.parallel,
        micro_batch=batch.micro,
        precision=precision,
        max_grad_norm=cfg.train.max_grad_norm,
        use_gpu=layout.use_gpu,
    )
    return found


def _device(
    place: Place, gpus: Sequence[GpuInfo], precision: hardware.Precision, why: str
) -> list[Decision]:
    """What ranks compute in, and what room they have."""
    room = memory_decision(place, gpus)
    return [
        Decision(name="train.precision", value=precision, reason=why),
        *([room] if room else []),
    ]


def _case(
    cfg: TrainConfig,
    model: ModelInfo,
    data: PreparedData,
    place: Place,
    precision: hardware.Precision,
) -> Case | None:
    """What the arithmetic of memory is about; ``None`` where the model's shape is not known."""
    if model.shape is None:
        return None
    longest = 2 ** len(data.audit.lengths) - 1 if data.audit.lengths else cfg.data.max_length
    if cfg.data.packing:
        longest = max(1, data.audit.tokens)
    return Case(
        cfg,
        model.shape,
        place,
        precision,
        length=min(cfg.data.max_length, longest),
        model_bytes=model.artifact.size,
        data_bytes=data.artifact.size,
    )


def _pick(cfg: TrainConfig, place: Place, case: Case | None) -> _Picked:
    """The strategy with its micro-batch and checkpointing. Raises ``ConfigError`` where nothing
    fits, and for a strategy that this cluster cannot run."""
    if case is None:
        return _without_shape(cfg, place)
    choice = choosing.choose(case)
    row = _asked_for(case, choice)
    if row is None or _lacks(case, row):
        raise ConfigError([nothing_fits(case, choice)])
    if not row.chosen:
        row = row.model_copy(update={"chosen": True})
        others = tuple(row if each.name == row.name else each for each in choice.rows)
        return _picked(case, row, "nothing fits for certain", others)
    return _picked(case, row, choice.reason, choice.rows)


def _asked_for(case: Case, choice: Choice) -> StrategyRow | None:
    """The row that is taken, or lacks least. Raises ``ConfigError`` for a strategy that was asked
    for and cannot run on this cluster: no other one takes its place."""
    if case.cfg.parallel.kind != "auto" and choice.chosen is None:
        wanted = choosing.resolve(case.cfg.parallel)
        raise ConfigError([refused(wanted, choosing.refusal(case, wanted))])
    return nearest(case, choice)


def _picked(case: Case, row: StrategyRow, reason: str, rows: tuple[StrategyRow, ...]) -> _Picked:
    """A row of the table as the choice of a run."""
    if row.fits is False:
        reason = f"Warning: may run out of memory: {row.why}; {reason}"
    elif case.cfg.parallel.kind != "auto":
        reason += f"; fits{'' if row.fits is None else ':'} {row.verdict.removeprefix('yes, ')}"
    if row.fits and (more := without_offloading(case, row)):
        reason += f"; nothing is offloaded on {more}"
    micro, again = case.micro, row.gradient_checkpointing
    why_micro = micro.why
    if micro.free and row.micro_batch_size < micro.most:
        why_micro = f"the largest that fits, of {micro.most} ({micro.why})"
    why_again = "as configured"
    if case.cfg.model.gradient_checkpointing == "auto":
        why_again = "it does not fit without" if again else "it fits without"
    words = {0: "none", 1: "full"}
    decisions = (
        Decision(name="parallel.kind", value=strategy_name(row.parallel), reason=reason),
        Decision(
            name="model.gradient_checkpointing", value=words.get(again, again), reason=why_again
        ),
    )
    return _Picked(row.parallel, row.micro_batch_size, again, why_micro, decisions, rows)


def _without_shape(cfg: TrainConfig, place: Place) -> _Picked:
    """The choice where nothing is known of memory: shard everything."""
    parallel = choosing.resolve(cfg.parallel)
    why = "as configured"
    if cfg.parallel.kind == "auto":
        parallel = choosing.SINGLE if place.ranks == 1 else choosing.FULL
        several = f"{place.ranks} processes, and the shape of the model is not known: sharded"
        why = "one process" if place.ranks == 1 else several
    if parallel.shard == "hybrid" and (uneven := place.uneven()):
        raise ConfigError([refused(parallel, uneven)])
    micro = batches.micro_batch(cfg, place.ranks)
    again = choosing.checkpointing_of(cfg)[0]
    decision = Decision(name="parallel.kind", value=strategy_name(parallel), reason=why)
    return _Picked(parallel, micro.most, again, micro.why, (decision,))


def _kind(parallel: ParallelConfig) -> Any:
    assert parallel.kind != "auto", "resolved before"
    return parallel.kind


def _lacks(case: Case, row: StrategyRow) -> bool:
    """Whether a strategy that does not fit is refused.

    One that was asked for may lack as much of a GPU as an estimate may be off. What is free of a
    host's memory changes by the minute: only what the host does not have at all is refused.
    """
    found, place = row.estimate, case.place
    if row.fits is not False or found is None:
        return False
    tolerance = 1.0 if case.cfg.parallel.kind == "auto" else 1 + _TOLERANCE
    needs = (
        (place.device_memory * tolerance, found.total),
        (place.host_total, found.host),
        (place.disk, found.disk),
    )
    return any(room and need > room for room, need in needs)


def _time(
    case: Case, rows: Sequence[StrategyRow], gpus: Sequence[GpuInfo], tokens: int
) -> TimeEstimate | None:
    row = next((row for row in rows if row.chosen), None)
    return _estimated(case, row, gpus, tokens) if row else None


def _estimated(
    case: Case, row: StrategyRow, gpus: Sequence[GpuInfo], tokens: int | None
) -> TimeEstimate:
    speed = hardware.speed(gpus, case.precision) if case.place.device == "cuda" else None
    unknown = hardware.unknown_speed(gpus, case.precision)
    return timing.estimate_time(case, row, speed, tokens, unknown)


def _code(cfg: TrainConfig, model: ModelInfo) -> tuple[Decision, ...]:
    if not cfg.model.trust_remote_code:
        return ()
    files = [entry.path for entry in model.artifact.files if entry.path.endswith(".py")]
    why = f"as configured: runs {', '.join(files)}" if files else "the model has no code of its own"
    return (Decision(name="model.trust_remote_code", value=bool(files), reason=why),)


def check_length(cfg: TrainConfig, model: ModelInfo) -> None:
    """Raise ``ConfigError`` for rows longer than the model has positions. Asked before the rows are
    read, too."""
    check_positions(cfg, model.max_positions, model.model_type)


def check_positions(cfg: TrainConfig, positions: int | None, model_type: str) -> None:
    """The same of a model of which only its configuration is known."""
    if positions is None or cfg.data.max_length <= positions:
        return
    raise ConfigError(
        [
            Problem(
                "data.max_length",
                f"expected at most {positions}, the positions that the model "
                f"({model_type}) was built for, found {cfg.data.max_length}",
            )
        ]
    )
