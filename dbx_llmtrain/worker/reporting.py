"""What a rank says while it runs: events and lines from rank 0, a few files for its supervisor."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import textwrap
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dbx_llmtrain import channel, logs, storage
from dbx_llmtrain.events import EVENTS_FILE, Event, EventLog, Kind
from dbx_llmtrain.outcomes import RankResult
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import failures, requests
from dbx_llmtrain.worker.output import LOG_ONLY, LOG_ONLY_VARIABLE

if TYPE_CHECKING:
    from dbx_llmtrain.outcomes import Sample
    from dbx_llmtrain.tracking import RankTracker
    from dbx_llmtrain.worker.evaluate import EvalReport
    from dbx_llmtrain.worker.loop import StepReport, Window
    from dbx_llmtrain.worker.saving import Saved

RANK_DIR = "DBX_LLMTRAIN_RANK_DIR"
"""Names the folder in which a rank leaves ``step``, ``result.json``, ``failure.json`` and, when it
was told to end and saves before, ``saving``.

Its owner removes it, also after a rank that was killed, so what a rank writes meanwhile is there.
"""
FAILURE = "failure.json"

_LIGHT_S = 2.0
"""Seconds between two messages of where this rank is, at least."""

_AROUND = (
    __file__,
    contextlib.__file__,
    logs.__file__,
    *(str(Path(__file__).with_name(name)) for name in ("main.py", "world.py")),
)
"""Files whose frames stand above every failure and say nothing about it."""


def rank_dir() -> Path | None:
    """The folder that the supervisor of this rank has named, if there is one."""
    folder = os.environ.get(RANK_DIR)
    return Path(folder) if folder else None


class Handover:
    """Files for the process that started this one, where it named a folder for them."""

    def __init__(self) -> None:
        self._folder = rank_dir()
        self._step: int | None = None

    def step(self, step: int) -> None:
        """The last step that was finished."""
        self._step = step
        if self._folder:
            storage.write_text(self._folder / "step", str(step))

    def result(self, result: RankResult) -> None:
        """What came of the run."""
        if self._folder:
            storage.write_text(self._folder / "result.json", result.model_dump_json())

    def failure(self, error: BaseException) -> None:
        """Why this rank failed; without a step where it never came to the first one."""
        if self._folder:
            stopped = isinstance(error, requests.Stopped)
            text = json.dumps(describe(error) | {"step": self._step, "stopped": stopped})
            storage.write_text(self._folder / FAILURE, text)


def describe(error: BaseException) -> dict[str, Any]:
    """``error`` in one line, what it comes of where that is known, and its traceback from where the
    rank's own work begins."""
    report = traceback.TracebackException.from_exception(error)
    while len(report.stack) > 1 and report.stack[0].filename in _AROUND:
        del report.stack[0]
    return {
        "error": f"{type(error).__name__}: {error}",
        "cause": failures.cause_of_error(error),
        "traceback": "".join(report.format()),
    }


@contextlib.contextmanager
def handed_over() -> Iterator[None]:
    """For what a rank does before it reports: a failure is handed over to its supervisor. One that
    is handed over already, with its step, stays."""
    try:
        yield
    except BaseException as error:
        home = rank_dir()
        if home and not (home / FAILURE).exists():
            Handover().failure(error)
        raise


def say_failure(error: BaseException) -> None:
    """Print ``error`` in its own words, after its traceback, which is for the log alone where this
    rank's supervisor keeps one."""
    mark = LOG_ONLY if rank_dir() else ""
    for line in "".join(traceback.format_exception(error)).splitlines():
        click.echo(f"{mark}{line}", err=True)
    if mark:
        click.echo(f"{type(error).__name__}: {error}", err=True)


@contextlib.contextmanager
def reporting(plan: RunPlan, rank: int) -> Iterator[Reporter]:
    """This rank's ``Reporter``. A failure is handed over and reported before anything is closed."""
    home = rank_dir()
    if home:
        home.mkdir(parents=True, exist_ok=True)
    with (
        logs.shown(plan.config.tracking.log_level),
        tempfile.TemporaryDirectory(prefix="dbx_llmtrain-events-", dir=home) as folder,
    ):
        reporter = Reporter(plan, rank, Path(folder) / EVENTS_FILE)
        try:
            yield reporter
        except BaseException as error:
            reporter.failed(error)
            reporter.close(patience_s=3.0)
            raise
        reporter.close(patience_s=30.0)


class Reporter:
    """Rank 0 writes events, prints lines and logs to MLflow; the other ranks only say where they
    are. Where the driver listens, it hears all of it live."""

    def __init__(self, plan: RunPlan, rank: int, local: Path) -> None:
        self._plan = plan
        self._began = time.perf_counter()
        self._handover = Handover()
        self._step = 0
        self._over = False
        self._phase = ""
        self._entered = self._began
        self._spent: dict[str, float] = defaultdict(float)
        self._rank = rank
        self._said_step = float("-inf")
        self._live = channel.client(os.environ)
        self._log_only = LOG_ONLY if os.environ.get(LOG_ONLY_VARIABLE) else ""
        self._shown = logs.LEVELS[plan.config.tracking.log_level]
        self._log: EventLog | None = None
        self._tracker: RankTracker | None = None
        if rank == 0:
            from dbx_llmtrain.tracking import RankTracker

            shared = storage.local_path(plan.run_dir) / EVENTS_FILE
            _keep_earlier(shared, local)
            self._log = EventLog(local, shared, plan.attempt, rank)
            self._tracker = RankTracker(plan.tracking)

    def elapsed(self) -> float:
        """Seconds since this rank began."""
        return time.perf_counter() - self._began

    def phase(self, name: str) -> None:
        """What this rank is about to do, as a participle: ``loading the model``."""
        if name != self._phase:
            now = time.perf_counter()
            self._spent[self._phase] += now - self._entered
            self._phase, self._entered = name, now
            self._emit("phase", phase=name)

    def spent(self, phase: str) -> float:
        """Seconds in this phase so far, without the present time in it."""
        return self._spent[phase]

    def started(self, step: int, notes: Sequence[str], *, origin: Path | None = None) -> None:
        """All is set up; ``step`` steps have been done before, by an earlier attempt, as in the
        checkpoint ``origin``. A note that begins with ``Warning:`` is one."""
        self._step = step
        self._handover.step(step)
        plan = self._plan
        resumed = f", resumed from {origin}" if origin else ""
        steps = f"{plan.total_steps} steps of {plan.global_batch_size}{resumed}"
        what = steps if plan.purpose == "train" else "evaluation"
        self._say(f"{plan.world_size} rank(s), {plan.strategy}, {plan.precision}, {what}")
        for note in notes:
            alarming = note.startswith("Warning:")
            self._say(
                note if alarming else f"note: {note}", logging.WARNING if alarming else logging.INFO
            )
        self._emit("started", notes=list(notes), resumed_from=str(origin) if origin else None)
        self.go_on()

    def step(
        self, report: StepReport, window: Window, seen: Window, memory: int, *, last: bool = False
    ) -> bool:
        """A step was done. Returns whether it was reported, so that a new window begins.

        ``window`` has what has been since the last report, ``seen`` everything since the run began,
        ``memory`` is this rank's peak in bytes; the ``last`` step is always reported.
        """
        self._step = report.step
        self._over = last
        self._handover.step(report.step)
        if report.skipped:
            text = f"step {report.step}: weights left as they are, {report.skipped}"
            self._say(text, logging.WARNING)
        self._say_step()
        every, total = self._plan.config.train.log_every, self._plan.total_steps
        if report.step % every and not last:
            return False
        self._say(
            f"step {report.step}/{total}  loss {window.loss:.4f}  "
            f"lr {report.learning_rate:.3g}  grad norm {report.grad_norm:.3g}  "
            f"{window.tokens_per_second:,.0f} tokens/s",
            logging.NOTSET,  # the driver shows it in a way of its own
        )
        metrics = {
            "loss": window.loss,
            "learning_rate": report.learning_rate,
            "grad_norm": report.grad_norm,
            "tokens_per_second": window.tokens_per_second,
            "seconds_per_step": window.seconds / max(1, window.steps),
            "rows_seen": seen.rows,
            "tokens_seen": seen.tokens,
            "trained_tokens_seen": seen.trained,
            "skipped_steps": seen.skipped,
            "memory_bytes": memory,
        }
        if self._log:
            self._emit("step", metrics)
        return True

    def evaluated(
        self, reports: Mapping[str, EvalReport], own: Mapping[str, float] | None = None
    ) -> None:
        """The model was evaluated: ``eval`` (all held-out rows), ``eval_<name>`` each, or ``test``;
        with ``best_`` in front those of the best model. ``own``: the user's metrics.

        The event has the rows and tokens of the first.
        """
        metrics: dict[str, float] = {}
        for name, report in reports.items():
            self._say(
                f"step {self._step}: {_told_set(name)} loss {report.loss:.4f} over {report.rows} "
                "rows"
            )
            metrics |= {f"{name}_loss": report.loss, f"{name}_perplexity": report.perplexity}
        for name, value in (own or {}).items():
            self._say(f"step {self._step}: {name} {value:.6g}")
        first = next(iter(reports.values()), None)
        counts = {"rows": first.rows, "trained_tokens": first.trained_tokens} if first else {}
        self._emit("eval", metrics | dict(own or {}), **counts)
        self.go_on()

    def sampled(self, samples: Sequence[Sample]) -> None:
        """The sample prompts were answered: shortened where it is printed, whole in the event."""
        for sample in samples:
            prompt = " ".join(sample.prompt.split())
            prompt = prompt if len(prompt) <= 60 else f"... {prompt[-60:]}"
            text = textwrap.shorten(sample.text, 200, placeholder=" ...")
            self._say(f"step {self._step}: {prompt} -> {text or '(nothing)'}")
        self._emit("samples", samples=[sample.model_dump() for sample in samples])
        self.go_on()

    def checkpointed(self, saved: Saved) -> None:
        """A checkpoint is complete, or could not be written; training goes on either way."""
        if saved.error:
            self._say(f"step {saved.step}: no checkpoint: {saved.error}", logging.WARNING)
            return
        self._say(f"step {saved.step}: checkpoint in {saved.folder}")
        self._emit(
            "checkpoint",
            step=saved.step,
            path=str(saved.folder),
            seconds=saved.seconds,
            seconds_stalled=saved.seconds_stalled,
            bytes=saved.bytes,
        )

    def publish(self) -> None:
        """Bring the events so far to the run folder, in whatever thread."""
        if self._log:
            self._log.publish()

    def warn(self, text: str) -> None:
        """Something did not work that the run does not need."""
        self._say(text, logging.WARNING)

    def saved(self, kind: Kind, path: Path) -> None:
        """An ``export`` is complete."""
        self._say(f"step {self._step}: {kind} in {path}")
        self._emit(kind, path=str(path))

    def finished(self, result: RankResult) -> None:
        """The run is over on this rank."""
        self._emit("finished", dict(result.metrics))
        if self._log:
            self._handover.result(result)

    def failed(self, error: BaseException) -> None:
        """Hand the failure over before anything that may take time."""
        self._handover.failure(error)
        self._emit("failed", error=f"{type(error).__name__}: {error}")

    def close(self, patience_s: float) -> None:
        """Publish what is left; wait at most so long for the tracking server, and for the driver to
        have heard everything."""
        if self._log:
            self._log.close()
        if self._live:
            self._live.close(min(patience_s, 5.0))
        if self._tracker:
            self._tracker.close(patience_s)

    def go_on(self) -> None:
        """After what happens between steps: the next step, where there is one."""
        if self._step < self._plan.total_steps and not self._over:
            self.phase("training")

    def _emit(
        self,
        kind: Kind,
        metrics: dict[str, float] | None = None,
        step: int | None = None,
        **data: Any,
    ) -> None:
        if self._log and self._tracker:
            event = self._log.emit(kind, self._step if step is None else step, metrics, **data)
            self._tracker.log(event)
            self._tell(event)
        elif self._live and kind in ("phase", "started", "failed", "finished"):
            self._tell(self._light(kind, data))

    def _say_step(self) -> None:
        """Where this rank is, now and then: the driver sees which one is slow."""
        now = time.monotonic()
        if self._live and now - self._said_step >= _LIGHT_S:
            self._said_step = now
            self._tell(self._light("step", {}))

    def _light(self, kind: Kind, data: dict[str, Any]) -> Event:
        return Event(
            attempt=self._plan.attempt,
            rank=self._rank,
            kind=kind,
            time=time.time(),
            step=self._step,
            data=data,
        )

    def _tell(self, event: Event) -> None:
        if self._live:
            self._live.send({"event": event.model_dump(mode="json")})

    def _say(self, line: str, level: int = logging.INFO) -> None:
        """Print a line of the run, on rank 0. Below the level that is shown it is for the log."""
        if self._log:
            click.echo(f"{'' if level >= self._shown else self._log_only}{line}")


def _told_set(name: str) -> str:
    """A set of rows in words: ``held-out``, ``held-out code``, ``test`` ... of the best model."""
    of_best, name = name.startswith("best_"), name.removeprefix("best_")
    told = "held-out" + name.removeprefix("eval").replace("_", " ", 1)
    return ("test" if name == "test" else told) + (" (best model)" if of_best else "")


def _keep_earlier(shared: Path, local: Path) -> None:
    """Begin with the events of earlier attempts, up to their last whole line: the file is always
    republished whole."""
    try:
        earlier = shared.read_bytes()
    except OSError:
        return
    local.write_bytes(earlier[: earlier.rfind(b"\n") + 1])
