"""When a run saves and when it ends, what it keeps, and the room that takes. Pure arithmetic."""

from __future__ import annotations

import math
import re
import time
from typing import Literal

from dbx_llmtrain.batches import Steps
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.display import size
from dbx_llmtrain.errors import CheckpointError, ConfigError, Problem
from dbx_llmtrain.forecasts import Decision
from dbx_llmtrain.records import ModelInfo

Mode = Literal["min", "max"]

_LESS_IS_BETTER = {"loss", "losses", "perplexity", "ppl"}


def seconds_of(max_time: str) -> int:
    """Seconds of ``train.max_time``, ``DD:HH:MM:SS``."""
    days, hours, minutes, seconds = map(int, max_time.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def mode_of(metric: str, metric_mode: str) -> Mode:
    """``min`` or ``max``; ``auto`` is ``min`` where the metric's name has a word for a loss or a
    perplexity in it, else ``max``."""
    if metric_mode == "min":
        return "min"
    if metric_mode == "max":
        return "max"
    words = set(re.split(r"[_./-]", metric.lower()))
    return "min" if words & _LESS_IS_BETTER else "max"


def check_held_out(
    cfg: TrainConfig, eval_splits: tuple[str, ...], *, own_metrics: bool = False
) -> None:
    """Raise ``ConfigError`` for settings that only evaluations can give an effect where no rows are
    held out. ``own_metrics``: a function of the user's is called at each evaluation."""
    if eval_splits:
        return
    if problems := [
        Problem(path, f"needs {what}, or remove it")
        for path, what in _needs(cfg, own_metrics).items()
    ]:
        raise ConfigError(problems)


def _needs(cfg: TrainConfig, own_metrics: bool) -> dict[str, str]:
    """The fields that are set and have no effect without held-out rows, and what each needs."""
    train, rows = cfg.train, "held-out rows: give data.eval"
    metric = f"{rows}, or metrics= to judge by"
    answers = f"{rows} (or train.sample_prompts, or metrics=)"
    asked = bool(train.sample_prompts)
    given = {
        "train.early_stopping": (metric, train.early_stopping is not None and not own_metrics),
        "checkpoint.keep_best": (metric, cfg.checkpoint.keep_best > 0 and not own_metrics),
        "train.eval_every": (
            answers,
            train.eval_every is not None and not (own_metrics or asked),
        ),
        "train.eval_max_rows": (rows, train.eval_max_rows is not None),
        "train.eval_micro_batch_size": (rows, train.eval_micro_batch_size is not None),
    }
    return {path: what for path, (what, is_set) in given.items() if is_set}


def uses_metric(cfg: TrainConfig) -> bool:
    """Whether ``checkpoint.metric`` decides something."""
    return cfg.checkpoint.keep_best > 0 or cfg.train.early_stopping is not None


def plan_milestones(cfg: TrainConfig, steps: Steps, began: float | None) -> list[Decision]:
    """When checkpoints are written and which stay; when the run may end before its last step."""
    found = [_checkpoints(cfg, steps)]
    stopping = cfg.train.early_stopping
    if stopping is not None:
        patience, delta = (
            (stopping, 0.0)
            if isinstance(stopping, int)
            else (stopping.patience, stopping.min_delta)
        )
        by = f" by more than {delta:g}" if delta else ""
        why = f"ends after {patience} evaluation(s) in a row without a better {_metric(cfg)}{by}"
        found.append(Decision(name="train.early_stopping", value=patience, reason=why))
    if cfg.train.max_time is not None:
        why = "of the whole call, with the last evaluation, checkpoint and export"
        if began is not None:
            end = time.gmtime(began + seconds_of(cfg.train.max_time))
            why += f": ends by {time.strftime('%Y-%m-%d %H:%M:%S UTC', end)}"
        found.append(Decision(name="train.max_time", value=cfg.train.max_time, reason=why))
    return found


def plan_space(
    cfg: TrainConfig, model: ModelInfo, each: int | None, steps: Steps, free: int | None
) -> list[Decision]:
    """The room that checkpoints of ``each`` bytes and the exports take of the ``free`` bytes of
    their storage; nothing where a size is not known. Raises ``CheckpointError`` where they do not
    fit."""
    if each is None:
        return []
    count, why_count = _kept(cfg, steps)
    export = _export_bytes(cfg, model)
    exports = 1 + (cfg.checkpoint.keep_best > 0) if export else 0
    total = count * each + exports * export
    why = f"{count} x {size(each)} ({why_count})"
    why += f" + {exports} x {size(export)} export" if exports else ""
    if free is not None:
        why += f", of {size(free)} that are free"
    if free is not None and total > free:
        raise CheckpointError(
            f"checkpoint.dir: the run needs {size(total)} for checkpoints and export ({why}): make "
            "room, give another folder, or lower checkpoint.keep_last and checkpoint.keep_best"
        )
    return [Decision(name="checkpoint space", value=size(total), reason=why)]


def _checkpoints(cfg: TrainConfig, steps: Steps) -> Decision:
    settings = cfg.checkpoint
    when = []
    if isinstance(settings.every, int):
        when.append(f"every {settings.every} steps")
    elif settings.every == "epoch":
        when.append(f"every epoch ({steps.per_epoch} steps)")
    if settings.every_minutes is not None:
        when.append(f"every {settings.every_minutes:g} minutes")
    if settings.keep_best:
        when.append("after an evaluation that makes the list of the best")
    kept = "all stay" if settings.keep_last == "all" else f"the last {settings.keep_last} stay"
    if settings.keep_best:
        kept += f", and the best {settings.keep_best} by {_metric(cfg)}"
    return Decision(name="checkpoints", value=", ".join([*when, "at the end"]), reason=kept)


def _metric(cfg: TrainConfig) -> str:
    metric = cfg.checkpoint.metric
    mode = mode_of(metric, cfg.checkpoint.metric_mode)
    return f"{metric} ({'less' if mode == 'min' else 'more'} is better)"


def _kept(cfg: TrainConfig, steps: Steps) -> tuple[int, str]:
    """How many checkpoints there are at once, at most, and why."""
    settings, train = cfg.checkpoint, cfg.train
    written = 1.0  # at the end
    for often, timed in ((settings.every, True), (train.eval_every, settings.keep_best > 0)):
        every = steps.per_epoch if often == "epoch" else often
        written += (steps.total - 1) // every if isinstance(every, int) and timed else 0
    if settings.every_minutes is not None:
        written = math.inf
    most = min(written, steps.total)
    if settings.keep_last == "all":
        return round(most), "all of them stay"
    stay = settings.keep_last + settings.keep_best
    if most <= stay:
        return round(most), "as many as are written"
    best = f" + checkpoint.keep_best {settings.keep_best}" if settings.keep_best else ""
    return stay + 1, f"checkpoint.keep_last {settings.keep_last}{best} + 1 that is being written"


def _export_bytes(cfg: TrainConfig, model: ModelInfo) -> int:
    """Of one exported model: as large as what it was loaded from, or where that has no weights in
    fp32."""
    if not cfg.checkpoint.export:
        return 0
    weights = sum(e.size for e in model.artifact.files if e.path.endswith(".safetensors"))
    return weights or 4 * (model.parameters or 0)
