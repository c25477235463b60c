"""Who has to be there for a rank: real processes above it, a real port of a driver."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from dbx_llmtrain import channel
from dbx_llmtrain.worker import lifeline
from dbx_llmtrain.worker.lifeline import Lifeline

CHAIN = """
import subprocess, sys
depth = int(sys.argv[1])
if depth:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[2], str(depth - 1), sys.argv[2]])
    print(child.pid, flush=True)
    child.wait()
else:
    sys.stdin.read()
"""


@contextmanager
def chain(depth: int) -> Iterator[list[int]]:
    """Processes below each other, the topmost first, that live until the block ends."""
    reader, writer = os.pipe()
    top = subprocess.Popen(
        [sys.executable, "-c", CHAIN, str(depth), CHAIN], stdin=reader, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    os.close(reader)
    assert top.stdout is not None
    pids = [top.pid, *(int(top.stdout.readline()) for _ in range(depth))]
    try:
        yield pids
    finally:
        os.close(writer)
        top.kill()
        top.wait()
        top.stdout.close()


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("level", "counts"), [(1, True), (2, True), (3, True), (4, False)])
def test_three_processes_above_have_to_be_there(level: int, counts: bool) -> None:
    """Launcher, wrapper and Spark task. What is above them may go."""
    with chain(4) as pids:
        mine = Lifeline(pids[3], {})
        assert not mine.is_cut()
        victim = pids[4 - level]
        os.kill(victim, 9)
        if counts:
            until(mine.is_cut)
        else:
            time.sleep(0.2)
            assert not mine.is_cut()


def test_a_parent_that_is_gone_already_is_noticed() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert Lifeline(gone.pid, {}).is_cut()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "_LOOK_S", 0.05)
    monkeypatch.setattr(lifeline, "_REFUSED_S", 0.3)


def test_a_driver_that_was_reached_and_refuses_is_gone(quick: None) -> None:
    server = channel.Server("127.0.0.1")
    mine = Lifeline(os.getpid(), server.variables())
    mine.watch()
    time.sleep(0.4)
    assert not mine.is_cut(), "somebody listens there"
    server.close()
    until(mine.is_cut, 5.0)


def test_a_driver_that_was_never_reached_is_not_missed(quick: None) -> None:
    server = channel.Server("127.0.0.1")
    server.close()
    mine = Lifeline(os.getpid(), server.variables())
    mine.watch()
    time.sleep(0.8)
    assert not mine.is_cut()


def test_a_driver_that_cannot_be_reached_is_not_taken_for_one_that_is_gone(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that does not resolve stands for a cut line."""
    server = channel.Server("127.0.0.1")
    mine = Lifeline(os.getpid(), server.variables())
    answers = iter([True])
    monkeypatch.setattr(lifeline, "_answers", lambda place: next(answers, None))
    mine.watch()
    time.sleep(0.8)
    server.close()
    assert not mine.is_cut()


@pytest.mark.parametrize(
    ("place", "answer"), [("127.0.0.1", False), ("no-such-host.invalid", None)]
)
def test_refused_is_not_unreachable(place: str, answer: bool | None) -> None:
    server = channel.Server("127.0.0.1")
    port = channel.split_address(server.address)[1]
    server.close()
    assert lifeline._answers((place, port)) is answer


def test_a_process_that_cannot_be_looked_at_is_not_gone() -> None:
    """Without a free file handle, which a busy machine may be short of for a moment."""
    import resource

    line = Lifeline(os.getpid(), {})
    assert not line.is_cut()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        cut = line.is_cut()
        late = Lifeline(os.getpid(), {}).is_cut()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (cut, late) == (False, False)
