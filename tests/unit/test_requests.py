"""What a rank is asked for: by signals, clocks and files."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import requests
from dbx_llmtrain.worker.requests import Wish
from tests import sample

pytestmark = pytest.mark.filterwarnings("error")


def plan(folder: Path, *settings: str, **changes: Any) -> RunPlan:
    (folder / "run").mkdir(exist_ok=True)
    config = sample.config().override(*settings)
    return sample.run_plan(folder / "run", config=config, **changes)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("wish", requests.FILES)
def test_a_file_in_the_run_folder_is_taken_by_rank_0(tmp_path: Path, wish: Wish) -> None:
    chosen = plan(tmp_path)
    file = tmp_path / "run" / wish.value
    with (
        requests.listening(chosen, 1) as second,
        requests.listening(chosen, 0) as first,
    ):
        assert first.wanted() == frozenset()
        requests.ask(tmp_path / "run", wish)
        until(lambda: not file.exists())
        until(lambda: first.wanted() == {wish})
        assert second.wanted() == frozenset()


def test_a_checkpoint_is_wanted_until_one_is_made(tmp_path: Path) -> None:
    with requests.listening(plan(tmp_path), 0) as asked:
        asked.add(Wish.CHECKPOINT)
        asked.add(Wish.STOP)
        asked.saved()
        assert asked.wanted() == {Wish.STOP}


def test_nothing_is_left_of_a_request_or_of_the_listener(tmp_path: Path) -> None:
    before = (
        signal.getsignal(signal.SIGTERM),
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
    )
    with requests.listening(plan(tmp_path), 0):
        pass
    requests.ask(tmp_path / "run", Wish.STOP)
    with requests.listening(plan(tmp_path), 1):
        pass
    assert (tmp_path / "run" / "STOP").exists(), "rank 0 alone removes it"
    with requests.listening(plan(tmp_path), 0):
        requests.ask(tmp_path / "run", Wish.CANCEL)
    assert os.listdir(tmp_path / "run") == []
    assert (
        signal.getsignal(signal.SIGTERM), threading.active_count(), len(os.listdir("/proc/self/fd"))
    ) == before  # fmt: skip


def test_a_folder_that_cannot_be_read_asks_for_nothing(tmp_path: Path) -> None:
    chosen = plan(tmp_path)
    (tmp_path / "run").rmdir()
    with requests.listening(chosen, 0) as asked:
        time.sleep(0.7)
        assert asked.wanted() == frozenset()
        (tmp_path / "run").mkdir()
        requests.ask(tmp_path / "run", Wish.STOP)
        until(asked.wanted)


def test_a_signal_is_noted_and_told_to_the_supervisor(tmp_path: Path) -> None:
    with requests.listening(plan(tmp_path), 3, home=tmp_path) as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: asked.wanted() == {Wish.SIGTERM})
        until((tmp_path / requests.SAVING).exists)


def test_the_supervisor_hears_of_it_while_the_interpreter_is_held_up(tmp_path: Path) -> None:
    """As in a collective, or when the GPU is waited for: no Python code of this thread runs."""
    with requests.listening(plan(tmp_path), 0, home=tmp_path):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            listener = next(t for t in threading.enumerate() if t.name == "requests")
            assert listener.ident is not None
            signal.pthread_kill(listener.ident, signal.SIGTERM)
            until((tmp_path / requests.SAVING).exists)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def test_other_signals_are_not_meant(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with requests.listening(plan(tmp_path), 0, home=tmp_path) as asked:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.2)
            assert asked.wanted() == frozenset()
            assert not (tmp_path / requests.SAVING).exists()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_outside_the_main_thread_signals_stay_as_they_are(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def listen() -> None:
        with requests.listening(plan(tmp_path), 0) as asked:
            seen.append((signal.getsignal(signal.SIGTERM), asked.wanted()))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [(before, frozenset())]


def test_a_checkpoint_is_due_after_so_many_minutes_on_rank_0(tmp_path: Path) -> None:
    chosen = plan(tmp_path, "checkpoint.every_minutes=0.005")
    with requests.listening(chosen, 0) as first, requests.listening(chosen, 1) as second:
        assert first.wanted() == frozenset()
        time.sleep(0.35)
        assert first.wanted() == {Wish.MINUTES}
        assert second.wanted() == frozenset()
        first.saved()
        assert first.wanted() == frozenset()


def test_time_is_over_when_what_follows_and_a_margin_would_not_fit_any_more(
    tmp_path: Path,
) -> None:
    """1000 s, of which 900 have gone on the driver's clock, and 50 are kept."""
    chosen = plan(tmp_path, "train.max_time=00:00:16:40", began=5000.0)
    with (
        requests.listening(chosen, 0, clock=lambda: 5900.0) as asked,
        requests.listening(chosen, 1, clock=lambda: 5900.0) as second,
    ):
        assert asked.wanted() == frozenset()
        asked.keep(45.0)
        assert asked.wanted() == frozenset()
        asked.keep(51.0)
        assert asked.wanted() == {Wish.TIME}
        second.keep(1000.0)
        assert second.wanted() == frozenset()
    without = plan(tmp_path, "train.max_time=00:00:16:40")
    with requests.listening(without, 0) as asked:
        asked.keep(900.0)
        assert asked.wanted() == frozenset(), "without a driver it counts from here"


@pytest.mark.parametrize(
    ("text", "seconds"), [("00:00:00:01", 1), ("01:02:03:04", 93784), ("10:00:00:00", 864000)]
)
def test_days_hours_minutes_seconds(text: str, seconds: int) -> None:
    assert requests.seconds_of(text) == seconds
