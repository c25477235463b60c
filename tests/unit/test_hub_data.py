"""Data sets of the hub: one commit, one download, splits; and tokenizers without weights.

The hub is a small HTTP server; its client reads its settings when it is imported, hence a process
of its own for every call.
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain import storage
from dbx_llmtrain.driver.inputs import Places, find_inputs
from dbx_llmtrain.sections import DataConfig
from tests import tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROWS = [{"text": f"row {i}"} for i in range(20)]

FIND = """
import json, sys
from pathlib import Path
from dbx_llmtrain.driver.inputs import Places, find_inputs
from dbx_llmtrain.errors import DataError
from dbx_llmtrain.sections import DataConfig

for source in json.loads(sys.argv[1]):
    try:
        (found,) = find_inputs(DataConfig(train=source), None, Places(None, Path(sys.argv[2])))
        rows = [row for row, _ in found.first_rows()]
        print(json.dumps([found.key, [str(file) for file in found.files], rows]))
    except DataError as error:
        print(json.dumps(str(error)))
"""


def answer(folder: Path, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
    """What the hub says of the repositories below ``folder``: ``models/org/tiny`` and the like."""
    is_data = "datasets/" in path
    name = "datasets/org/rows" if is_data else "models/org/tiny"
    root = folder / name
    files = [file for file in sorted(root.rglob("*")) if file.is_file()]
    entries = [
        {"type": "file", "path": file.relative_to(root).as_posix(), "size": file.stat().st_size,
         "oid": storage.hash_file(file)[:40]}
        for file in files
    ]  # fmt: skip
    if path in (f"/api/{name}", f"/api/{name}/revision/{COMMIT}"):
        siblings = [{"rfilename": entry["path"]} for entry in entries]
        info = {"id": "/".join(name.split("/")[1:]), "sha": COMMIT, "siblings": siblings,
                "private": False, "tags": [], "downloads": 0}  # fmt: skip
        return 200, {}, json.dumps(info).encode()
    if path in (f"/api/{name}/tree/{COMMIT}", f"/api/{name}/paths-info/{COMMIT}"):
        return 200, {}, json.dumps(entries).encode()
    inside = path.removeprefix(f"/{name.removeprefix('models/')}/resolve/{COMMIT}/")
    if inside != path and (root / inside).is_file():
        etag = storage.hash_file(root / inside)[:40]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}
        return 200, headers, (root / inside).read_bytes()
    if inside != path or "/tree/" in path:
        return 404, {"X-Error-Code": "EntryNotFound"}, b""
    return 404, {"X-Error-Code": "RepoNotFound"}, b""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    folder = tmp_path / "hub"
    rows = folder / "datasets" / "org" / "rows"
    for name, part in (("train", ROWS), ("test", ROWS[:3])):
        file = rows / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in part))
    tiny.model_folder(folder / "models" / "org" / "tiny")
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.split("?")[0].replace("%2F", "/")
            status, headers, body = answer(folder, self.command, path)
            asked.append(f"{self.command} {path} {status}")
            self.send_response(status)
            headers |= {"Content-Length": str(len(body)), "Content-Type": "application/json"}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def elsewhere(code: str, endpoint: str, cache: Path, *what: Any) -> list[Any]:
    """What the code prints, line by line, in a process that knows this hub."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": f"{cache}-home"}
    env = os.environ | settings | {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
    command = [sys.executable, "-c", code, json.dumps(what), str(cache)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line[0] in '["{']


def test_a_hub_data_set_is_downloaded_once(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    cache = tmp_path / "cache"
    sources = (
        "org/rows",
        {"path": "org/rows", "split": "train[:25%]"},
        {"path": "org/rows", "split": "test"},
        "org/rows",
        {"path": "org/rows", "split": "nowhere"},
        "org/none",
    )
    whole, part, test, again, split, missing = elsewhere(FIND, endpoint, cache, *sources)
    assert [row["text"] for row in whole[2]] == [row["text"] for row in ROWS]
    assert part[2] == ROWS[:5]
    assert test[2] == ROWS[:3]
    assert again == whole
    assert whole[0][:5] == ["hub", "org/rows", None, "train", COMMIT]
    assert len({json.dumps(found[0]) for found in (whole, part, test)}) == 3
    downloads = [line for line in asked if line.startswith("GET") and "train.jsonl" in line]
    assert 1 <= len(downloads) <= 4, "one for each split that was asked for"
    assert "nowhere" in split
    assert "check name (the subset) and split" in split
    assert "check the name; a private data set needs HF_TOKEN" in missing
    # The commit itself needs no network: this process has none.
    known = {"path": "org/rows", "revision": COMMIT}
    (found,) = find_inputs(DataConfig.model_validate({"train": known}), None, Places(None, cache))
    assert [str(file) for file in found.files] == whole[1]


RESOLVE = """
import json, sys
from pathlib import Path
from dbx_llmtrain.driver import fingerprints
from dbx_llmtrain.model_sections import ModelConfig
from dbx_llmtrain.driver.sources import resolve_model

for weights in json.loads(sys.argv[1]):
    model = resolve_model(ModelConfig(source="org/tiny"), Path(sys.argv[2]), weights=weights)
    names = [entry.path for entry in model.artifact.files]
    print(json.dumps([model.artifact.source, names, fingerprints.tokenizer(model).fingerprint]))
"""


@pytest.mark.slow
def test_preparing_needs_no_weights(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    cache = tmp_path / "cache"
    small, again, whole, enough = elsewhere(RESOLVE, endpoint, cache, False, False, True, False)
    assert small == again
    assert "model.safetensors" in whole[1]
    assert set(whole[1]) - set(small[1]) == {"model.safetensors"}
    assert small[2] == whole[2], "what is prepared for one is found with the other"
    assert enough == whole
    weights = [line for line in asked if line.startswith("GET") and "safetensors" in line]
    assert len(weights) == 1
