"""A run folder seen from outside: what is shown of it, until it ends, and what is no run folder."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import dbx_llmtrain as llm
from dbx_llmtrain import cli, storage
from dbx_llmtrain.driver import lease, watching
from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.events import EVENTS_FILE, Event
from dbx_llmtrain.live_state import RANKS_FILE, RankRow, RankTable, Snapshot
from dbx_llmtrain.records import RunPlan
from tests import sample
from tests.pages import ROOT, blocks


def write_events(run_dir: Path, *events: Event) -> None:
    """As rank 0 publishes: the whole file, in place of the one before."""
    text = "".join(event.model_dump_json() + "\n" for event in events)
    storage.write_text(run_dir / EVENTS_FILE, text)


def write_lease(run_dir: Path, status: Any = "running", error: str = "", age: float = 0.0) -> None:
    now = time.time() - age
    held = lease.Lease(
        attempt="a1", run_name="first", status=status, user="me", host="driver",
        pid=os.getpid(), since=now, renewed=now, error=error,
    )  # fmt: skip
    storage.write_text(run_dir / lease.LEASE, held.model_dump_json())


def make(folder: Path, **changes: Any) -> RunPlan:
    """A run that trains: its plan, its lease, three events, where its ranks are."""
    plan = sample.run_plan(folder, **({"total_steps": 100} | changes))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(plan.model_dump_json())
    write_lease(folder)
    write_events(folder, *steps(2))
    row = RankRow(rank=1, step=2, phase="training", heard=time.time(), host="worker-1")
    table = RankTable(attempt="a1", time=time.time(), ranks=(row,))
    storage.write_text(folder / RANKS_FILE, table.model_dump_json())
    return plan


def steps(count: int, attempt: str = "a1") -> list[Event]:
    begins = [sample.event("started", 0), sample.event("phase", 0)]
    begins[1].data["phase"] = "training"
    found = [*begins, *(sample.event("step", n, loss=1.0 / n) for n in range(1, count + 1))]
    return [one.model_copy(update={"attempt": attempt}) for one in found]


def test_a_run_as_it_is_now(tmp_path: Path) -> None:
    make(tmp_path / "first")
    for given in (str(tmp_path / "first"), sample.result(tmp_path / "first")):
        found = llm.watch(given, once=True)
        assert (found.run_name, found.step, found.total, found.ended) == ("first", 2, 100, "")
        assert found.curves == {"loss": ((1, 1.0), (2, 0.5))}
        assert [row.host for row in found.ranks] == ["worker-1"]
        assert "first: training, step 2 of 100" in str(found)


def test_ranks_of_another_attempt_are_not_shown(tmp_path: Path) -> None:
    make(tmp_path, attempt="a2")
    assert watching.once(str(tmp_path)).ranks == ()


def ended(folder: Path) -> str:
    return watching.once(str(folder)).ended


def test_how_a_run_has_ended(tmp_path: Path) -> None:
    make(tmp_path)
    write_lease(tmp_path, "failed", "TrainingFailed: rank 1")
    assert ended(tmp_path) == "failed: TrainingFailed: rank 1"
    write_lease(tmp_path, "stopped")
    assert ended(tmp_path) == "stopped"
    write_lease(tmp_path, age=3600)
    assert ended(tmp_path).startswith("its driver is gone without a word since 20")
    result = sample.result(tmp_path, stop_reason="train.max_time")
    (tmp_path / "result.json").write_text(result.model_dump_json())
    assert ended(tmp_path) == "finished (train.max_time)"


def test_an_evaluation_has_no_lease(tmp_path: Path) -> None:
    make(tmp_path, purpose="evaluate", total_steps=0)
    (tmp_path / lease.LEASE).unlink()
    assert ended(tmp_path) == ""
    write_events(tmp_path, *steps(0), sample.event("finished", 0))
    assert ended(tmp_path) == "finished"


def test_it_follows_until_the_run_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over another attempt, a file that is cut short for a moment, and a last event."""
    make(tmp_path)

    def run() -> None:
        time.sleep(0.3)
        whole = (tmp_path / EVENTS_FILE).read_bytes()
        (tmp_path / EVENTS_FILE).write_bytes(whole[:50])
        time.sleep(0.2)
        write_events(tmp_path, *steps(3))
        time.sleep(0.2)
        again = sample.run_plan(tmp_path, total_steps=5, attempt="a2")
        storage.write_text(tmp_path / "plan.json", again.model_dump_json())
        write_events(tmp_path, *steps(3), *steps(5, "a2"))
        time.sleep(0.2)
        write_lease(tmp_path, "finished")

    thread = threading.Thread(target=run)
    thread.start()
    watching.follow(str(tmp_path), poll_s=0.05)
    thread.join()
    shown = capsys.readouterr()
    assert "training, step 2 of 100" in shown.out
    assert shown.out.endswith("finished\n")
    assert "training: step 5 of 5, loss 0.2" in shown.err


def test_an_interrupt_is_nothing_to_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    over = threading.Event()

    def interrupt() -> None:
        # Python may have it raised where exceptions are ignored, in a destructor.
        wait_s = 0.5
        while not over.wait(wait_s):
            os.kill(os.getpid(), signal.SIGINT)
            wait_s = 5.0

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        assert cli.run(["watch", str(tmp_path)]) == 0
    finally:
        over.set()
        thread.join()
    assert "no longer watching; the run goes on" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_finished_run_is_shown_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path)
    (tmp_path / "result.json").write_text(sample.result(tmp_path).model_dump_json())
    assert cli.run(["watch", str(tmp_path)]) == 0
    assert "finished, step 2 of 100" in capsys.readouterr().out
    assert cli.run(["watch", str(tmp_path), "--once"]) == 0
    assert "finished, step 2 of 100" in capsys.readouterr().out


def test_json_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path)
    assert cli.run(["watch", str(tmp_path), "--json"]) == 0
    found = Snapshot.model_validate(json.loads(capsys.readouterr().out))
    assert (found.step, found.ended) == (2, "")


EXPECTED = "Expected checkpoint.dir/<run name>, which train prints, with plan.json and events.jsonl"


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("missing", "there is no such folder"),
        ("file", "there is no such folder"),
        ("empty", "it has no plan.json"),
        ("parent", "it has no plan.json, but these in it have: first"),
        ("prepared", "is being prepared: try again when it trains"),
    ],
)
def test_what_is_no_run_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, why: str
) -> None:
    folder = tmp_path / what
    if what == "file":
        folder.write_text("x")
    elif what != "missing":
        folder.mkdir()
    if what == "parent":
        make(folder / "first")
    if what == "prepared":
        write_lease(folder)
    for once in (True, False):
        with pytest.raises(ConfigError, match="is not the folder of a run") as caught:
            llm.watch(str(folder), once=once)
        assert why in str(caught.value)
        assert EXPECTED in str(caught.value)
        assert caught.value.problems[0].path == "run_dir"
    assert cli.run(["watch", str(folder)]) == 2
    assert f"RUN_DIR: {folder} is not the folder of a run" in capsys.readouterr().err


def test_what_the_page_shows_runs(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "result.json").write_text(sample.result(tmp_path).model_dump_json())
    (code,) = blocks("python", ROOT / "docs" / "watching.md")
    assert "/Volumes/main/ml/runs/first" in code
    names: dict[str, Any] = {}
    exec(code.replace("/Volumes/main/ml/runs/first", str(tmp_path)), names)
    assert names["state"].ended == "finished"


def test_a_long_file_is_read_piece_by_piece(tmp_path: Path) -> None:
    make(tmp_path)
    watched = watching._Watched(tmp_path)
    assert list(watched.new_events()) == []
    write_events(tmp_path, *steps(5))
    assert [event.step for event in watched.new_events()] == [3, 4, 5]
    with (tmp_path / EVENTS_FILE).open("a") as file:
        file.write('{"attempt": "a1", "ran')
    assert list(watched.new_events()) == []
