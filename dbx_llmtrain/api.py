"""The public functions. Each is a page of named calls in order; the logic is elsewhere."""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING

import click

from dbx_llmtrain import planning, tracking
from dbx_llmtrain.config import TrainConfig, require
from dbx_llmtrain.driver import (
    cluster,
    launch,
    monitor,
    preflight,
    prepare,
    run_folder,
    sources,
    staging,
)
from dbx_llmtrain.records import ClusterReport, RunPlan, TrainResult

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
    return _decide(cfg, cluster.session(spark))


def train(cfg: TrainConfig, *, spark: SparkSession | None = None) -> TrainResult:
    """Train on every GPU of the cluster (or on CPU) and return when every rank has finished.

    Raises ``ConfigError``, ``ClusterError``, ``DataError`` and ``StagingError`` before any GPU is
    used, and ``TrainingFailed`` with the first failing rank's traceback afterwards.
    """
    session = cluster.session(spark)
    chosen = _decide(cfg, session)
    with tracking.driver_run(chosen) as run:
        chosen = run.attach(chosen)
        run_folder.write_start(chosen)
        click.echo(str(chosen))
        run.log_start(chosen)
        staging.stage_everywhere(session, chosen)
        with monitor.follow(chosen, run.log_event):
            secrets = tracking.worker_secrets(os.environ)
            outcome = launch.launch(session, chosen, secrets)
        result = run_folder.write_result(chosen, outcome)
        run.log_result(result)
    click.echo(str(result))
    return result


def _decide(cfg: TrainConfig, session: SparkSession) -> RunPlan:
    """Check, probe, resolve the model, prepare the data, plan."""
    cfg = require(cfg)
    preflight.require(preflight.check_before_jobs(cluster.conf(session)))
    report = cluster.probe(session, local_dir=cfg.cluster.local_dir)
    layout = planning.choose_layout(cfg, report)
    preflight.require(preflight.check_conf(cluster.conf(session), report, layout, os.environ))
    on_databricks = "DATABRICKS_RUNTIME_VERSION" in os.environ
    parent = planning.checkpoint_dir(cfg, report, on_databricks=on_databricks)
    folder = run_folder.name_folder(cfg, parent, now=datetime.datetime.now())
    resume_from = run_folder.resume_point(cfg, folder)
    cache = run_folder.make_folder(folder.cache)
    model = sources.resolve_model(cfg.model, cache)
    data = prepare.prepare_data(cfg, model, cache)
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
