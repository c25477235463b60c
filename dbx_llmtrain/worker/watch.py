"""The heartbeat of a rank: every few seconds a thread says where the rank is, and whether it moves.

It goes to the driver by the channel, or where that cannot be reached into a small file of the run
folder. A rank that does not move looks whether its stacks are asked for, and writes them.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbx_llmtrain import storage
from dbx_llmtrain.events import Event
from dbx_llmtrain.worker import requests, stacks

if TYPE_CHECKING:
    from dbx_llmtrain.channel import Client
    from dbx_llmtrain.records import RunPlan

BEAT_S = 5.0
"""Seconds between two heartbeats, at most."""
FILE_S = 30.0
"""The same where they go into a file."""
_SHARE = 4
"""A rank says so often within ``cluster.stall_timeout`` where that is short."""
_WORK = 256 * 1024
"""Bytes that a process reads or writes between two beats when it works on files: what this thread
and the like do themselves is less."""
_STORE = 4096
"""The same for each rank: rank 0 answers the others' questions to the process group's store."""
_LEAST_COLLECTIVE_S = 1800.0
BEATS = "rank-*.beat"


def beat_path(run_dir: Path, rank: int) -> Path:
    """Where a rank's heartbeat lies that the driver does not hear."""
    return run_dir / "logs" / f"rank-{rank:05d}.beat"


def collective_timeout(plan: RunPlan) -> float:
    """Seconds after which a collective fails by itself: later than a stall is noticed, which says
    more."""
    return max(_LEAST_COLLECTIVE_S, 2 * plan.config.cluster.stall_timeout)


class Watch:
    """The heartbeat of this rank, from now until ``close``. ``where`` says the phase and the steps
    that are done. No method raises."""

    def __init__(
        self,
        plan: RunPlan,
        rank: int,
        *,
        live: Client | None,
        where: Callable[[], tuple[str, int]],
        home: Path | None,
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._live = live
        self._where = where
        self._home = home
        self._run_dir = storage.local_path(plan.run_dir)
        self._main = threading.get_ident()
        self._host = socket.gethostname()
        self._passes = 0
        self._files_worked = 0
        self._bytes = _bytes_moved()
        self._last: tuple[object, ...] = ()
        self._moved = time.monotonic()
        self._answered = ""
        self._published = time.monotonic()
        self._over = threading.Event()
        timeout = plan.config.cluster.stall_timeout
        self._every = min(BEAT_S, timeout / _SHARE)
        self._patience = timeout / 2
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def moved(self, *_: Any) -> None:
        """A part of something longer is done, such as a micro-batch; takes any arguments, so that
        it can be a hook."""
        self._passes += 1

    def close(self) -> None:
        """End it. What it has left for the driver in a file goes."""
        self._over.set()
        self._thread.join(2.0)
        with suppress(OSError):
            beat_path(self._run_dir, self._rank).unlink(missing_ok=True)

    def _run(self) -> None:
        with stacks.watchdog(self._home, self._patience) as dog:
            while not self._over.wait(self._every):
                if dog is not None:
                    dog.feed()
                with suppress(Exception):  # watching never ends a run
                    self._beat()

    def _beat(self) -> None:
        phase, step = self._where()
        moved = _bytes_moved()
        if moved - self._bytes >= _WORK + _STORE * self._plan.world_size:
            self._files_worked += 1
        self._bytes = moved
        now = time.monotonic()
        state = (phase, step, self._passes, self._files_worked)
        if state != self._last:
            self._last, self._moved = state, now
        self._say(phase, step, now)
        if now - self._moved >= self._patience:
            self._answer(phase, step)

    def _say(self, phase: str, step: int, now: float) -> None:
        event = Event(
            attempt=self._plan.attempt,
            rank=self._rank,
            kind="alive",
            time=time.time(),
            step=step,
            data={
                "phase": phase,
                "moves": self._passes + self._files_worked,
                "at": stacks.place_of(self._main),
                "host": self._host,
            },
        )
        if self._live is not None:
            self._live.send({"event": event.model_dump(mode="json")})
        if self._live is None or not self._live.connected:
            if now - self._published >= min(FILE_S, 2 * self._every):
                self._published = now
                storage.write_text(beat_path(self._run_dir, self._rank), event.model_dump_json())

    def _answer(self, phase: str, step: int) -> None:
        """Write the stacks when they are asked for, once for a request."""
        try:
            asked = (self._run_dir / requests.STACKS).read_text(encoding="utf-8")
        except OSError:
            return
        if asked == self._answered:
            return
        self._answered = asked
        when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        more = f"request {asked}, on {self._host}, step {step}, {phase}, {when}"
        text = stacks.head(self._plan.attempt, self._rank, more) + stacks.stacks_text(self._main)
        storage.write_text(stacks.stacks_path(self._run_dir, self._rank), text + _collectives())


def _bytes_moved() -> int:
    """Bytes that this process has read and written so far, and those that were read for it from
    disks; sockets do not count. 0 where the system does not say."""
    found = 0
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name in ("rchar", "wchar", "read_bytes"):
                found += int(value)
    return found


def _collectives() -> str:
    """What NCCL's flight recorder knows of the collectives that have not ended, as JSON; empty
    without one. (gloo has none.)"""
    module = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(module, "_dump_nccl_trace_json", None)
    with suppress(Exception):
        if dump is not None:
            found = dump(True, True)
            text = found.decode(errors="replace") if isinstance(found, bytes) else str(found)
            return f"\ncollectives by NCCL's flight recorder:\n{text}\n"
    return ""
