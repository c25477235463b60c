"""Processes that need not import torch and transformers: forked off one that has.

A rank that starts as ``python -m module`` spends most of a small test's time on imports. Here
``multiprocessing``'s fork server imports them once; what is forked off is a process of its own, as
the rank of a launcher is: its environment, session, output and end are its own.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).parents[2]
_IMPORTED = [
    "pytest",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "tests.dist.runs",
    "tests.dist.main_rank",
]


_READ_AT_START = ("LD_PRELOAD", "MALLOC_MMAP_THRESHOLD_")
"""With these a process has to begin anew, imports and all."""


def start(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], output: Path
) -> BaseProcess:
    """Start ``python -m module arguments`` with just this environment; what it prints is added to
    the file ``output``. It leads a process group of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    args = (module, list(arguments), dict(environment), str(output))
    process = context.Process(target=_become, args=args)
    process.start()
    return process


def _become(module: str, arguments: list[str], environment: dict[str, str], output: str) -> None:
    os.setsid()
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    if any(name in environment for name in _READ_AT_START):
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
    faulthandler.enable()
    # The server's own streams are of the process that started it.
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
