"""What stands in for Unity Catalog's registry: an HTTP server with the calls that MLflow makes.

It keeps what it is sent, and refuses tags where it is told to. Files go to it as Databricks' SDK
sends them (``USE_SDK``), not into anybody's cloud storage.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

USE_SDK = {"MLFLOW_USE_DATABRICKS_SDK_MODEL_ARTIFACTS_REPO_FOR_UC": "true"}


@dataclass
class Catalog:
    """What the server knows. ``calls`` are (method, path, body or query) in their order."""

    url: str = ""
    refuse_tags: bool = False
    refuse_aliases: bool = False
    calls: list[tuple[str, str, Any]] = field(default_factory=list)
    versions: dict[str, dict[str, Any]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and body of an answer."""
        what = path.rpartition("/mlflow/unity-catalog/")[2]
        name = body.get("name") or body.get("full_name", "")
        match method, what:
            case "POST", "registered-models/create":
                return 200, {"registered_model": {"name": name}}
            case "GET", "registered-models/get":
                aliases = [{"alias": key, "version": one} for key, one in self.aliases.items()]
                return 200, {"registered_model": {"name": name, "aliases": aliases}}
            case "GET", "registered-models/alias":
                version = self.versions.get(self.aliases.get(body["alias"], ""))
                return 200, {"model_version": version}
            case "POST", "model-versions/create":
                version = {"name": name, "version": str(len(self.versions) + 1), **body}
                version |= {"status": "PENDING_REGISTRATION", "storage_location": "s3://b/m"}
                self.versions[version["version"]] = version
                return 200, {"model_version": version}
            case "POST", "model-versions/finalize":
                self.versions[body["version"]]["status"] = "READY"
                return 200, {"model_version": self.versions[body["version"]]}
            case "GET", "model-versions/get":
                return 200, {"model_version": self.versions[body["version"]]}
            case "POST", "registered-models/alias" if not self.refuse_aliases:
                self.aliases[body["alias"]] = body["version"]
                return 200, {}
            case "POST", "model-versions/set-tag" if not self.refuse_tags:
                self.tags[body["key"]] = body["value"]
                return 200, {}
            case "POST", "model-versions/set-tag":
                error = {"error_code": "PERMISSION_DENIED", "message": "needs APPLY TAG"}
                return 403, error
        return 404, {"error_code": "ENDPOINT_NOT_FOUND", "message": f"no {method} {path}"}

    def file(self, method: str, path: str, content: bytes) -> bytes:
        """Put or get a file, or list a folder."""
        kind, _, name = path.partition("/fs/")[2].partition("/")
        if kind == "directories":
            return json.dumps({"contents": self._listed(name.rstrip("/"))}).encode()
        if method == "PUT":
            self.files[name] = content
            return b""
        return self.files[name]

    def _listed(self, folder: str) -> list[dict[str, Any]]:
        below = {}
        for name, content in self.files.items():
            if name.startswith(f"{folder}/"):
                first, _, rest = name.removeprefix(f"{folder}/").partition("/")
                entry = {"path": f"/{folder}/{first}", "name": first, "is_directory": bool(rest)}
                below[first] = entry | ({} if rest else {"file_size": len(content)})
        return list(below.values())


@contextmanager
def catalog() -> Iterator[Catalog]:
    """A server on a port of its own, for as long as the block lasts."""
    known = Catalog()

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            parts = urlsplit(self.path)
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = unquote(parts.path)
            if "/fs/" in path:
                known.calls.append((self.command, path, len(raw)))
                return self._send(200, known.file(self.command, path, raw))
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            body = json.loads(raw) if raw else query
            known.calls.append((self.command, path, body))
            status, answer = known.answer(self.command, path, body)
            return self._send(status, json.dumps(answer).encode())

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = _handle

        def _send(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    known.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield known
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
