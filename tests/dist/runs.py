"""Where a case runs, and a run with a tiny model in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dbx_llmtrain.sections import OptimConfig
from dbx_llmtrain.text.prepared import Example, Split, write_split
from dbx_llmtrain.worker.data import Order
from dbx_llmtrain.worker.loop import back_propagate, train_steps
from dbx_llmtrain.worker.loss import LossModule
from dbx_llmtrain.worker.masking import Masking
from dbx_llmtrain.worker.optim import build_optimizer
from dbx_llmtrain.worker.parallel import make_strategy
from dbx_llmtrain.worker.probe import probe
from dbx_llmtrain.worker.world import World
from tests import sample, tiny


@dataclass(frozen=True)
class Context:
    """Where a case runs. ``folder`` is this rank's own."""

    strategy: str
    world: World
    folder: Path

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
        **train: Any,
    ) -> None:
        self.world = context.world
        self.rows = rows
        folder = context.folder / str(len(list(context.folder.glob("*"))))
        write_split(folder, rows, max_length=64, packing=packing)
        self.split = Split(folder)
        self.model = tiny.llama() if model is None else model
        self.module = LossModule(self.model, masked=masking is not None)
        self.strategy = make_strategy(context.strategy, self.world, precision)
        self.root = self.strategy.wrap(self.module)
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
        settings = OptimConfig(**({"learning_rate": 1e-2, "schedule": "constant"} | train))
        self.optimizer = build_optimizer(self.model, settings)
        self.plan = sample.run_plan(
            config=sample.config(train=settings),
            total_steps=steps or self.order.steps_per_epoch,
            warmup_steps=1 if "warmup" in train else 0,
        )

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
        grads = {name: whole(p.grad) for name, p in self.model.named_parameters()}
        self.optimizer.zero_grad(set_to_none=True)
        return grads

    def state(self) -> dict[str, Tensor]:
        return {name: whole(p.detach()).clone() for name, p in self.model.named_parameters()}


def whole(tensor: Any) -> Tensor:
    """A tensor with all its shards."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full
