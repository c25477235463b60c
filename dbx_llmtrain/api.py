"""The public functions. Each is a page of named calls in order; the logic is elsewhere."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from dbx_llmtrain import logs, planning, storage, tracking, tracking_tensorboard
from dbx_llmtrain.config import TrainConfig, require
from dbx_llmtrain.driver import (
    checks,
    cluster,
    examples,
    launch,
    monitor,
    preflight,
    progress,
    run_folder,
    sources,
    staging,
)
from dbx_llmtrain.driver import prepare as preparing
from dbx_llmtrain.previewing import Preview
from dbx_llmtrain.records import (
    ClusterReport,
    ModelInfo,
    PreparedData,
    RankResult,
    RunPlan,
    TrainResult,
)

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from dbx_llmtrain.driver.formatters import Formatter


def probe(cfg: TrainConfig | None = None, *, spark: SparkSession | None = None) -> ClusterReport:
    """Every node's GPUs (by ``nvidia-smi``), CPU, memory, disk and package versions.

    Raises ``ClusterError`` where Spark cannot run tasks that reach the nodes.
    """
    session = cluster.session(spark)
    local_dir = require(cfg).cluster.local_dir if cfg is not None else None
    return cluster.probe(session, local_dir=local_dir)


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
    with _showing(cfg) as shown:
        return _prepare(cfg, session, data, formatter, shown)[1]


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
    with _showing(cfg) as shown:
        model, prepared = _prepare(cfg, session, data, formatter, shown)
        return examples.show_examples(cfg, model, prepared, count=n, split=split)


def plan(
    cfg: TrainConfig,
    *,
    data: Any = None,
    formatter: Formatter | None = None,
    spark: SparkSession | None = None,
) -> RunPlan:
    """What ``train`` would run and why. Reads the model's files and prepares the data.

    ``data`` and ``formatter`` as in ``prepare``. Raises ``ConfigError``, ``ClusterError`` or
    ``DataError`` for what cannot work.
    """
    cfg, session = checks.begin(cfg, spark, data, formatter, purpose="train")
    with _showing(cfg) as shown:
        return _decide(cfg, session, data, formatter, shown)


def train(
    cfg: TrainConfig,
    *,
    data: Any = None,
    formatter: Formatter | None = None,
    spark: SparkSession | None = None,
) -> TrainResult:
    """Train on every GPU of the cluster (or on CPU) and return when every rank has finished.

    ``data`` and ``formatter`` as in ``prepare``. Raises ``ConfigError``, ``ClusterError``,
    ``DataError`` and ``StagingError`` before any GPU is used, and ``TrainingFailed`` with the first
    failing rank's traceback afterwards.
    """
    cfg, session = checks.begin(cfg, spark, data, formatter, purpose="train")
    with _showing(cfg) as shown:
        chosen = _decide(cfg, session, data, formatter, shown)
        with run_folder.told_when_stopped(chosen), tracking.driver_run(chosen) as run:
            chosen = run.attach(chosen)
            run_folder.write_start(chosen)
            click.echo(str(chosen))
            run.log_start(chosen)
            outcome = _run(session, chosen, run, shown)
            result = run_folder.write_result(chosen, outcome)
            run.log_result(result)
    if not progress.is_interactive():  # there the value of a cell is shown in any case
        click.echo(str(result))
    return result


@contextmanager
def _showing(cfg: TrainConfig) -> Iterator[progress.Progress]:
    """Messages and progress, as the configuration wants them shown."""
    settings = cfg.tracking
    with logs.shown(settings.log_level), progress.showing(settings.progress) as shown:
        yield shown


def _run(
    session: SparkSession, plan: RunPlan, run: tracking.DriverRun, shown: progress.Progress
) -> RankResult:
    """Stage, launch, and follow what the ranks say."""
    conf = cluster.conf(session)
    with monitor.open_channel(conf, local_mode=plan.local_mode) as server:
        staging.stage_everywhere(session, plan, server=server, progress=shown)
        with (
            shown.training(plan) as training,
            tracking_tensorboard.event_files(plan, notebook=progress.in_notebook()) as write,
            monitor.follow(
                plan, training.event, run.log_event, write, server=server, heard=training.heard
            ),
        ):
            secrets = tracking.worker_secrets(os.environ) | monitor.rank_variables(server)
            return launch.launch(session, plan, secrets, on_poll=training.tick)


def _prepare(
    cfg: TrainConfig,
    session: SparkSession,
    data: Any,
    formatter: Formatter | None,
    shown: progress.Progress,
) -> tuple[ModelInfo, PreparedData]:
    """Check, resolve the model without its weights, prepare the data."""
    preflight.require(preflight.check_before_jobs(cluster.conf(session)))
    cache = _cache(cfg, session)
    return _model_and_data(cfg, session, cache, data, formatter, shown, weights=False)


def _cache(cfg: TrainConfig, session: SparkSession) -> Path:
    """The folder of prepared data: where ``train`` looks for it."""
    if cfg.data.cache_dir:
        path = storage.local_path(cfg.data.cache_dir).absolute()
        return run_folder.make_folder(path, "data.cache_dir")
    report = cluster.probe(session, local_dir=cfg.cluster.local_dir)
    on_databricks = "DATABRICKS_RUNTIME_VERSION" in os.environ
    parent = planning.checkpoint_dir(cfg, report, on_databricks=on_databricks)
    folder = run_folder.name_folder(cfg, parent, now=datetime.datetime.now())
    return run_folder.make_cache(cfg, folder)


def _model_and_data(
    cfg: TrainConfig,
    session: SparkSession,
    cache: Path,
    data: Any,
    formatter: Formatter | None,
    shown: progress.Progress,
    *,
    weights: bool = True,
) -> tuple[ModelInfo, PreparedData]:
    """Resolve the model, prepare the data; what is wrong shows before it costs a download."""
    objective = cfg.data.objective
    with run_folder.tidied(cache):
        model = sources.resolve_model(cfg.model, cache, objective=objective, weights=weights)
        planning.check_length(cfg, model)
        with shown.rows() as count:
            prepared = preparing.prepare_data(
                cfg, model, cache, spark=session, data=data, formatter=formatter, progress=count
            )
    return model, prepared


def _decide(
    cfg: TrainConfig,
    session: SparkSession,
    rows: Any,
    formatter: Formatter | None,
    shown: progress.Progress,
) -> RunPlan:
    """Check, probe, resolve the model, prepare the data, plan."""
    preflight.require(preflight.check_before_jobs(cluster.conf(session)))
    report = cluster.probe(session, local_dir=cfg.cluster.local_dir)
    layout = planning.choose_layout(cfg, report)
    preflight.require(preflight.check_conf(cluster.conf(session), report, layout, os.environ))
    on_databricks = "DATABRICKS_RUNTIME_VERSION" in os.environ
    parent = planning.checkpoint_dir(cfg, report, on_databricks=on_databricks)
    folder = run_folder.name_folder(cfg, parent, now=datetime.datetime.now())
    resume_from = run_folder.resume_point(cfg, folder)
    cache = run_folder.make_cache(cfg, folder)
    model, data = _model_and_data(cfg, session, cache, rows, formatter, shown)
    chosen = planning.make_plan(
        cfg,
        report,
        layout,
        model,
        data,
        attempt=folder.attempt,
        run_name=folder.name,
        run_dir=str(folder.path),
        resume_from=resume_from,
    )
    return run_folder.check_resume(chosen)
