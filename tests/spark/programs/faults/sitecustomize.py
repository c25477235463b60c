"""Breaks ranks of a real training run: on PYTHONPATH of the ranks, so Python runs it first.

FAULT is ``raise``, ``kill`` or ``kill-driver`` (of the number DRIVER); it happens at the optimizer
step FAULT_STEP of this process, in the ranks FAULT_RANK (``0`` or ``0,1``), when all the files
FAULT_AFTER (joined by ``:``) are there, and not again where the file FAULT_ONCE is, which it makes.
"""

import contextlib
import os
import signal
import time

if os.environ.get("RANK", "none") in os.environ.get("FAULT_RANK", "").split(","):
    import torch

    steps = 0
    real = torch.optim.AdamW.step

    def step(self, closure=None):
        global steps
        steps += 1
        if steps == int(os.environ["FAULT_STEP"]) and first():
            fault()
        return real(self, closure)

    def first():
        if once := os.environ.get("FAULT_ONCE"):
            with contextlib.suppress(FileExistsError):
                return open(once, "x").close() is None
            return False
        return True

    def fault():
        for path in filter(None, os.environ.get("FAULT_AFTER", "").split(":")):
            while not os.path.exists(path):
                time.sleep(0.05)
        if os.environ["FAULT"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ["FAULT"] == "kill-driver":
            os.kill(int(os.environ["DRIVER"]), signal.SIGKILL)
            time.sleep(600)  # whoever takes no further step has to go all the same
        raise ValueError("row 17 of the table is broken")

    torch.optim.AdamW.step = step
