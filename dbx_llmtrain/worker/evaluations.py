"""When a run evaluates, and what: held-out losses, answers to prompts, a user's own metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dbx_llmtrain import storage
from dbx_llmtrain.outcomes import ROWS, TOKENS
from dbx_llmtrain.worker import checkpoint, own_metrics, samples
from dbx_llmtrain.worker.evaluate import (
    EvalReport,
    chosen_examples,
    combined,
    evaluate,
    perplexity,
)
from dbx_llmtrain.worker.jobs import Job, Progress
from dbx_llmtrain.worker.tools import tools_of

EVAL, TEST, BEST = "eval", "test", "best_"
EVAL_LOSS, EVAL_PERPLEXITY = "eval_loss", "eval_perplexity"


@dataclass(frozen=True)
class _Found:
    """Reports by metric name (``eval``, ``eval_<name>``, ``test``) and the user's own numbers.
    ``between`` are the reports of those examples that are used between the steps."""

    reports: dict[str, EvalReport]
    between: dict[str, EvalReport]
    own: dict[str, float]

    def metrics(self, reports: Mapping[str, EvalReport]) -> dict[str, float]:
        """All of it by name."""
        return numbers(reports) | self.own


def numbers(reports: Mapping[str, EvalReport]) -> dict[str, float]:
    """``<name>_loss`` and ``<name>_perplexity`` of each report."""
    found: dict[str, float] = {}
    for name, report in reports.items():
        found |= {f"{name}_loss": report.loss, f"{name}_perplexity": report.perplexity}
    return found


def of_all_rows(progress: Progress) -> dict[str, float]:
    """The last loss over all evaluation sets and its perplexity; nothing where there are none."""
    loss = progress.eval_loss
    return {} if loss is None else {EVAL_LOSS: loss, EVAL_PERPLEXITY: perplexity(loss)}


def evaluate_first(job: Job, progress: Progress) -> None:
    """Evaluate before the first step; a run that goes on has done so. What cannot work (a prompt, a
    function that cannot be loaded) shows here in any case."""
    tools_of(job.plan, job.folders)
    if progress.step == 0 and progress.initial_eval_loss is None:
        progress.initial_eval_loss = evaluate_between(job, progress).get(EVAL_LOSS)


def evaluate_between(job: Job, progress: Progress) -> dict[str, float]:
    """All metrics of the model as it is, by name, the same on every rank: ``eval_loss`` and
    ``eval_perplexity`` over the tokens of all evaluation sets, ``eval_<name>_...`` of each set with
    a name, and the user's own. Of a set ``train.eval_max_rows`` examples are used, always the same.

    Training does not notice. Empty where there is nothing to evaluate. Raises ``ConfigError`` for
    metrics of the user's that are no numbers by name.
    """
    found = _evaluate(job, progress, whole=False)
    return found.metrics(found.between)


def evaluate_last(job: Job, progress: Progress) -> dict[str, float]:
    """Evaluate after the last step: whole sets, and the test rows. Where this step's weights have
    just been evaluated so, as early stopping has it, only the test rows are left.

    What is returned can be compared with what ``evaluate_between`` gave: it is of the same
    examples. The metrics of the whole sets are reported, and end in the result.
    """
    if progress.evaluated == progress.step and _always_whole(job):
        metrics = progress.metrics
    else:
        found = _evaluate(job, progress, whole=True)
        metrics = found.metrics(found.between)
    if TEST in job.held_out:
        report = _test(job)
        job.reporter.evaluated({TEST: report})
        progress.losses |= numbers({TEST: report})
    return metrics


def _always_whole(job: Job) -> bool:
    """Whether evaluations between steps are of every example, too."""
    most = job.plan.config.train.eval_max_rows
    sizes = [len(split) for name, split in job.held_out.items() if name != TEST]
    return most is None or max(sizes, default=0) <= most


def evaluate_alone(job: Job) -> dict[str, float]:
    """All metrics of a model that is not trained, on whole sets and the test rows, and over how
    many rows and trained tokens they are (of the evaluation sets where there are any)."""
    found = _evaluate(job, Progress(), whole=True)
    reports = dict(found.reports)
    if TEST in job.held_out:
        reports[TEST] = _test(job)
        job.reporter.evaluated({TEST: reports[TEST]})
    first = next(iter(reports.values()))
    counts = {ROWS: float(first.rows), TOKENS: float(first.trained_tokens)}
    return found.metrics(reports) | counts


def test_best(job: Job, progress: Progress, folder: Path) -> None:
    """Evaluate the weights of the checkpoint in ``folder``, the best one: whole sets, test rows and
    the user's metrics, under the names of the last model's with ``best_`` in front.

    The model holds these weights afterwards, so nothing may be trained any more. Raises
    ``CheckpointError`` for a checkpoint that cannot be read.
    """
    run_dir = storage.local_path(job.plan.run_dir)
    if folder.resolve() == storage.checkpoint_folder(run_dir, progress.step).resolve():
        last = {name: value for name, value in progress.losses.items() if not name.startswith(BEST)}
        last |= of_all_rows(progress)
        progress.losses |= {f"{BEST}{name}": value for name, value in last.items()}
        return
    job.reporter.phase("evaluating the best model")
    checkpoint.load_weights(folder, model=job.model, world=job.world)
    reports, _ = _reports(job, whole=True)
    if TEST in job.held_out:
        reports[TEST] = _test(job)
    own = _own(job, reports)
    job.reporter.evaluated(
        {f"{BEST}{name}": report for name, report in reports.items()},
        {f"{BEST}{name}": value for name, value in own.items()},
    )
    found = numbers(reports) | own
    progress.losses |= {f"{BEST}{name}": value for name, value in found.items()}


def _evaluate(job: Job, progress: Progress, *, whole: bool) -> _Found:
    """Everything that an evaluation of the current weights is, reported."""
    reports, between = _reports(job, whole=whole)
    own = _own(job, reports)
    if reports or own:
        job.reporter.evaluated(reports, own)
    if EVAL in reports:
        progress.eval_loss = reports[EVAL].loss
    named = {name: report for name, report in reports.items() if name != EVAL}
    progress.losses |= numbers(named) | own
    asked = tools_of(job.plan, job.folders).asked
    if asked is not None:
        job.reporter.phase("answering the sample prompts")
        job.reporter.sampled(samples.answer(job.root, job.model, job.world, asked))
    return _Found(reports, between, own)


def _reports(job: Job, *, whole: bool) -> tuple[dict[str, EvalReport], dict[str, EvalReport]]:
    """Of all evaluation sets together and of each that has a name: over the examples that were
    asked for, and over those that are used between the steps."""
    names = [name for name in sorted(job.held_out) if name != TEST]
    pairs = {name: _set(job, name, whole=whole) for name in names}
    asked = {name: found for name, (found, _) in pairs.items()}
    between = {name: found for name, (_, found) in pairs.items()}
    return _together(asked), _together(between)


def _together(reports: Mapping[str, EvalReport]) -> dict[str, EvalReport]:
    if not reports:
        return {}
    named = {name.replace("-", "_", 1): found for name, found in reports.items() if name != EVAL}
    return {EVAL: combined(list(reports.values()))} | named


def _set(job: Job, name: str, *, whole: bool) -> tuple[EvalReport, EvalReport]:
    """One set. Of the whole set the examples that are used between the steps come first, so that
    the last evaluation can be compared with those before at no cost."""
    job.reporter.phase("evaluating")
    split, train = job.held_out[name], job.plan.config.train
    chosen = chosen_examples(split, name, train.seed, train.eval_max_rows)
    between = _over(job, name, chosen)
    if not whole or len(chosen) == len(split):
        return between, between
    rest = np.setdiff1d(np.arange(len(split)), chosen)
    return combined([between, _over(job, name, rest)]), between


def _test(job: Job) -> EvalReport:
    job.reporter.phase("testing")
    return _over(job, TEST, np.arange(len(job.held_out[TEST])))


def _over(job: Job, name: str, examples: Any) -> EvalReport:
    plan = job.plan
    return evaluate(
        job.root,
        job.held_out[name],
        job.world,
        micro_batch=plan.config.train.eval_micro_batch_size or plan.micro_batch_size,
        padded=job.probe.padded,
        masking=job.order.masking,
        examples=examples,
    )


def _own(job: Job, reports: Mapping[str, EvalReport]) -> dict[str, float]:
    """The user's metrics; nothing without any."""
    tools = tools_of(job.plan, job.folders)
    if tools.metrics is None:
        return {}
    job.reporter.phase("computing the metrics of your own")
    return own_metrics.measure(job.root, job.model, job.world, tools, taken=numbers(reports))
