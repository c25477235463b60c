"""What is shown while it lasts: bars and lines as a terminal, a file and a notebook get them."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from tqdm import tqdm

from dbx_llmtrain import logs
from dbx_llmtrain.driver import progress, progress_views
from dbx_llmtrain.driver.progress import Progress
from dbx_llmtrain.driver.progress_views import BarView, Task, duration
from dbx_llmtrain.events import Event
from dbx_llmtrain.forecasts import TimeEstimate
from tests import sample

GIB = 2**30


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Shown:
    """What has been written to standard error so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._text = ""

    def text(self) -> str:
        self._text += self._capsys.readouterr().err
        return self._text


@pytest.fixture
def out(capsys: pytest.CaptureFixture[str]) -> Shown:
    return Shown(capsys)


def event(kind: str, step: int, seconds: float, **data: Any) -> Event:
    metrics = {name: data.pop(name) for name in ("loss", "tokens_per_second") if name in data}
    base = sample.event(kind=kind, step=step, **metrics)
    return base.model_copy(update={"time": seconds, "n": 1, "data": data})


def screen(text: str) -> list[str]:
    """The lines that a terminal shows of this text."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        shown: list[str] = []
        for part in line.split("\r"):
            shown[: len(part)] = part
        lines.append("".join(shown).rstrip())
    return lines


# Lines


def test_lines_of_a_run(out: Shown, clock: Clock) -> None:
    plan = sample.run_plan(total_steps=1000)
    with progress.showing("lines", clock=clock) as shown, shown.training(plan) as training:

        def at(seconds: float, kind: str, step: int, **data: Any) -> None:
            clock.now = 100.0 + seconds
            training.event(event(kind, step, seconds, **data))

        at(0, "phase", 0, phase="loading the model")
        clock.now += 31
        training.tick()
        clock.now += 29
        training.tick()
        at(60, "started", 0)
        at(60, "phase", 0, phase="training")
        at(60, "phase", 0, phase="evaluating")
        at(63.5, "eval", 0)
        at(63.5, "phase", 0, phase="training")
        for step in range(1, 1001):
            at(80 + step, "step", step, loss=2 - step / 1000, tokens_per_second=12_300.0)
            if step == 45:
                at(80 + step, "phase", step, phase="writing a checkpoint")
                at(80 + step + 0.5, "phase", step, phase="training")
        at(1081, "phase", 1000, phase="exporting")
        at(1081.5, "finished", 1000)
    lines = out.text().splitlines()
    assert lines[:8] == [
        "starting",
        "loading the model",
        "loading the model: 31 s so far",
        "loading the model: done in 60 s",
        "training: step 0 of 1,000",
        "evaluating",
        "evaluating: done in 3.5 s",
        "training: step 14 of 1,000, loss 1.986, 12,300 tokens/s, 40 min left",
    ]
    assert lines[8:11] == [
        "training: step 44 of 1,000, loss 1.956, 12,300 tokens/s, 23 min left",
        "writing a checkpoint",
        "training: step 75 of 1,000, loss 1.925, 12,300 tokens/s, 20 min left",
    ]
    assert lines[-2:] == [
        "training: step 1,000 of 1,000, loss 1, 12,300 tokens/s, done in 17 min",
        "exporting",
    ]
    assert len(lines) < 8 + 1000 / 30 + 5


def test_lines_of_preparing_and_staging(out: Shown, clock: Clock) -> None:
    with progress.showing("lines", clock=clock) as shown:
        with shown.rows() as count:
            for number in range(1, 1235):
                count(number)
        with shown.copies() as copied:
            copied("worker-1", 0, GIB)
            clock.now += 31
            copied("worker-2", GIB // 2, GIB)
            copied("worker-1", GIB, GIB)
            copied("worker-2", GIB, GIB)
    assert out.text().splitlines() == [
        "preparing: 1 row",
        "preparing: 1,234 rows, done in 0.0 s",
        "staging: 0 B of 1.0 GiB, worker-1 0%",
        "staging: 512 MiB of 2.0 GiB, worker-1 0%, worker-2 50%",
        "staging: 2.0 GiB of 2.0 GiB, worker-1 100%, worker-2 100%, done in 31 s",
    ]


def test_no_rows_yet_are_not_counted(out: Shown, clock: Clock) -> None:
    with progress.showing("lines", clock=clock) as shown, shown.rows() as count:
        count(0)
        clock.now += 31
        shown.show(progress.Task("preparing", "rows", 0))
        count(9)
    assert out.text().splitlines() == [
        "preparing",
        "preparing: 31 s so far",
        "preparing: 9 rows, done in 31 s",
    ]


def test_what_fails_is_not_done(out: Shown, clock: Clock) -> None:
    with progress.showing("lines", clock=clock) as shown:
        with suppress(ValueError), shown.rows() as count:
            count(9)
            clock.now += 2
            raise ValueError
        with suppress(KeyboardInterrupt), shown.copies() as copied:
            copied("worker-1", 0, GIB)
            clock.now += 3
            raise KeyboardInterrupt
        with suppress(ValueError), shown.training(sample.run_plan()) as training:
            training.event(event("phase", 0, 0.0, phase="loading the model"))
            clock.now += 4
            raise ValueError
        with shown.training(sample.run_plan()) as training:
            training.event(event("phase", 0, 0.0, phase="exporting"))
            clock.now += 5
            training.event(event("failed", 3, 1.0, error="x"))
    assert out.text().splitlines() == [
        "preparing: 9 rows",
        "preparing: 9 rows, stopped after 2.0 s",
        "staging: 0 B of 1.0 GiB, worker-1 0%",
        "staging: 0 B of 1.0 GiB, worker-1 0%, stopped after 3.0 s",
        "starting",
        "loading the model",
        "loading the model: stopped after 4.0 s",
        "starting",
        "exporting",
        "exporting: stopped after 5.0 s",
    ]


@pytest.mark.parametrize("mode", ["lines", "bar"])
def test_what_is_there_already_shows_nothing(out: Shown, mode: Any) -> None:
    with progress.showing(mode) as shown, shown.rows(), shown.copies():
        pass
    assert out.text() == ""


def test_many_nodes_are_told_by_their_number_and_the_slowest(out: Shown, clock: Clock) -> None:
    with progress.showing("lines", clock=clock) as shown, shown.copies() as copied:
        for number in range(20):
            copied(f"worker-{number}", GIB if number < 15 else number, GIB)
    assert "15 of 20 nodes, worker-15 0%, done in" in out.text()


def test_the_steps_between_the_reported_ones_are_seen(out: Shown, clock: Clock) -> None:
    plan = sample.run_plan(total_steps=1000)
    with progress.showing("lines", clock=clock) as shown, shown.training(plan) as training:
        training.event(event("started", 0, 0.0))
        training.event(event("phase", 0, 0.0, phase="training"))
        clock.now += 40
        light = event("step", 10, 40.0).model_copy(update={"n": 0})
        training.heard(light.model_copy(update={"rank": 1}))
        training.heard(light)
    assert "training: step 10 of 1,000, 66 min left\n" in out.text()


def test_the_plans_estimate_is_told_as_one_until_steps_are_measured(
    out: Shown, clock: Clock
) -> None:
    foreseen = TimeEstimate(flops_per_token=1e9, seconds=7200.0, why="by data sheet")
    plan = sample.run_plan(total_steps=1000, time=foreseen)
    with progress.showing("lines", clock=clock) as shown, shown.training(plan) as training:
        training.event(event("started", 0, 0.0))
        training.event(event("phase", 0, 0.0, phase="training"))
        clock.now += 40
        training.event(event("step", 10, 40.0))
    text = out.text()
    assert "training: step 0 of 1,000, about 2 h 0 min left by the plan's estimate\n" in text
    assert "training: step 10 of 1,000, 66 min left\n" in text, "measured: 4 s a step"


def test_a_failed_run_has_no_end_of_training(out: Shown, clock: Clock) -> None:
    plan = sample.run_plan(total_steps=10)
    with progress.showing("lines", clock=clock) as shown, shown.training(plan) as training:
        training.event(event("phase", 0, 0.0, phase="training"))
        training.event(event("failed", 3, 1.0, error="x"))
    assert "done" not in out.text()


def test_none_shows_nothing(out: Shown) -> None:
    with progress.showing("none") as shown, shown.training(sample.run_plan()) as training:
        training.event(event("step", 1, 1.0, loss=2.0))
        with shown.rows() as count:
            count(1)
    assert out.text() == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0.0 s"), (4.24, "4.2 s"), (40, "40 s"), (840, "14 min"), (7500, "2 h 5 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# Bars


def test_a_run_that_goes_on_from_an_earlier_checkpoint_than_planned(
    out: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest one was damaged, which the ranks find out."""
    monkeypatch.setattr(progress_views, "_DRAW_EVERY_S", 0.0)
    plan = sample.run_plan(total_steps=200, resume_from="/runs/first/checkpoints/step-00000100")
    with progress.showing("bar") as shown, shown.training(plan) as training:
        training.event(event("started", 50, 1.0))
        training.event(event("phase", 50, 1.0, phase="training"))
        training.event(event("step", 51, 7.0))
    drawn = [part.strip() for part in out.text().replace("\n", "\r").split("\r")]
    assert any("51/200" in part and "15 min left" in part for part in drawn)


def test_a_bar_in_a_file(out: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_views, "_DRAW_EVERY_S", 0.0)
    plan = sample.run_plan(total_steps=200, resume_from="/runs/first/checkpoints/step-00000050")
    with progress.showing("bar") as shown, shown.training(plan) as training:
        training.event(event("phase", 0, 0.0, phase="loading the model"))
        training.event(event("started", 50, 1.0))
        training.event(event("phase", 50, 1.0, phase="training"))
        for step in range(51, 201):
            metrics = {"loss": 1.9304, "tokens_per_second": 12_300.0}
            training.event(event("step", step, 1.0 + (step - 50) * 6, **metrics))
    text = out.text()
    drawn = [part.strip() for part in text.replace("\n", "\r").split("\r") if part.strip()]
    assert drawn[0].startswith("starting:  25%|")
    assert " 50/200 [" in drawn[0]
    assert any(part.startswith("loading the model:  25%|") for part in drawn)
    assert any(
        part.startswith("training:  50%|")
        and "100/200" in part
        and "loss 1.93, 12,300 tokens/s, 10 min left]" in part
        for part in drawn
    )
    assert drawn[-1].startswith("training: 100%|")
    assert text.endswith("\n"), "the bar stays, and what follows is below it"


IN_A_PIPE = """
import logging, sys
from dbx_llmtrain import logs
from dbx_llmtrain.driver import progress
with logs.shown("info"), progress.showing("bar") as shown, shown.copies() as copied:
    copied("worker-1", 1, 4)
    logging.getLogger("dbx_llmtrain").warning("to standard error")
    print("to standard output", flush=True)
    copied("worker-1", 4, 4)
print("after", flush=True)
"""


@pytest.mark.parametrize("together", [True, False])
def test_messages_and_a_bar_in_pipes_have_lines_of_their_own(together: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PIPE], text=True, timeout=60, cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT if together else subprocess.PIPE,
    )  # fmt: skip
    lines = done.stdout.splitlines() + ([] if together else done.stderr.splitlines())
    for message in ("dbx_llmtrain: WARNING: to standard error", "to standard output", "after"):
        assert message in lines
    assert sum("staging:" in line for line in lines) >= 2
    if not together:
        assert done.stdout == "to standard output\nafter\n"


def test_bars_of_rows_and_bytes(out: Shown) -> None:
    with progress.showing("bar") as shown:
        with shown.rows() as count:
            count(1)
            count(41_000)
        with shown.copies() as copied:
            copied("worker-1", GIB // 2, GIB)
    rows, copies = [line for line in screen(out.text()) if line]
    assert rows.startswith("preparing: 41000 rows [")
    assert copies.startswith("staging:  50%|")
    assert "512M/1.00G" in copies
    assert copies.endswith(", worker-1 50%]")


@contextmanager
def terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int = 100, rows: int = 30
) -> Iterator[Callable[[], str]]:
    """A terminal as standard output and error; gives what was written to it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    found = bytearray()

    def read() -> None:
        while True:
            try:
                found.extend(os.read(ours, 4096))
            except OSError:  # the other end is closed
                return

    reader = threading.Thread(target=read)
    with os.fdopen(theirs, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        reader.start()

        def text() -> str:
            stream.flush()
            time.sleep(0.2)
            return found.decode()

        yield text
    reader.join()
    os.close(ours)


def test_what_is_printed_in_a_terminal_is_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = sample.run_plan(total_steps=10)
    with terminal(monkeypatch) as text, tqdm(file=io.StringIO()):  # one that somebody left open
        before = sys.stdout
        with progress.showing("auto") as shown, shown.training(plan) as training:
            training.event(event("phase", 0, 0.0, phase="training"))
            print("[rank 1] one", flush=True)
            sys.stderr.write("[rank 0] ")
            sys.stderr.write("two\n[rank 0] three\n")
            sys.stdout.writelines(["four\n", "not a whole line"])
            click.echo("; five")
            training.event(event("step", 10, 5.0, loss=2.0))
        print("after")
        assert (sys.stdout, sys.stderr) == (before, before)
        lines = screen(text())
    assert lines[:5] == [
        "[rank 1] one",
        "[rank 0] two",
        "[rank 0] three",
        "four",
        "not a whole line; five",
    ]
    assert lines[5].startswith("training: 100%|")
    assert lines[5].endswith(", loss 2]")
    assert lines[6:] == ["after", ""]


@pytest.mark.parametrize(("columns", "rows"), [(0, 0), (100, 0)])
def test_a_terminal_without_a_size_has_a_bar_too(
    monkeypatch: pytest.MonkeyPatch, columns: int, rows: int
) -> None:
    with terminal(monkeypatch, columns, rows) as text:
        with progress.showing("bar") as shown, shown.copies() as copied:
            copied("worker-1", 1, 2)
        assert "staging:  50%|" in text()


def test_what_is_not_whole_is_printed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as text:
        with progress.showing("bar") as shown, shown.copies() as copied:
            copied("worker-1", 1, 2)
            sys.stdout.write("half a line")
        assert screen(text())[0] == "half a line"


def test_auto_is_lines_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert progress.choose("auto") == "lines"
    assert [progress.choose(mode) for mode in ("bar", "lines", "none")] == ["bar", "lines", "none"]
    assert not progress.in_notebook()
    assert not progress.is_interactive()


@pytest.mark.parametrize(
    ("name", "kernel", "databricks", "notebook"),
    [
        ("ZMQInteractiveShell", object(), False, True),
        ("TerminalInteractiveShell", None, False, False),
        ("TerminalInteractiveShell", None, True, False),
        ("DatabricksShell", None, True, True),
        ("SomeShell", None, False, False),
    ],
)
def test_which_shells_are_notebooks(
    monkeypatch: pytest.MonkeyPatch, name: str, kernel: Any, databricks: bool, notebook: bool
) -> None:
    shell = type(name, (), {"kernel": kernel})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    if databricks:
        monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "16.4")
    assert progress.in_notebook() is notebook


def test_a_view_that_breaks_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A standard error that is closed, as a terminal that has gone away."""
    plan = sample.run_plan(total_steps=10)
    for mode in ("bar", "lines"):
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        with progress.showing(mode) as shown, shown.training(plan) as training:
            stream.close()
            training.event(event("phase", 1, 0.0, phase="training"))
            training.event(event("step", 1, 1.0))
            training.event(event("phase", 1, 1.0, phase="evaluating"))


def test_a_bar_gives_the_streams_back_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threading.active_count()
    with terminal(monkeypatch):
        before = (sys.stdout, sys.stderr)
        threads += 1
        with (
            suppress(KeyboardInterrupt),
            progress.showing("bar") as shown,
            shown.training(sample.run_plan()),
        ):
            assert sys.stdout is not before[0]
            raise KeyboardInterrupt
        assert (sys.stdout, sys.stderr) == before
        assert threading.active_count() <= threads


def test_from_several_threads(out: Shown) -> None:
    shown = Progress(BarView())
    with shown.copies() as copied:
        threads = [
            threading.Thread(target=lambda n=n: [copied(f"w{n}", i, 50) for i in range(51)])
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    shown.close()
    assert screen(out.text())[0].endswith("w0 100%, w1 100%, w2 100%, w3 100%]")


NOTEBOOK = """
import warnings
warnings.simplefilter("error")
from dbx_llmtrain.driver import progress
from tests import sample
assert progress.in_notebook() and progress.is_interactive()
with progress.showing("auto") as shown, shown.copies() as copied:
    copied("worker-1", 512, 1024)
    print("printed meanwhile")
"""
WITHOUT_WIDGETS = "import sys\nsys.modules['ipywidgets'] = None\n"


def test_a_block_in_a_notebook() -> None:
    """A real kernel, which needs no widgets, and nothing warns."""
    import nbformat
    from nbclient import NotebookClient

    source = WITHOUT_WIDGETS + NOTEBOOK
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    resources = {"metadata": {"path": str(Path(__file__).parents[2])}}
    NotebookClient(notebook, timeout=120, resources=resources).execute()
    outputs = notebook.cells[0].outputs
    texts = {"stdout": "", "stderr": ""}
    for item in outputs:
        if item.output_type == "stream":
            texts[item.name] += item.text
    assert texts == {"stdout": "printed meanwhile\n", "stderr": ""}
    (block,) = [item for item in outputs if item.output_type == "display_data"]
    assert "staging: 512 B of 1.0 KiB, worker-1 50%, done in" in block.data["text/html"]
    assert not [item for item in outputs if item.output_type == "error"]


# Messages of ours


@contextmanager
def bare() -> Iterator[logging.Logger]:
    """Our logger as in a program that has not set up any logging."""
    root, ours = logging.getLogger(), logging.getLogger("dbx_llmtrain")
    handlers, root.handlers = root.handlers, []
    try:
        yield ours
    finally:
        root.handlers = handlers


def test_messages_are_shown_from_a_level_on(out: Shown) -> None:
    inner = logging.getLogger("dbx_llmtrain.driver.launch")
    with bare() as ours:
        for level in ("info", "error"):
            with logs.shown(level):
                inner.info("an info of %s", level)
                inner.error("an error of %s", level)
        assert (ours.handlers, ours.level, logging.getLogger().handlers) == ([], 0, [])
    assert out.text().splitlines() == [
        "dbx_llmtrain: INFO: an info of info",
        "dbx_llmtrain: ERROR: an error of info",
        "dbx_llmtrain: ERROR: an error of error",
    ]


def test_the_users_own_handlers_are_left_alone(out: Shown) -> None:
    mine = logging.StreamHandler(theirs := io.StringIO())
    with bare() as ours:
        ours.addHandler(mine)
        try:
            with logs.shown("debug"):
                assert (ours.handlers, ours.level) == ([mine], logging.NOTSET)
                ours.warning("to my handler")
        finally:
            ours.removeHandler(mine)
    assert theirs.getvalue() == "to my handler\n"
    assert out.text() == ""


def test_handlers_of_the_root_logger_get_them_once(out: Shown) -> None:
    with bare() as ours:
        logging.getLogger().addHandler(logging.StreamHandler(theirs := io.StringIO()))
        with suppress(ValueError), logs.shown("info"):
            ours.info("once")
            raise ValueError
        assert ours.level == logging.NOTSET
    assert theirs.getvalue() == "once\n"
    assert out.text() == ""


def test_a_standard_error_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    monkeypatch.setattr(sys, "stderr", gone := io.StringIO())
    gone.close()
    with bare() as ours, logs.shown("info"):
        ours.error("nobody reads it")


NOTES = [
    ("DeepSpeed", "Setting accelerator to CPU. If you have GPU or other accelerator"),
    ("TorchDistributor", "Started local training with 2 processes"),
    ("TorchDistributor", "Finished distributed training with 2 executor processes"),
]


@pytest.mark.parametrize("level", ["info", "debug"])
def test_notes_of_other_libraries_are_for_debugging(
    level: str, caplog: pytest.LogCaptureFixture
) -> None:
    def say() -> list[str]:
        caplog.clear()
        for name, note in NOTES:
            logging.getLogger(name).warning(note)
            logging.getLogger(name).warning("another one")
        return caplog.messages

    notes = [note for _, note in NOTES]
    with bare(), logs.shown(level):
        logging.getLogger().addHandler(caplog.handler)
        shown = say()
    assert [note in shown for note in notes] == [level == "debug"] * 3
    assert shown.count("another one") == 3
    assert set(notes) <= set(say()), "afterwards they are the user's"
    assert not any(logging.getLogger(name).filters for name, _ in NOTES)


def test_bars_of_models_are_hidden_and_come_back() -> None:
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging as library

    before = library.is_progress_bar_enabled(), are_progress_bars_disabled()
    for enabled in (True, False):
        library.enable_progress_bar() if enabled else library.disable_progress_bar()
        downloads = are_progress_bars_disabled()
        with suppress(ValueError), logs.without_bars():
            assert not library.is_progress_bar_enabled()
            assert are_progress_bars_disabled() == downloads, "a download takes its time"
            raise ValueError
        assert library.is_progress_bar_enabled() == enabled
        assert are_progress_bars_disabled() == downloads
    library.enable_progress_bar() if before[0] else library.disable_progress_bar()
    with bare() as ours, logs.shown("debug"), logs.without_bars():
        assert library.is_progress_bar_enabled() == before[0]
        assert logs.is_debugging()
    assert not ours.isEnabledFor(logging.DEBUG)


def test_the_level_of_libraries() -> None:
    levels = [logs.of_libraries(level) for level in ("debug", "info", "warning", "error")]
    assert levels == [logging.DEBUG, logging.WARNING, logging.WARNING, logging.ERROR]


def test_a_task_in_words() -> None:
    assert Task("preparing", "rows", 1).text() == "1 row"
    assert Task("staging", "bytes", 0, 2048, note="w 0%").text() == "0 B of 2.0 KiB, w 0%"
