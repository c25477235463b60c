from __future__ import annotations

import math
from pathlib import Path

from dbx_llmtrain.events import EVENTS_FILE, Event, EventLog, read_events
from tests import sample


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    shared = tmp_path / "run" / EVENTS_FILE
    log = EventLog(tmp_path / "local", shared, "a1", 0)
    first = log.emit("started", 0, host="h")
    second = log.emit("step", 1, {"loss": 2.5})
    log.close()
    assert list(read_events(shared)) == [first, second]
    assert first.data == {"host": "h"}
    assert second.metrics == {"loss": 2.5}
    assert second.time >= first.time


def test_only_one_attempt_is_read_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "events"
    other = sample.event(step=2).model_copy(update={"attempt": "a2"})
    lines = [event.model_dump_json() + "\n" for event in (sample.event(step=1), other)]
    path.write_text("".join(lines))
    assert list(read_events(path, attempt="a2")) == [other]
    assert len(list(read_events(path))) == 2


def test_a_line_that_is_cut_ends_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "events"
    line = sample.event().model_dump_json()
    path.write_text(f"{line}\n{line[:20]}")
    assert len(list(read_events(path))) == 1
    path.write_text(f"{line}\n{{}}\n{line}\n")
    assert len(list(read_events(path))) == 1


def test_no_file_has_no_events(tmp_path: Path) -> None:
    assert list(read_events(tmp_path / "missing")) == []
    (tmp_path / "binary").write_bytes(b"\xff\xfe\n")
    assert list(read_events(tmp_path / "binary")) == []


def test_a_loss_that_is_not_a_number_survives(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_text(sample.event(loss=float("nan"), norm=float("inf")).model_dump_json() + "\n")
    (event,) = read_events(path)
    assert math.isnan(event.metrics["loss"])
    assert event.metrics["norm"] == math.inf
    assert Event.model_validate_json(event.model_dump_json()).metrics["norm"] == math.inf
