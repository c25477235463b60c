"""Which checkpoints stay: the newest, and the best by a metric. The one place that deletes them.

A checkpoint loses its manifest first, so that one that is half deleted does not count; the one
that was just written, and whatever is protected, is never touched.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from dbx_llmtrain import storage
from dbx_llmtrain.milestones import Mode as Mode
from dbx_llmtrain.milestones import mode_of as mode_of
from dbx_llmtrain.sections import CheckpointConfig

logger = logging.getLogger(__name__)


def prune(run_dir: Path, policy: CheckpointConfig, *, protect: Collection[Path] = ()) -> list[Path]:
    """Delete the checkpoints that ``policy`` does not keep, and what killed writers left. Returns
    what was deleted.

    ``protect``: folders that stay, first of all the checkpoint just written. Those of later steps
    count as older than that one: a run that went on from an earlier step has taken them back.
    At least one complete checkpoint stays in any case. Those that were judged by other held-out
    rows than the one just written are not among the best: their metrics cannot be compared.
    """
    protected = {path.resolve() for path in protect}
    reached = max((storage.step_of(path) or 0 for path in protect), default=math.inf)
    found = storage.checkpoints(run_dir)
    newest = sorted(
        found,
        key=lambda path: ((storage.step_of(path) or 0) <= reached, storage.step_of(path)),
        reverse=True,
    )
    last = len(newest) if policy.keep_last == "all" else policy.keep_last
    rows = next((_judged_by(storage.read_manifest(path)) for path in protect), None)
    kept = {*newest[: max(1, last)], *_best(newest, policy, rows)}
    deleted = []
    for path in found:
        if path not in kept and path.resolve() not in protected:
            deleted += _delete(path)
    for path in storage.torn(run_dir):
        unfinished = not (path / storage.MANIFEST).exists()
        if unfinished and path.resolve() not in protected:
            deleted += _delete(path)
    return deleted


def _delete(folder: Path) -> list[Path]:
    """The folder, if it could be deleted; one whose manifest cannot be stays whole."""
    try:
        (folder / storage.MANIFEST).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be deleted: %s", folder, error)
        return []
    storage.remove(folder)
    return [folder]


def _judged_by(manifest: Any) -> Any:
    """The held-out rows that a checkpoint's metrics are of; see ``resuming.held_out``."""
    return (manifest or {}).get("state", {}).get("held_out")


def _best(newest_first: Sequence[Path], policy: CheckpointConfig, rows: Any) -> list[Path]:
    """Of equal ones the first. ``rows``: those that count; ``None``: any."""
    mode = mode_of(policy.metric, policy.metric_mode)
    valued: list[tuple[float, Path]] = []
    for path in reversed(newest_first):
        manifest: dict[str, Any] = storage.read_manifest(path) or {}
        value = manifest.get("metrics", {}).get(policy.metric)
        comparable = rows is None or _judged_by(manifest) == rows
        if comparable and value is not None and math.isfinite(value):
            valued.append((value if mode == "min" else -value, path))
    ranked = sorted(valued, key=lambda pair: pair[0])
    return [path for _, path in ranked[: policy.keep_best]]


def better(mode: Mode, value: float, than: float | None, min_delta: float = 0.0) -> bool:
    """Whether ``value`` is better than ``than`` by more than ``min_delta``. Whatever is not a
    finite number is never better, and worse than anything that is one (as is ``None``)."""
    if not math.isfinite(value):
        return False
    if than is None or not math.isfinite(than):
        return True
    gain = than - value if mode == "min" else value - than
    return gain > min_delta


def makes_the_list(values: Sequence[float], value: float, keep_best: int, mode: Mode) -> bool:
    """Whether ``value`` is among the ``keep_best`` best after ``values``: fewer than so many of
    these are as good or better."""
    if not math.isfinite(value):
        return False
    ahead = [other for other in values if math.isfinite(other) and not better(mode, value, other)]
    return len(ahead) < keep_best
