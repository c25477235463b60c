"""The parts of a rank's story: what is set up once, and what happens between the steps."""

from __future__ import annotations

import hashlib
import math
import random
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbx_llmtrain import storage
from dbx_llmtrain.custom_code import private_modules
from dbx_llmtrain.errors import CheckpointError, ClusterError, Finding
from dbx_llmtrain.planning import identity
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.text.prepared import Split
from dbx_llmtrain.worker import checkpoint, export, node
from dbx_llmtrain.worker.data import Order
from dbx_llmtrain.worker.evaluate import EvalReport, combined, evaluate
from dbx_llmtrain.worker.export import Collected
from dbx_llmtrain.worker.generation import Generation
from dbx_llmtrain.worker.loop import StepReport, Window
from dbx_llmtrain.worker.loss import LossModule
from dbx_llmtrain.worker.masking import Masking, make_masking
from dbx_llmtrain.worker.model import load_tokenizer
from dbx_llmtrain.worker.optim import build_optimizer
from dbx_llmtrain.worker.parallel import Strategy, make_strategy
from dbx_llmtrain.worker.probe import ProbeResult, probe
from dbx_llmtrain.worker.reporting import Reporter
from dbx_llmtrain.worker.world import World

if TYPE_CHECKING:
    import torch
    from torch import nn

EXPORT = "export"
"""Folder of the exported model in the run folder."""

EVAL, TEST = "eval", "test"


@dataclass(frozen=True)
class Folders:
    """On this node's own disk: the staged model and data, and this rank's temporary files."""

    model: Path
    data: Path
    scratch: Path


@dataclass(frozen=True)
class Job:
    """Everything that stays the same from the first step to the last."""

    plan: RunPlan
    world: World
    folders: Folders
    model: nn.Module
    root: nn.Module
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    order: Order
    held_out: Mapping[str, Split]
    """Splits to evaluate, by name: ``eval`` or ``eval-<name>``, and ``test``."""
    probe: ProbeResult
    reporter: Reporter


@dataclass
class Progress:
    """How far the run is; goes into every checkpoint, so that a resumed run reports the whole.

    ``seen`` sums over all steps (the loss of those that were skipped for not being finite is left
    out), ``window`` over those since the last report.
    """

    step: int = 0
    seen: Window = field(default_factory=Window)
    window: Window = field(default_factory=Window)
    initial_eval_loss: float | None = None
    eval_loss: float | None = None
    losses: dict[str, float] = field(default_factory=dict)
    """Last losses of the splits with a name: ``eval_<name>_loss``, ``test_loss``."""
    seconds_to_first_step: float | None = None
    saved: Path | None = None
    """The checkpoint that was saved last, or resumed from."""
    timed: bool = False
    """Whether this attempt has measured ``seconds_to_first_step``."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        state = asdict(self)
        del state["saved"], state["timed"]
        return state

    @classmethod
    def from_state(cls, state: dict[str, Any], saved: Path) -> Progress:
        """The progress that a checkpoint keeps."""
        windows = {name: Window(**state[name]) for name in ("seen", "window")}
        return cls(**(state | windows), saved=saved)


def stage(plan: RunPlan, scratch: Path) -> Folders:
    """Copies of model and data on this node, made by the first rank that needs them."""
    model, data = (
        node.stage(artifact.model_dump(), plan.local_dir)
        for artifact in (plan.model.artifact, plan.data.artifact)
    )
    return Folders(model, data, scratch)


@contextmanager
def scratch_folder(plan: RunPlan, rank: int) -> Iterator[Path]:
    """A folder for this rank's temporary files on the node's own disk, gone afterwards.

    What a killed attempt of the same run left behind is removed, too. Code that comes with the
    model is imported from below it.
    """
    run = hashlib.sha256(plan.run_dir.encode()).hexdigest()[:16]
    runs = node.local_dir(plan.local_dir) / "scratch" / run
    runs.mkdir(parents=True, exist_ok=True)
    for other in runs.iterdir():
        if other.name != plan.attempt:
            storage.remove(other)
    folder = runs / plan.attempt / str(rank)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with private_modules(folder, wanted=plan.config.model.trust_remote_code):
            yield folder
    finally:
        storage.remove(folder)
        with suppress(OSError):  # not empty: another rank is not done yet
            folder.parent.rmdir()
            runs.rmdir()


def set_up(
    plan: RunPlan, world: World, model: nn.Module, folders: Folders, reporter: Reporter
) -> Job:
    """Wrap the model, build what trains it, and prove on it that the loss is right.

    Raises ``ClusterError`` where the launcher started another number of ranks than planned.
    """
    if world.size != plan.world_size:
        message = f"the plan is for {plan.world_size} ranks, the launcher started {world.size}"
        raise ClusterError([Finding("error", "launcher", message)])
    train, data = plan.config.train, plan.config.data
    module = LossModule(model, masked=data.objective == "mlm")
    strategy = make_strategy(plan.strategy, world, plan.precision)
    root = strategy.wrap(module)
    optimizer = build_optimizer(model, train)
    splits = {name: Split(folders.data, name) for name in plan.data.splits}
    longest = max(int(part.tokens.max(initial=1)) for part in splits.values())
    probed = probe(root, module, device=world.device, max_length=longest)
    order = Order(
        split=splits.pop("train"),
        seed=train.seed,
        global_batch=plan.global_batch_size,
        micro_batch=plan.micro_batch_size,
        rank=world.rank,
        world_size=world.size,
        padded=probed.padded,
        shuffle=data.shuffle,
        group_by_length=data.group_by_length,
        longest_first=data.longest_first,
        masking=_masking(plan, folders) if module.masked else None,
    )
    return Job(
        plan=plan,
        world=world,
        folders=folders,
        model=model,
        root=root,
        strategy=strategy,
        optimizer=optimizer,
        order=order,
        held_out=splits,
        probe=probed,
        reporter=reporter,
    )


def _masking(plan: RunPlan, folders: Folders) -> Masking:
    return make_masking(
        load_tokenizer(folders.model, trusted=plan.config.model.trust_remote_code),
        seed=plan.config.train.seed,
        probability=plan.config.data.mlm_probability,
        vocab_size=plan.model.vocab_size,
    )


def resume(job: Job) -> Progress:
    """Where the plan's checkpoint left off, or the beginning; random states are set either way.

    Raises ``CheckpointError`` for a checkpoint that does not fit this run.
    """
    plan, world = job.plan, job.world
    if plan.resume_from is None:
        _seed(plan.config.train.seed, world.rank, 0)
        return Progress()
    folder = storage.local_path(plan.resume_from)
    # A checkpoint of another number of ranks has no random states for these.
    _seed(plan.config.train.seed, world.rank, 1)
    state = checkpoint.load(
        folder,
        model=job.model,
        optimizer=job.optimizer,
        world=world,
        identity=identity(plan),
    )
    progress = Progress.from_state(state, folder)
    if progress.step > plan.total_steps:
        raise CheckpointError(
            f"{folder} is after step {progress.step}, but the run ends with step "
            f"{plan.total_steps}: raise train.max_steps or train.epochs"
        )
    return progress


def _seed(seed: int, rank: int, start: int) -> None:
    """Seed this rank's generators, differently on every rank: ranks must not drop out alike."""
    import numpy as np
    import torch

    drawn = int(np.random.SeedSequence([seed, rank, start]).generate_state(1)[0])
    random.seed(drawn)
    np.random.seed(drawn)
    torch.manual_seed(drawn)


def evaluate_first(job: Job, progress: Progress) -> None:
    """The held-out loss before the first step; a resumed run knows it already."""
    if progress.step == 0 and progress.initial_eval_loss is None:
        progress.initial_eval_loss = _evaluate(job, progress)


def finish_step(job: Job, progress: Progress, report: StepReport) -> None:
    """Count and report a step; evaluate and save where that is due.

    The last step is evaluated and saved after the loop.
    """
    progress.step = report.step
    if not progress.timed:
        progress.seconds_to_first_step = job.reporter.elapsed()
        progress.timed = True
    progress.window.add(report)
    finite = math.isfinite(report.loss)
    progress.seen.add(report if finite else replace(report, loss=0.0, trained=0))
    if job.reporter.step(report, progress.window, progress.seen, peak_memory(job.world)):
        progress.window = Window()
    if report.step < job.plan.total_steps:
        every = job.plan.config.train.eval_every
        if every and report.step % every == 0:
            _evaluate(job, progress)
        often = job.plan.config.checkpoint.every
        if often != "never" and report.step % often == 0:
            save(job, progress)


def evaluate_last(job: Job, progress: Progress) -> None:
    """The held-out losses after the last step, and that of the test rows."""
    _evaluate(job, progress)
    if TEST in job.held_out:
        report = _evaluate_split(job, TEST)
        job.reporter.evaluated({TEST: report})
        progress.losses[f"{TEST}_loss"] = report.loss


def _evaluate(job: Job, progress: Progress) -> float | None:
    """The mean loss over the tokens of all evaluation splits; each is reported."""
    names = [name for name in sorted(job.held_out) if name != TEST]
    if not names:
        return None
    reports = {name: _evaluate_split(job, name) for name in names}
    whole = combined(list(reports.values()))
    named = {name.replace("-", "_", 1): found for name, found in reports.items() if name != EVAL}
    job.reporter.evaluated({EVAL: whole} | named)
    progress.eval_loss = whole.loss
    progress.losses |= {f"{name}_loss": report.loss for name, report in named.items()}
    return whole.loss


def _evaluate_split(job: Job, name: str) -> EvalReport:
    job.reporter.phase("testing" if name == TEST else "evaluating")
    return evaluate(
        job.root,
        job.held_out[name],
        job.world,
        micro_batch=job.plan.micro_batch_size,
        padded=job.probe.padded,
        masking=job.order.masking,
    )


def save(job: Job, progress: Progress) -> None:
    """Write the checkpoint of the current step, unless the run was resumed from that very one."""
    folder = storage.checkpoint_folder(storage.local_path(job.plan.run_dir), progress.step)
    if progress.saved is None or progress.saved.resolve() != folder.resolve():
        job.reporter.phase("writing a checkpoint")
        checkpoint.save(
            folder,
            model=job.model,
            optimizer=job.optimizer,
            world=job.world,
            state=progress.state(),
            identity=identity(job.plan),
            scratch=job.folders.scratch,
        )
        job.reporter.saved("checkpoint", folder)
    progress.saved = folder


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
    )


def write_export(job: Job, collected: Collected | None, generation: Generation) -> str | None:
    """Write what was collected to ``export`` in the run folder; its path on rank 0."""
    if collected is None:
        return None
    target = export.write_export(
        storage.local_path(job.plan.run_dir) / EXPORT,
        collected=collected,
        source=job.folders.model,
        generation=generation,
        scratch=job.folders.scratch,
        trusted=job.plan.config.model.trust_remote_code,
        chat_template=job.plan.data.chat_template,
    )
    job.reporter.saved("export", target)
    return str(target)


def measure(job: Job, progress: Progress) -> dict[str, float]:
    """The run's metrics; times are by this rank's clock. All ranks call it."""
    import torch
    import torch.distributed as dist

    memory = torch.tensor(peak_memory(job.world), dtype=torch.int64)
    dist.all_reduce(memory, dist.ReduceOp.MAX)
    metrics = {
        "initial_eval_loss": progress.initial_eval_loss,
        "eval_loss": progress.eval_loss,
        "train_loss": progress.seen.loss,
        "tokens_per_second": progress.seen.tokens_per_second,
        "peak_memory_bytes": float(memory),
        "seconds_to_first_step": progress.seconds_to_first_step,
        "skipped_steps": float(progress.seen.skipped),
        **progress.losses,
    }
    return {name: value for name, value in metrics.items() if value is not None}


def peak_memory(world: World) -> int:
    """Bytes that this rank has used at most: of its GPU, or on CPU of the machine's memory."""
    if world.device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    import torch

    return int(torch.cuda.max_memory_allocated(world.device))
