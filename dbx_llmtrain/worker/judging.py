"""What an evaluation means for a run: whether its checkpoint is among the best, and whether more
training is worth it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.errors import ConfigError, Problem
from dbx_llmtrain.model_sections import EarlyStopping
from dbx_llmtrain.worker import keeping
from dbx_llmtrain.worker.jobs import Progress


@dataclass(frozen=True)
class Verdict:
    """``keep``: a checkpoint of this step would be among the best. ``enough``: why no more steps
    are worth taking; empty where they are."""

    keep: bool = False
    enough: str = ""


def uses_metric(config: TrainConfig) -> bool:
    """Whether anything is decided by ``checkpoint.metric``."""
    return config.checkpoint.keep_best > 0 or config.train.early_stopping is not None


def check_metric(config: TrainConfig, names: Collection[str]) -> None:
    """Raise ``ConfigError`` where ``checkpoint.metric`` is needed and is none of ``names``, the
    metrics of an evaluation."""
    metric = config.checkpoint.metric
    if not uses_metric(config) or metric in names:
        return
    found = ", ".join(sorted(names)) or "no metric at all"
    message = f"expected a metric of the evaluations, found {metric!r}; they have {found}"
    raise ConfigError([Problem("checkpoint.metric", message)])


def judge(config: TrainConfig, progress: Progress, metrics: Mapping[str, float]) -> Verdict:
    """Take the ``metrics`` of an evaluation after ``progress.step`` in. A step is judged once.

    Raises ``ConfigError`` where ``checkpoint.metric`` is needed and is not among them.
    """
    progress.metrics = dict(metrics)
    if progress.evaluated == progress.step:
        return Verdict()
    progress.evaluated = progress.step
    check_metric(config, metrics)
    if not uses_metric(config):
        return Verdict()
    _begin_anew(config, progress)
    value = metrics[config.checkpoint.metric]
    _count_towards_stopping(config, progress, value)
    return Verdict(_enlist(config, progress, value), enough(config, progress))


def _begin_anew(config: TrainConfig, progress: Progress) -> None:
    """Forget what was judged by another metric: the run goes on with other settings."""
    metric = f"{config.checkpoint.metric} ({_mode(config)})"
    if progress.judged_by != metric:
        progress.judged_by, progress.reached, progress.waited = metric, None, 0
        progress.bests.clear()


def _enlist(config: TrainConfig, progress: Progress, value: float) -> bool:
    """Put this step among the best, if it is; of equal ones an older one stays."""
    count, mode = config.checkpoint.keep_best, _mode(config)
    if not keeping.makes_the_list([known for _, known in progress.bests], value, count, mode):
        return False
    progress.bests.append((progress.step, value))
    progress.bests.sort(key=lambda best: best[1], reverse=mode == "max")
    del progress.bests[count:]
    return True


def _count_towards_stopping(config: TrainConfig, progress: Progress, value: float) -> None:
    settings = stopping(config)
    least = settings.min_delta if settings else 0.0
    if keeping.better(_mode(config), value, progress.reached, least):
        progress.reached, progress.waited = value, 0
    else:
        progress.waited += 1


def enough(config: TrainConfig, progress: Progress) -> str:
    """Why early stopping ends the run here; empty where it does not."""
    settings = stopping(config)
    if settings is None or progress.waited < settings.patience:
        return ""
    metric = config.checkpoint.metric
    least = f" by at least {settings.min_delta:g}" if settings.min_delta else ""
    return (
        f"train.early_stopping: {metric} has not become better than {progress.reached:.6g}{least} "
        f"in {progress.waited} evaluations in a row"
        if progress.reached is not None
        else f"train.early_stopping: {metric} was no number in {progress.waited} evaluations"
    )


def stopping(config: TrainConfig) -> EarlyStopping | None:
    """The settings of early stopping; a number alone is the patience."""
    given = config.train.early_stopping
    return EarlyStopping(patience=given) if isinstance(given, int) else given


def _mode(config: TrainConfig) -> keeping.Mode:
    return keeping.mode_of(config.checkpoint.metric, config.checkpoint.metric_mode)
