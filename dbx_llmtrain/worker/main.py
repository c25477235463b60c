"""One rank's story: ``python -m dbx_llmtrain.worker.main plan.json``, also under torchrun.

Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as any launcher sets them; one rank without.
Under TF_CONFIG one call per node will do: it starts the ranks of that node.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dbx_llmtrain import logs
from dbx_llmtrain.outcomes import RankResult
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import caches, debugging, handover, reporting, torchrun, usage
from dbx_llmtrain.worker.watch import collective_timeout
from dbx_llmtrain.worker.world import gathered, launcher_environment, leave_process, open_world

if TYPE_CHECKING:
    from dbx_llmtrain.worker.jobs import Job, Progress


def run(plan: RunPlan) -> RankResult:
    """Train as planned. Every rank calls it; what rank 0 returns is the run's result.

    Raises ``StagingError``, ``ClusterError``, ``ConfigError``, ``CheckpointError``, ``Stopped``
    where it was asked to end, or whatever went wrong in a step.
    """
    from dbx_llmtrain.worker import (
        compute,
        exports,
        folders,
        generation,
        jobs,
        lora,
        session,
        starting,
        weights,
    )
    from dbx_llmtrain.worker.parallel import zero_ops

    rank = int(launcher_environment(os.environ).get("RANK", "0"))
    with (
        reporting.reporting(plan, rank) as report,
        gathered() as met,
        folders.scratch_folder(plan, rank) as scratch,
        zero_ops.offloading(plan, rank, tell=report.phase),
    ):
        report.phase("looking for model and data")
        staged = folders.stage(plan, scratch)
        ends = generation.check_generation_config(staged.model, plan.data.end_tokens)
        report.phase("waiting for all ranks")
        limit = collective_timeout(plan)
        with (
            open_world(use_gpu=plan.use_gpu, timeout_s=limit, met=met) as world,
            usage.sampled(plan, world, report.used),
        ):
            report.phase(session.LOADING)
            if plan.config.cluster.debug:
                handover.for_log(debugging.of_ranks(world.nodes, world.device))
            fill = weights.Fill(plan, staged.model, world)
            network = lora.adapt(fill.build(), plan)
            notes = compute.prepare(network, plan)
            job = jobs.set_up(plan, world, network, fill, staged, report)
            progress, origin = starting.resume(job)
            told = [*fill.notes, *lora.notes(network), *notes, *job.probe.reasons, *origin]
            report.started(
                progress.step, [*ends.notes, *world.notes, *told], origin=progress.now.saved
            )
            _take_steps(job, progress)
            whole = None if progress.now.cut else exports.collect_export(job)
            best = session.find_best(job, progress)
            metrics = session.measure(job, progress)
        path = exports.write_export(job, whole, ends)
        result = session.conclude(job, progress, metrics, path, best)
        report.finished(result)
    return result


def _take_steps(job: Job, progress: Progress) -> None:
    """Every step that is left, with what happens between them."""
    from dbx_llmtrain.worker import loop, session

    with session.steered(job) as control:
        done = session.begin(job, progress, control)
        for step in loop.train_steps(
            job.plan, job.root, job.optimizer, job.strategy, job.order, job.world,
            done=done, skipped_before=progress.seen.skipped, asked=control.asked.wanted,
        ):  # fmt: skip
            if session.finish_step(job, progress, control, step):
                break
        session.end(job, progress, control)


def main(argv: Sequence[str]) -> int:
    """Run the plan in the file that is named. Returns 0 when this rank has finished."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -m dbx_llmtrain.worker.main plan.json\n")
        return 2
    with handover.handed_over():
        plan = RunPlan.model_validate_json(Path(argv[0]).read_text(encoding="utf-8"))
        torchrun.become_launcher(plan.world_size, argv[0])
        _set_up(plan)
        story(plan)(plan)
    return 0


def story(plan: RunPlan) -> Callable[[RunPlan], RankResult]:
    """What a rank does with a plan: ``run``, or where nothing is trained ``evaluating.run``."""
    if plan.purpose == "evaluate":
        from dbx_llmtrain.worker import evaluating

        return evaluating.run
    return run


def _set_up(plan: RunPlan) -> None:
    """What has to be before anything heavy is imported, and the libraries' own output."""
    os.environ.update(plan.config.cluster.env)
    os.environ.update(caches.variables(os.environ, plan.config.cluster.env, plan.local_dir))
    from transformers.utils import logging

    logging.disable_progress_bar()
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity(logs.of_libraries(plan.config.tracking.log_level))


if __name__ == "__main__":
    leave_process(handover.exit_code(lambda: main(sys.argv[1:])))
