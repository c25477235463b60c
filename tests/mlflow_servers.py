"""Real MLflow tracking servers, and a door before one that can be jammed."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[str]:
    """A real tracking server over SQLite, in a process group of its own."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/server.db"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    environ = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, env=environ, start_new_session=True
        )
        try:
            _wait_until_up(f"http://127.0.0.1:{port}/health", process, folder / "server.log")
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    pytest.fail(f"the MLflow server did not start:\n{log.read_text()[-3000:]}")


class Door:
    """Passes requests on to a server, unless it is told otherwise.

    ``mode``: ``open``; ``hang`` (no answer), ``slow`` (an answer after ``delay`` seconds), or a
    status that every request gets whose path contains ``where``. After ``requests`` of them it
    hangs, where that is set.
    """

    def __init__(self, target: str) -> None:
        self.target = urlsplit(target)
        self.mode: str | int = "open"
        self.where = ""
        self.delay = 0.0
        self.headers: dict[str, str] = {}
        self.requests: int | None = None
        self.seen: list[str] = []
        self.closed = threading.Event()
        self.uri = ""

    def blocks(self, path: str) -> str | int | None:
        """What a request gets instead of an answer of the server."""
        self.seen.append(path)
        if self.requests is not None:
            self.requests -= 1
            if self.requests < 0:
                return "hang"
        return self.mode if self.mode != "open" and self.where in path else None


@contextlib.contextmanager
def door(target: str) -> Iterator[Door]:
    """A door before the server ``target``, for as long as the block lasts."""
    found = Door(target)

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            blocked = found.blocks(self.path)
            if blocked == "hang":
                found.closed.wait(60)
                return
            if blocked == "slow":
                found.closed.wait(found.delay)
            elif blocked is not None:
                self.answer(int(blocked), found.headers, b"no")
                return
            self.pass_on(body)

        do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

        def pass_on(self, body: bytes) -> None:
            there = http.client.HTTPConnection(str(found.target.hostname), found.target.port)
            with contextlib.closing(there):
                there.request(self.command, self.path, body, dict(self.headers))
                answer = there.getresponse()
                kept = {"Content-Type": answer.getheader("Content-Type", "application/json")}
                self.answer(answer.status, kept, answer.read())

        def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            with contextlib.suppress(OSError):  # nobody waits for it any more
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found.uri = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.closed.set()
        server.shutdown()
        server.server_close()
