"""Metrics and tags on their way to an MLflow run: in batches, and each metric once for a step.

MLflow keeps every value that it is given, and takes none back. So what is logged of a step waits
where something later at the same step may take its place, and what a run has already, of an attempt
whose work was lost, is not sent again.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dbx_llmtrain.credentials import redact
from dbx_llmtrain.events import Event
from dbx_llmtrain.tracking_store import BATCH, Outcome, Run, clip

if TYPE_CHECKING:
    from mlflow import MlflowClient

ENTITIES = 1000
"""That MLflow takes at once: metrics and tags together."""
PENDING, PENDING_ROWS = 20_000, 1000
"""Values of metrics, and rows of answers and values of machines, that wait at most."""
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
    """Metrics and tags on their way to a run. They wait while the store is down, at most so many:
    then the oldest make room. For one thread at a time."""

    def __init__(self, run: Run, secrets: Mapping[str, str]) -> None:
        self._run = run
        self._secrets = secrets
        self._metrics: deque[Value] = deque(maxlen=PENDING)
        self._held: dict[str, Value] = {}
        self._stored = _Stored()
        self._tags: dict[str, str] = {}
        self._answers: deque[dict[str, Any]] = deque(maxlen=PENDING_ROWS)
        self._usage: deque[Value] = deque(maxlen=PENDING_ROWS)
        self._lost = 0
        self.sent = 0
        """Values of metrics that have gone out."""

    def empty(self) -> bool:
        """Whether nothing waits to be sent."""
        return not (self._metrics or self._tags or self._answers or self._usage)

    def left_out(self) -> int:
        """Values and answers that wait, were refused, or made room for others."""
        return self._lost + len(self._metrics) + len(self._answers)

    def add(self, event: Event) -> None:
        """Take an event's metrics, the path of a checkpoint or an export as a tag, and answers to
        the sample prompts as rows of a table."""
        self._take(event)
        self.add_facts(event)

    def add_facts(self, event: Event) -> None:
        """Take what an event has beside metrics."""
        if event.kind == "checkpoint":
            self.add_tag("dbx_llmtrain.checkpoint", event.data.get("path"))
        if event.kind == "export":
            self.add_tag("dbx_llmtrain.model_path", event.data.get("path"))
        if event.kind == "samples":
            for sample in event.data.get("samples", ()):
                answer = {
                    key: redact(str(sample[key]), self._secrets) for key in ("prompt", "text")
                }
                answer |= {key: sample[key] for key in ("tokens", "stopped")}
                self._lost += len(self._answers) == PENDING_ROWS
                self._answers.append(answer | {"step": event.step})

    def _take(self, event: Event) -> None:
        if event.kind == "started":  # steps after this one may have been done before
            self.release()
            self._stored.forget(event.step)
        for value in values_of(event):
            if any(held.step != value.step for held in self._held.values()):
                self.release()
            if value.measured or event.kind == "finished" or value.name in _OF_THE_RUN_AT_ITS_END:
                self._held[value.name] = value
            else:
                self.add_metric(value)
        if event.kind in ("failed", "finished"):
            self.release()

    def release(self) -> None:
        """Nothing else will take the place of what was held back."""
        held = list(self._held.values())
        self._held.clear()
        for value in held:
            self.add_metric(value)

    def add_metric(self, value: Value) -> None:
        """Take one metric; the oldest one that waits makes room when there are too many."""
        self._lost += len(self._metrics) == PENDING
        self._metrics.append(value)

    def add_usage(self, values: Iterable[Value]) -> None:
        """Take what a machine is used for. It waits behind all else, and is not looked for in the
        run before: nobody sends it twice."""
        self._usage.extend(values)

    def add_last(self, metrics: Mapping[str, float], time_ms: int, step: int) -> None:
        """Take the metrics of a result, as far as nobody has sent them."""
        for name, held in list(self._held.items()):
            if name in metrics and held.step == step:
                del self._held[name]
        self.release()
        self._stored.forget(step)
        for name, value in metrics.items():
            self.add_metric(Value(name, value, time_ms, step))

    def fill(self, client: MlflowClient, events: Iterable[Event], last: int | None = None) -> None:
        """Send what the run lacks of the metrics up to the step ``last``, as an attempt whose work
        stands has told them; of several that did a step the last one's. Raises what MLflow does:
        then all of it has to be done again."""
        told = {
            (value.name, value.step): value._replace(measured=False)
            for event in events
            for value in values_of(event)
            if last is None or value.step <= last
        }
        values = sorted(told.values(), key=lambda value: value.step)
        self._stored.forget()
        for start in range(0, len(values), ENTITIES):
            self._send(client, metrics=values[start : start + ENTITIES])

    def add_tag(self, key: str, value: object) -> None:
        """Take one tag; ``None`` is no tag."""
        if value is not None:
            self._tags[key] = clip(redact(str(value), self._secrets))

    def flush(self, *, always: bool = False) -> bool:
        """Send what waits; whether all of it went out. ``always``: also during the cool-off, and
        what was held back."""
        if always:
            self.release()
        while not self.empty():
            if self._metrics or self._tags:
                outcome = self._send_batch(always=always)
            elif self._usage:
                outcome = self._send_usage(always=always)
            else:
                outcome = self._send_answers(always=always)
            if outcome == "down":
                return False
        return True

    def _send_batch(self, *, always: bool) -> Outcome:
        """Send the first metrics and tags that wait; they wait on where the store is down."""
        metrics = list(self._metrics)[: ENTITIES - BATCH]
        tags = list(self._tags.items())[:BATCH]
        send = partial(self._send, metrics=metrics, tags=tags)
        outcome = self._run.attempt("logging metrics", send, always=always)
        if outcome != "down":
            for _ in metrics:
                self._metrics.popleft()
            for key, _ in tags:
                del self._tags[key]
            self._lost += len(metrics) if outcome == "refused" else 0
        return outcome

    def _send_answers(self, *, always: bool) -> Outcome:
        """Add the answers that wait to their table."""
        rows = [[answer[key] for key in ANSWER_COLUMNS] for answer in self._answers]
        outcome = self._run.attempt(
            "logging the answers to sample prompts",
            lambda client: _add_rows(client, str(self._run.run_id), rows),
            always=always,
        )
        if outcome != "down":
            self._answers.clear()
            self._lost += len(rows) if outcome == "refused" else 0
        return outcome

    def _send_usage(self, *, always: bool) -> Outcome:
        from mlflow.entities import Metric

        values = list(self._usage)[:ENTITIES]
        outcome = self._run.attempt(
            "logging system metrics",
            lambda client: client.log_batch(
                str(self._run.run_id),
                metrics=[Metric(*value[:4]) for value in values],
                synchronous=True,
            ),
            always=always,
        )
        if outcome != "down":
            for _ in values:
                self._usage.popleft()
        return outcome

    def _send(
        self,
        client: MlflowClient,
        metrics: Sequence[Value],
        tags: Sequence[tuple[str, str]] = (),
    ) -> None:
        from mlflow.entities import Metric, RunTag

        run_id = str(self._run.run_id)
        lacking = self._stored.lacking(client, run_id, metrics)
        if lacking or tags:
            client.log_batch(
                run_id,
                metrics=[Metric(*value[:4]) for value in lacking],
                tags=[RunTag(*item) for item in tags],
                synchronous=True,
            )
        self._stored.note(lacking)
        self.sent += len(lacking)


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
    rows = [row for row in rows if row not in known]  # sent before, or done again
    if not rows:
        return
    client.log_dict(run_id, {"columns": [*ANSWER_COLUMNS], "data": known + rows}, ANSWERS)
    if not known:  # by this tag its pages know that it is a table
        table = [{"path": ANSWERS, "type": "table"}]
        client.set_tag(run_id, "mlflow.loggedArtifacts", json.dumps(table))
