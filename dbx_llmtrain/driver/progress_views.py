"""A task on standard error, as a bar that is redrawn or as a line now and then."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

from dbx_llmtrain.display import number, size
from dbx_llmtrain.display_live import duration
from dbx_llmtrain.live_state import ENDS, Snapshot
from dbx_llmtrain.worker import node

if TYPE_CHECKING:
    from tqdm import tqdm

_LINE_EVERY_S = 30.0
_DRAW_EVERY_S = 0.1


@dataclass(frozen=True)
class Task:
    """Something that takes its time. ``total`` is ``None`` where nobody knows it.

    ``phase`` is what it is at (of training), ``note`` the rest that is worth saying, ``failed``
    whether it ended before it was done. ``live`` gives all of a run, where there is room for it.
    """

    name: str
    unit: str
    done: int
    total: int | None = None
    note: str = ""
    phase: str = ""
    failed: bool = False
    live: Callable[[], Snapshot] | None = None

    def text(self) -> str:
        """How far it is, in words."""
        if self.unit == "bytes":
            done, total = size(self.done), size(self.total or 0)
            far = f"{done} of {total}"
        elif self.unit == "steps":
            far = f"step {number(self.done)} of {number(self.total)}"
        else:
            far = f"{number(self.done)} {self.unit if self.done != 1 else self.unit[:-1]}"
        return ", ".join(filter(None, (far, self.note)))


class View(Protocol):
    """Shows one task after the other. May raise; the caller takes care of it."""

    def begin(self, task: Task) -> None: ...
    def update(self, task: Task) -> None: ...
    def end(self, task: Task) -> None: ...
    def close(self) -> None: ...


class LinesView:
    """A line at the start and the end of each task and phase, and one every 30 s in between; only
    the start of what is over at once.

    Training is interrupted by evaluations and checkpoints and goes on: it starts and ends once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started: dict[str, float] = {}
        self._phase = ""
        self._last = float("-inf")

    def begin(self, task: Task) -> None:
        """Say that it begins."""
        self._started, self._phase = {}, ""
        self.update(task)

    def update(self, task: Task) -> None:
        """Say what has begun or ended, or how far it is when nothing was said for long."""
        phase = task.phase or task.name
        if phase != self._phase:
            self._leave(task)
            self._phase = phase
            if phase not in ENDS:
                self._enter(task)
        elif self._clock() - self._last >= _LINE_EVERY_S and phase in self._started:
            took = duration(self._clock() - self._started[phase])
            self._say(f"{phase}: {task.text()}" if _counts(task) else f"{phase}: {took} so far")

    def end(self, task: Task) -> None:
        """Say how it ended."""
        self._leave(task)
        self._phase = ""

    def close(self) -> None:
        """Nothing is left to do."""

    def _enter(self, task: Task) -> None:
        goes_on = _counts(task) and self._phase in self._started
        if not goes_on:
            self._started[self._phase] = self._clock()
            self._say(f"{self._phase}: {task.text()}" if _counts(task) else self._phase)

    def _leave(self, task: Task) -> None:
        phase = self._phase
        interrupted = phase == task.name and task.phase and task.done < (task.total or 0)
        if phase not in self._started or interrupted:
            return
        took = self._clock() - self._started[phase]
        how = "stopped after" if task.failed or task.phase == "failed" else "done in"
        if phase == task.name:
            self._say(f"{phase}: {task.text()}, {how} {duration(took)}")
        elif took >= 1.0:
            self._say(f"{phase}: {how} {duration(took)}")

    def _say(self, line: str) -> None:
        self._last = self._clock()
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def _counts(task: Task) -> bool:
    """Whether the number of the task is what its phase moves on. (Of rows nobody knows how many
    there will be: none yet says nothing.)"""
    return task.phase in ("", task.name) and (task.unit != "rows" or task.done > 0)


class BarView:
    """A bar that is a line of text and redrawn. What is printed meanwhile by Python to the same
    terminal is put above it.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._bar: tqdm[Any] | None = None
        self._exit = ExitStack()
        self._drawn = float("-inf")

    def begin(self, task: Task) -> None:
        """Draw a new bar."""
        self._bar = _text_bar(self._stream, _look(task))
        self._exit.enter_context(_printed_above(self._bar))
        self._draw(task)

    def update(self, task: Task) -> None:
        """Draw the bar as the task is now, ten times a second at most."""
        if time.monotonic() - self._drawn >= _DRAW_EVERY_S:
            self._draw(task)

    def end(self, task: Task) -> None:
        """Leave the bar as it is at the end."""
        bar, self._bar = self._bar, None
        if bar is not None:
            self._set(bar, task)
            self._exit.close()
            bar.close()

    def close(self) -> None:
        """Give standard output and error back, whatever happened."""
        self._exit.close()
        if self._bar is not None:
            self._bar.close()

    def _draw(self, task: Task) -> None:
        if self._bar is not None:
            self._set(self._bar, task)
            self._bar.refresh()
            self._drawn = time.monotonic()

    @staticmethod
    def _set(bar: tqdm[Any], task: Task) -> None:
        bar.n = task.done
        if task.total is not None:
            bar.total = task.total
        bar.set_description_str(task.phase or task.name, refresh=False)
        bar.set_postfix_str(task.note, refresh=False)


def _look(task: Task) -> dict[str, Any]:
    """Arguments of a tqdm bar. The time left is in the note: tqdm's counts phases in."""
    far = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}"
    if task.total is None:
        far = "{desc}: {n_fmt} " + task.unit
    look: dict[str, Any] = {
        "desc": task.phase or task.name,
        "initial": task.done,
        "total": task.total,
        "bar_format": far + " [{elapsed}{postfix}]",
    }
    if task.unit == "bytes":
        look |= {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    return look


def _text_bar(stream: TextIO, look: dict[str, Any]) -> tqdm[Any]:
    from tqdm import tqdm

    width: dict[str, Any] = {"dynamic_ncols": True}
    with node.Capture():
        columns, lines = os.get_terminal_size(stream.fileno())
        if not columns or not lines:  # a terminal whose size nobody has set: no bar would fit
            width = {"ncols": columns or 80, "nrows": 20}
    # Without tqdm's own thread, which would outlive the bar, and in the line where the cursor is: a
    # bar that some library has left open would else be given a line of its own.
    kind = type("_Bar", (tqdm,), {"monitor_interval": 0})
    return cast("tqdm[Any]", kind(**look, **width, file=stream, position=0))


@contextmanager
def _printed_above(bar: tqdm[Any]) -> Iterator[None]:
    """Print above the bar what goes to its place by ``sys.stdout`` or ``stderr``."""
    with ExitStack() as stack:
        for name, redirect in (("stdout", redirect_stdout), ("stderr", redirect_stderr)):
            stream = getattr(sys, name)
            if bar_shares(stream, cast(Any, bar).fp):
                above = _Above(stream, bar)
                stack.enter_context(redirect(cast(TextIO, above)))
                stack.callback(above.finish)
        yield


def bar_shares(stream: Any, place: Any) -> bool:
    """Whether what is written to ``stream`` is seen where the bar is: in a terminal or notebook, or
    in the file or pipe that the bar goes to."""
    if stream is place or _is_screen(stream):
        return True
    with node.Capture():
        here, there = (os.fstat(item.fileno()) for item in (stream, place))
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
    return False


def _is_screen(stream: Any) -> bool:
    return type(stream).__module__.startswith("ipykernel") or bool(stream.isatty())


class _Above:
    """A text stream whose whole lines are printed above a bar; else it is the stream itself."""

    def __init__(self, stream: Any, bar: tqdm[Any]) -> None:
        self._stream = stream
        self._bar = bar
        self._lock = cast(Any, bar).get_lock()
        self._rest = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Print what is whole."""
        with self._lock:
            whole, newline, self._rest = (self._rest + text).rpartition("\n")
            if newline:
                self._print(whole + newline)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write one after the other."""
        for line in lines:
            self.write(line)

    def finish(self) -> None:
        """Print what is not whole."""
        with self._lock:
            rest, self._rest = self._rest, ""
            if rest:
                self._print(rest + "\n")

    def _print(self, text: str) -> None:
        if _is_screen(self._stream):
            self._bar.clear(nolock=True)
        else:  # nothing that was written there can be taken back
            cast(Any, self._bar).fp.write("\n")
            cast(Any, self._bar).fp.flush()
        self._stream.write(text)
        self._stream.flush()
        self._bar.refresh(nolock=True)
