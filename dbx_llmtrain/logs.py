"""Which messages are shown while a function of this package runs: ours, and what other libraries
say of their own work."""

from __future__ import annotations

import logging
import re
import sys
import warnings
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
_NOTES = {
    "DeepSpeed": r"Setting accelerator to CPU",
    "TorchDistributor": r"(Started|Finished) (local|distributed) training with",
}
"""Logger of a library -> how those of its messages begin that are for debugging alone."""


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


class _Without(logging.Filter):
    def __init__(self, notes: str) -> None:
        super().__init__()
        self._notes = re.compile(notes)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a message is shown."""
        return not self._notes.match(record.getMessage())


def is_debugging() -> bool:
    """Whether our own messages for debugging are shown."""
    return logging.getLogger(_NAME).isEnabledFor(logging.DEBUG)


@contextmanager
def without_notes() -> Iterator[None]:
    """Leave out what some libraries note of their own work, unless one is debugging. Levels and
    handlers of their loggers stay as they are."""
    if is_debugging():
        yield
        return
    added = [(logging.getLogger(name), _Without(notes)) for name, notes in _NOTES.items()]
    for logger, without in added:
        logger.addFilter(without)
    try:
        yield
    finally:
        for logger, without in added:
            logger.removeFilter(without)


@contextmanager
def without_bars() -> Iterator[None]:
    """The same for the bars with which transformers opens and writes a model, for code that imports
    it anyway. Those of downloads stay."""
    from huggingface_hub import utils as hub
    from transformers.utils import logging as library

    if is_debugging() or not library.is_progress_bar_enabled():
        yield
        return
    downloads = not hub.are_progress_bars_disabled()

    def switch(*, bars: bool) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the environment has set it for the hub
            library.enable_progress_bar() if bars else library.disable_progress_bar()
            hub.enable_progress_bars() if downloads else hub.disable_progress_bars()

    switch(bars=False)
    try:
        yield
    finally:
        switch(bars=True)


@contextmanager
def shown(level: str) -> Iterator[None]:
    """Show messages of this package from ``level`` on, and put everything back afterwards.

    Where the user has given our logger handlers of his own, they decide. Handlers of the root
    logger get our messages as any others, and then none is added.
    """
    with _ours_shown(level), without_notes():
        yield


@contextmanager
def _ours_shown(level: str) -> Iterator[None]:
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
