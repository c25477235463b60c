"""Dynamic loss scaling: small fp16 gradients are kept from vanishing by a factor on the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FIRST, LOWEST, HIGHEST = 2.0**16, 1.0, 2.0**24
GROWTH_INTERVAL = 2000
"""Good steps after which the scale is doubled (as in ``torch.amp.GradScaler``)."""


class LossScale:
    """The factor on the loss: halved when a gradient overflows, doubled after many that did not.

    It is a power of two, so scaling changes no digit of an fp32 gradient, and it moves alike on
    every rank because the decision is made from the global gradient norm. Inactive (bf16, fp32) it
    stays 1. (``GradScaler`` asks each rank for itself whether a gradient overflowed, waits for the
    device once more, and does not know sharded gradients.)
    """

    def __init__(self, *, active: bool, growth_interval: int = GROWTH_INTERVAL) -> None:
        self.active = active
        self.value = FIRST if active else 1.0
        self.good_steps = 0
        self._growth_interval = growth_interval

    def scaled(self, loss: Tensor) -> Tensor:
        """What to back-propagate."""
        return loss * self.value if self.active else loss

    def unscale(self, gradients: list[Tensor]) -> None:
        """Take the factor out of fp32 gradients, in place."""
        if self.active and gradients:
            torch._foreach_mul_(gradients, 1 / self.value)

    def move(self, *, finite: bool) -> bool:
        """Adapt to the step that was tried; whether the scale was lowered."""
        if not self.active:
            return False
        before = self.value
        if not finite:
            self.value = max(LOWEST, self.value / 2)
            self.good_steps = 0
            return self.value < before
        self.good_steps += 1
        if self.good_steps == self._growth_interval:
            self.value = min(HIGHEST, self.value * 2)
            self.good_steps = 0
        return False

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        if not self.active:
            return {}
        return {"loss_scale": self.value, "good_steps": self.good_steps}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; one of another precision says nothing."""
        if self.active and "loss_scale" in state:
            self.value = float(state["loss_scale"])
            self.good_steps = int(state["good_steps"])
