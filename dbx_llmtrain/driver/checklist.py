"""Every check of the cluster in one list: asked for by one job on the nodes, judged here.

``plan`` and ``train`` refuse what is an error in it and show what is a warning; the whole list is
in ``probe(full=True)``.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dbx_llmtrain import layout as layouts
from dbx_llmtrain import storage, tracking_trial
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.credentials import uri_credentials, without_credentials
from dbx_llmtrain.driver import cluster, node_checks, preflight, strategy_checks
from dbx_llmtrain.errors import ConfigError, Finding
from dbx_llmtrain.reports import ClusterReport
from dbx_llmtrain.tracking import worker_secrets
from dbx_llmtrain.worker import facts, shared_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TRIAL = ".probe-"
"""Beginning of the name of the folder in which writing is tried."""
_OLD_S = 3600.0


@dataclass(frozen=True)
class Looked:
    """What the nodes have answered, which ranks run on them, and every finding."""

    report: ClusterReport
    layout: layouts.Layout
    findings: tuple[Finding, ...]


def look(
    cfg: TrainConfig, session: SparkSession, *, full: bool = False, timeout_s: float = 120.0
) -> Looked:
    """Ask every node and judge the answers. With ``full`` the nodes also read one another's files
    in the run folder. Raises ``ClusterError`` where a job would hang, and ``ConfigError`` where the
    batch cannot be cut for the ranks there are."""
    conf = cluster.conf(session)
    preflight.require(preflight.check_before_jobs(conf))
    with trial_folder(place(cfg)) as folder:
        report = cluster.probe(
            session, local_dir=cfg.cluster.local_dir, timeout_s=timeout_s,
            folder=str(folder) if folder else None, tracking=_tracking(cfg, conf),
        )  # fmt: skip
        layout = layouts.choose_layout(cfg, report)
        unseen = _unseen(session, report, layout, folder, full=full)
    findings = preflight.check_conf(conf, report, layout, os.environ, oks=True)
    findings += node_checks.check_nodes(report, layout)
    if has_place(cfg, report):
        where = f"{folder.parent}" if folder else ""
        findings += node_checks.check_folder(report, layout, folder=where, unseen=unseen)
    findings += node_checks.check_tracking(report, layout)
    findings += strategy_checks.check_strategy(cfg, report, layout)
    return Looked(report, layout, tuple(findings))


def require(findings: tuple[Finding, ...]) -> None:
    """Raise ``ClusterError`` where one is an error; show those that are warnings."""
    preflight.require(findings)
    for finding in findings:
        if finding.level == "warning":
            click.echo(str(finding), err=True)


def place(cfg: TrainConfig) -> Path | None:
    """Where run folders lie, as far as it shows without the nodes."""
    if cfg.checkpoint.dir is None and "DATABRICKS_RUNTIME_VERSION" in os.environ:
        return None
    return storage.local_path(cfg.checkpoint.dir or layouts.BESIDE).absolute()


def has_place(cfg: TrainConfig, report: ClusterReport) -> bool:
    """Whether run folders can lie there. (Where not, whoever needs one says what to set.)"""
    try:
        layouts.checkpoint_dir(
            cfg, report, on_databricks="DATABRICKS_RUNTIME_VERSION" in os.environ
        )
    except ConfigError:
        return False
    return True


@contextlib.contextmanager
def trial_folder(parent: Path | None) -> Iterator[Path | None]:
    """A new folder there, removed at the end with every folder that was made for it. Where it
    cannot be made, whoever writes to it says why."""
    if parent is None:
        yield None
        return
    made = [one for one in (parent, *parent.parents) if not one.exists()]
    folder = parent / f"{TRIAL}{uuid.uuid4().hex[:12]}"
    try:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True)
            _remove_old(parent)
        yield folder
    finally:
        storage.remove(folder)
        for parent in made:
            with contextlib.suppress(OSError):  # something else has been put there meanwhile
                parent.rmdir()


def _remove_old(parent: Path) -> None:
    """What a driver left that was killed while it tried."""
    for path in parent.glob(f"{TRIAL}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _OLD_S:
                storage.remove(path)


def _unseen(
    session: SparkSession,
    report: ClusterReport,
    layout: layouts.Layout,
    folder: Path | None,
    *,
    full: bool,
) -> str:
    """What the driver (``full``: or a node) cannot see of what the nodes have written."""
    if folder is None or layout.local_mode:
        return ""
    wrote = [node.node for node in report.nodes if node.tried.get(facts.FOLDER) == ""]
    problem = shared_folder.see(str(folder), wrote)
    if problem or not full or len(report.nodes) < 2:
        return problem
    target = "dbx_llmtrain.worker.shared_folder:see"
    answers = cluster.run_on_nodes(session, target, (str(folder), wrote), timeout_s=30.0)
    said = {name: str(answer.value or answer.error or "") for name, answer in answers.items()}
    return "; ".join(f"{name}: {text}" for name, text in said.items() if text)


def _tracking(cfg: TrainConfig, conf: dict[str, str]) -> tuple[str, dict[str, str]] | None:
    """Which MLflow the nodes are to ask, and the secrets for it; ``None``: ranks log to none."""
    uri = tracking_trial.uri_for_workers(os.environ)
    local = cfg.cluster.local_mode is True or preflight.is_local(conf.get("spark.master", ""))
    if not uri or local:
        return None
    return without_credentials(uri), worker_secrets(os.environ) | uri_credentials(uri)
