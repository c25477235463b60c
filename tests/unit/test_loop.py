"""Optimizer steps on one rank: accumulation, skipping, counting."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dbx_llmtrain.model_sections import OptimConfig
from dbx_llmtrain.text.prepared import Example, Split, write_split
from dbx_llmtrain.worker import loop
from dbx_llmtrain.worker.data import Order
from dbx_llmtrain.worker.loop import StepReport, Window, back_propagate, prepared_ahead, train_steps
from dbx_llmtrain.worker.loss import LossModule
from dbx_llmtrain.worker.parallel import make_strategy
from dbx_llmtrain.worker.requests import Wish
from dbx_llmtrain.worker.world import World
from tests import reference, sample, tiny

ALONE = World(rank=0, size=1, local_rank=0, node="n", host="h", device="cpu", ranks_on_host=1)


class Run:
    """A run of one rank on rows that are not packed."""

    def __init__(
        self,
        folder: Path,
        rows: list[Example],
        *,
        model: Any = None,
        global_batch: int = 4,
        micro_batch: int = 2,
        steps: int | None = None,
        precision: str = "fp32",
        **train: Any,
    ) -> None:
        self.rows = rows
        write_split(folder, rows, max_length=64, packing=False)
        self.split = Split(folder)
        self.order = Order(self.split, 0, global_batch, micro_batch)
        self.model = tiny.llama() if model is None else model
        module = LossModule(self.model)
        self.strategy = make_strategy("single", ALONE, precision)
        self.root = self.strategy.wrap(module)
        settings = OptimConfig(**({"learning_rate": 1e-2, "schedule": "constant"} | train))
        self.optimizer = self.strategy.build_optimizer(self.model, settings)
        self.plan = sample.run_plan(
            config=sample.config(train=settings),
            total_steps=steps or self.order.steps_per_epoch,
            warmup_steps=0,
        )

    def steps(self, done: int = 0, skipped_before: int = 0) -> Any:
        return train_steps(
            self.plan, self.root, self.optimizer, self.strategy, self.order, ALONE, done=done,
            skipped_before=skipped_before,
        )  # fmt: skip

    def state(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def rows_of(self, step: int) -> list[Example]:
        return [self.rows[int(row)] for row in self.order.examples(step - 1)]


def _silent(count: int) -> list[Example]:
    return [Example([5, 6, 7, 8], [False] * 4) for i in range(count)]


def test_batches_are_made_a_step_ahead_and_are_the_same(tmp_path: Path) -> None:
    order = Run(tmp_path, tiny.examples()).order
    before = threading.active_count()
    ahead = prepared_ahead(order, 1, 5)
    found = list(ahead)
    assert threading.active_count() == before
    for step, work in enumerate(found, start=1):
        expected = order.step(step)
        assert work.trained_total == expected.trained_total
        for one, other in zip(work.batches, expected.batches, strict=True):
            assert torch.equal(one.input_ids, other.input_ids)
            assert torch.equal(one.labels, other.labels)
    assert list(prepared_ahead(order, 3, 3)) == []


def test_a_step_that_cannot_be_made_ends_the_run_and_its_thread(tmp_path: Path) -> None:
    run = Run(tmp_path, tiny.examples(), steps=3)
    run.order = replace(run.order, micro_batch=0)
    before = threading.active_count()
    with pytest.raises(ValueError, match="must not be zero"):
        list(run.steps())
    assert threading.active_count() == before


def test_c53_the_loss_falls(tmp_path: Path) -> None:
    losses = [report.loss for report in Run(tmp_path, tiny.examples(), steps=10).steps()]
    assert losses[-1] < losses[0] - 0.1


def test_c30_c33_every_step_has_the_gradient_of_its_own_rows(tmp_path: Path) -> None:
    run = Run(tmp_path, tiny.examples()[:7], global_batch=3, micro_batch=1)
    assert run.order.steps_per_epoch == 3
    for step in range(1, 4):
        expected_loss, expected = reference.gradients(run.model, run.rows_of(step))
        work = run.order.step(step - 1)
        total = back_propagate(run.root, run.strategy, work, ALONE)
        found = {name: p.grad for name, p in run.model.named_parameters()}
        assert reference.difference(found, expected) < 1e-6
        assert abs(float(total) / work.trained_total - expected_loss) < 1e-6
        run.optimizer.zero_grad(set_to_none=True)


def test_c44_the_reported_loss_is_the_mean_over_the_tokens_of_the_window(tmp_path: Path) -> None:
    run = Run(tmp_path, tiny.examples(), global_batch=3, micro_batch=1, learning_rate=1e-30)
    expected = float(reference.mean_loss(run.model, run.rows).detach())
    window = Window()
    losses = []
    for report in run.steps():
        window.add(report)
        losses.append(report.loss)
    assert abs(window.loss - expected) < 1e-6
    assert abs(window.loss - sum(losses) / len(losses)) > 1e-4
    assert window.perplexity == pytest.approx(math.exp(expected), rel=1e-6)
    assert (window.steps, window.rows, window.tokens) == (3, 8, 122)
    assert window.trained == int(run.split.trained.sum())


def test_c45_a_window_counts_beyond_the_floats() -> None:
    window = Window()
    for count in (2**24, 1, 2**53, 1):
        window.add(StepReport(1, 1.0, 0.1, 1.0, count, 1, count, 0.5))
    assert window.tokens == 2**24 + 2**53 + 2
    assert window.trained == window.tokens
    assert window.tokens_per_second == window.tokens / 2.0
    assert Window().tokens_per_second == 0.0
    assert math.isnan(Window().loss)


def test_c58_one_clip_per_step_and_the_norm_before_it_is_reported(tmp_path: Path) -> None:
    run = Run(tmp_path, tiny.examples(), global_batch=8, micro_batch=2, max_grad_norm=0.01)
    _, gradients = reference.gradients(run.model, run.rows)
    clipped: list[float] = []

    def see(*_: Any) -> None:
        clipped.append(reference.norm({n: p.grad for n, p in run.model.named_parameters()}))

    run.optimizer.register_step_pre_hook(see)
    reports = list(run.steps())
    assert reports[0].grad_norm == pytest.approx(reference.norm(gradients), abs=1e-5)
    assert clipped == [pytest.approx(0.01, rel=1e-4)]


def test_c58_without_a_limit_nothing_is_clipped(tmp_path: Path) -> None:
    run = Run(tmp_path, tiny.examples(), global_batch=8, max_grad_norm=0.0)
    norms: list[float] = []
    run.optimizer.register_step_pre_hook(
        lambda *_: norms.append(
            reference.norm({n: p.grad for n, p in run.model.named_parameters()})
        )
    )
    assert [report.grad_norm for report in run.steps()] == [pytest.approx(norms[0], rel=1e-5)]


def test_c17_a_step_without_trained_tokens_is_skipped_and_counted(tmp_path: Path) -> None:
    run = Run(tmp_path, _silent(4))
    before = run.state()
    window = Window()
    for report in run.steps():
        window.add(report)
    assert (report.loss, report.grad_norm, report.trained) == (0.0, 0.0, 0)
    assert report.skipped == "no trained token"
    assert (window.skipped, window.steps) == (1, 1)
    assert all(torch.equal(before[name], value) for name, value in run.state().items())


def test_c63_a_gradient_that_is_not_finite_leaves_the_weights_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, tiny.examples(), steps=2)
    poison = run.root.register_forward_hook(lambda _, __, loss: loss * float("nan"))
    steps = run.steps()
    before = run.state()
    report = next(steps)
    assert report.skipped == "the gradient is not finite"
    assert math.isnan(report.loss)
    assert all(torch.equal(before[name], value) for name, value in run.state().items())
    poison.remove()
    window = Window()
    window.add(report)
    report = next(steps)
    window.add(report)
    assert not report.skipped
    assert not torch.equal(before["lm_head.weight"], run.state()["lm_head.weight"])
    assert math.isnan(window.loss)


def test_c64_a_skipped_step_uses_up_none_of_the_schedule(tmp_path: Path) -> None:
    """1 step of 5 is skipped: 4 updates at the schedule's first 4 rates, also after a resume."""
    settings = {"schedule": "linear", "learning_rate": 1.0, "max_grad_norm": 1e-3}
    run = Run(tmp_path, tiny.examples(), steps=5, **settings)
    poisoned = {2}
    now = [0]
    run.root.register_forward_hook(
        lambda _, __, loss: loss * float("nan") if now[0] in poisoned else loss
    )
    window = Window()
    rates = []
    steps = run.steps()
    for now[0] in range(1, 4):
        report = next(steps)
        window.add(report)
        rates.append(report.learning_rate)
    assert (window.steps, window.skipped) == (3, 1)
    steps.close()
    for now[0], report in zip(
        (4, 5), run.steps(done=3, skipped_before=window.skipped), strict=True
    ):
        window.add(report)
        rates.append(report.learning_rate)
    assert rates == pytest.approx([1.0, 0.8, 0.8, 0.6, 0.4])
    (taken,) = {int(state["step"]) for state in run.optimizer.state.values()}
    assert taken == window.steps - window.skipped == 4


def test_c63_too_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, tiny.examples(), steps=50)
    run.root.register_forward_hook(lambda _, __, loss: loss * float("inf"))
    reports = []
    with pytest.raises(RuntimeError, match="not finite in 10 steps in a row, up to step 10"):
        reports.extend(run.steps())
    assert loop.MAX_SKIPPED_IN_A_ROW == 10


def test_steps_without_tokens_never_end_a_run(tmp_path: Path) -> None:
    run = Run(tmp_path, _silent(4), steps=12)
    assert sum(bool(report.skipped) for report in run.steps()) == 12


def test_c66_no_gradient_outlives_its_step(tmp_path: Path) -> None:
    rows = _silent(4) + tiny.examples()
    run = Run(tmp_path, rows, steps=6, micro_batch=1)
    poisoned = {2, 4}
    now = [0]
    alive: list[bool] = []

    def spoil(_: Any, __: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * float("nan") if now[0] in poisoned else loss

    run.root.register_forward_hook(spoil)
    steps = run.steps()
    for now[0] in range(1, 7):
        next(steps)
        alive.append(any(p.grad is not None for p in run.model.parameters()))
    assert alive == [False] * 6
    run.model.lm_head.weight.grad = torch.zeros_like(run.model.lm_head.weight)
    with pytest.raises(AssertionError, match="a gradient outlived its step"):
        next(Run.steps(run, done=5))


def test_c40_a_parameter_without_a_gradient_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, tiny.examples())
    run.model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="2 of 23 trainable parameters got no gradient: "):
        next(run.steps())


def test_c40_a_gradient_of_zero_at_a_loss_is_an_error(tmp_path: Path) -> None:
    run = Run(tmp_path, tiny.examples())
    for parameter in run.model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(RuntimeError, match="the gradient of all parameters is zero"):
        next(run.steps())


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole = Run(tmp_path / "a", tiny.examples(), steps=5)
    reports = [(report.step, report.loss) for report in whole.steps()]
    halves = Run(tmp_path / "b", tiny.examples(), steps=5)
    first = halves.steps()
    found = [(report.step, report.loss) for report in (next(first), next(first))]
    found += [(report.step, report.loss) for report in halves.steps(done=2)]
    assert found == reports
    assert all(torch.equal(whole.state()[name], value) for name, value in halves.state().items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_c52_small_updates_are_not_rounded_away(tmp_path: Path, precision: str) -> None:
    """100 steps at 1e-5: every weight moves, also where the compute type is bf16."""
    run = Run(
        tmp_path, tiny.examples((5, 9, 7)), precision=precision, steps=100, learning_rate=1e-5
    )
    before = run.state()
    assert not any(report.skipped for report in run.steps())
    after = run.state()
    assert {value.dtype for value in after.values()} == {torch.float32}
    # Rows of tokens that never occur get no gradient from the embedding.
    names = [name for name in before if "embed" not in name]
    moved = [float((after[name] != before[name]).float().mean()) for name in names]
    assert min(moved) == 1
    change = torch.cat([(after[name] - before[name]).abs().flatten() for name in names]).mean()
    assert 2e-4 < float(change) < 1.05e-3


def test_c52_bf16_moves_as_far_as_fp32(tmp_path: Path) -> None:
    changes = []
    for precision in ("fp32", "bf16"):
        run = Run(
            tmp_path / precision,
            tiny.examples((5, 9, 7)),
            precision=precision,
            steps=100,
            learning_rate=1e-5,
        )
        before = run.state()
        list(run.steps())
        after = run.state()
        moved = [(after[name] - before[name]).abs().flatten() for name in before]
        changes.append(float(torch.cat(moved).mean()))
    assert abs(changes[1] / changes[0] - 1) < 0.05


def test_strategies_are_known_by_name() -> None:
    with pytest.raises(ValueError, match="strategy 'zero': expected single, ddp, fsdp or deeps"):
        make_strategy("zero", ALONE, "fp32")
    with pytest.raises(ValueError, match="precision 'fp8': expected fp32, bf16 or fp16"):
        make_strategy("single", ALONE, "fp8")
    with pytest.raises(ValueError, match="fp16 is not offered with deepspeed"):
        make_strategy("deepspeed", ALONE, "fp16")
    two = World(rank=0, size=2, local_rank=0, node="n", host="h", device="cpu", ranks_on_host=2)
    with pytest.raises(ValueError, match="strategy single needs one rank, there are 2"):
        make_strategy("single", two, "fp32")


def test_what_is_asked_for_is_in_the_report_of_the_step(tmp_path: Path) -> None:
    run = Run(tmp_path, tiny.examples(), steps=3)
    wishes = iter([frozenset(), frozenset({Wish.STOP, Wish.SIGTERM}), frozenset()])
    reports = train_steps(
        run.plan, run.root, run.optimizer, run.strategy, run.order, ALONE,
        asked=lambda: next(wishes),
    )  # fmt: skip
    assert [report.asked for report in reports] == [set(), {Wish.STOP, Wish.SIGTERM}, set()]


def test_a_step_without_trained_tokens_leaves_what_is_asked_for_to_the_next(tmp_path: Path) -> None:
    run = Run(tmp_path, [*tiny.examples((6,)), *_silent(1)], global_batch=1, steps=2)
    asked = list(
        train_steps(
            run.plan, run.root, run.optimizer, run.strategy, run.order, ALONE,
            asked=lambda: frozenset({Wish.STOP}),
        )
    )  # fmt: skip
    assert sorted((report.skipped, set(report.asked)) for report in asked) == [
        ("", {Wish.STOP}), ("no trained token", set()),
    ]  # fmt: skip


@pytest.mark.parametrize("wishes", [set(), {Wish.CANCEL}, set(Wish)])
def test_wishes_travel_as_numbers(wishes: set[Wish]) -> None:
    numbers = loop.as_numbers(frozenset(wishes), "cpu")
    assert loop.as_wishes((3 * numbers).tolist()) == wishes
