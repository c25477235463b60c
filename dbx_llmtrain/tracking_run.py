"""The driver's side of an MLflow run."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dbx_llmtrain import storage
from dbx_llmtrain.credentials import redact
from dbx_llmtrain.events import EVENTS_FILE, Event, read_events
from dbx_llmtrain.records import Audit, PreparedData, RunPlan, TrackingPlan, TrainResult
from dbx_llmtrain.tracking_courier import Call, Courier
from dbx_llmtrain.tracking_params import flat_params, flatten
from dbx_llmtrain.tracking_rank import later
from dbx_llmtrain.tracking_sender import Sender, Value
from dbx_llmtrain.tracking_store import BATCH, ERROR_TAG, KEY_CHARS, PARAM_CHARS, Run

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED"]

PATIENCE_S = 30.0
"""Seconds that the end of a run waits at most for what has not been sent yet."""
SHORT_PATIENCE_S = 10.0
"""The same where it has failed or was stopped."""

_ROLES = {"train": "training", "eval": "evaluation", "test": "testing"}


class DriverRun:
    """The driver's side of an MLflow run. No method raises. ``known`` are the parameters that a run
    has already which goes on: MLflow never changes one, so that another value becomes a tag
    ``changed.<name>``. ``run_dir`` is where everything is kept as well.
    """

    def __init__(
        self,
        plan: TrackingPlan | None,
        *,
        uri: str,
        secrets: Mapping[str, str],
        known: Mapping[str, str] | None = None,
        run_dir: str = "",
    ) -> None:
        self._plan = plan
        self._secrets = dict(secrets)
        self._known = dict(known or {})
        self._goes_on = known is not None
        self._run_dir = run_dir
        self._run = Run(uri, plan.run_id if plan else None)
        self._sender = Sender(self._run, self._secrets)
        self._courier = Courier(self._run, self._sender)
        self._keep_checkpoint = False
        self._told: set[str] = set()
        self.began = time.time()
        """When the MLflow run began, seconds since the epoch."""

    def plan(self) -> TrackingPlan | None:
        """What a rank needs to know of this run, no credentials; ``None``: nothing is logged."""
        return self._plan

    def attach(self, plan: RunPlan) -> RunPlan:
        """The run's plan with this MLflow run in it."""
        return plan.model_copy(update={"tracking": self._plan})

    def sent(self) -> int:
        """Values of metrics that this call has sent so far."""
        return self._sender.sent

    def wait(self, patience_s: float) -> bool:
        """Wait until everything has been sent, so many seconds at most; whether that is so."""
        return self._courier.settle(patience_s)

    def log_start(self, plan: RunPlan) -> None:
        """All that is known before the launch: configuration, plan, data sources, audit; of a run
        that goes on also the metrics which an attempt that was killed could not log."""
        self._keep_checkpoint = plan.config.tracking.log_checkpoints
        done = storage.step_of(Path(plan.resume_from)) if plan.resume_from else None
        if self._goes_on and done:
            self._fill(storage.local_path(plan.run_dir) / EVENTS_FILE, done)
        self.log_config(plan)
        self.log_inputs(plan.data)
        self.log_audit(plan.data.audit)

    def log_events(self, path: Path) -> None:
        """What the run lacks of all that its file of events has."""
        for event in read_events(path):
            if event.kind in ("checkpoint", "export", "samples"):
                self._courier.feed(partial(self._sender.add_facts, event))
        self._fill(path, None)

    def log_config(self, plan: RunPlan) -> None:
        """Parameters from the configuration and the plan; both whole as artifacts."""
        self._log_params(flat_params(plan))
        self._log_text("config.yaml", plan.config.to_yaml())
        self._log_text("plan.json", plan.model_dump_json(indent=1))

    def log_inputs(self, data: PreparedData) -> None:
        """The data sources, as the run's data set inputs."""

        def send(client: MlflowClient) -> None:
            from mlflow.entities import Dataset, DatasetInput, InputTag

            inputs = []
            for role, source in data.sources.items():
                text = redact(source, self._secrets)
                dataset = Dataset(
                    name=(text.rstrip("/").rsplit("/", 1)[-1] or text)[:500],
                    digest=f"{data.artifact.fingerprint[:24]}-{role}"[:36],
                    source_type="local",
                    source=json.dumps({"uri": text}),
                    profile=json.dumps({"format": data.format, **data.audit.model_dump()}),
                )
                context = InputTag("mlflow.data.context", _ROLES.get(role, role))
                inputs.append(DatasetInput(dataset, tags=[context]))
            client.log_inputs(self._run.run_id, datasets=inputs)

        self._courier.call(Call("the data inputs", "logging the data inputs", send))

    def log_audit(self, audit: Audit) -> None:
        """What became of every row and token: parameters, and whole as ``audit.json``."""
        self._log_params(flatten("audit", audit.model_dump()))
        self._log_text("audit.json", audit.model_dump_json(indent=1))

    def log_event(self, event: Event) -> None:
        """Metrics and tags of an event; nothing where rank 0 logs them itself."""
        if self._plan and not self._plan.by_rank:
            self._courier.feed(partial(self._sender.add, event))

    def log_usage(self, node: str, seconds: float, values: Mapping[str, float]) -> None:
        """What a node was used for at a time: ``system/<node>/...``, at steps that are seconds
        since the run began."""
        step = max(0, int(seconds - self.began))
        where = "system/" + re.sub(r"[^\w. -]", "_", node)
        took = [
            Value(f"{where}/{name}"[:KEY_CHARS], float(value), int(seconds * 1000), step)
            for name, value in values.items()
        ]
        self._courier.feed(partial(self._sender.add_usage, took))

    def log_result(self, result: TrainResult, *, at: float | None = None) -> None:
        """The final metrics, where the run's files are, and ``result.json``.

        With ``tracking.log_checkpoints`` also the last checkpoint's files, however long that takes.
        """
        time_ms = milliseconds(at) or int(time.time() * 1000)
        metrics = dict(result.metrics)
        self._courier.feed(partial(self._sender.add_last, metrics, time_ms, result.steps))
        self.set_tag("dbx_llmtrain.checkpoint", result.checkpoint)
        self.set_tag("dbx_llmtrain.model_path", result.model_path)
        self._log_text("result.json", result.model_dump_json(indent=1))
        if self._keep_checkpoint and result.checkpoint and self.wait(PATIENCE_S):
            self.log_artifacts(Path(result.checkpoint), "checkpoint")

    def log_artifacts(self, path: Path, artifact_path: str | None = None) -> None:
        """Copy a file, or a folder with all that is in it, to the run's artifacts, and wait for
        that: how long it takes is for its size to say."""

        def send(client: MlflowClient) -> None:
            log = client.log_artifacts if path.is_dir() else client.log_artifact
            log(self._run.run_id, str(path), artifact_path)

        self._run.attempt("logging artifacts", send, timeout="120")

    def set_tag(self, key: str, value: object) -> None:
        """Set a tag of the run; ``None`` is no tag."""
        self._courier.feed(partial(self._sender.add_tag, key, value))

    def log_text(self, name: str, text: str) -> None:
        """Put a text among the run's artifacts, without the secrets that may be in it."""
        self._log_text(name, text)

    def finish(
        self,
        status: Status,
        error: str = "",
        details: str = "",
        *,
        at: float | None = None,
        patience_s: float | None = None,
    ) -> bool:
        """End the run, now or ``at`` that time; whether the status is stored.

        The first line of ``error`` becomes a tag, ``details`` (or the whole error) ``error.txt``.
        A later call changes the status: a run whose end fails after all is FAILED. Says once what
        could not be sent, and how it can be sent later.
        """
        if self._plan is None:
            return False
        if error:
            self.set_tag(ERROR_TAG, error.strip().split("\n", 1)[0])
            self._log_text("error.txt", details or error)
        stored: list[bool] = []

        def end(client: MlflowClient) -> None:
            client.set_terminated(self._run.run_id, status=status, end_time=milliseconds(at))
            stored.append(True)

        what = f"setting the status {status} (the run may be shown as RUNNING)"
        call = Call(f"its status {status}", what, end)
        if patience_s is None:
            patience_s = PATIENCE_S if status == "FINISHED" else SHORT_PATIENCE_S
        if not self._courier.settle(patience_s, final=True, last=call):
            text = later(self._run_dir, *self._courier.left_out())
            logger.log(logging.DEBUG if "end" in self._told else logging.WARNING, "%s", text)
            self._told.add("end")
        return bool(stored)

    def _fill(self, path: Path, last: int | None) -> None:
        def send(client: MlflowClient) -> None:
            self._sender.fill(client, read_events(path), last)

        self._courier.call(Call("metrics of earlier on", "logging metrics", send))

    def _log_params(self, params: Mapping[str, str]) -> None:
        clean = {
            key[:KEY_CHARS]: redact(value, self._secrets)[:PARAM_CHARS]
            for key, value in params.items()
        }
        for key, value in clean.items():
            if self._known.get(key, value) != value:
                self.set_tag(f"changed.{key}"[:KEY_CHARS], value)
        items = [(key, value) for key, value in clean.items() if key not in self._known]
        self._known.update(items)
        for start in range(0, len(items), BATCH):
            send = partial(self._send, params=items[start : start + BATCH])
            self._courier.call(Call("parameters", "logging parameters", send))

    def _send(self, client: MlflowClient, params: list[tuple[str, str]]) -> None:
        from mlflow.entities import Param

        batch = [Param(key, value) for key, value in params]
        client.log_batch(self._run.run_id, params=batch, synchronous=True)

    def _log_text(self, name: str, text: str) -> None:
        clean = redact(text, self._secrets)
        what = f"logging {name}"

        def send(client: MlflowClient) -> None:
            client.log_text(self._run.run_id, clean, name)

        self._courier.call(Call(name, what, send, is_file=True))


def milliseconds(seconds: float | None) -> int | None:
    """As MLflow counts time."""
    return None if seconds is None else int(seconds * 1000)
