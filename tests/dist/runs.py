"""Where a case runs, and a run with a tiny model in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.model_sections import OptimConfig, ParallelConfig
from dbx_llmtrain.text.prepared import Example, Split, write_split
from dbx_llmtrain.worker.data import Order
from dbx_llmtrain.worker.loop import back_propagate, train_steps
from dbx_llmtrain.worker.loss import LossModule
from dbx_llmtrain.worker.masking import Masking
from dbx_llmtrain.worker.parallel import Fill, make_strategy
from dbx_llmtrain.worker.probe import probe
from dbx_llmtrain.worker.saving import saving
from dbx_llmtrain.worker.whole import Cut, Stored, whole, whole_gradient
from dbx_llmtrain.worker.world import World
from tests import sample, tiny

_ALL_PARTITIONED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
"""A model this small would not be partitioned at all."""

OPTIONS = {
    "single": ParallelConfig(kind="single"),
    "ddp": ParallelConfig(kind="ddp"),
    "fsdp": ParallelConfig(kind="fsdp"),
    "grad_op": ParallelConfig(kind="fsdp", shard="grad_op"),
    "hybrid": ParallelConfig(kind="fsdp", shard="hybrid"),
    "offload": ParallelConfig(kind="fsdp", cpu_offload=True),
    "zero1": ParallelConfig(kind="deepspeed", stage=1),
    "zero2": ParallelConfig(kind="deepspeed", stage=2),
    "zero3": ParallelConfig(kind="deepspeed", stage=3, config=_ALL_PARTITIONED),
}
"""Every way to share the work, by the name that launches give it."""


@dataclass(frozen=True)
class Context:
    """Where a case runs. ``strategy`` is one of ``OPTIONS``, ``folder`` this rank's own."""

    strategy: str
    world: World
    folder: Path

    @property
    def parallel(self) -> ParallelConfig:
        return OPTIONS[self.strategy]

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in order."""
        values: list[Any] = [None] * self.world.size
        dist.all_gather_object(values, value)
        return values


class Run:
    """A model, wrapped, with data and an optimizer."""

    def __init__(
        self,
        context: Context,
        rows: list[Example],
        *,
        model: Any = None,
        global_batch: int = 8,
        micro_batch: int = 2,
        packing: bool = False,
        precision: str = "fp32",
        steps: int | None = None,
        masking: Masking | None = None,
        fill: Fill | None = None,
        parallel: ParallelConfig | None = None,
        **train: Any,
    ) -> None:
        self.world = context.world
        self.rows = rows
        folder = context.folder / str(len(list(context.folder.glob("*"))))
        write_split(folder, rows, max_length=64, packing=packing)
        self.split = Split(folder)
        self.model = tiny.llama() if model is None else model
        self.module = LossModule(self.model, masked=masking is not None)
        settings = OptimConfig(**({"learning_rate": 1e-2, "schedule": "constant"} | train))
        parallel = parallel or context.parallel
        self.plan = sample.run_plan(
            config=sample.config(train=settings),
            parallel=parallel,
            strategy=parallel.kind,
            precision=precision,
            world_size=self.world.size,
            micro_batch_size=micro_batch,
            total_steps=steps or -(-len(self.split) // global_batch),
            warmup_steps=1 if "warmup" in train else 0,
        )
        self.strategy = make_strategy(
            parallel.kind, self.world, precision, parallel=parallel, train=settings, plan=self.plan
        )
        self.root = self.strategy.wrap(self.module, fill)
        self.probed = probe(self.root, self.module, device="cpu", max_length=64)
        self.order = Order(
            self.split,
            0,
            global_batch,
            micro_batch,
            rank=self.world.rank,
            world_size=self.world.size,
            padded=self.probed.padded,
            masking=masking,
        )
        self.optimizer = self.strategy.build_optimizer(self.model, settings)

    def steps(self) -> Any:
        return train_steps(
            self.plan, self.root, self.optimizer, self.strategy, self.order, self.world
        )

    def back_propagate(self, step: int = 1) -> float:
        """Leave the gradient of a step; its mean loss over all ranks."""
        work = self.order.step(step - 1)
        total = back_propagate(self.root, self.strategy, work, self.world)
        dist.all_reduce(total)
        return float(total) / work.trained_total

    def clip(self, max_norm: float = 0.0) -> float:
        norm = self.strategy.grad_norm_and_clip(self.model.parameters(), max_norm)
        assert type(norm) is Tensor
        assert norm.ndim == 0
        return float(norm)

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients, by the model's own names."""
        grads = {
            name: whole_gradient(p).clone()
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }
        if self.strategy.name == "deepspeed":
            self.strategy.update(self.optimizer, finite=False)  # it keeps them elsewhere
        else:
            self.optimizer.zero_grad(set_to_none=True)
        return grads

    def state(self) -> dict[str, Tensor]:
        return {name: whole(p).clone() for name, p in self.model.named_parameters()}


def joined(part: Stored) -> Tensor:
    """All of what the ranks have a part of. All ranks call it."""
    if not isinstance(part, Cut):
        return whole(part)
    total = torch.zeros(part.shape)
    for place, box in part.boxes:
        area = tuple(slice(at, at + size) for at, size in zip(place, box.shape, strict=True))
        assert not total[area].any(), "boxes overlap"
        total[area] = box
    dist.all_reduce(total)
    return total


def save(run: Run, folder: Path, **changes: Any) -> Path:
    """Write a checkpoint and wait for it; the run has no others. Raises ``CheckpointError``."""
    arguments = {"model": run.model, "optimizer": run.optimizer, "metrics": {}} | changes
    scratch = arguments.pop("scratch", folder.parent / "scratch")
    plan = run.plan.model_copy(update={"run_dir": str(folder.parent / "run")})
    with saving(plan, run.world, scratch, tell=lambda _: None) as saver:
        saver.save(folder, **arguments)
        saved = saver.wait()
    if saved is None or saved.error:
        raise CheckpointError(saved.error if saved else "nothing was saved")
    return folder
