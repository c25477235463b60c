"""A run from outside: its folder is read and shown, while it runs and afterwards. Nothing is
written, and nothing of the run is touched."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import click

from dbx_llmtrain import storage
from dbx_llmtrain.driver import lease, progress, results
from dbx_llmtrain.errors import ConfigError, Problem
from dbx_llmtrain.events import EVENTS_FILE, Event
from dbx_llmtrain.live_state import ENDS, RANKS_FILE, RankRow, RankTable, RunState, Snapshot
from dbx_llmtrain.records import RunPlan, TrainResult

_POLL_S = 2.0
_RANKS_S = 10.0
"""``ranks.json`` is as old as that, at most, while a run goes on."""


def once(run_dir: str | TrainResult) -> Snapshot:
    """The run in a folder as it is now. Raises ``ConfigError`` for what is not a run folder."""
    return _Watched(_folder(run_dir)).snapshot()


def follow(run_dir: str | TrainResult, *, poll_s: float = _POLL_S) -> None:
    """Show the run in a folder until it ends, or until this is interrupted, which is nothing to the
    run. Raises ``ConfigError`` for what is not a run folder."""
    watched = _Watched(_folder(run_dir))
    notebook = progress.has_kernel()
    if not notebook:
        click.echo(str(watched.snapshot()))
    try:
        with progress.showing("auto") as shown:
            _show(watched, shown, poll_s, always=notebook)
    except KeyboardInterrupt:
        click.echo("no longer watching; the run goes on", err=True)
        return
    if not notebook:
        click.echo(watched.ended())


def _show(watched: _Watched, shown: progress.Progress, poll_s: float, *, always: bool) -> None:
    if watched.ended() and not always:
        return
    with shown.training(watched.plan, watched.state, watched.rank_rows) as training:
        while True:
            ended = watched.ended()
            for event in watched.new_events():
                training.event(event)
            training.tick()
            if ended:
                return
            time.sleep(poll_s)
            if watched.is_another_attempt():
                watched.read_again()
                training.state = watched.state


def _folder(run_dir: str | TrainResult) -> Path:
    """The folder of a run. Raises ``ConfigError``."""
    given = run_dir.run_dir if isinstance(run_dir, TrainResult) else str(run_dir)
    folder = storage.local_path(given).absolute()
    if not folder.is_dir():
        raise _refused(folder, "there is no such folder")
    if results.read_plan(folder) is None:
        held = lease.read(folder)
        if held is not None and lease.is_alive(held):
            raise _refused(folder, f"this run ({held}) is being prepared: try again when it trains")
        inner = sorted(path.parent.name for path in folder.glob("*/plan.json"))[:5]
        others = f", but these in it have: {', '.join(inner)}" if inner else ""
        raise _refused(folder, f"it has no plan.json{others}")
    return folder


def _refused(folder: Path, why: str) -> ConfigError:
    message = (
        f"{folder} is not the folder of a run: {why}. Expected checkpoint.dir/<run name>, which "
        "train prints, with plan.json and events.jsonl in it"
    )
    return ConfigError([Problem("run_dir", message)])


class _Watched:
    """A run folder, and how much of it has been read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.plan = self._read_plan()
        self.read_again()

    def read_again(self) -> None:
        """Begin anew, with the plan as it is now."""
        self.plan = self._read_plan()
        self.state = RunState(self.plan)
        self._offset = 0
        for event in self.new_events():
            self.state.take(event)

    def _read_plan(self) -> RunPlan:
        found = results.read_plan(self._folder)  # a volume shows a file that is being written
        return found if found is not None else self.plan

    def is_another_attempt(self) -> bool:
        """Whether the run was started again since."""
        return self._read_plan().attempt != self.plan.attempt

    def new_events(self) -> Iterator[Event]:
        """The events that were not read yet. The file grows; while it is being replaced it may be
        shorter, and is left alone."""
        try:
            with (self._folder / EVENTS_FILE).open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.split(b"\n")[:-1]:
            try:
                event = Event.model_validate_json(line)
            except ValueError:
                return  # it is being written: the rest is read the next time
            self._offset += len(line) + 1
            yield event

    def rank_rows(self) -> tuple[RankRow, ...]:
        """Where the ranks of this attempt were, by the driver."""
        try:
            text = (self._folder / RANKS_FILE).read_text(encoding="utf-8")
            table = RankTable.model_validate(json.loads(text))
        except (OSError, ValueError):
            return ()
        return table.ranks if table.attempt == self.plan.attempt else ()

    def ended(self) -> str:
        """How the run ended; empty while it goes on."""
        result = results.read(self._folder)
        if result is not None:
            return "finished" + (f" ({result.stop_reason})" if result.stop_reason else "")
        held = lease.read(self._folder)
        if held is None:  # an evaluation
            return self.state.phase if self.state.phase in ENDS else ""
        if lease.is_alive(held):
            return ""
        if held.status == "running":
            return f"its driver is gone without a word since {lease.told_time(held.renewed)}"
        return f"{held.status}: {held.error}" if held.error else held.status

    def snapshot(self) -> Snapshot:
        """The run as it is now."""
        return self.state.snapshot(time.time(), self.rank_rows(), self.ended())
