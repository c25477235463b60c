"""What every test gets: no network, no accounts of the machine, few threads."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

# Before anything imports torch or a hub client.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

# Tests that look for what was left in the temporary folder see nobody else's.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["TMPDIR"] = tempfile.mkdtemp(prefix=f"{worker}-")
    tempfile.tempdir = None

_FOREIGN = (
    "MLFLOW_", "DATABRICKS_", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "DBX_LLMTRAIN_",
    "TORCHINDUCTOR_",  # torch sets it when it first compiles
)  # fmt: skip


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Variables of the machine that would change a result are not there."""
    for name in list(os.environ):
        if name.startswith(_FOREIGN):
            monkeypatch.delenv(name)
    yield
    # What a test's library calls have set (mlflow.set_tracking_uri does) goes, too.
    for name in list(os.environ):
        if name.startswith(_FOREIGN):
            del os.environ[name]
