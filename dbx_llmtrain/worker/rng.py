"""The random states of a rank as JSON, and back."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_states(device: str) -> dict[str, Any]:
    """This rank's generators of Python, numpy, torch and, on a GPU, CUDA."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if device != "cpu":
        states["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes().hex()
    return states


def restore_random_states(states: Mapping[str, Any], device: str) -> None:
    """Set the generators to what ``random_states`` gave."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes(states["torch"]))
    if device != "cpu" and "cuda" in states:
        torch.cuda.set_rng_state(_bytes(states["cuda"]), device)


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
