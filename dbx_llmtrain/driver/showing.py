"""Messages and progress, as a configuration wants them shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dbx_llmtrain import logs
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver import progress


@contextmanager
def as_wanted(cfg: TrainConfig) -> Iterator[progress.Progress]:
    """While it lasts: messages from ``tracking.log_level`` on, and ``tracking.progress``."""
    settings = cfg.tracking
    with logs.shown(settings.log_level), progress.showing(settings.progress) as shown:
        yield shown
