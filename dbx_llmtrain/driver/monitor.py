"""Follow a run from the driver: every event of rank 0 once and in order, and where each rank is.

Events come over the channel and are in a file of the run folder as well. The channel is quick, the
file has everything: what one of them lacks is taken from the other.
"""

from __future__ import annotations

import contextvars
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dbx_llmtrain import storage
from dbx_llmtrain.channel import Message, Server
from dbx_llmtrain.events import EVENTS_FILE, Event, read_events
from dbx_llmtrain.live_state import ENDS
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import node
from dbx_llmtrain.worker.output import LOG_ONLY_VARIABLE

logger = logging.getLogger(__name__)

Handler = Callable[[Event], None]
Used = Callable[[str, float, Mapping[str, float]], None]
"""Takes what a node was used for at a time."""

_POLL_S = 2.0
_QUIET_S = 6.0
"""The file is looked at when the channel has brought no event for so long."""
_LOOPBACK = "127.0.0.1"


@contextmanager
def open_channel(settings: Mapping[str, str], *, local_mode: bool) -> Iterator[Server | None]:
    """A server for ranks and nodes for as long as the block lasts.

    ``settings`` are Spark's. It listens where executors reach the driver, in local mode on the
    loopback address alone. Where that cannot be, ``None``, with a warning: then events come from
    the run folder.
    """
    host = settings.get("spark.driver.host") or _LOOPBACK
    bind = settings.get("spark.driver.bindAddress") or host
    server = None
    try:
        server = Server(_LOOPBACK) if local_mode else Server(bind, host)
    except OSError as error:
        logger.warning(
            "no live events from the ranks: the driver cannot listen on %s (%s); they are read "
            "from the run folder instead, some seconds later",
            bind,
            error,
        )
    try:
        yield server
    finally:
        if server is not None:
            server.close()


def rank_variables(server: Server | None) -> dict[str, str]:
    """Environment of a rank whose driver shows progress, secret as far as it names the key."""
    return {LOG_ONLY_VARIABLE: "1"} | (server.variables() if server else {})


@dataclass(frozen=True)
class RankState:
    """Where a rank was when it was last heard of.

    ``time`` is seconds since the epoch on the rank's clock, ``heard`` is ``time.monotonic()`` of
    the driver, ``phase`` what it was about to do, or ``failed`` or ``finished``. ``moved`` is when
    it was last heard to be further than before (by its step, its phase, or ``moves``, which counts
    parts of what takes long), ``at`` where its main thread was, ``host`` its machine.
    """

    step: int
    time: float
    heard: float
    phase: str = ""
    moved: float = 0.0
    moves: int = 0
    at: str = ""
    host: str = ""


class LiveState:
    """The last that was heard of every rank, for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks: dict[int, RankState] = {}

    def ranks(self) -> dict[int, RankState]:
        """Every rank that has been heard of."""
        with self._lock:
            return dict(self._ranks)

    def update(self, event: Event, now: float) -> None:
        """Take an event in, in whatever order it comes."""
        with self._lock:
            known = self._ranks.get(event.rank)
            if known is None or event.time >= known.time:
                self._ranks[event.rank] = _next(known or RankState(-1, 0.0, now), event, now)


def _next(known: RankState, event: Event, now: float) -> RankState:
    """What is known of a rank after an event of it."""
    phase = _phase(event) or known.phase
    if known.phase in ENDS and event.kind == "alive":
        phase = known.phase  # its heartbeat ends a little later
    moves = int(event.data.get("moves", known.moves))
    same = (event.step, phase, moves) == (known.step, known.phase, known.moves)
    return RankState(
        step=event.step,
        time=event.time,
        heard=now,
        phase=phase,
        moved=known.moved if same and event.kind == "alive" else now,
        moves=moves,
        at=str(event.data.get("at", "")),
        host=str(event.data.get("host", known.host)),
    )


def _phase(event: Event) -> str:
    """The phase that an event tells of, if any."""
    if event.kind in ("phase", "alive"):
        return str(event.data.get("phase", ""))
    return event.kind if event.kind in ENDS else ""


@contextmanager
def follow(
    plan: RunPlan,
    *handlers: Handler,
    server: Server | None = None,
    heard: Handler | None = None,
    used: Used | None = None,
) -> Iterator[LiveState]:
    """Call the handlers with every event of this attempt's log, in order, each once.

    A thread takes them from the channel, and from the file while there is nothing from the channel;
    what is left is read when the block ends, by success or failure. ``heard`` also gets what other
    ranks say, ``used`` what their nodes are used for. Handlers should not raise: what they do raise
    is logged, once per kind.
    """
    follower = _Follower(plan, handlers, heard, used)
    if server is None:
        with follower.running():
            yield follower.live
    else:
        with follower.running(), server.listening(follower.receive):
            yield follower.live


class _Follower:
    """The thread of ``follow`` and what it knows."""

    def __init__(
        self,
        plan: RunPlan,
        handlers: tuple[Handler, ...],
        heard: Handler | None,
        used: Used | None = None,
    ) -> None:
        self.live = LiveState()
        self._attempt = plan.attempt
        self._path = storage.local_path(plan.run_dir) / EVENTS_FILE
        self._handlers = handlers
        self._warned: set[str] = set()
        self._heard = heard
        self._used = used
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._next = 1
        self._waiting: dict[int, Event] = {}
        self._last_live = float("-inf")
        self._last_poll = float("-inf")
        self._seen_file: tuple[int, int] | None = None

    def receive(self, message: Message) -> None:
        """Take a message of the channel; runs in the server's thread."""
        if "event" in message:
            event = Event.model_validate(message["event"])
            if event.attempt == self._attempt:
                self.live.update(event, time.monotonic())
                self._queue.put(event)
        elif self._used is not None and message.get("usage", {}).get("attempt") == self._attempt:
            told = message["usage"]
            self._used(str(told["node"]), float(told["time"]), told["values"])

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._run,),
            name="dbx-llmtrain-monitor",
            daemon=True,
        )
        thread.start()
        try:
            yield
        finally:
            self._queue.put(None)
            thread.join()

    def _run(self) -> None:
        while True:
            with suppress(queue.Empty):
                event = self._queue.get(timeout=_POLL_S)
                if event is None:
                    break
                self._take(event)
            self._poll()
        self._finish()

    def _take(self, event: Event) -> None:
        if self._heard is not None:
            with node.Capture():
                self._heard(event)
        if event.n:
            self._last_live = time.monotonic()
            self._waiting[event.n] = event
            self._deliver()

    def _poll(self) -> None:
        """Read the file if it may have what is missing, every two seconds at most."""
        now = time.monotonic()
        quiet = now - self._last_live >= _QUIET_S
        if (quiet or self._waiting) and now - self._last_poll >= _POLL_S:
            self._last_poll = now
            self._read()

    def _read(self) -> None:
        try:
            state = os.stat(self._path)
        except OSError:
            return
        if (state.st_mtime_ns, state.st_size) == self._seen_file:
            return
        self._seen_file = (state.st_mtime_ns, state.st_size)
        for event in read_events(Path(self._path), attempt=self._attempt):
            if event.n >= self._next and event.n not in self._waiting:
                self.live.update(event, time.monotonic())
                self._waiting[event.n] = event
        self._deliver()

    def _deliver(self) -> None:
        for number in [number for number in self._waiting if number < self._next]:
            del self._waiting[number]
        while (event := self._waiting.pop(self._next, None)) is not None:
            self._next += 1
            self._handle(event)

    def _handle(self, event: Event) -> None:
        for handler in self._handlers:
            with node.Capture() as capture:
                handler(event)
            if capture.error and capture.text() not in self._warned:
                self._warned.add(capture.text())
                logger.warning("an event was lost in one place: %s", capture.text())

    def _finish(self) -> None:
        """What is left at the end, also after a number that is nowhere."""
        self._seen_file = None
        self._read()
        for number in sorted(self._waiting):
            self._handle(self._waiting.pop(number))
            self._next = number + 1
