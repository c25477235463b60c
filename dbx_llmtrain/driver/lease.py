"""Who writes to a run folder: ``lease.json``, written by the driver and renewed while it lives.

Two runs that write to one folder destroy each other's checkpoints. Volumes have no way to make a
file only if there is none, so a call writes its lease, waits a moment and reads it back: of several
that begin at once the last writer has it, and the others find that out before they touch anything.
"""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import click

from dbx_llmtrain import storage, tracking
from dbx_llmtrain.credentials import redact
from dbx_llmtrain.driver import run_folder
from dbx_llmtrain.driver.run_folder import RunFolder
from dbx_llmtrain.errors import CheckpointError, was_stopped
from dbx_llmtrain.records import TrackingPlan
from dbx_llmtrain.reports import Record

logger = logging.getLogger(__name__)

LEASE = "lease.json"
RENEW_S = 20.0
STALE_S = 60.0
"""A lease that was not renewed for so long is of a driver that is gone."""
_SETTLE_S = 1.0
"""Between writing a lease and trusting it: longer than another call takes from reading to writing.
"""
_held: set[str] = set()
"""Attempts of this process that hold a lease."""


class Lost(CheckpointError):
    """Another call has taken the folder over: it is not this one's any more."""


class Lease(Record):
    """What ``lease.json`` says. Times are seconds since the epoch on the driver's clock;
    ``tracking`` is the MLflow run, once it is open. It stays when the run is over, with how that
    ended in ``status`` and ``error``."""

    attempt: str
    run_name: str
    status: Literal["running", "finished", "failed", "stopped"] = "running"
    user: str
    host: str
    pid: int
    since: float
    renewed: float
    error: str = ""
    tracking: TrackingPlan | None = None

    def __str__(self) -> str:
        return (
            f"{self.run_name}, by {self.user} on {self.host} (process {self.pid}) since "
            f"{told_time(self.since)}"
        )


def told_time(seconds: float) -> str:
    """A time for people, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def read(run_dir: Path) -> Lease | None:
    """The lease of a run folder, if it has one that can be read."""
    for _ in range(5):  # a volume shows a file that is being written in part
        try:
            text = (run_dir / LEASE).read_text(encoding="utf-8")
        except OSError:
            return None
        with contextlib.suppress(ValueError):
            return Lease.model_validate_json(text)
        time.sleep(0.1)
    return None


@contextmanager
def held(folder: RunFolder) -> Iterator[Held]:
    """Hold the lease of a run folder, which is made, for as long as the block lasts.

    Raises ``CheckpointError`` while another call holds it. One on a machine that does not answer is
    watched until it is renewed or stale. Afterwards the lease says how the block ended; where that
    was before ``begin``, the folder is as it was.
    """
    run_dir = folder.path
    before = wait_until_free(run_dir)
    made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    run_folder.make_folder(run_dir)
    holder = Held(folder, before, made[-1] if made else None)
    if holder.dead is not None:
        _end(holder.dead, run_dir)
    try:
        yield holder
    except BaseException as error:
        stopped = was_stopped(error)
        first = f"{type(error).__name__}: {error}".strip().split("\n", 1)[0]
        first = redact(first, os.environ)
        holder.release("stopped" if stopped else "failed", first)
        raise
    holder.release("finished")


class Held:
    """A lease that this call holds; a thread renews it. ``before`` is the one that was there,
    ``made`` the topmost folder that had to be made for it."""

    def __init__(self, folder: RunFolder, before: Lease | None, made: Path | None) -> None:
        now = time.time()
        self.before = before
        self._run_dir = folder.path
        self._made = made
        self._lease = Lease(
            attempt=folder.attempt, run_name=folder.name, user=_user(), host=socket.gethostname(),
            pid=os.getpid(), since=now, renewed=now,
        )  # fmt: skip
        self._lost = ""
        self._began = False
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._settled = time.monotonic() + _SETTLE_S
        self._write()
        _held.add(folder.attempt)
        self._thread = threading.Thread(target=self._keep, name="dbx_llmtrain lease", daemon=True)
        self._thread.start()

    @property
    def dead(self) -> Lease | None:
        """The lease of a driver that is gone without having ended its run."""
        return self.before if self.before and self.before.status == "running" else None

    def begin(self) -> None:
        """Before anything else is written to the folder: make sure that it is this call's.

        Raises ``CheckpointError`` where another call began at the same moment and has it.
        """
        time.sleep(max(0.0, self._settled - time.monotonic()))
        self._look()
        self.check()
        self._began = True

    def check(self) -> None:
        """Raise ``Lost`` when another call has taken the folder over."""
        if self._lost:
            raise Lost(self._lost)

    def track(self, run: TrackingPlan | None) -> None:
        """Keep the MLflow run in the lease, for whoever goes on with it."""
        with self._lock:
            self._lease = self._lease.model_copy(update={"tracking": run})
        self._renew()

    def release(self, status: Literal["finished", "failed", "stopped"], error: str = "") -> None:
        """End the renewing; say how the run ended, or put back what was there before it began."""
        self._over.set()
        self._thread.join(STALE_S)
        _held.discard(self._lease.attempt)
        self._look()
        if self._lost:
            return
        with contextlib.suppress(OSError):
            if self._began:
                self._lease = self._lease.model_copy(update={"status": status, "error": error})
                self._write()
            elif self.before is not None:
                storage.write_text(self._path, self.before.model_dump_json(indent=1))
            else:
                self._path.unlink(missing_ok=True)
                if self._made is not None:
                    storage.remove_empty(self._made)

    @property
    def _path(self) -> Path:
        return self._run_dir / LEASE

    def _keep(self) -> None:
        while not self._over.wait(RENEW_S):
            self._renew()

    def _renew(self) -> None:
        try:
            self._look()
            if not self._lost:
                self._write()
        except OSError as error:
            logger.warning("the lease of %s cannot be renewed: %s", self._run_dir, error)

    def _look(self) -> None:
        """Whose lease it is now. (None at all is no other's.)"""
        found = read(self._run_dir)
        if found is not None and found.attempt != self._lease.attempt:
            self._lost = (
                f"{self._run_dir} was taken over by another call: {found}. This one has stopped, "
                "because two runs destroy each other's checkpoints in one folder: give each its "
                "own tracking.run_name"
            )

    def _write(self) -> None:
        with self._lock:
            self._lease = self._lease.model_copy(update={"renewed": time.time()})
            storage.write_text(self._path, self._lease.model_dump_json(indent=1))


def wait_until_free(run_dir: Path) -> Lease | None:
    """The lease that was left in a folder, when its holder has ended or is gone. Writes nothing:
    ``held`` looks again.

    Raises ``CheckpointError`` when the holder is alive.
    """
    found = first = read(run_dir)
    told = False
    began = time.monotonic()
    while found is not None and found.status == "running" and not _is_stale(found):
        here = _is_here(found)
        if here is False:
            return found
        if here or (first is not None and found.renewed != first.renewed):
            raise _in_use(run_dir, found)
        if not told:
            told = True
            click.echo(
                f"{run_dir} is in use by {found}: waiting to see whether that one is alive",
                err=True,
            )
        if time.monotonic() - began > STALE_S:  # its clock is ahead of this one
            return found
        time.sleep(1.0)
        found = read(run_dir)
    return found


def refuse_in_use(run_dir: Path) -> None:
    """Raise ``CheckpointError`` where the holder of a folder is alive, as far as it shows at once:
    one on this machine."""
    found = read(run_dir)
    if found is not None and is_alive(found) and _is_here(found):
        raise _in_use(run_dir, found)


def _end(dead: Lease, run_dir: Path) -> None:
    """Say that a run has lost its driver, in MLflow too."""
    why = gone(dead)
    logger.warning("%s: %s", run_dir, why)
    if dead.tracking is not None:
        tracking.end_dead(dead.tracking, run_dir.parent, why)


def gone(dead: Lease) -> str:
    """What there is to say of a driver that has not ended its run."""
    return f"the driver is gone: {dead}; its last word was on {told_time(dead.renewed)}"


def is_alive(lease: Lease) -> bool:
    """Whether a lease is of a run that is going on, as far as it shows at once."""
    return lease.status == "running" and not _is_stale(lease) and _is_here(lease) is not False


def _is_stale(lease: Lease) -> bool:
    return time.time() - lease.renewed >= STALE_S


def _is_here(lease: Lease) -> bool | None:
    """Whether its process lives on this machine; ``None``: it is of another machine."""
    if lease.host != socket.gethostname():
        return None
    if lease.pid == os.getpid():
        # A container's driver often has the same number as the one before it.
        return lease.attempt in _held
    try:
        return bool(Path(f"/proc/{lease.pid}/cmdline").read_bytes())  # a zombie has none
    except OSError:
        return False


def _in_use(run_dir: Path, lease: Lease) -> CheckpointError:
    age = max(0.0, time.time() - lease.renewed)
    return CheckpointError(
        f"{run_dir} is in use: {lease}; its lease was renewed {age:.0f} s ago. Wait until that run "
        "has ended, or give this one another tracking.run_name. (Of a driver that was killed, a "
        f"lease ends {STALE_S:.0f} s after it was renewed last.)"
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may have no name for its user
        return str(os.getuid())
