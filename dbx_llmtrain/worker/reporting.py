"""What a rank says while it runs: events and lines from rank 0, a few files for its supervisor."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dbx_llmtrain import channel, logs, storage
from dbx_llmtrain.credentials import redact
from dbx_llmtrain.events import EVENTS_FILE, Event, EventLog, Kind
from dbx_llmtrain.outcomes import RankResult
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker.handover import Handover, rank_dir
from dbx_llmtrain.worker.output import LOG_ONLY, LOG_ONLY_VARIABLE
from dbx_llmtrain.worker.watch import Watch

if TYPE_CHECKING:
    from torch import nn

    from dbx_llmtrain.outcomes import Sample
    from dbx_llmtrain.tracking_rank import RankTracker
    from dbx_llmtrain.worker.evaluate import EvalReport
    from dbx_llmtrain.worker.laps import Laps
    from dbx_llmtrain.worker.loop import StepReport, Window
    from dbx_llmtrain.worker.saving import Saved

_LIGHT_S = 2.0
"""Seconds between two messages of where this rank is, at least."""


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
            from dbx_llmtrain.tracking_rank import RankTracker

            shared = storage.local_path(plan.run_dir) / EVENTS_FILE
            _keep_earlier(shared, local)
            self._log = EventLog(local, shared, plan.attempt, rank)
            self._tracker = RankTracker(plan.tracking, plan.run_dir)
        self._watch = Watch(plan, rank, live=self._live, where=self._where, home=rank_dir())

    def _where(self) -> tuple[str, int]:
        return self._phase, self._step

    def watch(self, *modules: nn.Module) -> None:
        """Every forward pass of these counts as movement: a step, an evaluation or an answer may
        take longer than a rank that is stuck is waited for."""
        for module in modules:
            module.register_forward_pre_hook(self._watch.moved)

    def elapsed(self) -> float:
        """Seconds since this rank began."""
        return time.perf_counter() - self._began

    def phase(self, name: str) -> None:
        """What this rank is about to do, as a participle: ``loading the model``."""
        if name != self._phase:
            now = time.perf_counter()
            self._spent[self._phase] += now - self._entered
            self._phase, self._entered = name, now
            self._handover.phase(name)
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
        self,
        report: StepReport,
        window: Window,
        seen: Window,
        memory: int,
        *,
        laps: Laps | None = None,
        last: bool = False,
    ) -> bool:
        """A step was done. Returns whether it was reported, so that a new window begins.

        ``window`` has what has been since the last report, ``laps`` the ranks' own times of it,
        ``seen`` everything since the run began, ``memory`` is this rank's peak in bytes; the
        ``last`` step is always reported.
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
            metrics |= laps.metrics() if laps else {}
            self._emit("step", metrics, **(laps.by_rank() if laps else {}))
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

    def used(self, node: str, values: Mapping[str, float]) -> None:
        """What a node is used for: the driver logs it, where it listens."""
        if self._live:
            about = {"attempt": self._plan.attempt, "node": node, "time": time.time()}
            self._live.send({"usage": about | {"values": dict(values)}})

    def finished(self, result: RankResult) -> None:
        """The run is over on this rank."""
        self._emit("finished", dict(result.metrics))
        if self._log:
            self._handover.result(result)

    def failed(self, error: BaseException) -> None:
        """Hand the failure over before anything that may take time."""
        self._handover.failure(error)
        self._emit("failed", error=redact(f"{type(error).__name__}: {error}", os.environ))

    def close(self, patience_s: float) -> None:
        """Publish what is left; wait at most so long for the tracking server, and for the driver to
        have heard everything."""
        self._watch.close()
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
    except FileNotFoundError:
        return  # any other fault ends this attempt: it would publish a file without what was before
    local.write_bytes(earlier[: earlier.rfind(b"\n") + 1])
