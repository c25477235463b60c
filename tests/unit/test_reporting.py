"""What a rank says: its lines, its log and what the driver hears live."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain.channel import Server
from dbx_llmtrain.events import EVENTS_FILE, Event, read_events
from dbx_llmtrain.outcomes import RankResult
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import output, reporting
from tests import sample

torch = pytest.importorskip("torch", reason="a rank's modules need torch")

RESULT = RankResult(steps=3, metrics={"eval_loss": 1.0}, checkpoint=None, model_path=None)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Event]]:
    """What a server hears of ranks in this process."""
    events: list[Event] = []
    server = Server("127.0.0.1")
    for name, value in server.variables().items():
        monkeypatch.setenv(name, value)
    with server.listening(lambda message: events.append(Event(**message["event"]))):
        yield events
    server.close()


def plan(folder: Path, **tracking: Any) -> RunPlan:
    (folder / "run").mkdir(exist_ok=True)
    config = sample.config(tracking=tracking)
    return sample.run_plan(folder / "run", config=config)


def rank_story(chosen: RunPlan, rank: int) -> None:
    """Three steps with an evaluation before and a checkpoint in between."""
    from dbx_llmtrain.worker.evaluate import EvalReport
    from dbx_llmtrain.worker.loop import StepReport, Window

    with reporting.reporting(chosen, rank) as report:
        report.phase("loading the model")
        report.phase("loading the model")
        report.started(0, ["a note"])
        report.phase("evaluating")
        report.evaluated({"eval": EvalReport(loss=2.0, perplexity=7.4, rows=3, trained_tokens=7)})
        for number in (1, 2, 3):
            step = StepReport(
                step=number, loss=1.0, learning_rate=0.1, grad_norm=1.0, tokens=10, rows=2,
                trained=8, seconds=0.1, skipped="no trained token" if number == 2 else "",
            )  # fmt: skip
            window = Window()
            window.add(step)
            report.step(step, window, window, 1)
        report.finished(RESULT)


def test_rank_0_writes_what_the_driver_hears(heard: list[Event], tmp_path: Path) -> None:
    chosen = plan(tmp_path)
    rank_story(chosen, 0)
    written = list(read_events(Path(chosen.run_dir) / EVENTS_FILE))
    assert [event for event in heard if event.n] == written
    assert [event.n for event in written] == list(range(1, len(written) + 1))
    assert [(event.kind, event.data.get("phase")) for event in written] == [
        ("phase", "loading the model"),
        ("started", None),
        ("phase", "training"),
        ("phase", "evaluating"),
        ("eval", None),
        ("phase", "training"),
        ("step", None),
        ("step", None),
        ("step", None),
        ("finished", None),
    ]


def test_another_rank_only_says_where_it_is(heard: list[Event], tmp_path: Path) -> None:
    chosen = plan(tmp_path)
    rank_story(chosen, 1)
    assert [(event.kind, event.step, event.data.get("phase")) for event in heard] == [
        ("phase", 0, "loading the model"),
        ("started", 0, None),
        ("phase", 0, "training"),
        ("phase", 0, "evaluating"),
        ("phase", 0, "training"),
        ("step", 1, None),  # the next ones come within two seconds
        ("finished", 3, None),
    ]
    assert {(event.rank, event.n) for event in heard} == {(1, 0)}
    assert not (Path(chosen.run_dir) / EVENTS_FILE).exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_is_heard_at_once(heard: list[Event], tmp_path: Path, rank: int) -> None:
    with suppress(ZeroDivisionError), reporting.reporting(plan(tmp_path), rank):
        raise ZeroDivisionError("by https://me:word@zero")
    assert (heard[-1].kind, heard[-1].rank) == ("failed", rank)
    assert heard[-1].data["error"] == "ZeroDivisionError: by https://***@zero"


def test_events_of_earlier_attempts_are_not_replaced_where_they_cannot_be_read(
    tmp_path: Path,
) -> None:
    chosen = plan(tmp_path)
    shared = Path(chosen.run_dir) / EVENTS_FILE
    shared.mkdir(parents=True)  # reading it fails, whoever asks
    with pytest.raises(IsADirectoryError), reporting.reporting(chosen, 0):
        pass
    assert shared.is_dir()


def lines(chosen: RunPlan, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], list[str]]:
    """What rank 0 prints for all, and for its log alone."""
    rank_story(chosen, 0)
    printed = capsys.readouterr().out.splitlines()
    alone = [line for line in printed if line.startswith(output.LOG_ONLY)]
    return [line for line in printed if line not in alone], alone


def test_lines_are_plain_without_a_supervisor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, alone = lines(plan(tmp_path, log_level="error"), capsys)
    assert alone == []
    assert sum("tokens/s" in line for line in shown) == 3


@pytest.mark.parametrize(("level", "counts"), [("info", (4, 3)), ("warning", (1, 6))])
def test_steps_and_what_is_below_the_level_are_for_the_log(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    level: str,
    counts: tuple[int, int],
) -> None:
    monkeypatch.setenv(output.LOG_ONLY_VARIABLE, "1")
    shown, alone = lines(plan(tmp_path, log_level=level), capsys)
    assert (len(shown), len(alone)) == counts
    assert "step 2: weights left as they are, no trained token" in shown
    assert sum("tokens/s" in line for line in alone) == 3


def test_messages_of_a_rank_follow_the_level(tmp_path: Path) -> None:
    ours = logging.getLogger("dbx_llmtrain")
    with reporting.reporting(plan(tmp_path, log_level="debug"), 1):
        assert ours.level == logging.DEBUG
    assert ours.level == logging.NOTSET
    assert not os.listdir(tmp_path / "run")
