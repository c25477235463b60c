"""TensorBoard event files of a run, written by the driver from rank 0's events.

Only the record format of the package ``tensorboard`` is used: its higher writers load TensorFlow
where that is installed, as it is on Databricks ML runtimes.

Like everything of tracking, this never ends a training run: what goes wrong while it lasts is told
once per kind, as a warning.
"""

from __future__ import annotations

import io
import logging
import os
import shlex
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dbx_llmtrain import storage
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.errors import ConfigError, Problem
from dbx_llmtrain.events import Event
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.tracking_guard import Guard

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event as Message

logger = logging.getLogger(__name__)

FOLDER = "tensorboard"

GROUPS: dict[str, tuple[str, ...]] = {
    "train": ("loss", "learning_rate", "grad_norm", "skipped_steps"),
    "eval": ("eval_loss", "eval_perplexity", "test_loss", "test_perplexity"),
    "speed": ("tokens_per_second", "seconds_per_step", "memory_bytes"),
    "ranks": (
        "data_wait_seconds",
        "slowest_rank",
        "slowest_rank_seconds",
        "median_rank_seconds",
    ),
    "seen": ("rows_seen", "tokens_seen", "trained_tokens_seen"),
}
"""In which group of charts each metric of ``tracking.METRICS`` is. The result's own metrics, one
value each at the last step, are in ``result``; those of held-out sets with a name in ``eval``."""

_TAGS = {name: f"{group}/{name}" for group, names in GROUPS.items() for name in names}


def check(cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` where event files are asked for and cannot be written."""
    if not cfg.tracking.tensorboard:
        return
    try:
        _encode([_head(0.0)])
    except (ImportError, TypeError) as error:  # TypeError: a protobuf that does not fit
        message = (
            "true needs the package tensorboard on the driver, and it cannot be imported "
            f"({error}): install the extra dbx_llmtrain[tensorboard], or set it to false"
        )
        raise ConfigError([Problem("tracking.tensorboard", message)]) from error


@contextmanager
def event_files(
    plan: RunPlan, *, notebook: bool = False, every: float = 30.0
) -> Iterator[Callable[[Event], None]]:
    """What takes the events of a run, for as long as the block lasts; it never raises.

    With ``tracking.tensorboard`` they go to a file of this attempt in ``tensorboard/`` of the run
    folder, which is published every ``every`` seconds and when the block ends, by success or
    failure. Without it nothing is done. How they are opened is printed: in a ``notebook`` by two
    magics, elsewhere by a command.
    """
    if not plan.config.tracking.tensorboard:
        yield _ignore
        return
    folder = storage.local_path(plan.run_dir) / FOLDER
    command = f"tensorboard --logdir {shlex.quote(str(folder))}"
    click.echo(f"%load_ext tensorboard\n%{command}" if notebook else command)
    with ExitStack() as stack:
        take: Callable[[Event], None] = _ignore
        with Guard("opening the event file", set(), where="TensorBoard"):
            local = stack.enter_context(
                tempfile.TemporaryDirectory(
                    prefix="dbx_llmtrain-tensorboard-", ignore_cleanup_errors=True
                )
            )
            file = EventFile(Path(local), folder, plan.attempt, every=every)
            stack.callback(file.close)
            take = file.write
        yield take


def _ignore(event: Event) -> None:
    """Take an event for which there is no file."""


class EventFile:
    """One event file: it grows on local disk and is republished whole by a thread.

    Readers keep a file open, so the published one is overwritten in place and not replaced: they
    see a short one for a moment, and wait for the rest.
    """

    def __init__(self, local: Path, shared: Path, attempt: str, *, every: float) -> None:
        # TensorBoard wants "tfevents" in the name, and reads the files of a folder in its order.
        host = socket.gethostname()
        name = f"events.out.tfevents.{time.time():.0f}.{host}.{os.getpid()}.{attempt[:8]}"
        self._local = local / name
        self._shared = shared / name
        self._every = every
        self._warned: set[str] = set()
        self._dirty = True
        self._size = 0
        self._lock = threading.Lock()
        self._file = self._local.open("ab", buffering=0)
        self._append(_encode([_head(time.time())]))
        self._publish()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="tensorboard", daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        """Add the metrics of an event of rank 0."""
        if event.rank == 0:
            with Guard("writing an event", self._warned, where="TensorBoard"), self._lock:
                self._append(_encode(_messages(event)))

    def close(self) -> None:
        """Publish what is left."""
        self._closing.set()
        self._thread.join()
        self._publish()
        self._file.close()

    def _append(self, data: bytes) -> None:
        """All of ``data`` or nothing: what follows half a record could not be read."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(self._size)
            raise
        self._size += len(data)
        self._dirty = self._dirty or bool(data)

    def _work(self) -> None:
        while not self._closing.wait(self._every):
            self._publish()

    def _publish(self) -> None:
        with Guard(f"writing to {self._shared.parent}", self._warned, where="TensorBoard") as guard:
            if self._dirty:
                self._dirty = False
                storage.copy_file(self._local, self._shared)
        self._dirty = self._dirty or guard.error is not None


def _encode(messages: list[Message]) -> bytes:
    """Messages as records of an event file."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for message in messages:
        writer.write(message.SerializeToString())
    return buffer.getvalue()


def _head(wall_time: float) -> Message:
    """The message that an event file begins with."""
    from tensorboard.compat.proto import event_pb2

    return event_pb2.Event(wall_time=wall_time, file_version="brain.Event:2")


def _messages(event: Event) -> list[Message]:
    """An event's metrics as one message. A start hides what an earlier attempt, whose work was
    lost, had written of later steps."""
    from tensorboard.compat.proto import event_pb2
    from tensorboard.compat.proto.summary_pb2 import Summary

    if event.kind == "started":
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        first = event.step + 1 if event.step else 0
        return [event_pb2.Event(wall_time=event.time, step=first, session_log=start)]
    if event.kind == "finished":
        values = {f"result/{name}": value for name, value in event.metrics.items()}
    else:
        others = "eval" if event.kind == "eval" else "train"  # eval_<name>_loss
        values = {
            _TAGS.get(name, f"{others}/{name}"): value for name, value in event.metrics.items()
        }
    if not values:
        return []
    scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
    summary = Summary(value=scalars)
    return [event_pb2.Event(wall_time=event.time, step=event.step, summary=summary)]
