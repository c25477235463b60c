"""From a configuration to what will run: the model found, the data prepared, the plan made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbx_llmtrain import planning, storage
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver import (
    cluster,
    preflight,
    progress,
    run_folder,
    sample_prompts,
    sources,
    survey,
)
from dbx_llmtrain.driver import prepare as preparing
from dbx_llmtrain.layout import BESIDE
from dbx_llmtrain.records import ModelInfo, PreparedData, RunPlan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dbx_llmtrain.driver.formatters import Formatter


def prepare(
    cfg: TrainConfig,
    session: SparkSession,
    data: Any,
    formatter: Formatter | None,
    shown: progress.Progress,
) -> tuple[ModelInfo, PreparedData]:
    """Check, resolve the model without its weights, prepare the data."""
    preflight.require(preflight.check_before_jobs(cluster.conf(session)))
    cache = _cache(cfg, session)
    return model_and_data(cfg, session, cache, data, formatter, shown, weights=False)


def decide(
    cfg: TrainConfig,
    session: SparkSession,
    case: survey.Survey,
    data: Any,
    formatter: Formatter | None,
    shown: progress.Progress,
) -> RunPlan:
    """Resolve the model, prepare the data, plan.

    Raises ``CheckpointError`` where the run cannot go on from what is in its folder.
    """
    resume_from = None if case.trial else run_folder.resume_point(cfg, case.folder)
    cache = run_folder.make_cache(cfg, case.folder)
    model, prepared = model_and_data(cfg, session, cache, data, formatter, shown)
    plan = planning.make_plan(
        cfg,
        case.report,
        case.layout,
        model,
        prepared,
        attempt=case.folder.attempt,
        run_name=case.folder.name,
        run_dir=str(case.folder.path),
        resume_from=resume_from,
        began=case.began,
        free=run_folder.free_space(case.folder.path),
    )
    return run_folder.check_resume(plan.model_copy(update={"trial": case.trial}))


def _cache(cfg: TrainConfig, session: SparkSession) -> Path:
    """The folder of prepared data: where ``train`` looks for it."""
    if cfg.data.cache_dir:
        path = storage.local_path(cfg.data.cache_dir).absolute()
        return run_folder.make_folder(path, "data.cache_dir")
    report = cluster.probe(session, local_dir=cfg.cluster.local_dir)
    return run_folder.make_cache(cfg, survey.name_run(cfg, session, report))


def model_and_data(
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
    objective, runs = cfg.data.objective, storage.local_path(cfg.checkpoint.dir or BESIDE)
    with run_folder.tidied(cache):
        model = sources.resolve_model(
            cfg.model, cache, objective=objective, weights=weights, runs=runs
        )
        planning.check_length(cfg, model)
        with shown.rows() as count:
            prepared = preparing.prepare_data(
                cfg, model, cache, spark=session, data=data, formatter=formatter, progress=count
            )
        sample_prompts.check(cfg, model, prepared)
    return model, prepared
