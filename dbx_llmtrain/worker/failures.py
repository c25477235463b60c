"""What a failure comes of, where the driver does something of its own about it."""

from __future__ import annotations

import re

from dbx_llmtrain.errors import ConfigError

OUT_OF_MEMORY = "out_of_memory"
CONFIGURATION = "configuration"
"""A ``ConfigError`` that only a rank could find; its message says what to change."""

_TEXT = re.compile(
    r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|MemoryError|Cannot allocate memory|DefaultCPUAllocator"
)
"""torch's own error on a GPU, those of CUDA and cuBLAS, Python's, and torch's on a CPU."""


def cause_of_text(text: str) -> str:
    """``out_of_memory`` where an error's message says so, else nothing."""
    return OUT_OF_MEMORY if _TEXT.search(text) else ""


def cause_of_error(error: BaseException) -> str:
    """What an exception comes of: it, or one that it was raised from, is a lack of memory, or it is
    a ``ConfigError``."""
    if isinstance(error, ConfigError):
        return CONFIGURATION
    found: BaseException | None = error
    while found is not None:
        if cause_of_text(f"{type(found).__name__}: {found}"):
            return OUT_OF_MEMORY
        found = found.__cause__
    return ""
