"""A rank's trainer that gets stuck in its third step: rank 1 of two, as STUCK says."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from dbx_llmtrain.worker.main import main
from dbx_llmtrain.worker.world import leave_process
from tests.dist import forwards


def count_for_ever() -> None:
    number = 0
    while True:
        number += 1


def hang_in_native_code() -> None:
    ctypes.PyDLL(None).sleep(600)  # keeps the interpreter's lock


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


ACTIONS = {"loops": count_for_ever, "hangs": hang_in_native_code, "stopped": stop}

if __name__ == "__main__":
    mine = os.environ["RANK"] == "1"
    with forwards.watched({3: ACTIONS[os.environ["STUCK"]]} if mine else {}):
        code = main(sys.argv[1:])
    leave_process(code)
