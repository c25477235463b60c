"""``probe(full=True)``: every check there is, the ranks' own network among them."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from dbx_llmtrain import zero_config
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver import checklist, hub, launch, monitor, node_checks, sources
from dbx_llmtrain.driver.registered import is_registered
from dbx_llmtrain.errors import ClusterError, ConfigError, Finding, TrainingFailed
from dbx_llmtrain.layout import nodes_of
from dbx_llmtrain.records import LaunchPlan
from dbx_llmtrain.reports import ClusterReport, PairSpeed
from dbx_llmtrain.worker import pairs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_NODES_S = 45.0
_RANKS_S = 150.0
"""Most of it is the start of Python on every node: some ten seconds as a rule."""
_ANY = {"model": {"source": "none"}, "data": {"train": "none"}}
"""Where no configuration is given: its model and data are not looked at."""
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def probe_fully(cfg: TrainConfig | None, session: SparkSession) -> ClusterReport:
    """The report with every finding, and how fast hosts talk. Raises ``ClusterError`` where Spark
    cannot run tasks that reach the nodes."""
    known = cfg or TrainConfig.from_dict(_ANY)
    with checklist.trial_folder(checklist.place(known)) as folder:
        looked = checklist.look(known, session, full=True, timeout_s=_NODES_S)
        findings = [_access(), *looked.findings]
        if cfg is not None:
            findings += _operators(cfg, looked) + _hub(cfg)
        speeds: tuple[PairSpeed, ...] = ()
        if folder is None or not checklist.has_place(known, looked.report):
            why = "no folder that all nodes see is known: give a configuration with checkpoint.dir"
            findings.append(_not_tried(why))
        elif any(finding.level == "error" for finding in findings):
            findings.append(_not_tried("ranks are not started while there are errors"))
        else:
            speeds, told = _ranks(known, session, looked, folder)
            findings += told
    return looked.report.model_copy(
        update={"findings": tuple(dict.fromkeys(findings)), "speeds": speeds}
    )


def _access() -> Finding:
    """A session without access to the nodes is refused before anything is looked at."""
    return Finding("ok", "access mode", "a classic session, which reaches the nodes")


def _not_tried(why: str) -> Finding:
    return Finding("warning", "collective", f"not tried: {why}")


def _operators(cfg: TrainConfig, looked: checklist.Looked) -> list[Finding]:
    """What DeepSpeed compiles before the first step. (What it cannot is an error elsewhere.)"""
    check, parallel = "DeepSpeed's operators", cfg.parallel
    if parallel.kind != "deepspeed" or any(found.check == check for found in looked.findings):
        return []
    needed = zero_config.operators(parallel)
    nodes = nodes_of(looked.layout, looked.report)
    missing = [name for name in needed if not all(name in node.tools for node in nodes)]
    if not missing:
        return [Finding("ok", check, "nothing has to be compiled")]
    text = f"{', '.join(missing)} is compiled on every node before the first step: about a minute"
    return [Finding("ok", check, text)]


def _hub(cfg: TrainConfig) -> list[Finding]:
    """Whether the driver may have the model, where it is one of the hub."""
    check, source = "hub", cfg.model.source
    if not source or is_registered(source):
        return []
    try:
        if sources.find_model(cfg.model) is not None:
            return [Finding("ok", check, f"not needed: {source} is here")]
        if any(os.environ.get(name, "0") not in ("", "0") for name in _OFFLINE):
            return [Finding("ok", check, "offline: only what is in the cache is used")]
        hub.check_there(source, cfg.model.revision)
    except ConfigError as error:
        return [Finding("error", check, str(problem)) for problem in error.problems]
    return [Finding("ok", check, f"gives {source}")]


def _ranks(
    cfg: TrainConfig, session: SparkSession, looked: checklist.Looked, folder: Path
) -> tuple[tuple[PairSpeed, ...], list[Finding]]:
    """Start the ranks of a run, have them meet, and measure between hosts."""
    check, layout = "collective", looked.layout
    if layout.processes == 1:
        return (), [Finding("ok", check, "one rank"), *node_checks.check_speeds(())]
    plan = LaunchPlan(
        attempt=uuid.uuid4().hex, run_name="probe", run_dir=str(folder), config=cfg,
        world_size=layout.processes, local_mode=layout.local_mode, use_gpu=layout.use_gpu,
        local_dir=cfg.cluster.local_dir,
    )  # fmt: skip
    began = time.monotonic()

    def in_time() -> None:
        if time.monotonic() - began > _RANKS_S:
            text = f"the ranks have not met and measured within {_RANKS_S:.0f} s"
            raise ClusterError([Finding("error", check, text)])

    try:
        result = launch.launch(
            session, plan, monitor.rank_variables(None), on_poll=in_time, module=pairs.__name__
        )
    except ClusterError as error:
        return (), list(error.findings)
    except TrainingFailed as error:
        return (), [Finding("error", check, f"{error.message}. {error.advice}".strip())]
    seconds = time.monotonic() - began
    speeds = tuple(
        PairSpeed(first=first, second=second, bytes_per_second=speed)
        for name, speed in sorted(result.metrics.items())
        for first, second in [name.split(pairs.BETWEEN)]
    )
    text = f"all {layout.processes} ranks have met, {seconds:.0f} s after they were asked for"
    return speeds, [Finding("ok", check, text), *node_checks.check_speeds(speeds)]
