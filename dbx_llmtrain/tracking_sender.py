"""Metrics and tags on their way to an MLflow run: in batches, and each metric once for a step.

MLflow keeps every value that it is given, and takes none back. So what is logged of a step waits
where something later at the same step may take its place, and what a run has already, of an attempt
whose work was lost, is not sent again.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dbx_llmtrain.credentials import redact
from dbx_llmtrain.events import Event
from dbx_llmtrain.tracking_guard import lock
from dbx_llmtrain.tracking_store import BATCH, Run, clip

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

ENTITIES = 1000
"""That MLflow takes at once: metrics and tags together."""
PENDING = 20_000
ANSWERS = "samples.json"
"""The table of answers to ``train.sample_prompts`` among a run's artifacts."""
ANSWER_COLUMNS = ("step", "prompt", "text", "tokens", "stopped")
_OF_THE_RUN_AT_ITS_END = ("tokens_per_second",)
"""Of a step until the run ends: then that of the whole run is logged at its last step instead."""
_SAME = 1e-6
"""Relative distance of two evaluations of the same rows and weights, however they were cut."""
_LARGEST = 1e308
"""MLflow keeps infinity as the largest number."""


class Value(NamedTuple):
    """One value of a metric. ``measured``: by an evaluation, which may be done again on other rows;
    else the first one of a step stays."""

    name: str
    value: float
    time_ms: int
    step: int
    measured: bool = False


class _Stored:
    """What a run has of each metric, from a step on: asked for when it is first needed."""

    def __init__(self) -> None:
        self._first = 0
        self._names: frozenset[str] | None = None
        self._values: dict[str, dict[int, float]] = {}

    def forget(self, first: int = 0) -> None:
        """Ask again, for what is there from the step ``first`` on."""
        self._first, self._names = first, None
        self._values.clear()

    def lacking(self, client: MlflowClient, run_id: str, values: Iterable[Value]) -> list[Value]:
        """Those that the run does not have, each once."""
        found: dict[tuple[str, int], Value] = {}
        for value in values:
            at = value.name, value.step
            there = self._of(client, run_id, value.name)
            if value.step not in there:
                found.setdefault(at, value)
            elif value.measured and not _is_same(there[value.step], value.value):
                found[at] = value
        return list(found.values())

    def note(self, values: Iterable[Value]) -> None:
        """They are stored now. Of earlier steps nothing more is to be expected."""
        for name, value, _, step, _ in values:
            there = self._values.setdefault(name, {})
            self._values[name] = {at: old for at, old in there.items() if at > step} | {step: value}

    def _of(self, client: MlflowClient, run_id: str, name: str) -> dict[int, float]:
        if self._names is None:
            self._names = frozenset(client.get_run(run_id).data.metrics)
        if name not in self._values:
            known = client.get_metric_history(run_id, name) if name in self._names else ()
            self._values[name] = {it.step: it.value for it in known if it.step >= self._first}
        return self._values[name]


class Sender:
    """Metrics and tags on their way to a run. They wait while the store is down."""

    def __init__(self, run: Run, secrets: Mapping[str, str]) -> None:
        self._run = run
        self._secrets = secrets
        self._metrics: deque[Value] = deque(maxlen=PENDING)
        self._held: dict[str, Value] = {}
        self._stored = _Stored()
        self._tags: dict[str, str] = {}
        self._answers: deque[dict[str, Any]] = deque(maxlen=PENDING)
        self._lost = 0

    def empty(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self._metrics and not self._tags and not self._answers

    def add(self, event: Event) -> None:
        """Take an event's metrics, the path of a checkpoint or an export as a tag, and answers to
        the sample prompts as rows of a table."""
        with lock:
            self._take(event)
        if event.kind == "checkpoint":
            self.add_tag("dbx_llmtrain.checkpoint", event.data.get("path"))
        if event.kind == "export":
            self.add_tag("dbx_llmtrain.model_path", event.data.get("path"))
        if event.kind == "samples":
            with lock:
                self._answers.extend(
                    {key: redact(str(sample[key]), self._secrets) for key in ("prompt", "text")}
                    | {"step": event.step, "tokens": sample["tokens"], "stopped": sample["stopped"]}
                    for sample in event.data.get("samples", ())
                )

    def _take(self, event: Event) -> None:
        if event.kind == "started":  # steps after this one may have been done before
            self._release()
            self._stored.forget(event.step)
        for value in values_of(event):
            if any(held.step != value.step for held in self._held.values()):
                self._release()
            if value.measured or event.kind == "finished" or value.name in _OF_THE_RUN_AT_ITS_END:
                self._held[value.name] = value
            else:
                self.add_metric(value)
        if event.kind in ("failed", "finished"):
            self._release()

    def _release(self) -> None:
        """Nothing else will take the place of what was held back."""
        held = list(self._held.values())
        self._held.clear()
        for value in held:
            self.add_metric(value)

    def add_metric(self, value: Value) -> None:
        """Take one metric; the oldest one that waits makes room when there are too many."""
        with lock:
            self._lost += len(self._metrics) == PENDING
            if self._lost == 1:
                logger.warning("MLflow: too many metrics wait, the oldest are lost")
            self._metrics.append(value)

    def add_last(self, metrics: Mapping[str, float], time_ms: int, step: int) -> None:
        """Take the metrics of a result, as far as nobody has sent them."""
        with lock:
            for name, held in list(self._held.items()):
                if name in metrics and held.step == step:
                    del self._held[name]
            self._release()
            self._stored.forget(step)
            for name, value in metrics.items():
                self.add_metric(Value(name, value, time_ms, step))

    def fill(self, events: Iterable[Event], last: int) -> None:
        """Send what the run lacks of the metrics up to the step ``last``, as an attempt whose work
        stands has told them; of several that did a step the last one's."""
        told = {
            (value.name, value.step): value._replace(measured=False)
            for event in events
            for value in values_of(event)
            if value.step <= last
        }
        values = sorted(told.values(), key=lambda value: value.step)
        with lock:
            self._stored.forget()
            for start in range(0, len(values), ENTITIES):
                for value in values[start : start + ENTITIES]:
                    self.add_metric(value)
                if not self.flush():  # later on it would not be looked for any more
                    self._metrics.clear()
                    return

    def add_tag(self, key: str, value: object) -> None:
        """Take one tag; ``None`` is no tag."""
        if value is not None:
            self._tags[key] = clip(redact(str(value), self._secrets))

    def flush(self, *, always: bool = False) -> bool:
        """Send what waits; whether all of it went out. ``always``: also during the cool-off, and
        what was held back."""
        with lock:
            if always:
                self._release()
            while not self.empty():
                if self._run.resting() and not always:
                    return False
                if self._answers:
                    if not self._send_answers(always=always):
                        return False
                    continue
                metrics = list(self._metrics)[: ENTITIES - BATCH]
                tags = list(self._tags.items())[:BATCH]
                outcome = self._run.attempt(
                    "logging metrics",
                    partial(self._send, metrics=metrics, tags=tags),
                    always=always,
                )
                if outcome == "down":
                    return False
                for _ in metrics:
                    self._metrics.popleft()
                for key, _ in tags:
                    del self._tags[key]
            return True

    def _send_answers(self, *, always: bool) -> bool:
        """Add the answers that wait to their table; whether the store could be asked."""
        rows = [[answer[key] for key in ANSWER_COLUMNS] for answer in self._answers]
        outcome = self._run.attempt(
            "logging the answers to sample prompts",
            lambda client: _add_rows(client, str(self._run.run_id), rows),
            always=always,
        )
        if outcome != "down":
            self._answers.clear()
        return outcome != "down"

    def _send(
        self, client: MlflowClient, metrics: Sequence[Value], tags: Sequence[tuple[str, str]]
    ) -> None:
        from mlflow.entities import Metric, RunTag

        run_id = str(self._run.run_id)
        lacking = self._stored.lacking(client, run_id, metrics)
        client.log_batch(
            run_id,
            metrics=[Metric(*value[:4]) for value in lacking],
            tags=[RunTag(*item) for item in tags],
            synchronous=True,
        )
        self._stored.note(lacking)


def values_of(event: Event) -> list[Value]:
    """The metrics of an event."""
    now, measured = int(event.time * 1000), event.kind == "eval"
    return [Value(*item, now, event.step, measured) for item in event.metrics.items()]


def _is_same(one: float, other: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    one, other = (max(-_LARGEST, min(_LARGEST, value)) for value in (one, other))
    return math.isclose(one, other, rel_tol=_SAME)


def _add_rows(client: MlflowClient, run_id: str, rows: list[list[Any]]) -> None:
    """Append to the table of answers. (MLflow 2's own ``log_table`` looks for the rows that are
    there in the store of the process, and needs pandas.)"""
    known: list[list[Any]] = []
    if ANSWERS in {file.path for file in client.list_artifacts(run_id)}:
        with tempfile.TemporaryDirectory() as folder:
            path = client.download_artifacts(run_id, ANSWERS, folder)
            known = json.loads(Path(path).read_text(encoding="utf-8"))["data"]
    client.log_dict(run_id, {"columns": [*ANSWER_COLUMNS], "data": known + rows}, ANSWERS)
    if not known:  # by this tag its pages know that it is a table
        table = [{"path": ANSWERS, "type": "table"}]
        client.set_tag(run_id, "mlflow.loggedArtifacts", json.dumps(table))
