"""A rank that carries out several plans, one after the other, as ``dbx_llmtrain.worker.main`` does.

Arguments: this rank, then folders, each with a ``plan-RANK.json``. What comes of a plan goes into
its folder, as do digests of the rows of every forward pass. Two of these are started side by side.
An ``actions-RANK.json`` there has what happens in the middle of steps: a number of a forward pass,
and ``SIGTERM``, a request's name, or the step after whose checkpoint the process is killed.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dbx_llmtrain import storage
from dbx_llmtrain.errors import LlmTrainError
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker.main import story
from dbx_llmtrain.worker.world import leave_process
from tests.dist import forwards
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
        file = folder / f"actions-{rank}.json"
        # A rank that lost another one has what the other one's actions lead to.
        expected = (LlmTrainError, RuntimeError) if file.exists() else LlmTrainError
        with forwards.watched(actions(file, plan)) as rows:
            try:
                outcome = story(plan)(plan).model_dump()
            except expected as error:
                outcome = {"error": f"{type(error).__name__}: {error}"}
        (folder / f"outcome-{rank}.json").write_text(json.dumps(outcome))
        (folder / f"rows-{rank}.json").write_text(json.dumps(rows))


def actions(file: Path, plan: RunPlan) -> dict[int, Callable[[], None]]:
    """What the file says, if there is one."""
    if not file.exists():
        return {}
    return {
        int(number): _action(what, Path(plan.run_dir))
        for number, what in json.loads(file.read_text()).items()
    }


def _action(what: str | int, run_dir: Path) -> Callable[[], None]:
    if isinstance(what, int):
        return forwards.killed_after(run_dir, what)
    return forwards.terminated if what == "SIGTERM" else forwards.asked_for(run_dir, what)


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
