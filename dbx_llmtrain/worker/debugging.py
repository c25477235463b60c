"""What ``cluster.debug`` adds to the ranks' logs: who they are, where, and with which environment.

Standard library and pure modules only: the supervisor writes it before anything is started.
"""

from __future__ import annotations

import platform
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence

from dbx_llmtrain.credentials import redact
from dbx_llmtrain.secret_text import is_secret_name

VARIABLES = {
    "NCCL_DEBUG": "INFO",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_CPP_LOG_LEVEL": "INFO",
}
"""What the libraries are told to say, where ``cluster.env`` or the node has not set it."""
_PLACE = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
)  # fmt: skip


def of_process(environ: Mapping[str, str], secrets: Mapping[str, str]) -> Iterator[str]:
    """Lines about a rank's process that is about to start: its place, and its environment without
    secrets (those that were handed to it, and what has the name or the look of one)."""
    place = ", ".join(f"{name}={environ[name]}" for name in _PLACE if name in environ)
    yield f"debug: {place}"
    yield f"debug: host {socket.gethostname()}, Python {platform.python_version()} {sys.executable}"
    for name, value in sorted(environ.items()):
        hidden = name in secrets or is_secret_name(name)
        yield f"debug: {name}={'***' if hidden else redact(value, secrets)}"


def of_ranks(nodes: Sequence[str], device: str) -> Iterator[str]:
    """Lines about all ranks, once they have met, and about the libraries they use."""
    import torch

    for rank, node in enumerate(nodes):
        yield f"debug: rank {rank} is on node {node}"
    told = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    if torch.cuda.is_available():
        told += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    yield f"debug: this one uses {device}; {told}"
