"""How long a run takes: tokens times operations over the GPUs' stated speed. Pure arithmetic."""

from __future__ import annotations

from dbx_llmtrain import memory
from dbx_llmtrain.batches import total_of
from dbx_llmtrain.choosing import Case
from dbx_llmtrain.forecasts import StrategyRow, TimeEstimate

UTILISATION = 0.4
"""Share of the stated speed that training reaches on GPUs that hold everything; well-tuned runs of
large models have 35 to 55%."""
OFFLOADED = 0.1
"""The same where weights or optimizer state come from the host's memory in every step."""


def estimate_time(
    case: Case,
    row: StrategyRow,
    speed: float | None,
    tokens: int | None,
    unknown: str = "GPUs of unknown speed",
) -> TimeEstimate:
    """The time of a run over ``tokens`` (``None``: not known) on GPUs of ``speed`` FLOP/s each
    (``None``: ``unknown`` says why).

    Ranks without rows in a step do nothing; what gradient checkpointing computes again takes time
    and is no use, so it is in the time and not in ``flops_per_token``.
    """
    lora = case.cfg.model.lora is not None
    useful = memory.flops_per_token(case.shape, case.length, lora=lora)
    if speed is None:
        why = "CPUs" if case.place.device == "cpu" else unknown
        return TimeEstimate(
            flops_per_token=useful, tokens=tokens, why=f"{why}; the first steps will tell"
        )
    spent = memory.flops_per_token(
        case.shape, case.length, checkpointing=row.gradient_checkpointing, lora=lora
    )
    parallel = row.parallel
    offloads = parallel.cpu_offload or parallel.offload_optimizer != "none"
    share = OFFLOADED if offloads else UTILISATION
    busy = min(case.place.ranks, total_of(case.cfg, case.place.ranks, row.micro_batch_size))
    rate = busy * speed * share / spent
    why = f"{useful:.3g} FLOP a token, {share:.0%} of {busy} x {speed / 1e12:,.0f} TFLOP/s"
    if row.gradient_checkpointing:
        why += f", {spent / useful - 1:.0%} more with gradient checkpointing"
    seconds = tokens / rate if tokens is not None else None
    hours = seconds / 3600 if seconds is not None else None
    return TimeEstimate(
        flops_per_token=useful,
        flops_per_second=speed,
        utilisation=share,
        tokens_per_second=rate,
        tokens=tokens,
        seconds=seconds,
        node_hours=hours * len(case.place.per_node) if hours is not None else None,
        gpu_hours=hours * case.place.ranks if hours is not None else None,
        why=why,
    )
