"""What happens around the steps of a run: before the first one, between them, after the last."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from dbx_llmtrain import storage
from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.outcomes import RankResult
from dbx_llmtrain.resuming import held_out, identity, is_of_another_run
from dbx_llmtrain.worker import evaluations, exports, judging, requests, saving
from dbx_llmtrain.worker.handover import rank_dir
from dbx_llmtrain.worker.jobs import Job, Progress
from dbx_llmtrain.worker.laps import Laps
from dbx_llmtrain.worker.loop import StepReport, Window, as_numbers, as_wishes
from dbx_llmtrain.worker.pace import Pace
from dbx_llmtrain.worker.requests import LEAVE, SAVE, STOP, Requests, Stopped
from dbx_llmtrain.worker.saving import Saved, Saver
from dbx_llmtrain.worker.starting import by_rank_0, note_metrics, place
from dbx_llmtrain.worker.world import World

LOADING = "loading the model"
"""The phase in which a rank makes its model."""

TRIAL = "trial"
"""Why a run stops that was planned to be left after ``RunPlan.stop_after``."""


@dataclass(frozen=True)
class Control:
    """What a run is steered by while it takes steps."""

    asked: Requests
    saver: Saver
    pace: Pace


@contextmanager
def steered(job: Job) -> Iterator[Control]:
    """For as long as the block lasts the run can be asked to save and to end, and saves."""
    most, sets = job.plan.config.train.eval_max_rows, dict(job.held_out)
    whole = sum(map(len, sets.values()))
    sets.pop(evaluations.TEST, None)
    between = sum(min(len(split), most or len(split)) for split in sets.values())
    opening = job.reporter.spent(LOADING)
    pace = Pace(job.plan, between=between, whole=whole, opening=opening)

    def tell(saved: Saved) -> None:
        if not saved.error:
            pace.saved(saved.seconds, saved.bytes)
        job.reporter.checkpointed(saved)

    with (
        requests.listening(job.plan, job.world.rank, home=rank_dir()) as asked,
        saving.saving(
            job.plan, job.world, job.folders.scratch, tell=tell, publish=job.reporter.publish
        ) as saver,
    ):
        yield Control(asked, saver, pace)


def begin(job: Job, progress: Progress, control: Control) -> int:
    """What comes before the next step: the first evaluation, one that was due when the run was
    left, or one by which it is judged anew. Returns the steps that are done: all of them where
    early stopping has ended the run.

    Raises ``ConfigError`` where the evaluations lack ``checkpoint.metric``.
    """
    config = job.plan.config
    with _timed(job, control.pace):
        evaluations.evaluate_first(job, progress)
    missed = progress.evaluated != progress.step and _evaluation_due(job, progress.step)
    if not missed and not progress.now.anew:
        judging.check_metric(config, _names(progress))
    elif progress.step < job.plan.total_steps:
        origin = progress.now.saved
        _evaluate(job, progress, control)
        if origin is not None and is_of_another_run(job.plan, origin):
            progress.initial_eval_loss = progress.eval_loss
        note_metrics(job, progress)
    if progress.step < job.plan.total_steps:
        progress.now.stop_reason = judging.enough(config, progress)
    return job.plan.total_steps if progress.now.stop_reason else progress.step


def _names(progress: Progress) -> set[str]:
    """Metrics that an evaluation has, by what the first or last one had."""
    names = evaluations.of_all_rows(progress)
    return set(progress.metrics) or set(progress.losses) | set(names)


def finish_step(job: Job, progress: Progress, control: Control, report: StepReport) -> bool:
    """Count and report a step; evaluate and save where that is due or asked for.

    Returns whether it was the last one; what has to be done after that one is left to ``end``.
    """
    control.saver.poll()
    control.pace.step = report.seconds
    ends = _count(job, progress, report)
    if not ends and _evaluation_due(job, report.step):
        ends = _evaluate(job, progress, control)
    every = job.plan.config.checkpoint.every
    if not ends and (_due(job, report.step, every) or report.asked & SAVE):
        save(job, progress, control)
    control.asked.keep(control.pace.to_come())
    return ends


def _count(job: Job, progress: Progress, report: StepReport) -> bool:
    """Returns whether no other step follows, as the plan has it or as was asked."""
    progress.step = report.step
    if not progress.now.timed:
        progress.seconds_to_first_step = job.reporter.elapsed()
        progress.now.timed = True
    progress.window.add(report)
    finite = math.isfinite(report.loss)
    progress.seen.add(report if finite else replace(report, loss=0.0, trained=0))
    if report.step < job.plan.total_steps:
        progress.now.cut = bool(report.asked & LEAVE) or report.step == job.plan.stop_after
        reasons = sorted(report.asked & (LEAVE | STOP))
        progress.now.stop_reason = ", ".join(reasons) or (TRIAL if progress.now.cut else "")
    ends = report.step == job.plan.total_steps or bool(progress.now.stop_reason)
    progress.now.laps.add(report.own, report.waited)
    memory = peak_memory(job.world)
    window, laps = progress.window, progress.now.laps
    if job.reporter.step(report, window, progress.seen, memory, laps=laps, last=ends):
        progress.window, progress.now.laps = Window(), Laps()
    return ends


def _due(job: Job, step: int, every: int | str | None) -> bool:
    """Whether what is done ``every`` so many steps, or ``epoch``, is due after a step."""
    if every == "epoch":
        return step % job.order.steps_per_epoch == 0
    return isinstance(every, int) and step % every == 0


def _evaluation_due(job: Job, step: int) -> bool:
    return step > 0 and _due(job, step, job.plan.config.train.eval_every)


def _evaluate(job: Job, progress: Progress, control: Control) -> bool:
    """Evaluate between two steps, and save what is among the best. Returns whether early stopping
    ends the run."""
    with _timed(job, control.pace):
        metrics = evaluations.evaluate_between(job, progress)
    verdict = judging.judge(job.plan.config, progress, metrics)
    progress.now.stop_reason = verdict.enough
    if verdict.keep and not verdict.enough:
        save(job, progress, control)
    return bool(verdict.enough)


@contextmanager
def _timed(job: Job, pace: Pace) -> Iterator[None]:
    """Measure an evaluation. One that was not done does not count."""
    began = time.monotonic()
    before = job.reporter.spent("evaluating")
    yield
    losses = job.reporter.spent("evaluating") - before
    if losses:
        pace.losses, pace.rest = losses, time.monotonic() - began - losses


def save(job: Job, progress: Progress, control: Control) -> None:
    """Begin to write the checkpoint of the current step, unless that has been begun, or the run was
    resumed from that very one. All ranks call it."""
    folder = place(job, progress.step)
    control.asked.saved()
    if folder in (progress.now.saved, progress.now.begun):
        return
    progress.now.begun = folder
    job.reporter.phase("writing a checkpoint")
    control.saver.save(
        folder,
        model=job.model,
        optimizer=job.optimizer,
        state=progress.state() | {"strategy": job.strategy.state(), "held_out": held_out(job.plan)},
        identity=identity(job.plan),
        metrics=progress.metrics if progress.evaluated == progress.step else {},
    )
    job.reporter.go_on()


def end(job: Job, progress: Progress, control: Control) -> None:
    """What follows the last step: the last evaluation, and a checkpoint that is complete before
    this returns.

    Raises ``Stopped`` where the run was asked to leave it there, and ``CheckpointError`` where
    nothing can be kept of it: no checkpoint was ever complete, and no export is wanted.
    """
    leaving = _leaving(job, control, progress)
    if not leaving and not progress.now.cut:
        metrics = evaluations.evaluate_last(job, progress)
        judging.judge(job.plan.config, progress, metrics)
    save(job, progress, control)
    saved = control.saver.wait()
    newest = control.saver.newest()
    progress.now.saved = newest.folder if newest else progress.now.saved
    leaving = leaving or _leaving(job, control, progress)
    if leaving:
        raise Stopped(f"ended after step {progress.step} as it was asked to ({leaving}); "
                      f"{_left(progress)}")  # fmt: skip
    if progress.now.saved is None and (progress.now.cut or not job.plan.config.checkpoint.export):
        raise CheckpointError(saved.error if saved else "no checkpoint was written")


def _leaving(job: Job, control: Control, progress: Progress) -> str:
    """Why the run ends without a result, also where a rank was asked for it after the last step."""
    import torch.distributed as dist

    sums = as_numbers(control.asked.wanted(), "cpu")
    dist.all_reduce(sums)
    asked: Collection[str] = as_wishes(sums.tolist()) & LEAVE
    known = progress.now.stop_reason if progress.now.cut else ""
    return known if known and known != TRIAL else ", ".join(sorted(asked))


def _left(progress: Progress) -> str:
    if progress.now.saved is None:
        return "no checkpoint could be written"
    return f"the newest checkpoint is {progress.now.saved}"


def find_best(job: Job, progress: Progress) -> Path | None:
    """The checkpoint of the best evaluation, of those that ``keep_best`` keeps, after its weights
    were tested; ``None`` where there is none that can be read. All ranks call it, after the model
    has been collected: it holds other weights afterwards."""
    places = [place(job, step) for step, _ in progress.bests]
    if not places or progress.now.cut:
        return None

    def look() -> Path | None:
        return next((path for path in places if storage.read_manifest(path) is not None), None)

    found = by_rank_0(job.world, look)
    try:
        if found is not None:
            evaluations.test_best(job, progress, found)
    except CheckpointError as error:
        job.reporter.warn(f"no best model: {error}")
        return None
    return found


def measure(job: Job, progress: Progress) -> dict[str, float]:
    """The run's metrics; times are by this rank's clock. Of a run that has not taken a step, as
    another one had taken them all, those of the steps are left out. All ranks call it."""
    import torch
    import torch.distributed as dist

    memory = torch.tensor(peak_memory(job.world), dtype=torch.int64)
    dist.all_reduce(memory, dist.ReduceOp.MAX)
    steps = {
        "train_loss": progress.seen.loss,
        "tokens_per_second": progress.seen.tokens_per_second,
        "seconds_to_first_step": progress.seconds_to_first_step,
        "skipped_steps": float(progress.seen.skipped),
    }
    metrics = {
        "initial_eval_loss": progress.initial_eval_loss,
        **evaluations.of_all_rows(progress),
        "peak_memory_bytes": float(memory),
        **(steps if progress.seen.seconds else {}),
        **progress.losses,
    }
    return {name: value for name, value in metrics.items() if value is not None}


def conclude(
    job: Job, progress: Progress, metrics: dict[str, float], path: str | None, best: Path | None
) -> RankResult:
    """What this rank reports of the run, whose export is at ``path``; rank 0 exports the ``best``
    model, too, where it is not that one."""
    saved = progress.now.saved
    best_path = None
    if best is not None and job.world.rank == 0:
        best_path = path if best == saved else exports.export_best(job, best)
    return RankResult(
        steps=progress.step,
        metrics=metrics,
        checkpoint=str(saved) if saved else None,
        model_path=path,
        best_checkpoint=str(best) if best else None,
        best_model_path=best_path,
        stop_reason=progress.now.stop_reason,
    )


def peak_memory(world: World) -> int:
    """Bytes that this rank has used at most: of its GPU, or on CPU of the machine's memory."""
    if world.device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    import torch

    return int(torch.cuda.max_memory_allocated(world.device))
