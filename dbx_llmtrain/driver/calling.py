"""A user's own function on every rank: checked, sent, run, and what it returned."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import pickle
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbx_llmtrain import storage, tracking
from dbx_llmtrain.calls import CallPlan, Given, artifacts
from dbx_llmtrain.config import TrainConfig, require
from dbx_llmtrain.driver import cluster, launch, monitor, staging, user_metrics
from dbx_llmtrain.driver.progress import Progress
from dbx_llmtrain.driver.survey import Survey
from dbx_llmtrain.errors import CheckpointError, ConfigError, Problem
from dbx_llmtrain.outcomes import RankResult
from dbx_llmtrain.records import Artifact, FileEntry

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILE = "function.pkl"
MODULE = "dbx_llmtrain.worker.call"
_NEITHER = {"model": {"source": "none"}, "data": {"train": "none"}}
"""A configuration has a model and data; a function has neither, and nobody reads these."""


def settle(
    cfg: TrainConfig | None, run_name: str | None, folder: str | None, given: Mapping[str, Any]
) -> TrainConfig:
    """The configuration of a call: where and how ranks run and messages are shown, as in ``cfg``,
    with the fields of ``cluster`` that are ``given``. The run is named of the time, unless it has a
    name. Raises ``ConfigError``."""
    sections = require(cfg).to_dict() if cfg is not None else {}
    own = {name: value for name, value in given.items() if value is not None}
    shown = {
        name: value
        for name, value in sections.get("tracking", {}).items()
        if name in ("progress", "log_level")
    }
    name = run_name or f"launch-{datetime.datetime.now():%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:4]}"
    place = folder or sections.get("checkpoint", {}).get("dir")
    return TrainConfig.from_dict(
        {
            **_NEITHER,
            "cluster": sections.get("cluster", {}) | own,
            "tracking": shown | {"run_name": name},
            "checkpoint": {"dir": place} if place else {},
        }
    )


def pickled(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """The function and its arguments as bytes that a rank can load. Raises ``ConfigError`` for what
    cannot be called or sent."""
    if not callable(function):
        raise _refuse(f"expected a function, found {type(function).__name__}")
    return user_metrics.pickled((function, tuple(args), dict(kwargs)), path="launch")


def find(paths: Sequence[str]) -> tuple[Given, ...]:
    """The files and folders of ``stage``, hashed. Raises ``ConfigError`` for those that are not
    there."""
    if isinstance(paths, str):
        paths = [paths]
    found, problems = [], []
    for number, path in enumerate(paths):
        place = storage.local_path(path).absolute()
        if place.exists():
            found.append(_given(place))
        else:
            problems.append(Problem(f"launch.stage.{number}", f"there is no {place}"))
    if problems:
        raise ConfigError(problems)
    return tuple(found)


def _given(place: Path) -> Given:
    if place.is_file():
        entry = FileEntry(
            path=place.name, size=place.stat().st_size, sha256=storage.hash_file(place)
        )
        return Given(artifact=_artifact(place.parent, (entry,)), name=place.name)
    return Given(artifact=_artifact(place, storage.entries(place)))


def _artifact(folder: Path, files: tuple[FileEntry, ...]) -> Artifact:
    content = json.dumps(sorted((entry.path, entry.sha256) for entry in files))
    digest = hashlib.sha256(content.encode()).hexdigest()
    return Artifact(kind="data", source=str(folder), fingerprint=digest, files=files)


def make_plan(cfg: TrainConfig, case: Survey, content: bytes, stage: tuple[Given, ...]) -> CallPlan:
    """Put the function into the run folder; the plan that names it by its hash. Raises
    ``CheckpointError`` for a folder that is a training run's."""
    run_dir = case.folder.path
    if (run_dir / "config.yaml").exists():
        raise CheckpointError(f"{run_dir} is a training run's folder: give another run_name")
    with tempfile.TemporaryDirectory(prefix="dbx_llmtrain-") as folder:
        local = Path(folder) / FILE
        local.write_bytes(content)
        digest = storage.copy_file(local, run_dir / FILE)
    return CallPlan(
        attempt=case.folder.attempt,
        run_name=case.folder.name,
        run_dir=str(run_dir),
        config=cfg,
        world_size=case.layout.processes,
        local_mode=case.layout.local_mode,
        use_gpu=case.layout.use_gpu,
        local_dir=cfg.cluster.local_dir,
        call=FileEntry(path=FILE, size=len(content), sha256=digest),
        stage=stage,
    )


def run(
    session: SparkSession, plan: CallPlan, *, shown: Progress, check: Callable[[], None]
) -> Any:
    """Stage, launch and wait; what the function returned on rank 0. What ``check`` raises ends the
    ranks. Raises ``StagingError`` and ``TrainingFailed``."""
    conf = cluster.conf(session)
    with monitor.open_channel(conf, local_mode=plan.local_mode) as server:
        if plan.stage:
            staging.stage_artifacts(
                session,
                artifacts(plan),
                local_mode=plan.local_mode,
                local_dir=plan.local_dir,
                server=server,
                progress=shown,
            )
        secrets = tracking.worker_secrets(os.environ) | monitor.rank_variables(server)
        result = launch.launch(session, plan, secrets, on_poll=check, module=MODULE)
    return value(plan, result)


def value(plan: CallPlan, result: RankResult) -> Any:
    """What rank 0 has left. Raises ``CheckpointError`` where the file is not what it wrote."""
    entry = result.value
    if entry is None:
        return None
    path = storage.local_path(plan.run_dir) / entry.path
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise CheckpointError(f"{path} is not what rank 0 has written: its hash is another")
    return pickle.loads(content)


def begin_text(plan: CallPlan) -> str:
    """What is about to be done, in a line."""
    where = "on the driver's machine" if plan.local_mode else "on the workers"
    device = "GPU" if plan.use_gpu else "CPU"
    return f"{plan.world_size} rank(s) on {device} {where}; logs are in {plan.run_dir}/logs"


def _refuse(message: str) -> ConfigError:
    return ConfigError([Problem("launch", message)])
