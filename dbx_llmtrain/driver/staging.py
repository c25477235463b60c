"""The model and the data on every node's own disk, before a rank needs them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dbx_llmtrain.channel import Message, Server
from dbx_llmtrain.driver import cluster
from dbx_llmtrain.driver.progress import Progress
from dbx_llmtrain.errors import StagingError
from dbx_llmtrain.records import Artifact, RunPlan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

_TARGET = "dbx_llmtrain.worker.staged:stage_all"
_LEAST_BYTES_PER_SECOND = 20e6
_LEAST_S = 300.0


def stage_everywhere(
    spark: SparkSession,
    plan: RunPlan,
    *,
    server: Server | None = None,
    progress: Progress | None = None,
) -> dict[str, dict[str, str]]:
    """Stage the model and the data of a plan; see ``stage_artifacts``."""
    artifacts = (plan.model.artifact, plan.data.artifact)
    return stage_artifacts(
        spark,
        artifacts,
        local_mode=plan.local_mode,
        local_dir=plan.local_dir,
        server=server,
        progress=progress,
    )


def stage_artifacts(
    spark: SparkSession,
    artifacts: Sequence[Artifact],
    *,
    local_mode: bool,
    local_dir: str | None,
    timeout_s: float | None = None,
    server: Server | None = None,
    progress: Progress | None = None,
) -> dict[str, dict[str, str]]:
    """Copy the artifacts once to every node that will have ranks.

    In local mode that is the driver's machine alone. Returns, by node, each fingerprint's folder.
    ``timeout_s`` defaults to what the size takes at 20 MB/s. Nodes tell ``server`` how far they
    are, and ``progress`` shows it. A node that does not answer, as it is busy, is warned of: its
    ranks copy for themselves. Raises ``StagingError`` that names every node that failed, with the
    cause, and all of them where none has answered.
    """
    args: tuple[Any, ...] = ([item.model_dump(mode="json") for item in artifacts], local_dir)
    args += ((server.address, server.key) if server and progress else None,)
    with _shown(server, progress):
        if local_mode:
            outcomes = cluster.run_here(_TARGET, args)
        else:
            size = sum(artifact.size for artifact in artifacts)
            limit = timeout_s or _LEAST_S + size / _LEAST_BYTES_PER_SECOND
            outcomes = cluster.run_on_nodes(spark, _TARGET, args, timeout_s=limit)
    staged = {name: found.value for name, found in outcomes.items() if found.status == "ok"}
    silent = {found.node: found for found in outcomes.values() if found.status == "missing"}
    failed = {found.node: found for found in outcomes.values() if found.status == "failed"}
    if not staged:
        failed |= silent
    if failed:
        what = " and ".join(artifact.source for artifact in artifacts)
        raise StagingError(what, {name: _cause(found) for name, found in failed.items()})
    for name, found in silent.items():
        logger.warning("staging: %s: %s. Its ranks will copy what they need.", name, found.error)
    return staged


@contextmanager
def _shown(server: Server | None, progress: Progress | None) -> Iterator[None]:
    if server is None or progress is None:
        yield
        return

    def take(message: Message) -> None:
        copied = message.get("copied")
        if isinstance(copied, dict):
            count(str(copied["node"]), int(copied["done"]), int(copied["total"]))

    with progress.copies() as count, server.listening(take):
        yield


def _cause(outcome: cluster.Outcome) -> str:
    return f"{outcome.error}\n{outcome.traceback}".strip()
