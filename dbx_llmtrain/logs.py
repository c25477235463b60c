"""Which messages of this package are shown while one of its functions runs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
"""Values of ``tracking.log_level``."""
_NAME = "dbx_llmtrain"


def of_libraries(level: str) -> int:
    """The level for a library on a rank: their notes are for debugging."""
    return max(LEVELS[level], logging.WARNING) if level != "debug" else logging.DEBUG


class _StandardError(logging.Handler):
    """Writes to what ``sys.stderr`` is at the moment: a progress bar may stand in front of it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
        except (OSError, ValueError):
            self.handleError(record)


@contextmanager
def shown(level: str) -> Iterator[None]:
    """Show messages of this package from ``level`` on, and put everything back afterwards.

    Where the user has given our logger handlers of his own, nothing is done. Handlers of the root
    logger get our messages as any others, and then none is added.
    """
    ours = logging.getLogger(_NAME)
    if ours.handlers:
        yield
        return
    before = ours.level
    added = None if ours.hasHandlers() else _StandardError()
    if added is not None:
        added.setFormatter(logging.Formatter(f"{_NAME}: %(levelname)s: %(message)s"))
        ours.addHandler(added)
    ours.setLevel(LEVELS[level])
    try:
        yield
    finally:
        ours.setLevel(before)
        if added is not None:
            ours.removeHandler(added)
