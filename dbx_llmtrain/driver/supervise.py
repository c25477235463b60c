"""The attempts at a run: one that ran out of memory at its start is followed by one that computes
the same in smaller pieces, one that has lost a node by one that goes on from the last checkpoint.

Ranks cannot agree on it among themselves: while one has no memory left, or is gone, the others wait
for it in a collective. So the attempt ends as with any other error, and the driver starts another.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import click

from dbx_llmtrain import storage
from dbx_llmtrain.display import size
from dbx_llmtrain.driver import recovery, run_folder
from dbx_llmtrain.errors import CheckpointError, TrainingFailed
from dbx_llmtrain.estimates import MemoryEstimate
from dbx_llmtrain.events import EVENTS_FILE, Event, read_events
from dbx_llmtrain.forecasts import Decision
from dbx_llmtrain.outcomes import RankResult
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import node
from dbx_llmtrain.worker.failures import OUT_OF_MEMORY

MAX_RESTARTS = 2
EARLY_STEPS = 3
"""A lack of memory before so many steps are done is one of the sizes, not of chance. The longest
example is in the first step, so that it shows there."""

Attempt = Callable[[RunPlan], RankResult]
Regroup = Callable[[RunPlan], RunPlan]
"""Makes the cluster ready for a plan's ranks, or the plan for the cluster. Raises where neither can
be."""


@dataclass(frozen=True)
class Outcome:
    """What came of a run: the ``plan`` of the last attempt, rank 0's ``result``, and in words every
    attempt that was given up for another."""

    plan: RunPlan
    result: RankResult
    restarts: tuple[str, ...] = ()


@dataclass
class _History:
    """What was given up so far: in words, how often for smaller pieces, and what was lost."""

    restarts: list[str] = field(default_factory=list)
    smaller: int = 0
    lost: list[TrainingFailed] = field(default_factory=list)


def run(
    plan: RunPlan,
    attempt: Attempt,
    *,
    regroup: Regroup = lambda plan: plan,
    tell: Callable[[str], object] | None = None,
) -> Outcome:
    """Call ``attempt`` with the plan, and again with half the micro-batch and twice the
    accumulation where a rank ran out of memory before its third step was done: twice at most. Where
    something was lost, up to ``cluster.max_restarts`` times with what ``regroup`` makes of the
    plan, from the last checkpoint.

    Rows, gradients and learning rates stay the same. ``tell`` gets each restart in words (default:
    the screen). Raises what the last attempt raised; a lack of memory with what the plan had
    counted and what would take less, a loss with why it was not tried again.
    """
    past = _History()
    say = tell or click.echo
    while True:
        try:
            result = attempt(plan)
            return Outcome(_as_taken(plan), result, tuple(past.restarts))
        except TrainingFailed as error:
            short_of_memory = error.cause == OUT_OF_MEMORY
            plan, text = (
                _in_smaller_pieces(plan, error, past)
                if short_of_memory
                else _after_a_loss(plan, error, past, regroup)
            )
            past.restarts.append(text)
            say(text)


def _in_smaller_pieces(plan: RunPlan, error: TrainingFailed, past: _History) -> tuple[RunPlan, str]:
    """The next attempt after a lack of memory, and that in words. Raises the failure."""
    smaller = _smaller(plan, error) if past.smaller < MAX_RESTARTS else None
    if smaller is None:
        raise _told_what_helps(plan, error, past.smaller) from error
    past.smaller += 1
    return smaller, _restart_text(plan, smaller, error)


def _after_a_loss(
    plan: RunPlan, error: TrainingFailed, past: _History, regroup: Regroup
) -> tuple[RunPlan, str]:
    """The next attempt after a loss, and that in words. Raises the failure."""
    if error.step is None:
        error.step = _progress(plan)
    verdict = recovery.decide(error, past.lost, plan.config.cluster.max_restarts)
    if not verdict.go_on:
        raise _advised(error, error.advice, verdict.why) if verdict.why else error
    origin = _last_checkpoint(plan)
    again = plan.model_copy(update={"attempt": uuid.uuid4().hex})
    with node.Capture() as capture:
        if origin and origin != plan.resume_from:
            again = run_folder.take_other(again, origin)
        again = regroup(again)
    if capture.error is not None:
        if isinstance(capture.error, CheckpointError):
            raise capture.error  # the folder is another call's now
        raise _advised(
            error, error.advice, f"it could not be started again: {capture.text()}"
        ) from capture.error
    past.lost.append(error)
    step = storage.step_of(Path(origin)) if origin else None
    return again, recovery.restart_text(error, plan, again, step)


def _progress(plan: RunPlan) -> int | None:
    """Steps that this attempt has told of: where all ranks are gone at once, nobody else knows."""
    events = read_events(storage.local_path(plan.run_dir) / EVENTS_FILE, attempt=plan.attempt)
    return max((event.step for event in events if event.kind == "step"), default=None)


def _last_checkpoint(plan: RunPlan) -> str | None:
    """Where an attempt that was lost has got to: the newest complete checkpoint of the run, else
    where it began. Whoever wrote it may not have come to say so."""
    newest = storage.latest_checkpoint(storage.local_path(plan.run_dir))
    if plan.purpose == "train" and newest is not None:
        if (storage.step_of(newest) or 0) >= _first_step(plan):
            return str(newest)
    return _as_taken(plan).resume_from


def _smaller(plan: RunPlan, error: TrainingFailed) -> RunPlan | None:
    """The plan of the next attempt, or ``None`` where smaller pieces would not help: there are
    none, the model itself did not fit (no step was begun), or it happened later."""
    if error.step is None or not _early(plan, error.step):
        return None
    share = math.ceil(plan.global_batch_size / plan.world_size)
    ran = min(plan.micro_batch_size, share)
    if ran == 1:
        return None
    micro = ran // 2
    accumulation = math.ceil(share / micro)
    why = f"{_who(error)} ran out of memory with {ran}"
    changed = {
        "train.micro_batch_size": Decision(
            name="train.micro_batch_size", value=micro, reason=f"{why}; the numbers stay the same"
        ),
        "accumulation": Decision(
            name="accumulation",
            value=accumulation,
            reason=f"ceil({share} examples on a rank / {micro})",
        ),
    }
    return plan.model_copy(
        update={
            "attempt": uuid.uuid4().hex,
            "micro_batch_size": micro,
            "accumulation": accumulation,
            "resume_from": _newest_checkpoint(plan) or _as_taken(plan).resume_from,
            "decisions": tuple(changed.get(one.name, one) for one in plan.decisions),
        }
    )


def _early(plan: RunPlan, step: int) -> bool:
    """Whether this attempt had done fewer than three steps, with one still to do."""
    return step < plan.total_steps and step - _first_step(plan) < EARLY_STEPS


def _first_step(plan: RunPlan) -> int:
    """Steps that were done before the attempt began: those of the checkpoint that it went on from,
    which it says (it may have taken an older one than was planned). Where it was ended before that
    was heard, those of the planned one."""
    started = _started(plan)
    if started is not None or plan.resume_from is None:
        return started.step if started else 0
    return storage.step_of(storage.local_path(plan.resume_from)) or 0


def _started(plan: RunPlan) -> Event | None:
    """What this attempt has said when all was set up."""
    events = read_events(storage.local_path(plan.run_dir) / EVENTS_FILE, attempt=plan.attempt)
    return next((event for event in events if event.kind == "started"), None)


def _as_taken(plan: RunPlan) -> RunPlan:
    """The plan with the checkpoint that its attempt has gone on from."""
    started = _started(plan) if plan.resume_from is not None else None
    origin = _other_origin(plan, started) if started else None
    return run_folder.take_other(plan, origin) if origin else plan


def noticing(plan: RunPlan, tell: Callable[[RunPlan], object]) -> Callable[[Event], None]:
    """A handler of the attempt's events. Where it goes on from another checkpoint than was planned,
    since that one is damaged, the plan in the run folder is corrected and ``tell`` gets it."""

    def handle(event: Event) -> None:
        if origin := _other_origin(plan, event):
            tell(run_folder.take_other(plan, origin))

    return handle


def _other_origin(plan: RunPlan, event: Event) -> str | None:
    """The checkpoint that an attempt has ``started`` from, where it is not the planned one."""
    origin = event.data.get("resumed_from") if event.kind == "started" else None
    return str(origin) if origin and origin != plan.resume_from else None


def _newest_checkpoint(plan: RunPlan) -> str | None:
    """The last checkpoint that this attempt has written. (The folder may have others, of an earlier
    run that is done again from the middle.)"""
    path: str | None = None
    events = read_events(storage.local_path(plan.run_dir) / EVENTS_FILE, attempt=plan.attempt)
    for event in events:
        if event.kind == "checkpoint":
            path = str(event.data["path"])
    return path if path and storage.read_manifest(Path(path)) is not None else None


def _who(error: TrainingFailed) -> str:
    rank = f"rank {error.rank}" if error.rank is not None else "a rank"
    return f"{rank} on {error.host}" if error.host else rank


def _restart_text(plan: RunPlan, smaller: RunPlan, error: TrainingFailed) -> str:
    share = math.ceil(plan.global_batch_size / plan.world_size)
    before = f"{min(plan.micro_batch_size, share)} x {plan.accumulation}"
    given = plan.config.train.micro_batch_size
    although = "" if given == "auto" else f", although train.micro_batch_size is {given}"
    return (
        f"{_who(error)} ran out of memory after step {error.step} with a micro-batch x accumulation"
        f" of {before}: started again with {smaller.micro_batch_size} x {smaller.accumulation}"
        f"{although}; rows and numbers of a step stay the same"
    )


def _told_what_helps(plan: RunPlan, error: TrainingFailed, tried: int) -> TrainingFailed:
    """The failure with the plan's own account of the memory, and every setting that takes less."""
    before = [f"{tried} restart(s) with less at once did not help"] if tried else []
    remedies = f"what takes less: {'; '.join(_remedies(plan))}"
    return _advised(error, *before, *_breakdown(plan), remedies)


def _advised(error: TrainingFailed, *parts: str) -> TrainingFailed:
    """The same failure with other advice."""
    return TrainingFailed(
        error.message,
        rank=error.rank,
        host=error.host,
        gpu=error.gpu,
        step=error.step,
        exit_code=error.exit_code,
        traceback=error.traceback,
        log_tail=error.log_tail,
        advice=". ".join(filter(None, parts)),
        cause=error.cause,
        log=error.log,
    )


def _breakdown(plan: RunPlan) -> list[str]:
    """What the plan had counted with, if it had, by what the memory is for."""
    row = next((row for row in plan.strategies if row.chosen), None)
    if row is None or row.estimate is None:
        return []
    estimate: MemoryEstimate = row.estimate
    kinds = "weights master gradients optimizer activations logits communication".split()
    counted = {kind: getattr(estimate, kind) for kind in kinds}
    listed = ", ".join(f"{kind} {size(count)}" for kind, count in counted.items() if count)
    return [
        f"the plan counted {size(estimate.total)} a rank for {row.name} with a micro-batch of "
        f"{row.micro_batch_size} ({listed})"
    ]


def _remedies(plan: RunPlan) -> list[str]:
    """Settings that would take less memory than this plan's, the cheapest first."""
    found = []
    if plan.micro_batch_size > 1:
        found.append(f"train.micro_batch_size=1 (the plan's is {plan.micro_batch_size})")
    if plan.gradient_checkpointing != 1:
        found.append("model.gradient_checkpointing=full")
    found.append(f"data.max_length below {plan.config.data.max_length}")
    if plan.parallel.kind == "ddp" or plan.parallel.shard != "full":
        found.append("parallel.kind=fsdp with parallel.shard=full")
    if plan.parallel.kind == "single":
        found.append("more ranks with parallel.kind=fsdp")
    elif plan.parallel.kind == "fsdp":
        if not plan.parallel.cpu_offload:
            found.append("parallel.cpu_offload=true")
        found.append("more ranks")
    elif plan.parallel.kind == "deepspeed":
        found.append("parallel.stage=3, parallel.offload_optimizer and parallel.offload_params")
    if plan.config.model.lora is None:
        found.append("model.lora={}")
    if not plan.use_gpu:
        found.append("machines with more memory, or fewer ranks on each")
    return found
