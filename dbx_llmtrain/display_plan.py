"""What a plan looks like, and a forecast: what runs, why, what every strategy takes, how long it
lasts. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dbx_llmtrain.addresses import REGISTRY
from dbx_llmtrain.display import (
    Page,
    Table,
    audit_rows,
    many,
    number,
    overlaps,
    page_html,
    page_text,
)
from dbx_llmtrain.forecasts import Decision, Forecast, StrategyRow, TimeEstimate, strategy_name
from dbx_llmtrain.records import ModelInfo, RunPlan

_NAMED_BY_TIME = " (without tracking.run_name every call names it by its time)"
_NAMED_BY_JOB = " (named by the job: its retries and repairs go on in it)"
_UNITS = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))
_PARTS = ("weights", "master", "gradients", "optimizer", "activations", "logits", "communication")


def plan_text(plan: RunPlan) -> str:
    """The plan as ASCII text."""
    return page_text(_plan(plan))


def plan_html(plan: RunPlan) -> str:
    """The plan as HTML."""
    return page_html(_plan(plan))


def forecast_text(forecast: Forecast) -> str:
    """The forecast as ASCII text."""
    return page_text(_forecast(forecast))


def forecast_html(forecast: Forecast) -> str:
    """The forecast as HTML."""
    return page_html(_forecast(forecast))


def duration(seconds: float) -> str:
    """A time that is only estimated, in a readable unit: ``3.2 h``."""
    for name, length in (("days", 48 * 3600), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / (86400 if name == 'days' else length):.3g} {name}"
    return f"{seconds:.2g} s"


def _plan(plan: RunPlan) -> Page:
    model, data = plan.model, plan.data
    count = model.shape.parameters if model.shape else model.parameters
    size_of_model = number(count) if count else "unknown"
    steps = (
        f"{number(plan.total_steps)}, of them {number(plan.warmup_steps)} warm-up; "
        f"{number(plan.steps_per_epoch)} an epoch"
    )
    device = "GPU" if plan.use_gpu else "CPU"
    place = "the driver's machine" if plan.local_mode else "Spark executors"
    name = strategy_name(plan.parallel) if plan.parallel.kind != "auto" else plan.strategy
    facts: list[tuple[str, ...]] = [
        (
            "model",
            f"{model.source}{_revision(model)} ({model.model_type}, {size_of_model} parameters)",
        ),
        ("data", f"{number(plan.examples)} examples of {_sources(data.sources)}, {data.format}"),
        ("ranks", f"{plan.world_size} on {place}, {device}, {name}, {plan.precision}"),
        ("step", _step(plan)),
        ("steps", steps),
        ("run folder", plan.run_dir + _named(plan)),
    ]
    facts.append(("evaluation", _evaluation(plan)))
    if plan.time:
        facts.append(("time", _time(plan.time)))
    if plan.resume_from:
        facts.append(("resumes from", plan.resume_from))
    parts: list[str | Table] = [Table((), tuple(facts)), *_decisions(plan.decisions)]
    parts += _strategies(plan.strategies, "GPU" if plan.use_gpu else "process")
    parts += [Table((), audit_rows(data.audit)), *overlaps(data)]
    return Page(f"Plan of {plan.run_name}", tuple(parts))


def _forecast(forecast: Forecast) -> Page:
    shape, total = forecast.shape, forecast.total_steps
    examples = many(forecast.global_batch_size, "example")
    steps = number(total) if total else "known when the data is, or with train.max_steps"
    facts: list[tuple[str, ...]] = [
        ("model", f"{forecast.model} ({shape.model_type}, {number(shape.parameters)} parameters)"),
        (
            "ranks",
            f"{forecast.world_size} on {many(forecast.nodes, 'node')}, "
            f"{strategy_name(forecast.parallel)}, {forecast.precision}",
        ),
        (
            "step",
            f"{examples} of up to {number(forecast.config.data.max_length)} tokens: up to "
            f"{many(forecast.accumulation, 'micro-batch')} of {number(forecast.micro_batch_size)} "
            "on a rank",
        ),
        ("steps", steps),
        ("fits", "; ".join(row.verdict for row in forecast.strategies if row.chosen)),
        ("time", _time(forecast.time)),
    ]
    parts: list[str | Table] = [Table((), tuple(facts))]
    if not forecast.fits or forecast.advice:
        asked = forecast.config.parallel.kind != "auto"
        lacks = f"{strategy_name(forecast.parallel)} does not fit" if asked else "Nothing fits"
        head = "Else this would fit" if forecast.fits else f"{lacks}. What would"
        found = forecast.advice or ("a smaller model, or GPUs with more memory",)
        parts.append("\n".join([f"{head}:", *(f"- {each}" for each in found)]))
    parts += _decisions(forecast.decisions)
    parts += _strategies(forecast.strategies, "GPU")
    return Page(f"Forecast for {forecast.cluster}", tuple(parts))


def _decisions(decisions: Sequence[Decision]) -> list[str | Table]:
    rows = tuple((item.name, number(item.value), item.reason) for item in decisions)
    return [Table(("decided", "value", "because"), rows)] if rows else []


def _strategies(rows: Sequence[StrategyRow], device: str) -> list[str | Table]:
    """Two tables: what fits, and of what a rank's memory consists."""
    known = [row.estimate for row in rows if row.estimate]
    if not known:
        return []
    largest = max(max(each.total, each.host, each.checkpoint) for each in known)
    unit, length = next((u for u in _UNITS if largest >= u[1]), _UNITS[-1])

    def cell(count: int) -> str:
        return f"{count / length:.1f}"

    verdicts, shares = [], []
    for row in rows:
        name = f"{row.name} *" if row.chosen else row.name
        if row.estimate is None:
            verdicts.append((name, *("-" * 6), row.why))
            continue
        found = row.estimate
        again = {0: "none", 1: "full"}.get(row.gradient_checkpointing)
        verdicts.append(
            (
                name,
                number(row.micro_batch_size),
                again or f"every {row.gradient_checkpointing}",
                *map(cell, (found.total, found.host, found.disk, found.checkpoint)),
                row.why,
            )
        )
        shares.append((name, *(cell(getattr(found, part)) for part in _PARTS), cell(found.total)))
    headers = ("strategy", "batch", "again", device, "host", "disk", "saved", "fits")
    return [
        f"Memory by estimate in {unit} (* chosen): of the worst {device}; host memory and local "
        "disk of a\nnode; a checkpoint (saved). Each strategy with the largest micro-batch (batch) "
        "that fits, and\nwith gradient checkpointing (again) where it does not fit without.",
        Table(headers, tuple(verdicts)),
        f"Of that, a {device} holds, when it holds most (single, ddp and fsdp: fp32 masters are "
        "weights):",
        Table(("strategy", *_PARTS, "total"), tuple(shares)),
    ]


def _time(time: TimeEstimate) -> str:
    """The estimate, told as one."""
    if time.tokens_per_second is None:
        return f"not known: {time.why}"
    speed = f"{number(round(time.tokens_per_second))} tokens/s, {time.why}"
    if time.seconds is None:
        hours = time.hours_per_million_tokens() or 0.0
        return f"by estimate {duration(hours * 3600)} for a million tokens ({speed})"
    text = f"by estimate {duration(time.seconds)}"
    if time.node_hours is not None and time.gpu_hours is not None:
        text += f", {_hours(time.node_hours)} node-hours, {_hours(time.gpu_hours)} GPU-hours"
    return f"{text} ({speed}); the progress shows what the first steps measure"


def _hours(count: float) -> str:
    return f"{count:,.0f}" if count >= 100 else f"{count:.2g}"


def _step(plan: RunPlan) -> str:
    """How the examples of a step are shared out: a product only where it is one."""
    total, ranks, micro = plan.global_batch_size, plan.world_size, plan.micro_batch_size
    examples = many(total, "example")
    if total == ranks * micro * plan.accumulation:
        batches = many(plan.accumulation, "micro-batch")
        text = f"{examples} = {many(ranks, 'rank')} x {batches} of {number(micro)}"
    else:
        share = math.ceil(total / ranks)
        shared = "up to " if total > ranks and total % ranks else ""
        busy = many(min(ranks, total), "rank")
        text = f"{examples}: {shared}{number(share)} on each of {busy}"
        if ranks == 1:
            text = f"{examples}: all on 1 rank"
        if plan.accumulation > 1:
            batches = many(plan.accumulation, "micro-batch")
            text += f", in {shared}{batches} of at most {number(micro)}"
        if ranks > total:
            text += f"; {many(ranks - total, 'rank')} without any"
    if plan.examples < total:
        text += f"; an epoch has only {number(plan.examples)}"
    return text


def _named(plan: RunPlan) -> str:
    """What a run's name is made of, where nobody gave it one."""
    if plan.config.tracking.run_name:
        return ""
    return _NAMED_BY_JOB if plan.run_name.startswith("job-") else _NAMED_BY_TIME


def _evaluation(plan: RunPlan) -> str:
    """When the held-out rows are evaluated, and how many of them."""
    train, data, often = plan.config.train, plan.data, ""
    if train.eval_every is not None:
        number_of = str(train.eval_every)
        often = ", every epoch" if number_of == "epoch" else f", every {number_of} steps"
    if not data.eval_splits:
        none = "no rows are held out (data.eval)"
        if not train.sample_prompts and train.eval_every is None:
            return f"none: {none}"
        what = "answers" if train.sample_prompts else "metrics of your own"
        return f"{what} before the first step{often} and after the last; {none}"
    rows = many(data.eval_rows, "row")
    if train.eval_max_rows is None:
        return f"{rows} before the first step{often} and after the last"
    most = many(train.eval_max_rows, "example")
    return f"{rows} after the last step; of each set at most {most} before the first{often}"


def _revision(model: ModelInfo) -> str:
    """The version that a registered model's name stands for, or the commit of one of the hub."""
    if model.revision is None:
        return ""
    kind = "version" if model.source.startswith(REGISTRY) else "at"
    return f", {kind} {model.revision[:12]}"


def _sources(sources: dict[str, str]) -> str:
    return sources.get("train") or ", ".join(sources.values())
