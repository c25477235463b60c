"""What tests run once per node."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


def append(path: str, text: str) -> int:
    """Leave a trace of every call."""
    with Path(path).open("a") as file:
        file.write(text)
    time.sleep(0.3)
    return os.getpid()


def fail(text: str) -> None:
    raise ValueError(text)


def where() -> dict[str, Any]:
    import dbx_llmtrain

    return {"code": str(dbx_llmtrain.__file__), "environ": dict(os.environ)}


def sleep(seconds: float) -> None:
    time.sleep(seconds)
