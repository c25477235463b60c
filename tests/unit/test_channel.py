"""The channel over real sockets: who is let in, what is lost, and that nobody is in the way."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dbx_llmtrain import channel
from dbx_llmtrain.channel import Client, Server
from dbx_llmtrain.config_checks import is_secret_name


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server("127.0.0.1")
    yield made
    made.close()


def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def connect(server: Server) -> socket.socket:
    """A connection without the client's manners."""
    return socket.create_connection(channel.split_address(server.address), timeout=20)


def wait_for_the_end(connection: socket.socket) -> None:
    """Read until the other side closes; ``TimeoutError`` where it does not."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        return


def test_messages_arrive_in_order(server: Server) -> None:
    got: list[dict[str, Any]] = []
    with server.listening(got.append):
        client = Client(server.address, server.key)
        for number in range(100):
            client.send({"n": number, "loss": float("inf"), "text": "caf\u00e9\nline"})
        assert client.close(), "the server has read everything"
    assert [message["n"] for message in got] == list(range(100))
    assert got[0] == {"n": 0, "loss": float("inf"), "text": "caf\u00e9\nline"}


def test_nobody_listens(server: Server) -> None:
    client = Client(server.address, server.key)
    client.send({"n": 1})
    assert client.close()


def test_the_innermost_block_gets_the_messages(server: Server) -> None:
    outer: list[Any] = []
    inner: list[Any] = []
    with server.listening(outer.append):
        with server.listening(inner.append):
            client = Client(server.address, server.key)
            client.send({"n": 1})
            assert client.close()
        client = Client(server.address, server.key)
        client.send({"n": 2})
        assert client.close()
    assert (outer, inner) == ([{"n": 2}], [{"n": 1}])


def test_a_wrong_key_gets_nothing_through(server: Server) -> None:
    got: list[Any] = []
    with server.listening(got.append):
        stranger = Client(server.address, "0" * 64)
        stranger.send({"n": 1})
        friend = Client(server.address, server.key)
        friend.send({"n": 2})
        assert friend.close()
        assert not stranger.close(1.0)
    assert got == [{"n": 2}]


def test_an_answer_is_worth_nothing_on_another_connection(server: Server) -> None:
    with connect(server) as first, connect(server) as second:
        nonces = [json.loads(one.makefile("rb").readline())["nonce"] for one in (first, second)]
        assert nonces[0] != nonces[1]
        answer = channel._line({"answer": channel._answer(server.key, nonces[0])})
        second.sendall(answer)
        wait_for_the_end(second)
        first.sendall(answer)
        assert json.loads(first.makefile("rb").readline()) == {"welcome": True}


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x80\x04\x95\n",
        b"[1]\n",
        b'{"answer": 7}\n',
        b'{"answer": "\\u00e9"}\n',
        b"{}\n",
        b"[" * 400 + b"\n",
        b"x" * 2000,
        b'{"answer": "\\ud800"}\n',
    ],
)
def test_garbage_closes_its_own_connection_alone(server: Server, data: bytes) -> None:
    got: list[Any] = []
    with server.listening(got.append):
        friend = Client(server.address, server.key)
        with connect(server) as stranger:
            stranger.sendall(data)
            wait_for_the_end(stranger)
        friend.send({"n": 1})
        assert friend.close()
    assert got == [{"n": 1}]


@pytest.mark.parametrize(
    "data", [b"garbage\n", b"[" * 100_000 + b"\n", b"[]\n", b"x" * (channel.LINE_LIMIT + 2)]
)
def test_garbage_after_the_key_closes_the_connection(server: Server, data: bytes) -> None:
    got: list[Any] = []
    with server.listening(got.append), connect(server) as known:
        nonce = json.loads(known.makefile("rb").readline())["nonce"]
        known.sendall(channel._line({"answer": channel._answer(server.key, nonce)}))
        assert json.loads(known.makefile("rb").readline()) == {"welcome": True}
        known.sendall(b'{"n": 1}\n')
        until(lambda: got == [{"n": 1}])
        try:
            known.sendall(data)
        except ConnectionError:
            return  # closed before all of it was sent
        wait_for_the_end(known)


def test_a_slow_handshake_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_HANDSHAKE_S", 0.3)
    server = Server("127.0.0.1")
    try:
        with connect(server) as slow:
            slow.sendall(b'{"ans')
            wait_for_the_end(slow)
    finally:
        server.close()


def test_too_many_strangers_push_out_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_STRANGERS", 3)
    server = Server("127.0.0.1")
    strangers = [connect(server) for _ in range(5)]
    try:
        wait_for_the_end(strangers[0])
        client = Client(server.address, server.key)
        client.send({"n": 1})
        assert client.close()
    finally:
        for stranger in strangers:
            stranger.close()
        server.close()


def test_a_handler_that_raises_loses_its_message_alone(server: Server) -> None:
    got: list[Any] = []

    def handle(message: dict[str, Any]) -> None:
        got.append(message["n"])

    with server.listening(handle):
        client = Client(server.address, server.key)
        client.send({"m": 1})
        client.send({"n": 2})
        assert client.close()
    assert got == [2]


def serve_again(gone: Server) -> Server:
    """A server with the address and the key of one that is gone."""
    place, listen = channel.split_address(gone.address), socket.create_server
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_server", lambda _, **options: listen(place, **options))
        server = Server(place[0])
    server.key = gone.key
    return server


def test_a_client_connects_again(server: Server) -> None:
    got: list[Any] = []
    client = Client(server.address, server.key)
    with server.listening(got.append):
        client.send({"n": 1})
        until(lambda: got)
    server.close()
    client.send({"n": 2})
    time.sleep(0.1)
    successor = serve_again(server)
    try:
        with successor.listening(got.append):
            client.send({"n": 3})
            assert client.close()
    finally:
        successor.close()
    assert got == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_a_server_that_is_gone_costs_nothing(server: Server) -> None:
    server.close()
    client = Client(server.address, server.key)
    for number in range(10):
        client.send({"n": number})
    started = time.monotonic()
    assert not client.close(20.0)
    assert time.monotonic() - started < 10.0, "nobody waits for a server that refuses"


def test_something_else_at_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        client = Client(f"127.0.0.1:{other.getsockname()[1]}", "key")
        connection, _ = other.accept()
        with connection:
            connection.sendall(b"220 mail.example.org ESMTP\r\n")
        client.send({"n": 1})
        assert not client.close(0.5)
    assert not Client("no port", "key").close(0.1)
    assert not Client("127.0.0.1:99999", "key").close(0.1)


def test_a_server_that_does_not_read_blocks_nobody() -> None:
    """A full queue loses the oldest; close keeps to its time."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        client = Client(f"127.0.0.1:{deaf.getsockname()[1]}", "key", queue=3)
        for number in range(1000):
            client.send({"n": number})
        assert [json.loads(line)["n"] for line in client._messages] == [997, 998, 999]
        started = time.monotonic()
        assert not client.close(0.3)
        assert time.monotonic() - started < 5.0


def test_what_cannot_be_sent_is_dropped(server: Server) -> None:
    got: list[Any] = []
    with server.listening(got.append):
        client = Client(server.address, server.key)
        client.send({"n": object()})
        client.send({"n": "x" * channel.LINE_LIMIT})
        client.send({"n": 1})
        assert client.close()
        client.send({"n": 2})
    assert got == [{"n": 1}]


def test_nothing_is_left() -> None:
    before, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    server = Server("127.0.0.1")
    clients = [Client(server.address, server.key) for _ in range(5)]
    strangers = [connect(server) for _ in range(5)]
    until(lambda: len(server._peers) == 10)
    server.close()
    server.close()
    for client in clients:
        client.close(0.5)
    for stranger in strangers:
        stranger.close()
    until(lambda: threading.active_count() <= before)
    assert len(os.listdir("/proc/self/fd")) <= files


def test_the_key_is_named_as_a_secret_and_shown_nowhere(server: Server) -> None:
    assert is_secret_name(channel.SECRET)
    variables = server.variables()
    assert variables == {channel.ADDRESS: server.address, channel.SECRET: server.key}
    client = channel.client(variables)
    assert client is not None
    assert server.key not in f"{server!r} {client!r}"
    client.close()
    assert channel.client({}) is None


def test_the_address_that_others_are_told(server: Server) -> None:
    other = Server("127.0.0.1", "driver.example.org")
    try:
        assert other.address.startswith("driver.example.org:")
        assert other.key != server.key
    finally:
        other.close()
    assert channel.split_address("[fd00::1]:7") == ("fd00::1", 7)
    with pytest.raises(OSError):  # noqa: PT011 - the address is of a network for examples
        Server("192.0.2.1")


def test_many_clients(server: Server) -> None:
    """256 ranks with 20 events each."""
    got: list[Any] = []
    with server.listening(got.append):
        clients = [Client(server.address, server.key) for _ in range(256)]
        for number in range(20):
            for rank, client in enumerate(clients):
                client.send({"rank": rank, "n": number})
        assert all([client.close(30.0) for client in clients])
    assert len(got) == 256 * 20
    for rank in (0, 255):
        assert [message["n"] for message in got if message["rank"] == rank] == list(range(20))
