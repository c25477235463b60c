"""The exports of a run, at its end."""

from __future__ import annotations

from pathlib import Path

from dbx_llmtrain import storage
from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.outcomes import CHECKPOINT, DATA_FORMAT, RUN_DIR
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import export, rebuild
from dbx_llmtrain.worker.export import Collected, Place
from dbx_llmtrain.worker.generation import Generation, check_generation_config
from dbx_llmtrain.worker.jobs import Job

EXPORT = "export"
"""Folder of the exported model in the run folder."""

ADAPTER = "adapter"
"""The same of the adapter by itself."""

BEST = "-best"
"""What follows in the names of those of the best model."""


def collect_export(job: Job) -> Collected | None:
    """The whole model on rank 0, if the plan wants it exported. All ranks call it."""
    if not job.plan.config.checkpoint.export:
        return None
    job.reporter.phase("exporting")
    return export.collect(
        job.root,
        job.model,
        job.folders.model,
        job.world,
        objective=job.plan.config.data.objective,
        trusted=job.plan.config.model.trust_remote_code,
    )


def write_export(job: Job, collected: Collected | None, generation: Generation) -> str | None:
    """Write what was collected to ``export`` in the run folder, and an adapter by itself to
    ``adapter``; the path of the first on rank 0."""
    if collected is None:
        return None
    path, *adapter = _write(job, collected, generation)
    job.reporter.saved("export", path)
    for other in adapter:
        job.reporter.saved("adapter", other)
    return str(path)


def export_best(job: Job, checkpoint: Path) -> str | None:
    """Write the model of a checkpoint to ``export-best`` in the run folder, and an adapter by
    itself to ``adapter-best``; the path of the first, ``None`` where the plan wants no export.

    Rank 0 alone calls it, when no rank needs another any more; see ``rebuild.collect``.
    """
    if not job.plan.config.checkpoint.export:
        return None
    job.reporter.phase("exporting the best model")
    source = job.folders.model
    collected = rebuild.collect(checkpoint, job.plan, source)
    generation = check_generation_config(source, job.plan.data.end_tokens)
    path, *_ = _write(job, collected, generation, BEST)
    job.reporter.saved("best_export", path)
    return str(path)


def export_checkpoint(
    folder: Path,
    plan: RunPlan,
    target: Path,
    *,
    source: Path,
    scratch: Path,
    dtype: str | None = None,
    merge: bool = True,
) -> str:
    """Write the model of a checkpoint to ``target``, or without ``merge`` its adapter by itself;
    the type of what was written, as ``rebuild.DTYPES`` calls it. No process group is needed.

    ``source`` is the folder that was trained, ``scratch`` one on local disk. Raises
    ``CheckpointError``; see ``rebuild.collect`` and ``export.write_export``.
    """
    collected = rebuild.collect(folder, plan, source, dtype)
    place = place_of(plan, source, scratch, folder)
    generation = check_generation_config(source, plan.data.end_tokens)
    if merge:
        export.write_export(target, collected=collected, place=place, generation=generation)
        return next(name for name, known in rebuild.DTYPES.items() if known == collected.dtype)
    model = plan.model
    written = export.write_adapter(
        target,
        collected=collected,
        place=place,
        generation=generation,
        base=model.source,
        revision=model.revision,
    )
    if written is None:
        raise CheckpointError(
            f"{folder} has no adapter that others could use: its base started with random weights. "
            "Export it merged"
        )
    return dtype or "fp32"


def place_of(plan: RunPlan, source: Path, scratch: Path, checkpoint: Path | None = None) -> Place:
    """What the exports of a run are made beside; of a ``checkpoint`` that it has left, where they
    are made of one."""
    run_dir = checkpoint.parents[1] if checkpoint else storage.local_path(plan.run_dir)
    told = {DATA_FORMAT: plan.data.format, RUN_DIR: str(run_dir)}
    return Place(
        source,
        scratch,
        chat_template=plan.data.chat_template,
        trusted=plan.config.model.trust_remote_code,
        told=told | ({CHECKPOINT: str(checkpoint)} if checkpoint else {}),
    )


def _write(job: Job, collected: Collected, generation: Generation, ending: str = "") -> list[Path]:
    """The paths of the export and, where there is one, of the adapter by itself."""
    run_dir = storage.local_path(job.plan.run_dir)
    place = place_of(job.plan, job.folders.model, job.folders.scratch)
    paths = [
        export.write_export(
            run_dir / f"{EXPORT}{ending}", collected=collected, place=place, generation=generation
        )
    ]
    model = job.plan.model
    adapter = export.write_adapter(
        run_dir / f"{ADAPTER}{ending}",
        collected=collected,
        place=place,
        generation=generation,
        base=model.source,
        revision=model.revision,
    )
    return paths if adapter is None else [*paths, adapter]
