"""After a failure: whether the run goes on by itself, and with which ranks.

What was lost from outside may be tried again: an executor, a machine, a connection, a process that
somebody killed. What a run does by itself it would do again.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dbx_llmtrain import batches, planning
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver import cluster, preflight
from dbx_llmtrain.errors import ClusterError, Finding, TrainingFailed
from dbx_llmtrain.forecasts import Decision
from dbx_llmtrain.layout import Layout
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.reports import ClusterReport
from dbx_llmtrain.worker.failures import HOST_MEMORY, LOST, NETWORK

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAIT_S = 120.0
"""How long to wait for the executors that Spark starts in place of lost ones,"""
ENOUGH_S = 20.0
"""and where there are enough without them."""
_POLL_S = 0.5
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
_PASSING = re.compile(r"; Spark says: .*|0x[0-9a-f]+|\b\d{4,}\b|\b\d+\.\d+ ?s\b", re.DOTALL)
"""What differs between two errors of the same kind: ports, addresses, process numbers, times."""
_OF_EXECUTOR = re.compile(r"ExecutorLostFailure.*?(?= Driver stacktrace|$)")
_SHOWN = 200


@dataclass(frozen=True)
class Verdict:
    """Whether to go on, and where not, why, if there is something to say."""

    go_on: bool
    why: str = ""


def decide(error: TrainingFailed, earlier: Sequence[TrainingFailed], most: int) -> Verdict:
    """What follows a failure. ``earlier`` are those that a run was started again after, ``most`` is
    ``cluster.max_restarts``. Pure."""
    if most == 0 or not is_transient(error):
        return Verdict(False)
    if _fault(error) in [_fault(each) for each in earlier]:
        return Verdict(False, "not tried again: the same failure at the same step as before")
    if error.cause == HOST_MEMORY and HOST_MEMORY in [each.cause for each in earlier]:
        return Verdict(False, "not tried again: a machine's memory was full for the second time")
    if len(earlier) >= most:
        return Verdict(False, f"not tried again: cluster.max_restarts is {most}")
    return Verdict(True)


def is_transient(error: TrainingFailed) -> bool:
    """Whether a failure came from outside, so that the same need not happen again."""
    if error.cause == TrainingFailed.STOPPED:
        return False
    return error.cause in (LOST, NETWORK, HOST_MEMORY) or error.exit_code in _FROM_OUTSIDE


def _fault(error: TrainingFailed) -> tuple[object, ...]:
    return error.cause, error.step, error.exit_code, _PASSING.sub("", error.message)


def restart_text(error: TrainingFailed, before: RunPlan, plan: RunPlan, origin: int | None) -> str:
    """A restart in words: what was wrong, where, when, and what was done."""
    who = f"rank {error.rank}" if error.rank is not None else "a rank"
    who += f" on {error.host}" if error.host else ""
    when = f"after step {error.step}" if error.step is not None else "before its first step"
    own, _, spark = " ".join(error.message.split()).partition("; Spark says: ")
    lost = _OF_EXECUTOR.search(spark)
    what = "; ".join(_cut(text) for text in (own, lost[0] if lost else spark) if text)
    begun = "from the beginning" if origin is None else f"from step {origin}"
    ranks = f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''}"
    if plan.world_size != before.world_size:
        ranks += (
            f" instead of {before.world_size} (micro-batch x accumulation "
            f"{plan.micro_batch_size} x {plan.accumulation}, the global batch stays "
            f"{plan.global_batch_size})"
        )
    return f"{error.cause or 'killed'}: {who} {when}: {what}; started again {begun} with {ranks}"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def regroup(
    session: SparkSession,
    first: RunPlan,
    plan: RunPlan,
    *,
    slots: int,
    check: Callable[[], None],
    say: Callable[[str], object],
) -> RunPlan:
    """The plan on the nodes that are there now, after those that Spark replaces have come.

    ``first`` is the plan of the first attempt: as many ranks as then are wanted. ``slots`` were
    there then; ``check`` may raise meanwhile. Raises ``ClusterError`` where the ranks that are left
    are too few, and ``ConfigError`` where these cannot run it. Locally nothing is asked.
    """
    if plan.local_mode:
        return plan
    session = cluster.session(session)
    conf = cluster.conf(session)
    each = _ranks_per_slot(first, conf)
    _wait(session, -(-first.world_size // each), slots, check, say)
    report = cluster.probe(session, local_dir=plan.local_dir)
    ranks = ranks_left(first, report.slots * each)
    placed = Layout(ranks, False, plan.use_gpu, (_why(ranks, first),))
    preflight.require(preflight.check_conf(conf, report, placed, os.environ))
    return plan if ranks == plan.world_size else replan(plan, report, placed)


def ranks_left(first: RunPlan, there: int) -> int:
    """As many ranks as at first where there is room, else fewer as far as that is allowed.

    Raises ``ClusterError``.
    """
    least = first.config.cluster.min_processes or first.world_size
    if there >= min(least, first.world_size):
        return min(there, first.world_size)
    allowed = (
        f"cluster.min_processes is {least}"
        if first.config.cluster.min_processes
        else f"{first.world_size} are needed as cluster.min_processes is not set"
    )
    found = Finding("error", "task slots", f"{there} rank(s) have room after the loss; {allowed}")
    raise ClusterError([found])


def _why(ranks: int, first: RunPlan) -> Decision:
    reason = "as before" if ranks == first.world_size else f"{first.world_size} before the loss"
    return Decision(name="cluster.processes", value=ranks, reason=reason)


def _ranks_per_slot(plan: RunPlan, conf: dict[str, str]) -> int:
    amount = conf.get(preflight.TASK_GPUS, "1") if plan.use_gpu else "1"
    return max(1, int(amount)) if amount.isdecimal() else 1


def _wait(
    session: SparkSession,
    wanted: int,
    before: int,
    check: Callable[[], None],
    say: Callable[[str], object],
) -> None:
    """Until there are as many slots as before; two minutes at most, less where there are enough."""
    sc = session.sparkContext
    began, told = time.monotonic(), False
    while True:
        check()
        there, waited = cluster.slots(sc), time.monotonic() - began
        if there >= before or waited > (ENOUGH_S if there >= wanted else WAIT_S):
            return
        if not told and waited > 2 * _POLL_S:
            told = True
            say(f"waiting for executors in place of those that were lost: {there} of {before} "
                "task slots are there")  # fmt: skip
        time.sleep(_POLL_S)


def replan(plan: RunPlan, report: ClusterReport, placed: Layout) -> RunPlan:
    """The plan for another number of ranks: the same steps with the same rows in each, cut anew.

    Raises ``ConfigError`` where the strategy cannot run on them.
    """
    ranks = placed.processes
    if plan.purpose == "evaluate":
        total = plan.micro_batch_size * ranks
        return plan.model_copy(update={"world_size": ranks, "global_batch_size": total})
    made = planning.make_plan(
        _same_batch(plan), report, placed, plan.model, plan.data,
        attempt=plan.attempt, run_name=plan.run_name, run_dir=plan.run_dir,
    )  # fmt: skip
    # An attempt before may have had no memory for more.
    batch = batches.cut_batch(
        made.config, ranks, min(plan.micro_batch_size, made.micro_batch_size), "as before"
    )
    changed = {each.name: each for each in (*made.decisions, *batch.decisions)}
    names = ("strategy", "parallel", "gradient_checkpointing", "strategies", "time")
    return plan.model_copy(
        update={name: getattr(made, name) for name in names}
        | {
            "world_size": ranks,
            "micro_batch_size": batch.micro,
            "accumulation": batch.accumulation,
            "decisions": tuple(changed.get(each.name, each) for each in plan.decisions),
        }
    )


def _same_batch(plan: RunPlan) -> TrainConfig:
    """The configuration with the global batch that the run has, whatever it was made of."""
    values = plan.config.to_dict()
    train = values.get("train", {}) | {"global_batch_size": plan.global_batch_size}
    train.pop("gradient_accumulation_steps", None)
    return TrainConfig.from_dict(values | {"train": train})
