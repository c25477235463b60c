"""A run that stands still: when that is said, of whom, and what the ranks are asked for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain import storage
from dbx_llmtrain.driver import stalls
from dbx_llmtrain.driver.monitor import LiveState, RankState
from dbx_llmtrain.driver.stalls import Guard, Stall
from dbx_llmtrain.errors import TrainingFailed
from dbx_llmtrain.events import Event
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import requests, stacks
from tests import sample
from tests.pages import ROOT, blocks

WAITS = "back_propagate (dbx_llmtrain/worker/loop.py:260), in all_reduce"
SHARES = "backward (dbx_llmtrain/worker/parallel/common.py:51), in _engine_run_backward"
LOOPS = "count_for_ever (/home/me/metrics.py:7)"


def state(moved: float, heard: float = 1000.0, **changes: Any) -> RankState:
    values = {"step": 41, "time": 0.0, "phase": "training", "host": "worker-1", "at": WAITS}
    return RankState(moved=moved, heard=heard, **(values | changes))


def find(ranks: dict[int, RankState], now: float = 1000.0, **changes: Any) -> Stall | None:
    values: dict[str, Any] = {"world_size": 2, "timeout": 600.0} | changes
    return stalls.find(ranks, now=now, **values)


def test_a_run_stalls_when_its_last_rank_does() -> None:
    assert find({0: state(399.0), 1: state(401.0)}) is None
    assert find({0: state(399.0), 1: state(400.0)}) == Stall(600.0, (), (0, 1))


def test_nobody_is_stalled_before_the_first_word_or_after_the_last() -> None:
    assert find({}, now=1e9) is None
    over = state(0.0, phase="finished")
    assert find({0: over, 1: over}, now=1e9) is None
    assert find({0: over, 1: state(1.0)}) == Stall(999.0, (), (1,))
    assert find({0: state(1.0, phase="failed"), 1: state(1.0)}) is None, "that is told by itself"


def test_silent_ranks_are_those_that_were_not_heard() -> None:
    ranks = {0: state(399.0), 1: state(395.0, heard=395.0)}
    assert find(ranks) == Stall(601.0, (1,), (0,))
    assert find({0: state(399.0)}) == Stall(601.0, (1,), (0,)), "one that never said a word"
    slow = {0: state(399.0), 1: state(399.0, heard=1000.0 - 449.0)}
    assert find(slow) == Stall(601.0, (), (0, 1)), "three quarters of the time"


def test_what_was_while_this_process_slept_does_not_count() -> None:
    ranks = {0: state(10.0, heard=10.0), 1: state(10.0, heard=10.0)}
    assert find(ranks, now=1000.0, since=990.0) is None
    assert find(ranks, now=1600.0, since=990.0) == Stall(610.0, (0, 1), ())


def test_a_first_step_that_compiles_may_take_longer() -> None:
    plan = sample.run_plan()
    compiled = sample.config(model={"source": "/m", "compile": True})
    assert stalls.limit(plan, {0: state(0.0, step=0)}) == 600.0
    first = plan.model_copy(update={"config": compiled})
    assert stalls.limit(first, {0: state(0.0, step=0)}) == 1800.0
    assert stalls.limit(first, {0: state(0.0, step=1)}) == 600.0
    resumed = first.model_copy(update={"resume_from": "/runs/first/checkpoints/step-00000041"})
    assert stalls.limit(resumed, {0: state(0.0)}) == 1800.0


def places(*told: str) -> dict[int, str]:
    return dict(enumerate(told))


def test_who_is_suspected() -> None:
    two, four = Stall(600.0, (), (0, 1)), Stall(600.0, (), (0, 1, 2, 3))
    assert stalls.suspected(Stall(1.0, (1,), (0,)), places(WAITS, ""), {}) == (1,)
    assert stalls.suspected(two, places(WAITS, LOOPS), {}) == (1,)
    assert stalls.suspected(two, places(SHARES, LOOPS), {}) == (1,)
    assert stalls.suspected(two, places(WAITS, WAITS), {}) == ()
    assert stalls.suspected(four, places("a", "a", "b", "a"), {}) == (2,)
    assert stalls.suspected(four, places("a", "a", "b", "b"), {}) == ()
    deep = 'main thread:\n  File "/x/torch/distributed/distributed_c10d.py", line 9, in f\n'
    assert stalls.suspected(two, places("a", "b"), {0: deep}) == (1,)


def test_the_error_names_the_silent_and_where_the_others_are() -> None:
    plan = sample.run_plan(world_size=3)
    ranks = {
        0: state(1.0),
        1: state(1.0),
        2: state(1.0, heard=2.0, host="worker-2", at="step (optim.py:9)"),
    }
    error = stalls.failure(plan, Stall(600.0, (2,), (0, 1)), ranks, {})
    assert (error.cause, error.rank, error.host, error.step) == ("stalled", 2, "worker-2", 41)
    assert error.message.splitlines() == [
        "no rank has moved for 10 min (cluster.stall_timeout)",
        "  silent: rank 2 on worker-2, last heard in phase 'training', after step 41, in step "
        "(optim.py:9)",
        f"  ranks 0, 1: phase 'training', step 41, in {WAITS}",
    ]
    assert "its process is stopped (SIGSTOP" in error.advice
    assert "raise cluster.stall_timeout (now 600 s)" in error.advice
    assert "/shared/runs/first/logs/rank-*.stacks.txt" in error.advice


def test_the_error_is_the_one_of_the_page() -> None:
    """``docs/watching.md`` shows it."""
    ranks = {
        0: state(1.0, at=SHARES),
        1: state(1.0, heard=2.0, host="worker-2", at=""),
    }
    error = stalls.failure(sample.run_plan(), Stall(600.0, (1,), (0,)), ranks, {})
    page = ROOT / "docs" / "watching.md"
    assert f"{error.message}\n" in blocks("text", page)


def test_the_error_has_the_stack_of_the_one_that_is_elsewhere() -> None:
    text = (
        "rank 1, attempt a1, request x\n"
        'main thread:\n  File "/home/me/metrics.py", line 7, in count_for_ever\n    n += 1\n\n'
        'thread watch:\n  File "/x.py", line 1, in run\n'
    )
    ranks = {0: state(1.0), 1: state(1.0, at="")}
    error = stalls.failure(sample.run_plan(), Stall(600.0, (), (0, 1)), ranks, {1: text})
    assert (error.rank, error.step) == (1, 41)
    assert f"rank 1 on worker-1: phase 'training', step 41, in {LOOPS}" in error.message
    assert error.traceback.endswith("in count_for_ever\n    n += 1")
    assert "look at what rank 1 does" in error.advice


def test_a_silent_rank_with_a_watchdogs_stack_hangs_in_native_code() -> None:
    text = f"rank 1, attempt a1, {stacks.BY_WATCHDOG}\n"
    text += "Timeout!\nThread 0x01 (most recent call first):\n"
    text += '  File "/home/me/native.py", line 3 in hang\n'
    ranks = {0: state(1.0), 1: state(1.0, heard=1.0)}
    error = stalls.failure(sample.run_plan(), Stall(600.0, (1,), (0,)), ranks, {1: text})
    assert "in hang (/home/me/native.py:3)" in error.message
    assert "never gives the interpreter back" in error.advice
    assert "SIGSTOP" not in error.advice


def test_a_thousand_ranks_are_told_in_a_few_lines() -> None:
    ranks = {rank: state(1.0, at=f"f (x.py:{rank % 20})") for rank in range(1000)}
    found = Stall(600.0, tuple(range(500)), tuple(range(500, 1000)))
    plan = sample.run_plan(world_size=1000)
    message = stalls.failure(plan, found, ranks, {}).message
    assert len(message.splitlines()) <= 16
    assert "silent: 494 more ranks" in message
    assert "14 more groups of ranks elsewhere" in message
    assert len(message) < 3000


# The guard


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    return sample.run_plan(
        tmp_path, config=sample.config(cluster={"stall_timeout": 60.0}), world_size=2
    )


def alive(rank: int, moves: int = 0, at: str = WAITS, time: float = 1.0) -> Event:
    data = {"phase": "training", "moves": moves, "at": at, "host": f"worker-{rank}"}
    event = sample.event("alive", 41).model_copy(update={"rank": rank, "time": time, "data": data})
    return event


class Run:
    """A guard, what it knows, and time that passes in half seconds."""

    def __init__(self, plan: RunPlan) -> None:
        self.clock, self.live = Clock(), LiveState()
        self.guard = Guard(plan, self.live, clock=self.clock)
        self.sent = 0.0

    def hear(self, *events: Event) -> None:
        for event in events:
            self.sent += 1.0
            self.live.update(event.model_copy(update={"time": self.sent}), self.clock.now)

    def after(self, seconds: float, *heard: Event) -> None:
        for _ in range(int(2 * seconds)):
            self.clock.now += 0.5
            self.hear(*heard)
            self.guard.check()


def answer(plan: RunPlan, rank: int, request: str) -> None:
    text = f'main thread:\n  File "/me/{rank}.py", line 7, in wait\n'
    storage.write_text(
        stacks.stacks_path(Path(plan.run_dir), rank),
        stacks.head(plan.attempt, rank, f"request {request}, on x") + text,
    )


def test_the_guard_asks_for_stacks_and_raises_when_they_are_there(
    plan: RunPlan, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(plan)
    asked = Path(plan.run_dir) / requests.STACKS
    answer(plan, 0, "of an earlier time")
    answer(plan, 1, "of an earlier time")
    run.hear(alive(0), alive(1))
    with caplog.at_level(logging.WARNING, logger="dbx_llmtrain"):
        run.after(59.5, alive(0), alive(1))
        assert not asked.exists()
        run.after(1, alive(0), alive(1))
    assert "no rank has moved for 60 s: they are asked for their stacks" in caplog.text
    run.after(5, alive(0), alive(1))
    answer(plan, 0, asked.read_text())
    run.after(1, alive(0), alive(1))
    answer(plan, 1, asked.read_text())
    with pytest.raises(TrainingFailed, match="no rank has moved for") as caught:
        run.after(1, alive(0), alive(1))
    assert caught.value.cause == "stalled"
    assert not asked.exists(), "the next attempt is not asked"


def test_the_guard_does_not_wait_for_ever_for_stacks(plan: RunPlan) -> None:
    run = Run(plan)
    run.hear(alive(0), alive(1))
    began = run.clock.now
    with pytest.raises(TrainingFailed) as caught:
        run.after(200, alive(0))
    assert 60 + stalls.STACKS_S <= run.clock.now - began < 60 + stalls.STACKS_S + 2
    assert caught.value.rank == 1
    assert caught.value.message.count("silent: rank 1 on worker-1") == 1


def test_parts_of_a_long_step_are_movement(plan: RunPlan) -> None:
    run = Run(plan)
    for moves in range(20):
        run.hear(alive(0, moves), alive(1))
        run.after(30, alive(0, moves), alive(1))


def test_a_request_is_taken_back_when_the_run_moves_again(plan: RunPlan) -> None:
    run = Run(plan)
    run.hear(alive(0), alive(1))
    run.after(62, alive(0), alive(1))
    asked = Path(plan.run_dir) / requests.STACKS
    assert asked.exists()
    run.after(1, alive(0, moves=1), alive(1))
    assert not asked.exists()


def test_a_driver_that_was_held_up_blames_nobody(plan: RunPlan) -> None:
    run = Run(plan)
    run.hear(alive(0), alive(1))
    run.after(1)
    run.clock.now += 3600
    run.after(50)
    run.after(5, alive(0, moves=1), alive(1))
