"""A rehearsal of a run: two steps on the longest rows, an evaluation, a checkpoint, going on from
it, an export, each with the time that it takes; and what the whole run will take by that."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from dbx_llmtrain import storage
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.display import Page, Table, page_text
from dbx_llmtrain.display_plan import duration
from dbx_llmtrain.driver.supervise import Outcome
from dbx_llmtrain.events import EVENTS_FILE, Event, read_events
from dbx_llmtrain.records import RunPlan

STEPS = 2

_CHANGES: dict[str, dict[str, Any]] = {
    # (Without shuffling there is no order to change.)
    "data": {"shuffle": True, "longest_first": True},
    "train": {"eval_every": None, "early_stopping": None, "max_time": None, "log_every": 1},
    "checkpoint": {"every": "never", "every_minutes": None, "keep_best": 0, "resume": "auto"},
    "tracking": {"log_model": "none", "register_as": None, "log_checkpoints": False},
}
"""Settings of the run that a rehearsal does not keep to."""


_EVALUATION = (
    "evaluating",
    "computing the metrics of your own",
    "answering the sample prompts",
    "testing",
)
"""The phases that an evaluation has."""


@dataclass(frozen=True)
class Times:
    """Seconds of a rehearsal's parts. ``start``: until the first step can be taken, staging and
    loading included, without the first evaluation; ``resume``: the same of the second launch.
    ``stall`` is of the training that waits for a checkpoint, ``checkpoint`` until it is complete.
    """

    start: float
    first_evaluation: float
    steps: tuple[float, ...]
    stall: float
    checkpoint: float
    checkpoint_bytes: int
    resume: float
    last_evaluation: float
    export: float


def shorten(plan: RunPlan) -> RunPlan:
    """The plan that a rehearsal launches: the same ranks, strategy and batch."""
    return plan.model_copy(
        update={
            "config": _shortened(plan),
            "total_steps": STEPS,
            "resume_from": None,
        }
    )


def _shortened(plan: RunPlan) -> TrainConfig:
    values = plan.config.to_dict()
    for section, changes in _CHANGES.items():
        values[section] = values.get(section, {}) | changes
    values["tracking"]["run_name"] = plan.run_name
    if plan.data.eval_splits:
        # The evaluation before the first step is to show that it works; the last one is whole.
        train = plan.config.train
        few = plan.world_size * (train.eval_micro_batch_size or plan.micro_batch_size)
        values["train"]["eval_max_rows"] = min(few, train.eval_max_rows or few)
    return TrainConfig.from_dict(values)


def rehearse(
    plan: RunPlan, go: Callable[[RunPlan], Outcome], *, clock: Callable[[], float] = time.time
) -> Outcome:
    """Launch twice by ``go``: one step and a checkpoint; from there the second one, to the end.
    Print what each part took, and what all of ``plan`` will take.

    Raises what ``go`` raises: then a part of the run does not work.
    """
    began = clock()
    first = go(shorten(plan).model_copy(update={"stop_after": 1}))
    again = clock()
    second = go(
        first.plan.model_copy(
            update={
                "attempt": uuid.uuid4().hex,
                "stop_after": None,
                "resume_from": first.result.checkpoint,
            }
        )
    )
    path = storage.local_path(plan.run_dir) / EVENTS_FILE
    events = [list(read_events(path, attempt=outcome.plan.attempt)) for outcome in (first, second)]
    click.echo(page_text(summary(plan, measure(events[0], events[1], began, again))))
    return Outcome(second.plan, second.result, (*first.restarts, *second.restarts))


def measure(first: Sequence[Event], second: Sequence[Event], began: float, again: float) -> Times:
    """The times of both launches, which began at ``began`` and ``again``, by rank 0's events."""
    phases, later = _phases(first), _phases(second)
    written = next((event.data for event in first if event.kind == "checkpoint"), {})
    first_evaluation = _evaluating(phases)
    return Times(
        start=_until_training(first, began) - first_evaluation,
        first_evaluation=first_evaluation,
        steps=tuple(
            event.metrics["seconds_per_step"] for event in (*first, *second) if event.kind == "step"
        ),
        stall=float(written.get("seconds_stalled", 0.0)),
        checkpoint=float(written.get("seconds", 0.0)),
        checkpoint_bytes=int(written.get("bytes", 0)),
        resume=_until_training(second, again),
        last_evaluation=_evaluating(later),
        export=later.get("exporting", 0.0),
    )


def _phases(events: Sequence[Event]) -> dict[str, float]:
    """Seconds of each phase, added up."""
    found: dict[str, float] = {}
    marks = [event for event in events if event.kind == "phase"]
    ends = [*(event.time for event in marks[1:]), *(event.time for event in events[-1:])]
    for event, end in zip(marks, ends, strict=False):
        name = str(event.data["phase"])
        found[name] = found.get(name, 0.0) + end - event.time
    return found


def _evaluating(phases: Mapping[str, float]) -> float:
    return sum(phases.get(name, 0.0) for name in _EVALUATION)


def _until_training(events: Sequence[Event], began: float) -> float:
    for event in events:
        if event.kind == "phase" and event.data["phase"] == "training":
            return max(0.0, event.time - began)
    return 0.0


def summary(plan: RunPlan, times: Times) -> Page:
    """What a rehearsal took, and what the run that is planned will take by it."""
    step = min(times.steps, default=0.0)
    rows = [
        ("start until the first step", times.start, "staging, launch, loading"),
        ("first evaluation", times.first_evaluation, "of a part of the rows"),
        *[(f"step {n}", took, "longest rows") for n, took in enumerate(times.steps, 1)],
        ("checkpoint", times.checkpoint, f"training waits {duration(times.stall)}"),
        ("start from the checkpoint", times.resume, "what a retry costs"),
        ("last evaluation", times.last_evaluation, "whole sets"),
        ("export", times.export, ""),
    ]
    parts = expect(plan, times, step)
    foreseen = ", ".join(f"{duration(took)} {name}" for name, took in parts if took)
    return Page(
        f"Rehearsal of {plan.run_name.removesuffix('-trial')}: all of it works",
        (
            Table(
                ("part", "time", ""),
                tuple((name, duration(took), note) for name, took, note in rows),
            ),
            f"The whole run of {plan.total_steps} steps takes about "
            f"{duration(sum(took for _, took in parts))} by these times: {foreseen}. Steps on "
            "shorter rows take less.",
        ),
    )


def expect(plan: RunPlan, times: Times, step: float) -> list[tuple[str, float]]:
    """Seconds of the parts of the whole run."""
    between, checkpoints = _between(plan, plan.config.train.eval_every), 0
    if plan.config.checkpoint.every != "never":
        checkpoints = _between(plan, plan.config.checkpoint.every)
    each = times.last_evaluation * _share(plan)
    evaluations = times.last_evaluation + (between + 1) * each
    return [
        ("to start", times.start),
        (f"of steps ({plan.total_steps} x {duration(step)})", plan.total_steps * step),
        ("of evaluations", evaluations),
        ("waiting for checkpoints", checkpoints * times.stall + times.checkpoint),
        ("of export", times.export),
    ]


def _between(plan: RunPlan, every: int | str | None) -> int:
    """How often something is due between the steps."""
    steps = plan.steps_per_epoch if every == "epoch" else every
    return (plan.total_steps - 1) // steps if isinstance(steps, int) else 0


def _share(plan: RunPlan) -> float:
    """Of the held-out examples, how many are used between the steps."""
    most = plan.config.train.eval_max_rows
    sizes = [plan.data.splits[name].examples for name in plan.data.eval_splits]
    tested = plan.data.splits["test"].examples if "test" in plan.data.splits else 0
    total = sum(sizes) + tested
    return sum(min(size, most or size) for size in sizes) / total if total else 0.0
