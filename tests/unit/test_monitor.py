"""Events of a run reach the handlers once and in order, whichever way they come."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain import channel
from dbx_llmtrain.channel import Client, Server
from dbx_llmtrain.driver import monitor
from dbx_llmtrain.events import EVENTS_FILE, Event, EventLog
from dbx_llmtrain.records import RunPlan
from tests import sample


@pytest.fixture
def server() -> Iterator[Server]:
    with monitor.open_channel({}, local_mode=True) as made:
        assert made is not None
        yield made


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    (tmp_path / "run").mkdir()
    return sample.run_plan(tmp_path / "run")


def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def events(count: int, **changes: Any) -> list[Event]:
    return [
        sample.event(step=n, loss=1.0 / n).model_copy(update={"n": n} | changes)
        for n in range(1, count + 1)
    ]


def write(plan: RunPlan, found: list[Event]) -> None:
    """As rank 0 publishes: the whole file, under a name of its own first."""
    path = Path(plan.run_dir) / EVENTS_FILE
    temporary = path.with_suffix(".new")
    temporary.write_text("".join(event.model_dump_json() + "\n" for event in found))
    temporary.replace(path)


def send(server: Server, found: list[Event]) -> None:
    client = Client(server.address, server.key)
    for event in found:
        client.send({"event": event.model_dump(mode="json")})
    assert client.close()


def test_the_channel_alone_is_enough_and_immediate(server: Server, plan: RunPlan) -> None:
    got: list[Event] = []
    sent = events(50)
    with monitor.follow(plan, got.append, server=server):
        send(server, sent)
        until(lambda: len(got) == 50)
    assert got == sent


def test_the_file_alone_is_enough(plan: RunPlan) -> None:
    got: list[Event] = []
    written = [*events(2, attempt="earlier"), *events(5)]
    with monitor.follow(plan, got.append):
        write(plan, written[:4])
        until(lambda: len(got) == 2)
        write(plan, written)
    assert got == written[2:], "what is left is read at the end"


def test_an_event_that_the_channel_lost_is_taken_from_the_file(
    server: Server, plan: RunPlan
) -> None:
    got: list[Event] = []
    sent = events(9)
    with monitor.follow(plan, got.append, server=server):
        send(server, sent[:3])
        send(server, sent[5:7])
        until(lambda: len(got) == 3)
        time.sleep(0.2)
        assert got == sent[:3], "4 and 5 come first"
        write(plan, sent[:6])
        until(lambda: len(got) == 7)
        send(server, [sent[7], sent[4], sent[7]])
        until(lambda: len(got) == 8)
        write(plan, sent)
    assert got == sent


def test_a_channel_that_is_lost_on_the_way_loses_no_event(
    server: Server, plan: RunPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "_QUIET_S", 0.5)
    got: list[Event] = []
    sent = events(20)
    with monitor.follow(plan, got.append, server=server):
        send(server, sent[:7])
        until(lambda: len(got) == 7)
        server.close()
        write(plan, sent[:15])
        until(lambda: len(got) == 15)
        write(plan, sent)
    assert got == sent


def test_others_that_talk_all_the_time_do_not_hide_the_file(server: Server, plan: RunPlan) -> None:
    got: list[Event] = []
    heard: list[Event] = []
    other = Client(server.address, server.key)
    light = sample.event(step=3).model_copy(update={"rank": 1})
    with monitor.follow(plan, got.append, server=server, heard=heard.append) as live:
        write(plan, events(2))
        deadline = time.monotonic() + 20.0
        while len(got) < 2:
            assert time.monotonic() < deadline
            other.send({"event": light.model_dump(mode="json")})
            time.sleep(0.02)
        assert live.ranks()[1].step == 3
    other.close()
    assert {event.rank for event in heard} == {1}
    assert [event.rank for event in got] == [0, 0], "what is not of the log is no event"


def test_what_never_reached_the_file_is_handled_at_the_end(server: Server, plan: RunPlan) -> None:
    got: list[Event] = []
    sent = events(5)
    with monitor.follow(plan, got.append, server=server):
        send(server, [sent[0], sent[4], sent[2]])
        until(lambda: len(got) == 1)
    assert [event.n for event in got] == [1, 3, 5]


def test_events_of_another_attempt_and_nonsense_do_not_count(server: Server, plan: RunPlan) -> None:
    got: list[Event] = []
    with monitor.follow(plan, got.append, server=server):
        send(server, events(1, attempt="other"))
        client = Client(server.address, server.key)
        client.send({"event": {"kind": "step"}})
        client.send({"copied": 7})
        assert client.close()
        send(server, events(1))
    assert got == events(1)


def test_a_handler_that_raises_disturbs_no_other(
    plan: RunPlan, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[Event] = []

    def broken(event: Event) -> None:
        raise ValueError("a broken view")

    write(plan, events(3))
    with monitor.follow(plan, broken, got.append):
        pass
    assert got == events(3)
    assert caplog.text.count("a broken view") == 1


def test_the_end_is_read_after_a_failure_too(plan: RunPlan) -> None:
    got: list[Event] = []
    with suppress(KeyboardInterrupt), monitor.follow(plan, got.append):
        write(plan, events(3))
        raise KeyboardInterrupt
    assert got == events(3)


def test_the_log_numbers_its_events(tmp_path: Path, plan: RunPlan) -> None:
    path = Path(plan.run_dir) / EVENTS_FILE
    path.write_text("".join(event.model_dump_json() + "\n" for event in events(2, attempt="old")))
    log = EventLog(tmp_path / "local", path, "a1", 0)
    assert [log.emit("phase", 0, phase="x").n, log.emit("started", 0).n] == [1, 2]
    log.close()


def test_where_every_rank_is(server: Server, plan: RunPlan) -> None:
    def said(kind: str, rank: int, time_: float, step: int, **data: Any) -> Event:
        base = sample.event(kind=kind, step=step)
        return base.model_copy(update={"rank": rank, "time": time_, "data": data})

    with monitor.follow(plan, server=server) as live:
        send(
            server,
            [
                said("phase", 1, 10.0, 0, phase="loading the model"),
                said("phase", 2, 10.0, 0, phase="loading the model"),
                said("started", 1, 11.0, 4),
                said("phase", 1, 11.5, 4, phase="training"),
                said("step", 1, 13.5, 9),
                said("step", 1, 12.5, 6),
                said("failed", 2, 12.0, 0, error="x"),
            ],
        )
    ranks = live.ranks()
    assert {rank: (one.step, one.time, one.phase) for rank, one in ranks.items()} == {
        1: (9, 13.5, "training"),
        2: (0, 12.0, "failed"),
    }
    assert 0 <= time.monotonic() - ranks[1].heard < 20


def test_where_the_channel_listens() -> None:
    settings = {"spark.driver.host": "driver.example.org", "spark.driver.bindAddress": "127.0.0.2"}
    with monitor.open_channel(settings, local_mode=False) as server:
        assert server is not None
        assert server.address.startswith("driver.example.org:")
        assert server._listener.getsockname()[0] == "127.0.0.2"
        variables = monitor.rank_variables(server)
        assert variables[channel.ADDRESS] == server.address
    with monitor.open_channel(settings, local_mode=True) as server:
        assert server is not None
        assert server._listener.getsockname()[0] == "127.0.0.1"
    with monitor.open_channel({"spark.driver.host": "127.0.0.3"}, local_mode=False) as server:
        assert server is not None
        assert server._listener.getsockname()[0] == "127.0.0.3"


def test_an_address_that_is_not_ours_costs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"spark.driver.host": "192.0.2.1"}
    with monitor.open_channel(settings, local_mode=False) as server:
        assert server is None
    assert "cannot listen on 192.0.2.1" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
    assert set(monitor.rank_variables(None)) == {"DBX_LLMTRAIN_LOG_ONLY"}


def test_nothing_is_left(plan: RunPlan) -> None:
    before, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with (
        suppress(ValueError),
        monitor.open_channel({}, local_mode=True) as server,
        monitor.follow(plan, server=server),
    ):
        raise ValueError
    assert threading.active_count() <= before
    assert len(os.listdir("/proc/self/fd")) <= files
