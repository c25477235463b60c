"""A plan before there is a cluster: from a configuration and a cluster told in words."""

from __future__ import annotations

import tempfile
from pathlib import Path

from dbx_llmtrain import planning, storage
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.custom_code import private_modules
from dbx_llmtrain.driver import (
    adapters,
    composed,
    outlines,
    preflight,
    rules,
    sources,
    strategy_checks,
)
from dbx_llmtrain.driver.model_files import tokenizer_files
from dbx_llmtrain.errors import ConfigError, LlmTrainError, Problem, together
from dbx_llmtrain.forecasts import Forecast
from dbx_llmtrain.hardware import describe_cluster
from dbx_llmtrain.layout import BESIDE, choose_layout
from dbx_llmtrain.reports import ClusterReport


def refuse_others(**given: object) -> None:
    """Raise ``ConfigError`` for arguments that a forecast has no use for."""
    found = [name for name, value in given.items() if value is not None]
    if found:
        raise ConfigError(
            [
                Problem(
                    "cluster",
                    "what is told of a cluster needs no Spark and reads no data: leave out "
                    f"{', '.join(found)}, or leave out cluster to plan on the cluster that is here",
                )
            ]
        )


def forecast(cfg: TrainConfig, cluster: str) -> Forecast:
    """What would run on a cluster like ``2x8xH100-80GB``. The faults that a plan on a real cluster
    finds are found here too, but for those of packages and tools on its nodes, and for a tokenizer
    that only the hub has.

    Raises ``ConfigError``, and ``ClusterError`` for what such a cluster cannot run.
    """
    report = describe_cluster(cluster)
    found: list[LlmTrainError] = []
    outline = None
    try:
        adapters.check(cfg)
    except ConfigError as error:
        found.append(error)
    try:
        runs = storage.local_path(cfg.checkpoint.dir or BESIDE)
        outline = outlines.outline(cfg.model, objective=cfg.data.objective, runs=runs)
        planning.check_positions(cfg, outline.positions, outline.shape.model_type)
        _check_parts(cfg)
    except ConfigError as error:
        found.append(error)
    try:
        _check_cluster(cfg, cluster, report)
    except LlmTrainError as error:
        found.append(error)
    if found or outline is None:
        raise together(found)
    return planning.forecast(cfg, cluster, report, outline.shape, model=outline.name)


def _check_cluster(cfg: TrainConfig, told: str, report: ClusterReport) -> None:
    """Raise for settings that such a cluster cannot run."""
    problems = []
    if cfg.cluster.use_gpu is False:
        problems.append(
            Problem("cluster.use_gpu", f"is false, but {told} has GPUs: set cluster.use_gpu=auto")
        )
    if cfg.cluster.local_mode is True and len(report.nodes) > 1:
        problems.append(
            Problem(
                "cluster.local_mode",
                f"is true, which runs on the driver's machine alone, but {told} has "
                f"{len(report.nodes)} nodes: set cluster.local_mode=auto, or tell of one node",
            )
        )
    if problems:
        raise ConfigError(problems)
    layout = choose_layout(cfg, report)
    # As on a cluster that is set up right: one GPU a task.
    preflight.require(
        preflight.check_conf({preflight.TASK_GPUS: "1"}, report, layout, {})
        + strategy_checks.check_strategy(cfg, report, layout, told=True)
    )


def _check_parts(cfg: TrainConfig) -> None:
    """Raise for a model and tokenizer on this machine that do not fit together, as ``train`` does;
    weights are not asked for, and of the hub nothing more is downloaded. A model folder without
    tokenizer files is taken for a configuration alone."""
    model, trusted = cfg.model, cfg.model.trust_remote_code
    settings = composed.own_tokenizer(model)
    own = settings is not None and settings.source is not None
    base = sources.find_model(model) if model.source else None
    words = sources.find_tokenizer(model) if own else base
    if (model.source and (base is None or not base.is_dir())) or words is None:
        return
    if not own and not tokenizer_files(words, trusted=trusted):
        return
    with tempfile.TemporaryDirectory(prefix="dbx_llmtrain-") as temporary:
        folder = Path(temporary)
        found = sources.resolve_model(
            model, folder / "cache", work_dir=folder, objective=cfg.data.objective, weights=False
        )
        with private_modules(folder, wanted=trusted):
            rules.load_tokenizer(found, trusted=trusted)
