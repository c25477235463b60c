"""A run while it lasts: what is kept of it, as text and as a block of a notebook, and how large."""

from __future__ import annotations

import html.parser
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain import display_live, live_state
from dbx_llmtrain.driver import progress
from dbx_llmtrain.driver.html_view import HtmlView
from dbx_llmtrain.driver.progress import Progress
from dbx_llmtrain.driver.progress_views import Task
from dbx_llmtrain.events import Event
from dbx_llmtrain.forecasts import TimeEstimate
from dbx_llmtrain.live_state import RankRow, RunState, Snapshot, Thinned
from tests import sample
from tests.pages import ROOT, blocks

LIMIT = 60_000
"""Bytes of a block, however long the run is and however many ranks it has."""
NOW = 1.8e9 + 1000


def event(kind: str, step: int, seconds: float = 0.0, **data: Any) -> Event:
    metrics = {name: value for name, value in data.items() if isinstance(value, float)}
    base = sample.event(kind, step, **metrics)
    rest = {name: value for name, value in data.items() if name not in metrics}
    return base.model_copy(update={"time": 1.8e9 + seconds, "n": 1, "data": rest})


def rows(count: int, **changes: Any) -> list[RankRow]:
    values = {"step": 40, "phase": "training", "heard": NOW - 2, "host": "worker-1"} | changes
    return [RankRow(rank=rank, **values) for rank in range(count)]


def taken(*events: Event, **changes: Any) -> RunState:
    state = RunState(sample.run_plan(**({"total_steps": 100} | changes)))
    for one in events:
        state.take(one)
    return state


# What is kept


def test_a_curve_is_thinned_and_keeps_first_and_last() -> None:
    curve = Thinned()
    for step in range(1, 100_001):
        curve.add(step, 1.0 / step)
        assert len(curve._points) < live_state.POINTS
    points = curve.points()
    assert live_state.POINTS / 2 <= len(points) <= live_state.POINTS + 1
    assert points[0] == (1, 1.0)
    assert points[-1] == (100_000, 1e-5)
    steps = [step for step, _ in points]
    assert steps == sorted(set(steps))
    gaps = {b - a for a, b in itertools.pairwise(steps[:-1])}
    assert len(gaps) == 1, "evenly"


def test_few_points_are_all_kept_and_a_step_has_one_value() -> None:
    curve = Thinned()
    for step, value in ((1, 3.0), (2, 2.0), (2, 2.5), (3, 1.0)):
        curve.add(step, value)
    assert curve.points() == ((1, 3.0), (2, 2.5), (3, 1.0))
    curve.until(2)
    assert curve.points() == ((1, 3.0), (2, 2.5))
    curve.add(3, 0.5)
    assert curve.points()[-1] == (3, 0.5)


def test_a_run_that_goes_on_has_its_later_steps_again() -> None:
    first = [event("started", 0), *(event("step", step, loss=9.0) for step in (1, 2, 3, 4))]
    again = [event("started", 2), event("step", 3, loss=1.0)]
    state = taken(*first, event("failed", 4, error="lost"), *again)
    found = state.snapshot(NOW)
    assert found.curves == {"loss": ((1, 9.0), (2, 9.0), (3, 1.0))}
    assert found.step == 3


def test_only_losses_that_are_numbers_are_drawn() -> None:
    metrics = {"loss": math.nan, "eval_loss": 1.0, "best_eval_loss": 1.0, "tokens_per_second": 2.0}
    found = taken(event("eval", 1, **metrics)).snapshot(NOW)
    assert found.curves == {"eval_loss": ((1, 1.0),)}
    many = {f"eval_{name}_loss": 1.0 for name in "abcdefghij"}
    assert len(taken(event("eval", 1, **many)).snapshot(NOW).curves) == live_state.MOST_CURVES


def test_mfu_is_told_where_the_speed_of_the_gpus_is_known() -> None:
    speed = event("step", 1, tokens_per_second=1e4)
    known = TimeEstimate(flops_per_token=1e10, flops_per_second=1e14, why="x")
    assert taken(speed, time=known).mfu() == pytest.approx(1e4 * 1e10 / (2 * 1e14))
    unknown = TimeEstimate(flops_per_token=1e10, why="CPUs")
    assert taken(speed, time=unknown).mfu() is None
    assert taken(speed).mfu() is None
    assert taken(time=known).mfu() is None


# What is shown


RUN = (
    event("started", 0),
    event("phase", 0, phase="training"),
    event("checkpoint", 20, 500.0, path="/x"),
    event("eval", 0, eval_loss=2.5),
    event(
        "step", 10, 300.0, loss=2.25, learning_rate=1e-5, tokens_per_second=12_300.0,
        memory_bytes=2.0**33, seconds_per_step=1.2, data_wait_seconds=0.01, slowest_rank=1.0,
        slowest_rank_seconds=0.9, median_rank_seconds=0.5,
    ),
    event("step", 40, 990.0, loss=1.5),
    event("eval", 40, 995.0, eval_loss=1.625),
    event("phase", 40, 1000.0, phase="training"),
)  # fmt: skip


def test_the_text_is_the_one_of_the_page() -> None:
    """``docs/watching.md`` shows it."""
    known = TimeEstimate(flops_per_token=8.1e8, flops_per_second=9.89e14, why="x")
    quiet = RankRow(
        rank=3, step=40, phase="training", heard=NOW - 75, host="worker-2",
        at="step (dbx_llmtrain/worker/optim.py:81)",
    )  # fmt: skip
    found = taken(*RUN, world_size=4, time=known).snapshot(NOW, [*rows(3), quiet])
    (shown,) = (
        text for text in blocks("text", ROOT / "docs" / "watching.md") if "not heard" in text
    )
    assert f"{found}\n" == shown


class Text(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.text += "".join(f" [{value}]" for name, value in attrs if name == "title")

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(fragment: str) -> Text:
    parser = Text()
    parser.feed(fragment)
    return parser


def test_the_block_says_everything() -> None:
    known = TimeEstimate(flops_per_token=8.1e8, flops_per_second=9.89e14, why="x")
    found = taken(*RUN, world_size=4, time=known).snapshot(NOW, rows(4))
    page = parsed(found._repr_html_())
    for part in (
        "first: training, step 40 of 100, 25 min left", "loss 1.5", "eval_loss 1.625",
        "learning rate 1e-05", "12,300 tokens/s", "MFU 0%", "memory 8.0 GiB",
        "rank 1 is slow: 0.9 s a step, others 0.5 s", "checkpoint of step 20, complete 8 min ago",
        "[rank 3: training, step 40, heard 2.0 s ago]", "4 ranks: 4 training (step 40)",
    ):  # fmt: skip
        assert part in page.text, part
    assert {"svg", "polyline"} <= page.tags
    assert "width:40.0%" in found._repr_html_()
    assert not {"script", "img", "a"} & page.tags


def test_names_are_escaped() -> None:
    evil = "<script>alert(1)</script>"
    found = Snapshot(
        run_name=evil, now=NOW, phase=evil, ended=f"failed: {evil}",
        ranks=(RankRow(rank=0, step=1, phase=evil, heard=NOW - 100, host=evil, at=evil),),
    )  # fmt: skip
    assert "script" not in parsed(found._repr_html_()).tags


def test_slow_data_and_slow_ranks_are_told_when_they_are() -> None:
    fine = {"seconds_per_step": 1.0, "data_wait_seconds": 0.05}
    even = {"slowest_rank": 1.0, "slowest_rank_seconds": 1.1, "median_rank_seconds": 1.0}
    assert display_live.slow_notes(fine | even) == []
    assert display_live.slow_notes(fine | {"data_wait_seconds": 0.5}) == [
        "waits 0.5 s of 1 s a step for data"
    ]
    assert display_live.slow_notes({}) == []


def test_a_rank_that_is_late_or_silent_looks_so() -> None:
    found = taken(*RUN, world_size=3).snapshot(NOW, [])
    for heard, colour in ((2, "#1a7f37"), (30, "#bf8700"), (90, "#cf222e")):
        shown = found.model_copy(update={"ranks": tuple(rows(3, heard=NOW - heard))})
        assert shown._repr_html_().count(f"background:{colour}") == 3
    over = found.model_copy(update={"ranks": tuple(rows(3, phase="finished", heard=NOW - 999))})
    assert "#cf222e" not in over._repr_html_()
    assert "not heard" not in str(over)


@pytest.mark.parametrize("ranks", [1, 64, 65, 1000, 10_000])
def test_any_number_of_ranks_has_a_strip(ranks: int) -> None:
    late = rows(ranks)
    late[-1] = late[-1].model_copy(update={"heard": NOW - 400})
    found = taken(*RUN, world_size=ranks).snapshot(NOW, late)
    block = found._repr_html_()
    assert len(block) < LIMIT
    assert block.count("background:#cf222e") == 1
    assert f"rank {ranks - 1} on worker-1: not heard for 7 min" in str(found)
    assert len(str(found).splitlines()) < 30


def fed(count: int) -> RunState:
    state = RunState(sample.run_plan(total_steps=count))
    one = event("step", 1, loss=1.0, learning_rate=1e-5, tokens_per_second=1e4)
    for step in range(1, count + 1):
        # (Nothing of an event is checked again: this is about the state.)
        state.take(Event.model_construct(**(vars(one) | {"step": step, "time": 1.8e9 + step})))
    return state


def sizes(count: int) -> tuple[int, int]:
    found = fed(count).snapshot(NOW, rows(64))
    return len(found._repr_html_()), len(str(found))


def test_a_long_run_takes_no_more_room() -> None:
    long = sizes(20_000)
    assert long[0] < LIMIT
    assert long[1] < 3000


@pytest.mark.slow
def test_a_million_steps_take_no_more_room() -> None:
    state = fed(1_000_000)
    found = state.snapshot(NOW, rows(64))
    assert len(found._repr_html_()) < LIMIT
    began = time.perf_counter()
    for _ in range(20):
        found = state.snapshot(NOW, rows(64))
        assert found._repr_html_()
    assert (time.perf_counter() - began) / 20 < 0.05, "once a second"


# In a notebook


class Kernel:
    """What a notebook would have been told, as IPython tells it."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []
        self.updates: list[dict[str, str]] = []

    def publish(self, data: Any, **rest: Any) -> None:
        (self.updates if rest.get("update") else self.shown).append(data)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    found = Kernel()
    monkeypatch.setattr(shell.display_pub, "publish", found.publish)
    yield found
    InteractiveShell.clear_instance()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_one_block_is_updated_at_most_once_a_second(kernel: Kernel) -> None:
    clock = Clock()
    shown = Progress(HtmlView(clock))
    with shown.copies() as copied:
        copied("worker-1", 1, 4)
        for _ in range(20):
            clock.now += 0.1
            copied("worker-1", 2, 4)
    plan = sample.run_plan(total_steps=100)
    with shown.training(plan) as training:
        training.show_ranks(lambda: rows(2))
        for one in RUN:
            clock.now += 1.0
            training.event(one)
        drawn = len(kernel.updates)
        for _ in range(100):
            clock.now += 0.01
            training.tick()
        assert len(kernel.updates) <= drawn + 2
    shown.close()
    assert len(kernel.shown) == 1
    last = kernel.updates[-1]
    page = parsed(last["text/html"])
    assert "staging: 2 B of 4 B, worker-1 50%, done in 2.0 s" in page.text
    assert "first: training, step 40 of 100" in page.text
    assert "rank 1: training" in page.text
    assert "step 40 of 100" in last["text/plain"]


def test_a_week_is_drawn_some_ten_thousand_times(kernel: Kernel) -> None:
    clock = Clock()
    view = HtmlView(clock)
    task = Task("preparing", "rows", 1)
    view.begin(task)
    for _ in range(7 * 24 * 3600 // 30):
        clock.now += 30.0
        view.update(task)
    assert len(kernel.updates) < 25_000
    early = len(kernel.updates)
    for _ in range(100):
        clock.now += 1.0
        view.update(task)
    assert len(kernel.updates) <= early + 11, "every ten seconds"


def test_what_fails_is_not_done(kernel: Kernel) -> None:
    clock = Clock()
    view = HtmlView(clock)
    view.begin(Task("preparing", "rows", 1))
    view.end(Task("preparing", "rows", 1, failed=True))
    assert "preparing: 1 row, stopped after 0.0 s" in kernel.updates[-1]["text/html"]


def test_elsewhere_there_is_no_block() -> None:
    assert not progress.has_kernel()
    with progress.showing("bar") as shown:
        assert type(shown._view).__name__ == "BarView"


def test_the_page_names_what_there_is() -> None:
    text = (Path(ROOT) / "docs" / "watching.md").read_text(encoding="utf-8")
    for name in ("ranks.json", "rank-NNNNN.stacks.txt", "cluster.stall_timeout"):
        assert f"`{name}`" in text or name in text
