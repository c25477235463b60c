"""The public functions. Each is a page of named calls in order; the logic is elsewhere."""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING

import click

from dbx_llmtrain import logs, planning, tracking, tracking_tensorboard
from dbx_llmtrain.config import TrainConfig, require
from dbx_llmtrain.driver import (
    cluster,
    launch,
    monitor,
    preflight,
    prepare,
    progress,
    run_folder,
    sources,
    staging,
)
from dbx_llmtrain.records import ClusterReport, RankResult, RunPlan, TrainResult

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def probe(cfg: TrainConfig | None = None, *, spark: SparkSession | None = None) -> ClusterReport:
    """Every node's GPUs (by ``nvidia-smi``), CPU, memory, disk and package versions.

    Raises ``ClusterError`` where Spark cannot run tasks that reach the nodes.
    """
    session = cluster.session(spark)
    local_dir = require(cfg).cluster.local_dir if cfg is not None else None
    return cluster.probe(session, local_dir=local_dir)


def plan(cfg: TrainConfig, *, spark: SparkSession | None = None) -> RunPlan:
    """What ``train`` would run and why. Reads the model's files and prepares the data.

    Raises ``ConfigError``, ``ClusterError`` or ``DataError`` for what cannot work.
    """
    settings = require(cfg).tracking
    session = cluster.session(spark)
    with logs.shown(settings.log_level), progress.showing(settings.progress) as shown:
        return _decide(cfg, session, shown)


def train(cfg: TrainConfig, *, spark: SparkSession | None = None) -> TrainResult:
    """Train on every GPU of the cluster (or on CPU) and return when every rank has finished.

    Raises ``ConfigError``, ``ClusterError``, ``DataError`` and ``StagingError`` before any GPU is
    used, and ``TrainingFailed`` with the first failing rank's traceback afterwards.
    """
    settings = require(cfg).tracking
    session = cluster.session(spark)
    with logs.shown(settings.log_level), progress.showing(settings.progress) as shown:
        chosen = _decide(cfg, session, shown)
        with tracking.driver_run(chosen) as run:
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


def _run(
    session: SparkSession, plan: RunPlan, run: tracking.DriverRun, shown: progress.Progress
) -> RankResult:
    """Stage, launch, and follow what the ranks say."""
    conf = cluster.conf(session)
    with monitor.open_channel(conf, local_mode=plan.local_mode) as server:
        staging.stage_everywhere(session, plan, server=server, progress=shown)
        with (
            shown.training(plan) as training,
            tracking_tensorboard.event_files(plan) as write,
            monitor.follow(
                plan, training.event, run.log_event, write, server=server, heard=training.heard
            ),
        ):
            secrets = tracking.worker_secrets(os.environ) | monitor.rank_variables(server)
            return launch.launch(session, plan, secrets, on_poll=training.tick)


def _decide(cfg: TrainConfig, session: SparkSession, shown: progress.Progress) -> RunPlan:
    """Check, probe, resolve the model, prepare the data, plan."""
    tracking_tensorboard.check(cfg)
    preflight.require(preflight.check_before_jobs(cluster.conf(session)))
    report = cluster.probe(session, local_dir=cfg.cluster.local_dir)
    layout = planning.choose_layout(cfg, report)
    preflight.require(preflight.check_conf(cluster.conf(session), report, layout, os.environ))
    on_databricks = "DATABRICKS_RUNTIME_VERSION" in os.environ
    parent = planning.checkpoint_dir(cfg, report, on_databricks=on_databricks)
    folder = run_folder.name_folder(cfg, parent, now=datetime.datetime.now())
    resume_from = run_folder.resume_point(cfg, folder)
    cache = run_folder.make_folder(folder.cache)
    sources.check_files(cfg.data)
    model = sources.resolve_model(cfg.model, cache)
    planning.check_length(cfg, model)
    with shown.rows() as count:
        data = prepare.prepare_data(cfg, model, cache, progress=count)
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
