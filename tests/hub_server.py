"""A small Hugging Face hub on this machine that takes uploads, and a process that uses it."""

from __future__ import annotations

import base64
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

TOKEN = "hf_" + "aB3" * 8
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the hub has: files by repository, which ones are private; ``refuses`` (a status) every
    new repository. ``asked`` are the requests that it got."""

    address: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    refuses: int = 0
    asked: list[str] = field(default_factory=list)
    stored: dict[str, bytes] = field(default_factory=dict)

    def answer(self, method: str, path: str, body: bytes, token: str) -> tuple[int, Any]:
        """Status and JSON."""
        if path.startswith("/store/"):  # signed addresses need no token
            self.stored[path.removeprefix("/store/")] = body
            return 200, {}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path == "/api/whoami-v2":
            return 200, {"type": "user", "name": "me", "orgs": []}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        name, _, rest = path.removeprefix("/api/models/").partition("/")
        name, _, rest = f"{name}/{rest}".replace(".git", "", 1).lstrip("/").partition("/")
        owner, (name, _, rest) = name, rest.partition("/")
        return self._in_repository(f"{owner}/{name}", rest, body)

    def _create(self, wanted: dict[str, Any]) -> tuple[int, Any]:
        name = f"{wanted.get('organization')}/{wanted['name']}"
        if self.refuses:
            return self.refuses, {"error": "no"}
        if name in self.files:
            return 409, {"error": "exists", "url": f"{self.address}/{name}"}
        private = wanted.get("private") or wanted.get("visibility") == "private"
        self.files[name], self.private[name] = {}, bool(private)
        return 200, {"url": f"{self.address}/{name}", "name": name}

    def _in_repository(self, name: str, rest: str, body: bytes) -> tuple[int, Any]:
        if name not in self.files:
            return 404, {"error": "Repository not found"}
        if rest.startswith("preupload/"):
            paths = [entry["path"] for entry in json.loads(body)["files"]]
            return 200, {
                "files": [
                    {
                        "path": path,
                        "uploadMode": "lfs" if path.endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for path in paths
                ]
            }
        if rest == "info/lfs/objects/batch":
            objects = [
                entry | {"actions": {"upload": {"href": f"{self.address}/store/{entry['oid']}"}}}
                for entry in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        if rest.startswith("commit/"):
            self._commit(self.files[name], body)
            url = f"{self.address}/{name}/commit/{COMMIT}"
            return 200, {"commitUrl": url, "commitOid": COMMIT, "success": True}
        if rest.startswith("tree/"):
            return 200, [
                {"type": "file", "path": path, "size": len(content), "oid": "0"}
                for path, content in self.files[name].items()
            ]
        siblings = [{"rfilename": path} for path in self.files[name]]
        return 200, {"id": name, "sha": COMMIT, "siblings": siblings}

    def _commit(self, files: dict[str, bytes], body: bytes) -> None:
        for line in body.decode().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.stored[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub, while the block runs."""
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def _do(self) -> None:
            path = self.path.split("?")[0]
            hub.asked.append(f"{self.command} {path}")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            token = self.headers.get("Authorization", "")
            status, content = hub.answer(self.command, path, body, token)
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = _do

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def with_hub(
    address: str, program: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A Python program in a process of its own, which has the hub's client use this hub (it reads
    its settings when it is imported); plain uploads, without the client's own chunk store."""
    settings = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | settings | {"HF_TOKEN": TOKEN} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
