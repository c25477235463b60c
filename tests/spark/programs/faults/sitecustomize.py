"""Breaks one rank of a real training run: on PYTHONPATH of the ranks, so Python runs it first.

FAULT is ``raise`` or ``kill``; it happens at the optimizer step FAULT_STEP of rank FAULT_RANK.
"""

import os
import signal

if os.environ.get("RANK") == os.environ.get("FAULT_RANK") and "FAULT" in os.environ:
    import torch

    steps = 0
    real = torch.optim.AdamW.step

    def step(self, closure=None):
        global steps
        steps += 1
        if steps == int(os.environ["FAULT_STEP"]):
            if os.environ["FAULT"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("row 17 of the table is broken")
        return real(self, closure)

    torch.optim.AdamW.step = step
