"""One rank's story where a model is evaluated and nothing is trained; see ``main``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dbx_llmtrain import storage
from dbx_llmtrain.outcomes import RankResult
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import debugging, handover, reporting, usage
from dbx_llmtrain.worker.watch import collective_timeout
from dbx_llmtrain.worker.world import gathered, launcher_environment, open_world

if TYPE_CHECKING:
    from dbx_llmtrain.worker.jobs import Job


def run(plan: RunPlan) -> RankResult:
    """Evaluate as planned. Every rank calls it; what rank 0 returns is the result: all metrics, and
    over how many rows and trained tokens they are.

    Raises ``StagingError``, ``ClusterError``, ``ConfigError`` or ``CheckpointError``.
    """
    from dbx_llmtrain.worker import compute, evaluations, folders, jobs, lora, weights

    rank = int(launcher_environment(os.environ).get("RANK", "0"))
    with (
        reporting.reporting(plan, rank) as report,
        gathered() as met,
        folders.scratch_folder(plan, rank) as scratch,
    ):
        report.phase("looking for model and data")
        staged = folders.stage(plan, scratch)
        report.phase("waiting for all ranks")
        limit = collective_timeout(plan)
        with (
            open_world(use_gpu=plan.use_gpu, timeout_s=limit, met=met) as world,
            usage.sampled(plan, world, report.used),
        ):
            report.phase("loading the model")
            if plan.config.cluster.debug:
                handover.for_log(debugging.of_ranks(world.nodes, world.device))
            fill = weights.Fill(plan, staged.model, world)
            network = lora.adapt(fill.build(), plan)
            compute.prepare(network, plan)
            job = jobs.set_up(plan, world, network, fill, staged, report)
            put_weights(job)
            report.started(0, [*fill.notes, *world.notes, *job.probe.reasons])
            metrics = evaluations.evaluate_alone(job)
        result = RankResult(steps=0, metrics=metrics, checkpoint=None, model_path=None)
        report.finished(result)
    return result


def put_weights(job: Job) -> None:
    """Give the model the weights that the plan names: a checkpoint's, or an adapter's.

    Raises ``CheckpointError`` for those of another model.
    """
    from dbx_llmtrain.worker import adapter_weights, adapters, checkpoint

    if job.plan.weights_from is None:
        return
    folder = storage.local_path(job.plan.weights_from)
    if (folder / adapters.CONFIG).is_file():
        adapter_weights.put_adapter(folder, job.model)
    else:
        checkpoint.load_weights(folder, model=job.model, world=job.world)
