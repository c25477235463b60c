"""One rank's story: ``python -m dbx_llmtrain.worker.main plan.json``, also under torchrun.

Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as any launcher sets them; one rank without.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dbx_llmtrain import logs
from dbx_llmtrain.records import RankResult, RunPlan
from dbx_llmtrain.worker.world import launcher_environment, leave_process, open_world


def run(plan: RunPlan) -> RankResult:
    """Train as planned. Every rank calls it; what rank 0 returns is the run's result.

    Raises ``StagingError``, ``ClusterError``, ``ConfigError``, ``CheckpointError``, or whatever
    went wrong in a step.
    """
    from dbx_llmtrain.worker import generation, loop, model, reporting, session

    rank = int(launcher_environment(os.environ).get("RANK", "0"))
    with reporting.reporting(plan, rank) as report, session.scratch_folder(plan, rank) as scratch:
        report.phase("looking for model and data")
        folders = session.stage(plan, scratch)
        ends = generation.check_generation_config(folders.model, plan.data.end_tokens)
        report.phase("waiting for all ranks")
        with open_world(use_gpu=plan.use_gpu) as world:
            report.phase("loading the model")
            network = model.load_model(
                folders.model,
                attention=plan.attention,
                objective=plan.config.data.objective,
                trusted=plan.config.model.trust_remote_code,
            )
            model.check_same_weights(network)
            job = session.set_up(plan, world, network, folders, report)
            progress = session.resume(job)
            report.started(progress.step, [*ends.notes, *job.probe.reasons])
            session.evaluate_first(job, progress)
            for step in loop.train_steps(
                plan, job.root, job.optimizer, job.strategy, job.order, world, done=progress.step
            ):
                session.finish_step(job, progress, step)
            session.evaluate_last(job, progress)
            session.save(job, progress)
            metrics = session.measure(job, progress)
            whole = session.collect_export(job)
        path = session.write_export(job, whole, ends)
        result = RankResult(
            steps=progress.step, metrics=metrics, checkpoint=str(progress.saved), model_path=path
        )
        report.finished(result)
    return result


def main(argv: Sequence[str]) -> int:
    """Run the plan in the file that is named. Returns 0 when this rank has finished."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -m dbx_llmtrain.worker.main plan.json\n")
        return 2
    plan = RunPlan.model_validate_json(Path(argv[0]).read_text(encoding="utf-8"))
    os.environ.update(plan.config.cluster.env)
    from transformers.utils import logging

    logging.disable_progress_bar()
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity(logs.of_libraries(plan.config.tracking.log_level))
    run(plan)
    return 0


if __name__ == "__main__":
    leave_process(main(sys.argv[1:]))
