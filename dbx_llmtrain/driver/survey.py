"""What a call finds before it looks at model and data: the cluster, the ranks, the run's folder."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from dbx_llmtrain import layout as layouts
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver import checklist, job_context, run_folder
from dbx_llmtrain.driver.run_folder import RunFolder
from dbx_llmtrain.reports import ClusterReport

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Survey:
    """The cluster, which ranks run on it, and where. ``began`` is when the call began, seconds
    since the epoch."""

    report: ClusterReport
    layout: layouts.Layout
    folder: RunFolder
    began: float
    trial: bool = False


def look(cfg: TrainConfig, session: SparkSession, *, began: float, trial: bool = False) -> Survey:
    """Check Spark's settings, probe the nodes, place the ranks, name the run; nothing stays that is
    made for it.

    Raises ``ClusterError`` and ``ConfigError``.
    """
    found = checklist.look(cfg, session)
    checklist.require(found.findings)
    folder = name_run(cfg, session, found.report, trial=trial)
    return Survey(found.report, found.layout, folder, began, trial)


def name_run(
    cfg: TrainConfig, session: SparkSession, report: ClusterReport, *, trial: bool = False
) -> RunFolder:
    """The folder of a run. Raises ``ConfigError`` where every node could not see it."""
    on_databricks = "DATABRICKS_RUNTIME_VERSION" in os.environ
    parent = layouts.checkpoint_dir(cfg, report, on_databricks=on_databricks)
    job = None if cfg.tracking.run_name else job_context.run_name(session)
    return run_folder.name_folder(cfg, parent, now=datetime.datetime.now(), job=job, trial=trial)


def tell_name(folder: RunFolder) -> None:
    """Print the name of a run that nobody has named."""
    if folder.why:
        click.echo(f"run {folder}; its name is made {folder.why}")
