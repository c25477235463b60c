"""The optimizer steps of a run: accumulation, clipping, skipping, and what is said of each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.schedules import learning_rate
from dbx_llmtrain.worker.data import Order, StepBatches
from dbx_llmtrain.worker.evaluate import perplexity
from dbx_llmtrain.worker.laps import Lap, Times, as_times
from dbx_llmtrain.worker.parallel import Strategy
from dbx_llmtrain.worker.requests import Wish
from dbx_llmtrain.worker.world import World

MAX_SKIPPED_IN_A_ROW = 10
"""After so many steps in a row with a gradient that is not finite, training has failed."""

NOT_FINITE = "the gradient is not finite"
SCALE_LOWERED = "the gradient overflowed, and the loss scale was halved"
"""Why a step was skipped: the second is part of training in fp16, and no failure."""

Asked = Callable[[], frozenset[Wish]]
"""What this rank has been asked for."""


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, the same on every rank.

    ``step`` counts from 1. ``loss`` is the mean over the ``trained`` tokens of all ranks and
    micro-batches, ``grad_norm`` the global norm before clipping. ``tokens``, ``rows`` (documents)
    and ``trained`` are of all ranks. ``skipped`` says why the weights were left as they are,
    ``asked`` what any rank was asked for when the step was done. ``own`` are each rank's seconds of
    work until the gradient is shared (see ``laps``), ``waited`` those in which it had no data.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    rows: int
    trained: int
    seconds: float
    skipped: str = ""
    asked: frozenset[Wish] = frozenset()
    own: tuple[float, ...] = ()
    waited: tuple[float, ...] = ()


@dataclass
class Window:
    """Sums over several steps, so that a reported loss is the mean over all their tokens.

    Counts are Python integers: exact at any size. A step without trained tokens weighs nothing.
    ``untimed`` tokens are of steps whose ``seconds`` are not in it: another run has taken them.
    """

    steps: int = 0
    tokens: int = 0
    rows: int = 0
    trained: int = 0
    skipped: int = 0
    seconds: float = 0.0
    untimed: int = 0
    _nll: float = field(default=0.0, repr=False)

    def add(self, report: StepReport) -> None:
        """Count a step in."""
        self.steps += 1
        self.tokens += report.tokens
        self.rows += report.rows
        self.trained += report.trained
        self.skipped += bool(report.skipped)
        self.seconds += report.seconds
        self._nll += report.loss * report.trained

    @property
    def loss(self) -> float:
        """Mean over the trained tokens of all steps; not a number where there were none."""
        return self._nll / self.trained if self.trained else math.nan

    @property
    def perplexity(self) -> float:
        """exp of the mean, not a mean of exps."""
        return perplexity(self.loss)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks, padding not counted, by the time the steps took."""
        return (self.tokens - self.untimed) / self.seconds if self.seconds else 0.0


def train_steps(
    plan: RunPlan,
    root: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    order: Order,
    world: World,
    *,
    done: int = 0,
    skipped_before: int = 0,
    asked: Asked = frozenset,
) -> Iterator[StepReport]:
    """Run optimizer steps ``done + 1`` to ``plan.total_steps``, yielding after each.

    Every rank calls it with the same ``done`` (steps that a checkpoint holds, ``skipped_before`` of
    them without an update). The learning rate follows the updates: a skipped step uses up none of
    the schedule. Between two steps the caller may evaluate or save: no gradient is alive then.
    What a rank was ``asked`` for is known to all after the step, by the collective that the loss
    takes in any case; a step without trained tokens has none, and carries nothing.
    Raises ``RuntimeError`` when a parameter got no gradient, or when too many gradients in a row
    were not finite.
    """
    root.train()
    with closing(prepared_ahead(order, done, plan.total_steps)) as batches:
        failures = 0
        lap = Lap(world)
        updates = done - skipped_before
        for step in range(done + 1, plan.total_steps + 1):
            started = time.perf_counter()
            work = next(batches)
            lap.begin(waited=time.perf_counter() - started)
            rate = _set_rate(optimizer, plan, updates + 1)
            loss, norm, skipped, wishes, times = _step(
                root, optimizer, strategy, work, world, plan.config.train.max_grad_norm, asked, lap
            )
            updates += not skipped
            if skipped != SCALE_LOWERED:
                failures = failures + 1 if skipped == NOT_FINITE else 0
            yield StepReport(
                step=step,
                loss=loss,
                learning_rate=rate,
                grad_norm=norm,
                tokens=work.tokens_total,
                rows=work.rows_total,
                trained=work.trained_total,
                seconds=time.perf_counter() - started,
                skipped=skipped,
                asked=wishes,
                own=times[0],
                waited=times[1],
            )
            if failures >= MAX_SKIPPED_IN_A_ROW:
                raise RuntimeError(
                    f"the gradient was not finite in {failures} steps in a row, up to step {step}: "
                    "lower train.learning_rate, or look for broken rows in the data"
                )


def _set_rate(optimizer: torch.optim.Optimizer, plan: RunPlan, update: int) -> float:
    """Give every group the learning rate of an update, which is returned."""
    rate = learning_rate(
        update,
        plan.config.train,
        warmup_steps=plan.warmup_steps,
        total_steps=plan.total_steps,
        decay_steps=plan.decay_steps,
    )
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def prepared_ahead(order: Order, first: int, end: int) -> Generator[StepBatches]:
    """The batches of steps ``first`` to ``end`` - 1, counted from 0, each made in a thread while
    the device computes the step before. They do not depend on when they are made."""
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
        coming = thread.submit(order.step, first) if first < end else None
        for step in range(first, end):
            assert coming is not None
            work = coming.result()
            coming = thread.submit(order.step, step + 1) if step + 1 < end else None
            yield work


def _step(
    root: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    work: StepBatches,
    world: World,
    max_norm: float,
    asked: Asked,
    lap: Lap,
) -> tuple[float, float, str, frozenset[Wish], Times]:
    """One optimizer step: mean loss, gradient norm, why the weights were not touched, what any rank
    was asked for, and the ranks' own times."""
    parameters = {name: p for name, p in root.named_parameters() if p.requires_grad}
    assert all(p.grad is None for p in parameters.values()), "a gradient outlived its step"
    if work.trained_total == 0:
        # Known from the index, so all ranks leave here together.
        return 0.0, 0.0, "no trained token", frozenset(), ((), ())
    total = back_propagate(root, strategy, work, world, alone=lap.end)
    missing = strategy.missing_gradients(root)
    if missing:
        # The wrapper did not reduce, or a weight is not used.
        raise RuntimeError(
            f"{len(missing)} of {len(parameters)} trainable parameters got no gradient: "
            f"{', '.join(missing[:5])}"
        )
    norm = strategy.grad_norm_and_clip(parameters.values(), max_norm)
    sums = torch.cat([total[None], as_numbers(asked(), world.device), lap.as_numbers()])
    if world.size > 1:
        dist.all_reduce(sums)
    # The one moment in a step at which the host waits for the device.
    values = torch.cat([norm.double().to(total.device)[None], sums]).tolist()
    norm_value, loss_sum = values[:2]
    wishes = as_wishes(values[2 : 2 + len(Wish)])
    times = as_times(values[2 + len(Wish) :])
    loss = loss_sum / work.trained_total
    finite = math.isfinite(norm_value)
    if norm_value == 0 and loss > 0:
        raise RuntimeError(f"the gradient of all parameters is zero at a loss of {loss}")
    lowered = strategy.update(optimizer, finite=finite)
    if finite:
        return loss, norm_value, "", wishes, times
    # Where the loss itself is not finite, no other scale of it would help.
    skipped = SCALE_LOWERED if lowered and math.isfinite(loss) else NOT_FINITE
    return loss, norm_value, skipped, wishes, times


def as_numbers(wishes: frozenset[Wish], device: str) -> Tensor:
    """Wishes to sum over the ranks: (number of wishes,) fp64. Nothing is copied to the device: that
    would wait for it."""
    numbers = torch.zeros(len(Wish), dtype=torch.float64, device=device)
    for place, wish in enumerate(Wish):
        if wish in wishes:
            numbers[place].fill_(1.0)
    return numbers


def as_wishes(sums: Sequence[float]) -> frozenset[Wish]:
    """What any rank wished for."""
    return frozenset(wish for wish, ranks in zip(Wish, sums, strict=True) if ranks)


def back_propagate(
    root: nn.Module,
    strategy: Strategy,
    work: StepBatches,
    world: World,
    *,
    alone: Callable[[], None] = lambda: None,
) -> Tensor:
    """Leave the gradient of the step's mean loss in the parameters, reduced over ranks once.

    Returns this rank's summed loss, fp64, on the device. Gradients are averaged over the ranks, so
    each micro-batch back-propagates its sum times ``world.size / N``. ``alone`` is called when the
    rank is about to share its gradient.
    """
    scale = world.size / work.trained_total
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for number, batch in enumerate(work.batches, start=1):
        batch = batch.to(world.device)
        with strategy.accumulate(root, last=number == len(work.batches)):
            loss = root(**batch.inputs())
            if number == len(work.batches):
                alone()
            strategy.backward(root, loss * scale)
        total += loss.detach()
    return total
