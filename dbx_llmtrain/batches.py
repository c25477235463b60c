"""How a step is cut into micro-batches, and how many steps there are. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dbx_llmtrain import schedules
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.errors import Problem
from dbx_llmtrain.forecasts import Decision
from dbx_llmtrain.records import PreparedData

DEFAULT_GLOBAL_BATCH = 32
_MOST_TOKENS = 8192
"""Of an automatic micro-batch: more do not fill a device better, they only take memory."""
_SHARE = "the whole share of a rank"


@dataclass(frozen=True)
class MicroBatch:
    """Examples that a rank runs at once: ``most`` of them, and why; ``free``: less will do."""

    most: int
    free: bool
    why: str


@dataclass(frozen=True)
class Batch:
    """Examples of a step, of a micro-batch, and micro-batches of the busiest rank."""

    total: int
    micro: int
    accumulation: int
    decisions: tuple[Decision, ...]


def micro_batch(cfg: TrainConfig, ranks: int) -> MicroBatch:
    """What the configuration says of the micro-batch of ``ranks`` ranks."""
    train = cfg.train
    if train.micro_batch_size != "auto":
        return MicroBatch(train.micro_batch_size, False, "as configured")
    total, steps = train.global_batch_size, train.gradient_accumulation_steps
    fits = max(1, _MOST_TOKENS // cfg.data.max_length)
    reason = f"at most {_MOST_TOKENS} tokens at data.max_length {cfg.data.max_length}"
    if steps is not None and total is None:
        return MicroBatch(fits, True, reason)
    if steps is not None and total is not None:
        micro = max(1, math.ceil(total / (ranks * steps)))
        return MicroBatch(
            micro, False, f"ceil({total} / {ranks} ranks / {steps} accumulation steps)"
        )
    share = math.ceil((total or DEFAULT_GLOBAL_BATCH) / ranks)
    return MicroBatch(*((fits, True, reason) if fits < share else (share, True, _SHARE)))


def contradictions(cfg: TrainConfig, ranks: int) -> list[Problem]:
    """Why global batch, micro-batch and accumulation cannot agree on that many ranks."""
    total, steps = cfg.train.global_batch_size, cfg.train.gradient_accumulation_steps
    if total is None or steps is None:
        return []
    micro = micro_batch(cfg, ranks).most
    if micro * ranks * steps == total:
        return []
    return [
        Problem(
            "train.global_batch_size",
            f"expected micro-batch x ranks x accumulation = {micro} x {ranks} x {steps} = "
            f"{micro * ranks * steps}, found {total}: give one of global_batch_size and "
            "gradient_accumulation_steps",
        )
    ]


def accumulation_of(cfg: TrainConfig, ranks: int, micro: int) -> int:
    """Micro-batches of the busiest rank in a step."""
    return math.ceil(math.ceil(total_of(cfg, ranks, micro) / ranks) / micro)


def total_of(cfg: TrainConfig, ranks: int, micro: int) -> int:
    """Examples of a step."""
    total, steps = cfg.train.global_batch_size, cfg.train.gradient_accumulation_steps
    if total is not None:
        return total
    return DEFAULT_GLOBAL_BATCH if steps is None else micro * ranks * steps


def cut_batch(cfg: TrainConfig, ranks: int, micro: int, why_micro: str) -> Batch:
    """Global batch, micro-batch and accumulation that agree, with their reasons."""
    steps = cfg.train.gradient_accumulation_steps
    total = total_of(cfg, ranks, micro)
    why_total = "as configured"
    if cfg.train.global_batch_size is None:
        product = f"{micro} micro-batch x {ranks} ranks x {steps} accumulation steps"
        why_total = "default" if steps is None else product
    if total < ranks:
        why_total = (
            f"Warning: {ranks - total} of {ranks} ranks have no example in a step: set "
            f"train.global_batch_size to at least {ranks}; {why_total}"
        )
    share = math.ceil(total / ranks)
    accumulation = accumulation_of(cfg, ranks, micro)
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
    return Batch(total, micro, accumulation, decisions)


@dataclass(frozen=True)
class Steps:
    """Steps of a run, and of its learning rate."""

    per_epoch: int
    total: int
    warmup: int
    decay: int | None
    decisions: tuple[Decision, ...]


def count_steps(cfg: TrainConfig, data: PreparedData, batch: Batch) -> Steps:
    """Steps of an epoch, of the run, and of the schedule, with their reasons."""
    kind = "packs" if cfg.data.packing else "rows"
    per_epoch = math.ceil(data.train_examples / batch.total)
    total, why_total = _total_steps(cfg, per_epoch)
    warmup, why_warmup = warmup_steps(cfg, total)
    decay = schedules.steps_of_decay(cfg.train, warmup_steps=warmup, total_steps=total)
    decisions = [
        Decision(
            name="steps_per_epoch",
            value=per_epoch,
            reason=f"{data.train_examples} {kind} / {batch.total}, the last step may be short",
        ),
        Decision(name="total_steps", value=total, reason=why_total),
        Decision(name="warmup_steps", value=warmup, reason=why_warmup),
        _decay(cfg, total, warmup, decay),
        Decision(
            name="tokens_per_step",
            value=round(data.audit.tokens / per_epoch),
            reason=f"{data.audit.tokens} tokens ({data.audit.trained_tokens} trained) in "
            f"{data.audit.train_rows} rows, {data.train_examples} {kind}",
        ),
    ]
    return Steps(per_epoch, total, warmup, decay, tuple(decisions))


def _total_steps(cfg: TrainConfig, steps_per_epoch: int) -> tuple[int, str]:
    if cfg.train.max_steps is not None:
        epochs = cfg.train.max_steps / steps_per_epoch
        return cfg.train.max_steps, f"train.max_steps ({epochs:.2f} epochs)"
    epochs = 1.0 if cfg.train.epochs is None else cfg.train.epochs
    return math.ceil(epochs * steps_per_epoch), f"{epochs:g} epoch(s) of {steps_per_epoch} steps"


def warmup_steps(cfg: TrainConfig, total: int) -> tuple[int, str]:
    """Steps of warm-up in a run of ``total``, and why; a longer one is told with what it costs."""
    warmup = cfg.train.warmup
    if warmup < 1:
        steps = schedules.steps_of_share(warmup, total)
        return steps, f"ceil({warmup:g} x {total} steps)"
    steps = int(warmup)
    if steps > total:
        highest = schedules.highest_rate(cfg.train, warmup_steps=steps, total_steps=total)
        return steps, (
            f"Warning: longer than the run: the learning rate only reaches {highest:.3g}"
        )
    return steps, "as configured"


def _decay(cfg: TrainConfig, total: int, warmup: int, decay: int | None) -> Decision:
    """In which steps the learning rate falls, and to what."""
    train = cfg.train
    if decay is None:
        return Decision(name="decay_steps", value=0, reason="train.schedule is constant")
    why = "as configured"
    if train.decay_steps is None:
        share = f"the last tenth of {total} steps (wsd)"
        why = share if train.schedule == "wsd" else "all after the warm-up"
    elif train.decay_steps < 1:
        why = f"ceil({train.decay_steps:g} x {total} steps)"
    why += f"; {train.schedule} down to {train.min_learning_rate:g}"
    after = total - max(warmup, 1)
    if decay > max(1, after):
        why = (
            f"Warning: only {max(0, after)} steps are left after the warm-up: {why} is not reached"
        )
    return Decision(name="decay_steps", value=decay, reason=why)
