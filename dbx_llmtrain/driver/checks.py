"""What shows before anything is started: every fault that is cheap to find, told together."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dbx_llmtrain import (
    config,
    milestones,
    model_checks,
    planning,
    tracking_tensorboard,
    zero_config,
)
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver import (
    adapters,
    cluster,
    examples,
    formatters,
    inputs,
    job_context,
    lease,
    outlines,
    preflight,
    registry,
    run_folder,
    sources,
    user_metrics,
)
from dbx_llmtrain.errors import ConfigError, LlmTrainError, Problem, together
from dbx_llmtrain.layout import BESIDE, Layout, choose_layout
from dbx_llmtrain.reports import ClusterReport

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Purpose = Literal["train", "prepare"]
Begins = Literal["run", "trial"]
"""What is about to write to a run folder."""


def begin(
    cfg: object,
    spark: SparkSession | None,
    data: Any = None,
    formatter: Any = None,
    *,
    purpose: Purpose,
    metrics: Any = None,
    shown: tuple[object, object] | None = None,
    begins: Begins | None = None,
) -> tuple[TrainConfig, SparkSession]:
    """The configuration and the session, when nothing is wrong with either that shows at once, and
    no other call writes to the folder of what ``begins``, as far as its name is known: that comes
    first, as it costs nothing. (Whoever takes the folder looks again.)

    Where something is, the cluster's settings are looked at too, as far as no job is needed, and
    one error has it all: ``ConfigError``, ``DataError``, ``CheckpointError`` or ``ClusterError``.
    """
    checked = config.require(cfg)
    place = _run_folder(checked, begins)
    if place is not None:
        lease.refuse_in_use(place)
    found = _faults(checked, data, formatter, purpose, shown, metrics)
    if not found:
        session = cluster.session(spark)
        place = place or _run_folder(checked, begins, session)
        if place is not None:
            lease.wait_until_free(place)
        return checked, session
    try:
        _check_cluster(checked, cluster.session(spark), purpose)
    except LlmTrainError as error:
        found.append(error)
    raise together(found)


def require(
    cfg: object,
    *,
    purpose: Purpose,
    shown: tuple[object, object] | None = None,
    begins: Begins | None = None,
) -> TrainConfig:
    """The same without a session, which takes long to start: faults of the configuration, of a
    model folder, of data files and of the run folder. ``shown`` are the number and the split of a
    preview."""
    checked = config.require(cfg)
    place = _run_folder(checked, begins)
    if place is not None:
        lease.refuse_in_use(place)
    if found := _faults(checked, None, None, purpose, shown):
        raise together(found)
    if place is not None:
        lease.wait_until_free(place)
    return checked


def _run_folder(
    cfg: TrainConfig, begins: Begins | None, session: SparkSession | None = None
) -> Path | None:
    """The folder of what is about to begin, where its name and place are known without a look at
    the cluster, or by the job of the ``session``."""
    on_databricks = "DATABRICKS_RUNTIME_VERSION" in os.environ
    parent = cfg.checkpoint.dir or (None if on_databricks else BESIDE)
    if begins is None or parent is None:
        return None
    job = job_context.run_name(session) if session and not cfg.tracking.run_name else None
    if not cfg.tracking.run_name and job is None:
        return None
    now = datetime.datetime.now()
    return run_folder.name_folder(cfg, parent, now=now, job=job, trial=begins == "trial").path


def _faults(
    cfg: TrainConfig,
    data: Any,
    formatter: Any,
    purpose: Purpose,
    shown: tuple[object, object] | None,
    metrics: Any = None,
) -> list[LlmTrainError]:
    training = purpose == "train"
    checks: list[Callable[[], object]] = [
        lambda: inputs.check_files(cfg.data, data),
        lambda: formatters.choose(cfg.data.formatter, formatter),
        lambda: _check_model(cfg, weights=training),
        lambda: sources.find_tokenizer(cfg.model),
        lambda: run_folder.check_places(cfg),
        lambda: adapters.check(cfg),
        lambda: _check_deepspeed(cfg),
    ]
    if training:
        checks.append(lambda: tracking_tensorboard.check(cfg))
        checks.append(lambda: user_metrics.check(metrics))
        checks.append(lambda: _check_evaluations(cfg, data, metrics))
        checks.append(lambda: registry.check(cfg))
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
    elif sources.is_here(cfg.model) and not cfg.model.trust_remote_code:
        found = outlines.outline(cfg.model, objective=cfg.data.objective)
        planning.check_positions(cfg, found.positions, found.shape.model_type)


def _check_deepspeed(cfg: TrainConfig) -> None:
    """Raise for a JSON file of DeepSpeed's that cannot be used. (What the configuration holds
    itself was checked with it.)"""
    parallel = cfg.parallel
    if parallel.kind != "deepspeed" or not isinstance(parallel.config, str):
        return
    sections = {name: getattr(cfg, name) for name in ("model", "train", "cluster")}
    read = {**sections, "parallel": zero_config.with_content(parallel)}
    if problems := model_checks.parallel_problems(read):
        raise ConfigError(problems)


def _check_evaluations(cfg: TrainConfig, data: Any, metrics: Any) -> None:
    """Raise for what only evaluations can do where no rows are held out, and for a metric that no
    evaluation will have."""
    names = inputs.eval_names(cfg.data, data)
    milestones.check_held_out(cfg, names, own_metrics=metrics is not None)
    if not milestones.uses_metric(cfg) or metrics is not None:
        return
    stems = ["eval", *(f"eval_{name}" for name in names if name)]
    known = [f"{stem}_{kind}" for stem in stems for kind in ("loss", "perplexity")]
    if cfg.checkpoint.metric not in known:
        message = (
            f"expected a metric of the evaluations ({', '.join(known)}), or one that a function "
            f"given as metrics= computes, found {cfg.checkpoint.metric}"
        )
        raise ConfigError([Problem("checkpoint.metric", message)])


def _check_cluster(cfg: TrainConfig, session: SparkSession, purpose: Purpose) -> None:
    """Raise for settings under which the ranks cannot run, as far as they show without a job."""
    conf = cluster.conf(session)
    preflight.require(preflight.check_before_jobs(conf))
    if purpose == "train":
        report = cluster.glance(session, local_dir=cfg.cluster.local_dir)
        layout = _layout(cfg, report)
        preflight.require(preflight.check_conf(conf, report, layout, os.environ))


def _layout(cfg: TrainConfig, report: ClusterReport) -> Layout:
    """Which ranks are asked for by name. Without the nodes nobody knows how many ``auto`` gives, or
    whether they have GPUs: then no number is held against the slots."""
    settings = cfg.cluster
    local = report.local if settings.local_mode == "auto" else settings.local_mode
    gpus = bool(report.driver.gpus) if local else report.task_gpus is not None
    use_gpu = gpus if settings.use_gpu == "auto" else settings.use_gpu
    if settings.processes == "auto" or not report.slots:
        return Layout(0, local, use_gpu, ())
    return dataclasses.replace(choose_layout(cfg, report), use_gpu=use_gpu)
