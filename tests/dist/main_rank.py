"""A rank that carries out several plans, one after the other, as ``dbx_llmtrain.worker.main`` does.

Arguments: this rank, then folders, each with a ``plan-RANK.json``. What comes of a plan goes into
its folder. Two of these are started side by side.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import time
from pathlib import Path

from dbx_llmtrain import storage
from dbx_llmtrain.errors import LlmTrainError
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker.main import run
from dbx_llmtrain.worker.world import leave_process
from tests.dist.launch import TIMEOUT


def main() -> None:
    faulthandler.dump_traceback_later(TIMEOUT - 20, exit=True)
    rank, *names = sys.argv[1:]
    for name in names:
        folder = Path(name)
        # A store for each plan: addresses of an earlier group must not be found in it.
        os.environ |= {
            "RANK": rank,
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": meeting_port(folder / "port", offer=rank == "0"),
        }
        plan = RunPlan.model_validate_json((folder / f"plan-{rank}.json").read_text())
        try:
            outcome = run(plan).model_dump()
        except LlmTrainError as error:
            outcome = {"error": f"{type(error).__name__}: {error}"}
        (folder / f"outcome-{rank}.json").write_text(json.dumps(outcome))


def meeting_port(file: Path, *, offer: bool) -> str:
    """A free port, chosen by the rank that offers it and read by the other."""
    if offer:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            storage.write_text(file, str(listener.getsockname()[1]))
    deadline = time.monotonic() + TIMEOUT
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return file.read_text()


if __name__ == "__main__":
    main()
    leave_process(0)
