"""One attempt at training on every rank: start, follow, cancel, judge.

The only module that imports ``TorchDistributor``. Its own return and exceptions say little that can
be trusted: it drops exit codes, returns one rank's value although another failed, and its exception
names no cause. The records that the ranks' supervisors leave in the run folder decide.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dbx_llmtrain import storage
from dbx_llmtrain.driver import cluster, diagnosis, preflight, shipping
from dbx_llmtrain.errors import TrainingFailed
from dbx_llmtrain.outcomes import RankRecord, RankResult
from dbx_llmtrain.records import LaunchPlan
from dbx_llmtrain.worker import node, requests, supervisor
from dbx_llmtrain.worker.requests import Wish

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

_TARGET = "dbx_llmtrain.worker.supervisor:run"
_THREADS = "OMP_NUM_THREADS"
_POLL_S = 0.5
_RECORDS_S = 30.0
"""How long ranks may take to end and leave their records after the launcher has."""
_TAKEN_S = 6.0
"""How long rank 0 may take to see that it is asked to end, where it takes steps at all,"""
_LEAVING_S = 120.0
"""and how long the ranks may then take to finish a step and write a checkpoint."""
_CANCEL_S = 60.0
_WAITING_S = 30.0


def launch(
    spark: SparkSession,
    plan: LaunchPlan,
    secrets: dict[str, str],
    *,
    on_poll: Callable[[], None] | None = None,
    module: str = supervisor.TRAINER,
) -> RankResult:
    """Run the plan's ranks to their end and return rank 0's result.

    Success is a ``finished`` record of every rank with this attempt. Raises ``TrainingFailed`` of
    the first rank that failed. ``on_poll`` is called about twice a second; what it raises ends the
    ranks and passes on. A ``KeyboardInterrupt`` or ``SystemExit`` lets them write a checkpoint
    before, unless another one follows. In every case no trainer is left.
    ``module`` is what runs as ``python -m module plan.json`` on each rank.
    """
    run_dir = storage.local_path(plan.run_dir)
    storage.write_text(run_dir / "plan.json", plan.model_dump_json(indent=1))
    requests.clear(run_dir)  # what an earlier attempt was asked for and did not hear
    with _stop_file(plan) as stop_file:
        args = (plan.model_dump_json(), secrets, module, str(stop_file) if stop_file else None)
        job = cluster.SparkJob(
            spark.sparkContext,
            f"dbx_llmtrain: training of {plan.run_name}",
            _distributor(spark, plan, partial(shipping.caller(), _TARGET, *args)),
        )
        try:
            _follow(job, plan, on_poll)
        except BaseException as cause:
            _end(job, stop_file, run_dir, plan, cause)
            raise
    error = job.error()
    records = _wait_for_records(run_dir, plan)
    return _judge(plan, records, error)


def _distributor(
    spark: SparkSession, plan: LaunchPlan, function: Callable[[], object]
) -> Callable[[], object]:
    """What runs in the job's thread. Wrong arguments raise here, in the caller's."""
    from pyspark.ml.torch.distributor import TorchDistributor

    # In local mode TorchDistributor hands out GPUs only if Spark manages the driver's. Else every
    # rank sees all of them and takes the one of its local rank.
    managed = cluster.conf(spark).get(preflight.DRIVER_GPUS, "0") != "0"
    distributor = TorchDistributor(
        num_processes=plan.world_size,
        local_mode=plan.local_mode,
        use_gpu=plan.use_gpu and (managed or not plan.local_mode),
    )

    def run() -> object:
        if plan.local_mode:
            # The processes that this thread starts inherit it: a terminal's Ctrl-C is for the
            # driver, which ends them, while the launcher would print a traceback.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        state = random.getstate()
        try:
            with _threads_told(plan):
                return distributor.run(function)
        finally:
            random.setstate(state)  # it seeds Python's generator when it picks GPUs

    return run


@contextmanager
def _threads_told(plan: LaunchPlan) -> Iterator[None]:
    """What torchrun would set for several processes of one machine, and say so in a banner; the
    ranks decide by themselves how many threads they have."""
    if not plan.local_mode or plan.world_size == 1 or _THREADS in os.environ:
        yield
        return
    os.environ[_THREADS] = "1"
    try:
        yield
    finally:
        os.environ.pop(_THREADS, None)


@contextmanager
def _stop_file(plan: LaunchPlan) -> Iterator[Path | None]:
    """In local mode no Spark job runs that could be cancelled: a file tells the ranks to end."""
    if not plan.local_mode:
        yield None
        return
    folder = tempfile.mkdtemp(prefix="dbx_llmtrain-stop-")
    try:
        yield Path(folder) / "stop"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _follow(job: cluster.SparkJob, plan: LaunchPlan, on_poll: Callable[[], None] | None) -> None:
    started = time.monotonic()
    waiting = not plan.local_mode
    while not job.wait(_POLL_S):
        if on_poll is not None:
            on_poll()
        if waiting and time.monotonic() - started > _WAITING_S:
            waiting = False
            if not job.active_tasks():
                logger.warning(
                    "waiting for %d free task slots at once: other jobs use the cluster",
                    plan.world_size,
                )


def _end(
    job: cluster.SparkJob,
    stop_file: Path | None,
    run_dir: Path,
    plan: LaunchPlan,
    cause: BaseException,
) -> None:
    """Stop the ranks and wait for them. It never raises: the cause is what has to be told, and what
    stops this process may have ended the JVM, or closed the terminal, too."""
    if isinstance(cause, KeyboardInterrupt | SystemExit):
        with node.Capture():
            _let_leave(job, run_dir, plan)
    with node.Capture() as stopping:
        _stop(job, stop_file)
    if stopping.error:
        logger.warning("the ranks could not be told to stop: %s", stopping.text())
    _wait_for_records(run_dir, plan)


def _let_leave(job: cluster.SparkJob, run_dir: Path, plan: LaunchPlan) -> None:
    """Have the ranks write a checkpoint and end by themselves; returns when they have, or will not.

    Rank 0 takes the request away where steps are taken; where none are there is nothing to save.
    """
    with node.Capture():  # its terminal may be gone
        click.echo(
            f"stopping {plan.world_size} rank(s), please wait ... (they write a checkpoint; "
            "interrupt again to end them at once)",
            err=True,
        )
    requests.ask(run_dir, Wish.CANCEL)
    began = time.monotonic()
    try:
        while not job.wait(_POLL_S):
            taken = not (run_dir / Wish.CANCEL.value).exists()
            if time.monotonic() - began > (_LEAVING_S if taken else _TAKEN_S):
                return
    except KeyboardInterrupt:
        return
    finally:
        requests.clear(run_dir)


def _stop(job: cluster.SparkJob, stop_file: Path | None) -> None:
    """End the ranks, if they have not ended, and wait until the launcher has noticed."""
    if stop_file is not None:
        stop_file.touch()
    else:
        job.cancel()
    if not job.wait(_CANCEL_S):
        logger.warning("the launcher has not ended within %.0f s of being cancelled", _CANCEL_S)


def _wait_for_records(run_dir: Path, plan: LaunchPlan) -> dict[int, RankRecord]:
    """Supervisors write their records after their trainers are gone, some seconds after Spark has
    given up; and shared storage may show them late."""
    deadline = time.monotonic() + _RECORDS_S
    while True:
        records = diagnosis.read_records(run_dir, plan.attempt, plan.world_size)
        if len(records) == plan.world_size or time.monotonic() > deadline:
            return records
        time.sleep(_POLL_S)


def _judge(
    plan: LaunchPlan, records: dict[int, RankRecord], error: BaseException | None
) -> RankResult:
    finished = [record for record in records.values() if record.status == "finished"]
    result = records[0].result if 0 in records else None
    if len(finished) == plan.world_size and result is not None:
        if error is not None:
            logger.warning("every rank finished; %s", diagnosis.launcher_text(error))
        return result
    failed: TrainingFailed = diagnosis.failure(
        records, plan.world_size, error, storage.local_path(plan.run_dir)
    )
    raise failed from error
