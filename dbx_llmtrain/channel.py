"""Messages from ranks and nodes to the driver, live: one TCP port, JSON lines, a shared key.

The driver opens a ``Server``; whoever has its address and key talks through a ``Client``. The
server sends a random nonce, the client answers with its HMAC-SHA256 under the key, and only then is
anything else read. What is received is JSON and nothing but data. A connection that is wrong in any
way is closed, and no other notices.

The channel is for watching. What must not be lost is in files as well, so nothing here raises,
blocks or waits in the way of what it reports. Standard library only: nodes use it before anything
is known to be installed.
"""

from __future__ import annotations

import contextvars
import hmac
import json
import logging
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

ADDRESS = "DBX_LLMTRAIN_EVENTS"
SECRET = "DBX_LLMTRAIN_EVENTS_SECRET"
"""Environment variables of a rank: ``host:port`` of the driver's server, and the key."""

LINE_LIMIT = 1024 * 1024
"""Bytes of a message at most."""
_ANSWER_LIMIT = 512
_HANDSHAKE_S = 10.0
_STRANGERS = 1024
"""Connections that have not shown the key yet, at most; the oldest goes first."""
_READ = 64 * 1024
_TICK_S = 0.2
_UNHEARD_MS = 20_000
"""Without an answer from the other machine for so long a connection counts as lost."""
_PAUSE_S = 0.2
"""Before a lost connection is made anew; doubled each time."""
_FAULTS = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""What a server that is gone, or something else at its address, can cause."""

Message = dict[str, Any]


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``; an IPv6 host is in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _answer(key: str, nonce: str) -> str:
    return hmac.new(key.encode(), nonce.encode(), "sha256").hexdigest()


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


@dataclass
class _Peer:
    """One connection of the server."""

    nonce: str
    since: float
    known: bool = False
    buffer: bytearray = field(default_factory=bytearray)


class Server:
    """The driver's end: one port and one thread for every client.

    ``key`` is random. A message is given to the handler of the innermost ``listening`` block, in
    the server's thread, in the order of its connection; the handler has to be quick. Messages that
    nobody listens to are dropped.
    """

    def __init__(self, bind: str, advertise: str | None = None) -> None:
        """Listen on the address ``bind``; clients are told ``advertise`` where it differs.

        Raises ``OSError`` where the address is not one of this machine.
        """
        self.key = secrets.token_hex(32)
        family, _, _, _, place = socket.getaddrinfo(bind, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(place[:2], family=family, backlog=512)
        self._listener.setblocking(False)
        host = advertise or bind
        port = self._listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._handlers: list[Callable[[Message], None]] = []
        self._peers: dict[socket.socket, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._closing = False
        # What a thread shows in a notebook belongs to the cell in whose context it runs.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._serve,),
            name="dbx-llmtrain-channel",
            daemon=True,
        )
        self._thread.start()

    def __repr__(self) -> str:
        return f"Server({self.address})"

    def variables(self) -> dict[str, str]:
        """The environment by which a rank finds this server."""
        return {ADDRESS: self.address, SECRET: self.key}

    @contextmanager
    def listening(self, handle: Callable[[Message], None]) -> Iterator[None]:
        """Give every message to ``handle`` for as long as the block lasts."""
        self._handlers.append(handle)
        try:
            yield
        finally:
            self._handlers.remove(handle)

    def close(self) -> None:
        """Close every connection and end the thread. A second call does nothing."""
        self._closing = True
        self._thread.join()

    def _serve(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(_TICK_S):
                    if isinstance(key.fileobj, socket.socket):
                        self._attend(key.fileobj)
                self._drop_strangers()
        finally:
            for peer in list(self._peers):
                self._drop(peer)
            self._listener.close()
            self._selector.close()

    def _attend(self, connection: socket.socket) -> None:
        """Whatever a peer has sent, it costs its own connection at most: ranks end where nobody
        listens any more."""
        try:
            if connection is self._listener:
                self._accept()
            else:
                self._receive(connection)
        except Exception as error:
            logger.debug("a message broke its connection", exc_info=error)
            if connection is not self._listener:
                self._drop(connection)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            time.sleep(_TICK_S)  # too many open files, say: others go on meanwhile
            return
        peer = _Peer(nonce=secrets.token_hex(32), since=time.monotonic())
        self._peers[connection] = peer
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.send(_line({"nonce": peer.nonce}))
            self._selector.register(connection, selectors.EVENT_READ)
        except OSError:
            self._drop(connection)

    def _receive(self, connection: socket.socket) -> None:
        peer = self._peers[connection]
        try:
            data = connection.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer.buffer += data
        *lines, rest = peer.buffer.split(b"\n") if data else [bytearray()]
        limit = LINE_LIMIT if peer.known else _ANSWER_LIMIT
        fine = bool(data) and all(self._take(connection, peer, bytes(line)) for line in lines)
        peer.buffer = bytearray(rest)
        if not fine or len(rest) > limit:
            self._drop(connection)

    def _take(self, connection: socket.socket, peer: _Peer, line: bytes) -> bool:
        """Act on a line; ``False`` when the connection is to be closed."""
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if not isinstance(message, dict):
            return False
        if peer.known:
            for handle in self._handlers[-1:]:
                with suppress(Exception):  # one bad message is not the end of all
                    handle(message)
            return True
        given = str(message.get("answer", "")).encode("utf-8", "replace")
        peer.known = hmac.compare_digest(given, _answer(self.key, peer.nonce).encode())
        if peer.known:
            with suppress(OSError):
                connection.send(_line({"welcome": True}))
        return peer.known

    def _drop_strangers(self) -> None:
        strangers = [item for item in self._peers.items() if not item[1].known]
        limit = time.monotonic() - _HANDSHAKE_S
        surplus = len(strangers) - _STRANGERS
        for number, (connection, peer) in enumerate(strangers):
            if number < surplus or peer.since < limit:
                self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        with suppress(KeyError, ValueError, OSError):
            self._selector.unregister(connection)
        self._peers.pop(connection, None)
        connection.close()


class Client:
    """The other end: a queue and a thread that sends what is in it.

    No method raises or waits, except ``close``, for at most its time-out. A lost connection is
    made anew, with growing pauses; while there is none, the oldest messages make room for new ones.
    """

    def __init__(self, address: str, key: str, *, queue: int = 1000) -> None:
        self._address = address
        self._key = key
        self._messages: deque[bytes] = deque(maxlen=queue)
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._flushed = False
        self._connected_now = False
        self._thread = threading.Thread(target=self._run, name="dbx-llmtrain-events", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Client({self._address})"

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._connected_now

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message of JSON values. One that is too long or no JSON is dropped."""
        try:
            line = _line(message)
        except (TypeError, ValueError, RecursionError):
            return
        if len(line) <= LINE_LIMIT:
            with self._changed:
                self._messages.append(line)
                self._changed.notify()

    def close(self, timeout: float = 5.0) -> bool:
        """Send what is queued; whether the server has read all of it within ``timeout`` s."""
        with self._changed:
            if self._deadline is None:
                self._deadline = time.monotonic() + timeout
            self._changed.notify()
        self._thread.join(timeout + 1.0)
        return not self._thread.is_alive() and not self._messages and self._flushed

    def _run(self) -> None:
        pause, last_tries = _PAUSE_S, 2
        while last_tries and not self._over():
            try:
                with self._connected() as connection:
                    pause = _PAUSE_S
                    if self._talk(connection):
                        self._flushed = True
                        return
            except _FAULTS:
                closing = self._deadline is not None
                last_tries -= closing
                self._wait(pause, closing)
                # Told to close meanwhile: the server may be back.
                pause = min(2 * pause, 30.0) if self._deadline is None else _PAUSE_S

    def _wait(self, pause: float, closing: bool) -> None:
        """Wait for ``pause`` seconds, or until told to close where that is news."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._over() or (not closing and self._deadline is not None),
                self._left(pause),
            )

    def _over(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _left(self, most: float) -> float:
        """Seconds until the deadline, ``most`` at most and where there is none."""
        if self._deadline is None:
            return most
        return max(0.01, min(most, self._deadline - time.monotonic()))

    @contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        place = split_address(self._address)
        with socket.create_connection(place, timeout=self._left(5.0)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # what is not acknowledged is not heard
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNHEARD_MS)
            connection.settimeout(self._left(_HANDSHAKE_S))
            with connection.makefile("rb") as reader:
                nonce = json.loads(reader.readline(_ANSWER_LIMIT))["nonce"]
                connection.sendall(_line({"answer": _answer(self._key, str(nonce))}))
                if not reader.readline(_ANSWER_LIMIT):
                    raise ConnectionError("the server did not accept the key")
            self._connected_now = True
            try:
                yield connection
            finally:
                self._connected_now = False

    def _talk(self, connection: socket.socket) -> bool:
        """Send until told to close; ``True`` when the server has read everything."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._messages or self._deadline is not None, 30.0)
                line = self._messages.popleft() if self._messages else None
            if line is None and self._deadline is not None:
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(self._left(30.0))
                return connection.recv(1) == b""
            try:
                self._check_open(connection)
                connection.settimeout(self._left(_HANDSHAKE_S))
                connection.sendall(line or b"")
            except OSError:
                self._put_back(line)
                raise

    def _check_open(self, connection: socket.socket) -> None:
        """The server says nothing more; so what can be read is the end of the connection."""
        connection.settimeout(0.0)
        with suppress(BlockingIOError):
            connection.recv(1)
            raise ConnectionError("the server has closed the connection")

    def _put_back(self, line: bytes | None) -> None:
        with self._changed:
            if line is not None and len(self._messages) < (self._messages.maxlen or 0):
                self._messages.appendleft(line)


def client(environ: Mapping[str, str]) -> Client | None:
    """A client of the server that the environment names, if it names one."""
    if environ.get(ADDRESS) and environ.get(SECRET):
        return Client(environ[ADDRESS], environ[SECRET])
    return None
