"""A rank's heartbeat: by the channel, or by a file; its stacks when they are asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain.channel import Client, Server
from dbx_llmtrain.driver import board
from dbx_llmtrain.driver.monitor import LiveState
from dbx_llmtrain.events import Event
from dbx_llmtrain.live_state import RANKS_FILE, RankTable
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import requests, stacks, watch
from dbx_llmtrain.worker.watch import Watch, beat_path
from tests import sample


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    """A rank of it says every 0.1 s where it is."""
    config = sample.config(cluster={"stall_timeout": 0.4})
    return sample.run_plan(tmp_path / "run", config=config)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server("127.0.0.1")
    yield made
    made.close()


def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def where() -> tuple[str, int]:
    return "evaluating", 7


def test_a_heartbeat_says_where_a_rank_is_and_that_it_moves(plan: RunPlan, server: Server) -> None:
    heard: list[Event] = []
    live = Client(server.address, server.key)
    with server.listening(lambda message: heard.append(Event(**message["event"]))):
        one = Watch(plan, 1, live=live, where=where, home=None)
        until(lambda: len(heard) >= 2)
        before = heard[-1].data["moves"]
        one.moved()
        one.moved("what", "a hook gets")
        until(lambda: heard[-1].data["moves"] >= before + 2)
        one.close()
        count = len(heard)
        time.sleep(0.3)
    assert len(heard) <= count + 1
    last = heard[-1]
    assert (last.kind, last.rank, last.step, last.n) == ("alive", 1, 7, 0)
    assert last.data["phase"] == "evaluating"
    assert "test_a_heartbeat_says" in last.data["at"] or "until" in last.data["at"]
    assert last.data["host"]
    assert not beat_path(Path(plan.run_dir), 1).exists(), "the channel is enough"
    live.close()


def test_work_on_files_is_movement(plan: RunPlan, server: Server, tmp_path: Path) -> None:
    heard: list[Event] = []
    live = Client(server.address, server.key)
    with server.listening(lambda message: heard.append(Event(**message["event"]))):
        one = Watch(plan, 0, live=live, where=where, home=None)
        until(lambda: len(heard) >= 3)
        still = {event.data["moves"] for event in heard[1:]}
        (tmp_path / "file").write_bytes(b"x" * 2 * watch._WORK)
        until(lambda: heard[-1].data["moves"] > max(still))
        one.close()
    live.close()


@pytest.mark.parametrize("address", ["", "127.0.0.1:9"], ids=["no channel", "leads nowhere"])
def test_without_a_driver_that_hears_it_is_in_a_file(plan: RunPlan, address: str) -> None:
    live = Client(address, "key") if address else None
    file = beat_path(Path(plan.run_dir), 1)
    known = LiveState()
    with board.kept(plan, known):
        one = Watch(plan, 1, live=live, where=where, home=None)
        until(lambda: 1 in known.ranks())
        first = known.ranks()[1]
        assert (first.step, first.phase) == (7, "evaluating")
        until(lambda: known.ranks()[1].time > first.time)
        one.close()
        assert not file.exists(), "nothing is left"
    table = RankTable.model_validate_json((Path(plan.run_dir) / RANKS_FILE).read_text())
    assert (table.attempt, table.ranks[0].rank) == ("a1", 1)
    assert abs(table.ranks[0].heard - time.time()) < 20
    if live is not None:
        live.close(0.1)


def test_a_file_of_another_attempt_is_nobody(plan: RunPlan) -> None:
    file = beat_path(Path(plan.run_dir), 1)
    file.parent.mkdir(parents=True)
    other = sample.event("alive", 3).model_copy(update={"attempt": "other", "rank": 1})
    file.write_text(other.model_dump_json())
    known = LiveState()
    with board.kept(plan, known):
        until(lambda: (Path(plan.run_dir) / RANKS_FILE).exists())
        time.sleep(0.3)
    assert known.ranks() == {}


def test_stacks_are_written_once_for_a_request(plan: RunPlan) -> None:
    run_dir = Path(plan.run_dir)
    one = Watch(plan, 2, live=None, where=where, home=None)
    path = stacks.stacks_path(run_dir, 2)
    run_dir.mkdir(exist_ok=True)
    (run_dir / requests.STACKS).write_text("first")
    until(path.exists)
    text = path.read_text()
    assert text.startswith("rank 2, attempt a1, request first, on ")
    assert "step 7, evaluating" in text.split("\n")[0]
    assert "test_stacks_are_written_once" in stacks.main_stack(text)
    path.unlink()
    time.sleep(0.3)
    assert not path.exists()
    (run_dir / requests.STACKS).write_text("second")
    until(path.exists)
    one.close()


def test_a_rank_that_moves_is_not_asked(plan: RunPlan) -> None:
    run_dir = Path(plan.run_dir)
    run_dir.mkdir()
    (run_dir / requests.STACKS).write_text("first")
    one = Watch(plan, 2, live=None, where=where, home=None)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        one.moved()
        time.sleep(0.02)
    assert not stacks.stacks_path(run_dir, 2).exists()
    one.close()


def test_a_folder_that_cannot_be_written_ends_nothing(plan: RunPlan) -> None:
    Path(plan.run_dir).write_text("a file in its place")
    one = Watch(plan, 2, live=None, where=where, home=None)
    time.sleep(0.5)
    assert one._thread.is_alive()
    one.close()
    assert not one._thread.is_alive()


def test_a_collective_waits_longer_than_a_stall_takes() -> None:
    assert watch.collective_timeout(sample.run_plan()) == 1800.0
    slow = sample.config(cluster={"stall_timeout": 3600.0})
    assert watch.collective_timeout(sample.run_plan(config=slow)) == 7200.0


def test_a_heartbeat_costs_little(plan: RunPlan, server: Server) -> None:
    """Once in five seconds, and far less than a ten-thousandth of them."""
    live = Client(server.address, server.key)
    one = Watch(plan, 1, live=live, where=where, home=None)
    began = time.thread_time()
    for _ in range(100):
        one._beat()
    assert (time.thread_time() - began) / 100 < 5e-3
    one.close()
    live.close()
