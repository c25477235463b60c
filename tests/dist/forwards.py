"""Looking at a run from inside its steps: which rows each forward pass of training had, and doing
something at a certain one of them."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from dbx_llmtrain import storage
from dbx_llmtrain.worker.loss import LossModule

WITHIN_S = 60.0


@contextmanager
def watched(actions: dict[int, Callable[[], None]] | None = None) -> Iterator[list[str]]:
    """Digests of the token ids of every forward pass of training within the block, in order; after
    the one with a number in ``actions``, counted from 1, that is done: in the middle of a step,
    where other micro-batches follow."""
    seen: list[str] = []

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(module, LossModule) and module.training and torch.is_grad_enabled():
            ids = kwargs["input_ids"]
            seen.append(hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:12])
            (actions or {}).get(len(seen), lambda: None)()

    handle = register_module_forward_hook(hook, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def killed_after(run_dir: Path, step: int) -> Callable[[], None]:
    """End this process as if the machine were gone, when the checkpoint of a step is complete."""

    def kill() -> None:
        _wait(lambda: storage.read_manifest(storage.checkpoint_folder(run_dir, step)) is not None)
        os.kill(os.getpid(), signal.SIGKILL)

    return kill


def asked_for(run_dir: Path, name: str) -> Callable[[], None]:
    """Put a request into the run folder, and wait until it has been taken."""

    def ask() -> None:
        (run_dir / name).touch()
        _wait(lambda: not (run_dir / name).exists())

    return ask


def terminated() -> None:
    """Send this process SIGTERM, as a scheduler does."""
    os.kill(os.getpid(), signal.SIGTERM)


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
