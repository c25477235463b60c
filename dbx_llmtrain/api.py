"""The public functions of a run. Each is a page of named calls in order; the logic is elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import click

from dbx_llmtrain import tracking
from dbx_llmtrain.config import TrainConfig, require
from dbx_llmtrain.driver import (
    calling,
    checks,
    cluster,
    deciding,
    examples,
    forecasting,
    lease,
    probing,
    progress,
    registry,
    results,
    run_folder,
    running,
    showing,
    signals,
    survey,
    user_metrics,
)
from dbx_llmtrain.driver import trial as rehearsal
from dbx_llmtrain.forecasts import Forecast
from dbx_llmtrain.previewing import Preview
from dbx_llmtrain.records import PreparedData, RunPlan, TrainResult
from dbx_llmtrain.reports import ClusterReport

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dbx_llmtrain.driver.formatters import Formatter
    from dbx_llmtrain.driver.user_metrics import Metrics


def probe(
    cfg: TrainConfig | None = None, *, full: bool = False, spark: SparkSession | None = None
) -> ClusterReport:
    """Every node's GPUs (by ``nvidia-smi``), CPU, memory, disk and package versions.

    ``full``: also every check that ``plan`` and ``train`` make (in ``findings``, each with what to
    change), with the settings of ``cfg``; then the ranks are started, meet, and measure how fast
    every two hosts talk. Needs the cluster for itself, for less than a minute. Raises
    ``ClusterError`` where Spark cannot run tasks that reach the nodes.
    """
    session = cluster.session(spark)
    known = require(cfg) if cfg is not None else None
    if full:
        return probing.probe_fully(known, session)
    return cluster.probe(session, local_dir=known.cluster.local_dir if known else None)


def prepare(
    cfg: TrainConfig,
    *,
    data: Any = None,
    formatter: Formatter | None = None,
    spark: SparkSession | None = None,
) -> PreparedData:
    """Tokenise, mask and pack the data on Spark; ``train`` with the same settings finds the result.

    Needs no GPU and no weights: a small cluster will do, where ``checkpoint.dir`` (or
    ``data.cache_dir``) is storage that the one for training sees too. ``data`` takes the place of
    the configuration's sources: a Spark DataFrame or ``datasets.Dataset`` to train on, or a mapping
    of ``train``, ``eval`` and ``test`` to such. ``formatter`` gets every row as a dict and returns
    one of a supported shape, or ``None`` to leave it out. Raises ``ConfigError``, ``ClusterError``
    or ``DataError``.
    """
    cfg, session = checks.begin(cfg, spark, data, formatter, purpose="prepare")
    with showing.as_wanted(cfg) as shown:
        return deciding.prepare(cfg, session, data, formatter, shown)[1]


def preview(
    cfg: TrainConfig,
    n: int = 3,
    *,
    split: str = "train",
    data: Any = None,
    formatter: Formatter | None = None,
    spark: SparkSession | None = None,
) -> Preview:
    """The first ``n`` examples of a split as the model sees them, with what is trained of them.

    ``split`` is ``train``, or where rows are held out ``eval`` (``eval-NAME`` for one of several)
    or ``test``. Prepares the data, or uses what is prepared; needs no GPU and no weights. The page
    is also kept beside the prepared data. ``data`` and ``formatter`` as in ``prepare``. Raises
    ``ConfigError``, ``ClusterError`` or ``DataError``.
    """
    cfg, session = checks.begin(cfg, spark, data, formatter, purpose="prepare", shown=(n, split))
    with showing.as_wanted(cfg) as shown:
        model, prepared = deciding.prepare(cfg, session, data, formatter, shown)
        return examples.show_examples(cfg, model, prepared, count=n, split=split)


@overload
def plan(
    cfg: TrainConfig,
    *,
    cluster: None = None,
    data: Any = None,
    formatter: Formatter | None = None,
    spark: SparkSession | None = None,
) -> RunPlan: ...
@overload
def plan(cfg: TrainConfig, *, cluster: str) -> Forecast: ...
def plan(
    cfg: TrainConfig,
    *,
    cluster: str | None = None,
    data: Any = None,
    formatter: Formatter | None = None,
    spark: SparkSession | None = None,
) -> RunPlan | Forecast:
    """What ``train`` would run and why, what every strategy takes of memory, and how long it takes.
    Reads the model's files and prepares the data.

    With ``cluster``, such as ``2x8xH100-80GB`` (nodes x GPUs of each x kind-memory), the same for
    a cluster that does not exist yet, from the model's configuration alone: no Spark, no weights,
    no data. ``data`` and ``formatter`` as in ``prepare``. Raises ``ConfigError``, ``ClusterError``
    or ``DataError`` for what cannot work.
    """
    if cluster is not None:
        forecasting.refuse_others(data=data, formatter=formatter, spark=spark)
        return forecasting.forecast(require(cfg), cluster)
    cfg, session = checks.begin(cfg, spark, data, formatter, purpose="train")
    with showing.as_wanted(cfg) as shown:
        case = survey.look(cfg, session, began=time.time())
        return deciding.decide(cfg, session, case, data, formatter, shown)


def train(
    cfg: TrainConfig,
    *,
    data: Any = None,
    formatter: Formatter | None = None,
    metrics: Metrics | None = None,
    trial: bool = False,
    spark: SparkSession | None = None,
) -> TrainResult:
    """Train on every GPU of the cluster (or on CPU) and return when every rank has finished.

    A run that was interrupted goes on from its newest complete checkpoint; one that is finished
    already returns its result. ``metrics`` gets the model and its tokenizer at every evaluation, on
    every rank, and returns numbers by name. ``trial`` rehearses the run in a folder of its own: two
    steps on the longest rows, one evaluation, one checkpoint, its resume, one export. ``data`` and
    ``formatter`` as in ``prepare``. Raises ``ConfigError``, ``ClusterError``, ``DataError``,
    ``StagingError``, and ``CheckpointError`` (the run's folder is in use, or it cannot go on from
    what is in it), before any GPU is used, and ``TrainingFailed`` with the first failing rank's
    traceback afterwards. SIGTERM, where nobody else handles it, is taken as Ctrl-C is: the ranks
    write a checkpoint, and ``SystemExit`` is raised.
    """
    began = time.time()
    begins: checks.Begins = "trial" if trial else "run"
    cfg, session = checks.begin(
        cfg, spark, data, formatter, purpose="train", metrics=metrics, begins=begins
    )
    with signals.terminated(by_default=True), showing.as_wanted(cfg) as shown:
        case = survey.look(cfg, session, began=began, trial=trial)
        survey.tell_name(case.folder)
        with lease.held(case.folder) as holder:
            chosen = deciding.decide(cfg, session, case, data, formatter, shown)
            result = results.finished(chosen)
            if result is None:
                result = _train(session, chosen, metrics, holder, shown)
    if not progress.is_interactive():  # there the value of a cell is shown in any case
        click.echo(str(result))
    return result


def launch(
    function: Callable[..., Any],
    *args: Any,
    cfg: TrainConfig | None = None,
    processes: int | None = None,
    use_gpu: bool | None = None,
    local_mode: bool | None = None,
    env: Mapping[str, str] | None = None,
    dir: str | None = None,
    run_name: str | None = None,
    stage: Sequence[str] = (),
    spark: SparkSession | None = None,
    **kwargs: Any,
) -> Any:
    """Call ``function(*args, **kwargs)`` on every rank, and return what it returned on rank 0.

    The ranks are placed, checked and watched as those of ``train``, and fail with the same errors;
    their logs are in the run's folder. The function finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR
    and MASTER_PORT in its environment as under torchrun; it opens a process group itself
    (``torch.distributed.init_process_group()``). It is sent by value, with what it uses of your own
    modules; libraries have to be on every node. What it returns may take 64 MiB.

    ``stage``: files and folders that every node gets a copy of on its own disk; the function then
    gets their places there as ``staged=``, a tuple in the same order. ``processes``, ``use_gpu``,
    ``local_mode`` and ``env`` as in the configuration's section ``cluster``, ``dir`` as
    ``checkpoint.dir``: they win over ``cfg``. Raises ``ConfigError``, ``ClusterError``,
    ``StagingError``, ``CheckpointError`` and ``TrainingFailed``.
    """
    began = time.time()
    given = {"processes": processes, "use_gpu": use_gpu, "local_mode": local_mode, "env": env}
    settings = calling.settle(cfg, run_name, dir, given)
    content = calling.pickled(function, args, kwargs)
    files = calling.find(stage)
    session = cluster.session(spark)
    with signals.terminated(by_default=True), showing.as_wanted(settings) as shown:
        case = survey.look(settings, session, began=began)
        with lease.held(case.folder) as holder:
            holder.begin()
            plan = calling.make_plan(settings, case, content, files)
            click.echo(calling.begin_text(plan))
            return calling.run(session, plan, shown=shown, check=holder.check)


def _train(
    session: SparkSession,
    plan: RunPlan,
    metrics: Metrics | None,
    holder: lease.Held,
    shown: progress.Progress,
) -> TrainResult:
    """Do what was planned in a folder that this call holds; MLflow has it from beginning to end."""
    holder.begin()
    earlier = results.earlier_tracking(holder, plan)
    began = time.monotonic()
    with (
        run_folder.told_when_stopped(plan),
        tracking.driver_run(plan, earlier, others=(lease.Lost,)) as run,
    ):
        holder.track(run.plan() or earlier)
        plan = run.attach(plan)
        plan = user_metrics.ship(run_folder.clear(plan, keep=lease.LEASE), metrics)
        run_folder.write_start(plan)
        click.echo(str(plan))
        run.log_start(plan)
        running.tell_origin(plan, run)
        plan = running.closing(plan, time.monotonic() - began)
        go = partial(running.run, session, run=run, shown=shown, check=holder.check)
        outcome = rehearsal.rehearse(plan, go) if plan.trial else go(plan)
        result = results.write(outcome.plan, outcome.result, outcome.restarts)
        run.log_result(result)
        result = registry.log_trained(outcome.plan, result)
    return result
