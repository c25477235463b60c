"""One run: stage, launch, follow what its ranks say, again where they need smaller pieces or
something was lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from dbx_llmtrain import tracking, tracking_tensorboard
from dbx_llmtrain.driver import (
    board,
    cluster,
    launch,
    monitor,
    progress,
    recovery,
    staging,
    stalls,
    supervise,
)
from dbx_llmtrain.outcomes import RankResult
from dbx_llmtrain.records import RunPlan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORIGIN = "dbx_llmtrain.resumed_from"
"""Tag of the MLflow run: the checkpoint that its last attempt has gone on from."""
RESTARTS = "dbx_llmtrain.restarts"
"""Tag of the MLflow run: the attempts that were given up for another, in words, each a line."""

_ENDING_S = 3.0
"""From the end of the last rank until its launcher has noticed and its record is read."""
_AGAIN = 0.5
"""Of the time that it took to begin with MLflow, what ending takes: it is imported by then."""
_LOGGING_S = 10.0
"""What logging a model to MLflow takes, however small it is,"""
_BYTES_PER_SECOND = 100e6
_PASSES = 3
"""and its size: it is read, copied and hashed."""


def closing(plan: RunPlan, tracked: float) -> RunPlan:
    """The plan with the time that the driver will need at the end: for the ranks to be gone, for
    MLflow to get the result (it took ``tracked`` seconds to begin), for model and checkpoint
    to be logged where that is asked for."""
    tracking = plan.config.tracking
    logged = tracking.log_model or ("final" if tracking.register_as else "none")
    seconds = _ENDING_S + _AGAIN * tracked
    if logged != "none":
        seconds += _LOGGING_S + _PASSES * plan.model.artifact.size / _BYTES_PER_SECOND
    if tracking.log_checkpoints and plan.memory is not None:
        seconds += plan.memory.checkpoint / _BYTES_PER_SECOND
    return plan.model_copy(update={"closing": seconds})


def run(
    session: SparkSession,
    plan: RunPlan,
    *,
    run: tracking.DriverRun,
    shown: progress.Progress,
    check: Callable[[], None],
) -> supervise.Outcome:
    """Stage, launch, and follow what the ranks say; again where they need smaller pieces, or where
    something was lost and ``cluster.max_restarts`` allows it. What ``check`` raises ends the ranks.
    """
    conf = cluster.conf(session)
    with monitor.open_channel(conf, local_mode=plan.local_mode) as server:
        staging.stage_everywhere(session, plan, server=server, progress=shown)
        slots = 0 if plan.local_mode else cluster.slots(session.sparkContext)
        secrets = tracking.worker_secrets(os.environ) | monitor.rank_variables(server)

        def attempt(plan: RunPlan) -> RankResult:
            with (
                shown.training(plan) as training,
                tracking_tensorboard.event_files(plan, notebook=progress.in_notebook()) as write,
                monitor.follow(
                    plan,
                    training.event,
                    run.log_event,
                    write,
                    supervise.noticing(plan, lambda taken: _correct(taken, run)),
                    server=server,
                    heard=training.heard,
                    used=run.log_usage,
                ) as live,
                board.kept(plan, live),
            ):
                training.show_ranks(lambda: board.rows(live))
                guard = stalls.Guard(plan, live)

                def tick() -> None:
                    training.tick()
                    check()
                    guard.check()

                return launch.launch(session, plan, secrets, on_poll=tick)

        def regroup(again: RunPlan) -> RunPlan:
            found = recovery.regroup(session, plan, again, slots=slots, check=check, say=click.echo)
            staging.stage_everywhere(session, found, server=server, progress=shown)
            _correct(found, run)
            return found

        return supervise.run(plan, attempt, regroup=regroup, tell=_telling(run))


def _telling(run: tracking.DriverRun) -> Callable[[str], None]:
    """Says a restart on the screen and in MLflow."""
    restarts: list[str] = []

    def tell(text: str) -> None:
        restarts.append(text)
        click.echo(text)
        run.set_tag(RESTARTS, "\n".join(restarts))

    return tell


def tell_origin(plan: RunPlan, run: tracking.DriverRun) -> None:
    """Say in MLflow which checkpoint a run goes on from, if it does."""
    if plan.resume_from:
        run.set_tag(ORIGIN, plan.resume_from)


def _correct(taken: RunPlan, run: tracking.DriverRun) -> None:
    """The same where the run has gone on from another one than was planned."""
    run.log_config(taken)
    tell_origin(taken, run)
