"""What shows before anything is started: every fault that is cheap to find, told together."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from dbx_llmtrain import config, planning, tracking_tensorboard
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver import (
    cluster,
    examples,
    formatters,
    inputs,
    preflight,
    run_folder,
    sources,
)
from dbx_llmtrain.errors import LlmTrainError, together
from dbx_llmtrain.records import ClusterReport

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Purpose = Literal["train", "prepare"]


def begin(
    cfg: object,
    spark: SparkSession | None,
    data: Any = None,
    formatter: Any = None,
    *,
    purpose: Purpose,
    shown: tuple[object, object] | None = None,
) -> tuple[TrainConfig, SparkSession]:
    """The configuration and the session, when nothing is wrong with either that shows at once.

    Where something is, the cluster's settings are looked at too, as far as no job is needed, and
    one error has it all: ``ConfigError``, ``DataError``, ``CheckpointError`` or ``ClusterError``.
    """
    checked = config.require(cfg)
    found = _faults(checked, data, formatter, purpose, shown)
    if not found:
        return checked, cluster.session(spark)
    try:
        _check_cluster(checked, cluster.session(spark), purpose)
    except LlmTrainError as error:
        found.append(error)
    raise together(found)


def require(
    cfg: object, *, purpose: Purpose, shown: tuple[object, object] | None = None
) -> TrainConfig:
    """The same without a session, which takes long to start: faults of the configuration, of a
    model folder, of data files and of the run folder. ``shown`` are the number and the split of a
    preview."""
    checked = config.require(cfg)
    if found := _faults(checked, None, None, purpose, shown):
        raise together(found)
    return checked


def _faults(
    cfg: TrainConfig,
    data: Any,
    formatter: Any,
    purpose: Purpose,
    shown: tuple[object, object] | None,
) -> list[LlmTrainError]:
    training = purpose == "train"
    checks: list[Callable[[], object]] = [
        lambda: inputs.check_files(cfg.data, data),
        lambda: formatters.choose(cfg.data.formatter, formatter),
        lambda: _check_model(cfg, weights=training),
        lambda: run_folder.check_places(cfg),
    ]
    if training:
        checks.append(lambda: tracking_tensorboard.check(cfg))
    if shown:
        checks.append(lambda: examples.require(cfg, *shown, data))
    found = []
    for check in checks:
        try:
            check()
        except LlmTrainError as error:
            found.append(error)
    return found


def _check_model(cfg: TrainConfig, *, weights: bool) -> None:
    model = sources.look(cfg.model, objective=cfg.data.objective, weights=weights)
    if model is not None:
        planning.check_length(cfg, model)


def _check_cluster(cfg: TrainConfig, session: SparkSession, purpose: Purpose) -> None:
    """Raise for settings under which the ranks cannot run, as far as they show without a job."""
    conf = cluster.conf(session)
    preflight.require(preflight.check_before_jobs(conf))
    if purpose == "train":
        report = cluster.glance(session, local_dir=cfg.cluster.local_dir)
        layout = _layout(cfg, report)
        preflight.require(preflight.check_conf(conf, report, layout, os.environ))


def _layout(cfg: TrainConfig, report: ClusterReport) -> planning.Layout:
    """Which ranks are asked for by name. Without the nodes nobody knows how many ``auto`` gives, or
    whether they have GPUs: then no number is held against the slots."""
    settings = cfg.cluster
    local = report.local if settings.local_mode == "auto" else settings.local_mode
    gpus = bool(report.driver.gpus) if local else report.task_gpus is not None
    use_gpu = gpus if settings.use_gpu == "auto" else settings.use_gpu
    if settings.processes == "auto" or not report.slots:
        return planning.Layout(0, local, use_gpu, ())
    return dataclasses.replace(planning.choose_layout(cfg, report), use_gpu=use_gpu)
