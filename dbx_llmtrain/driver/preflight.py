"""Checks of the cluster and of Spark's settings, before any stage that a wrong one would hang.

Pure: settings and reports in, findings out. Each finding has the line to change. What each guards
against is what ``TorchDistributor`` and barrier stages do otherwise: wait for ten minutes or
for ever, run on the wrong GPU, or fail without a word on the cause.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from dbx_llmtrain.errors import ClusterError, Finding
from dbx_llmtrain.reports import ClusterReport

TASK_GPUS = "spark.task.resource.gpu.amount"
DRIVER_GPUS = "spark.driver.resource.gpu.amount"
IGNORE_SSL = "pytorch.spark.distributor.ignoreSsl"
DYNAMIC = "spark.dynamicAllocation.enabled"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LOCAL_RANKS = 2
_PYTHON_MEMORY = "spark.executor.pyspark.memory"
_SCALING = "spark.databricks.clusterUsageTags.clusterScalingType"

_error = partial(Finding, "error")


class Layout(Protocol):
    """Which processes run where (``layout.Layout``)."""

    @property
    def processes(self) -> int:
        """Ranks of the run."""

    @property
    def local_mode(self) -> bool:
        """On the driver's machine."""

    @property
    def use_gpu(self) -> bool:
        """One GPU a rank."""


@dataclass(frozen=True)
class _Case:
    """What the checks look at."""

    conf: Mapping[str, str]
    report: ClusterReport
    layout: Layout
    environ: Mapping[str, str]


def is_local(master: str) -> bool:
    """Whether Spark runs in one process, without executors of its own."""
    return master == "local" or master.startswith("local[")


def promised_executors(conf: Mapping[str, str], master: str) -> int | None:
    """How many executors the settings say there will be; ``None`` where they do not say."""
    cluster = re.match(r"local-cluster\[\s*(\d+)", master)
    named = conf.get("spark.executor.instances") or conf.get(
        "spark.databricks.clusterUsageTags.clusterTargetWorkers"
    )
    if cluster:
        return int(cluster[1])
    return int(named) if named and named.isdecimal() else None


def require(findings: Sequence[Finding]) -> None:
    """Raise ``ClusterError`` with every finding that is not ``ok`` when one of them is an error."""
    findings = list(dict.fromkeys(findings))
    if any(finding.level == "error" for finding in findings):
        raise ClusterError([finding for finding in findings if finding.level != "ok"])


def check_before_jobs(conf: Mapping[str, str]) -> list[Finding]:
    """Settings under which every Spark job would hang. Asked before the first one."""
    if is_local(conf.get("spark.master", "")) and TASK_GPUS in conf:
        return [
            _error(
                "task GPUs",
                f"{TASK_GPUS} is {conf[TASK_GPUS]} with master {conf['spark.master']}, which has "
                f"no GPUs to give to tasks: every Spark job would wait for ever. Remove {TASK_GPUS}"
                " from the Spark configuration",
            )
        ]
    return []


def check_conf(
    conf: Mapping[str, str],
    report: ClusterReport,
    layout: Layout,
    environ: Mapping[str, str],
    *,
    oks: bool = False,
) -> list[Finding]:
    """Everything that would make this launch hang, fail or run on the wrong devices; with ``oks``
    also a line for every check that found nothing.

    ``conf`` are Spark's settings, ``environ`` the driver's environment.
    """
    case = _Case(conf, report, layout, environ)
    findings = check_before_jobs(conf)
    for name, check, well in _LOCAL_CHECKS if layout.local_mode else _CLUSTER_CHECKS:
        found = check(case)
        if oks and not found:
            text = well.format(
                slots=report.slots, ranks=layout.processes, nodes=len(report.nodes),
                gpus="GPUs for every rank" if layout.use_gpu else "this run needs none",
            )  # fmt: skip
            found = [Finding("ok", name, text)]
        findings += found
    return findings


def _slots(case: _Case) -> list[Finding]:
    amount = _whole(case.conf.get(TASK_GPUS, "")) if case.layout.use_gpu else None
    tasks = case.layout.processes // max(1, amount or 1)
    if tasks <= case.report.slots:
        return []
    per_task = f"spark.task.cpus {case.conf.get('spark.task.cpus', '1')}"
    per_task += f", {TASK_GPUS} {case.conf[TASK_GPUS]}" if TASK_GPUS in case.conf else ""
    return [
        _error(
            "task slots",
            f"{case.layout.processes} ranks need {tasks} task slots at once, the cluster has "
            f"{case.report.slots} ({len(case.report.executors)} executors, {per_task}): set "
            f"cluster.processes={case.report.slots * max(1, amount or 1)}, or add workers",
        )
    ]


def _dynamic_allocation(case: _Case) -> list[Finding]:
    if case.conf.get(DYNAMIC, "false").lower() != "true":
        return []
    return [
        _error(
            "dynamic allocation",
            f"{DYNAMIC} is true: all ranks have to start together, which Spark refuses with it. "
            f"Set {DYNAMIC} false and give the cluster a fixed number of workers",
        )
    ]


def _autoscaling(case: _Case) -> list[Finding]:
    if case.conf.get(_SCALING, "").lower() != "autoscaling":
        return []
    return [
        Finding(
            "warning",
            "autoscaling",
            "the cluster may add and remove workers while the ranks run, and training ends with a "
            "worker that is removed. Turn autoscaling off and set a fixed number of workers",
        )
    ]


def _task_gpus(case: _Case) -> list[Finding]:
    if not case.layout.use_gpu:
        return []
    text = case.conf.get(TASK_GPUS)
    if is_local(case.report.master):
        message = (
            f"master {case.report.master} gives no GPUs to tasks: set cluster.local_mode=true, "
            "which runs the ranks on the driver's GPUs"
        )
    elif text is None:
        message = f"{TASK_GPUS} is not set, so no rank would get a GPU. Set {TASK_GPUS} 1"
    elif not (amount := _whole(text)):
        message = f"{TASK_GPUS} is {text}: expected a whole number, one rank a GPU. Set it to 1"
    elif amount > 1 and _version(case.report.spark_version) < (4, 2):
        message = (
            f"{TASK_GPUS} is {text}: on Spark {case.report.spark_version} (below 4.2) a launch "
            f"with more than one GPU a task hangs. Set {TASK_GPUS} 1"
        )
    elif case.layout.processes % amount:
        message = (
            f"{TASK_GPUS} is {text}, of which {case.layout.processes} ranks are no multiple. Set "
            f"{TASK_GPUS} 1, or change cluster.processes"
        )
    else:
        return []
    return [_error("task GPUs", message)]


def _preset_devices(case: _Case) -> list[Finding]:
    key = f"spark.executorEnv.{_VISIBLE}"
    if not case.layout.use_gpu or key not in case.conf:
        return []
    return [
        _error(
            "visible GPUs",
            f"{key} is {case.conf[key]!r}: every rank would see the same GPUs instead of its own. "
            f"Remove {key} from the Spark configuration",
        )
    ]


def _encryption(case: _Case) -> list[Finding]:
    enabled = case.conf.get("spark.ssl.enabled", "false").lower() == "true"
    if not enabled or case.conf.get(IGNORE_SSL, "false").lower() == "true":
        return []
    return [
        _error(
            "encryption",
            "spark.ssl.enabled is true, but what ranks send each other (gradients, parameters) is "
            f"not encrypted, so TorchDistributor refuses. Set {IGNORE_SSL} true if that is "
            "acceptable on this network",
        )
    ]


def _python_memory(case: _Case) -> list[Finding]:
    if _PYTHON_MEMORY not in case.conf:
        return []
    return [
        Finding(
            "error" if case.layout.use_gpu else "warning",
            "Python memory",
            f"{_PYTHON_MEMORY} is {case.conf[_PYTHON_MEMORY]}: it also limits the address space of "
            f"the ranks, and CUDA needs far more. Remove {_PYTHON_MEMORY}",
        )
    ]


def _missing(case: _Case) -> list[Finding]:
    return [
        _error(
            "nodes",
            f"executor host {host} did not answer: end other jobs that keep it busy (notebooks, "
            "streams), or restart the cluster",
        )
        for host in case.report.missing
    ]


def _nodes(case: _Case) -> list[Finding]:
    return [
        _error("nodes", f"{node.node} cannot be used: {node.problem}")
        if not node.gpus and (case.layout.use_gpu or not node.cpus)
        else Finding("warning", "nodes", f"{node.node}: {node.problem}")
        for node in ((case.report.driver,) if case.layout.local_mode else case.report.nodes)
        if node.problem
    ]


def _silent_or_broken(case: _Case) -> list[Finding]:
    return _missing(case) + _nodes(case)


def _gpu_nodes(case: _Case) -> list[Finding]:
    if not case.layout.use_gpu:
        return []
    return [
        _error(
            "GPUs",
            f"{node.node} has no GPU: use GPU machines for every worker, or set "
            "cluster.use_gpu=false",
        )
        for node in case.report.nodes
        if not node.gpus and not node.problem
    ]


def driver_gpus(conf: Mapping[str, str], report: ClusterReport, environ: Mapping[str, str]) -> int:
    """GPUs that ranks on the driver's machine can use.

    Those that Spark gives to the driver, where it manages them; else those that ``nvidia-smi``
    lists, as far as ``CUDA_VISIBLE_DEVICES`` shows them.
    """
    if amount := _whole(conf.get(DRIVER_GPUS, "")):
        return amount
    if _VISIBLE in environ:
        shown = [name for name in environ[_VISIBLE].split(",") if name.strip()]
        return min(len(shown), len(report.driver.gpus))
    return len(report.driver.gpus)


def _local_slots(case: _Case) -> list[Finding]:
    """Without GPUs: two ranks anywhere, which is what tests of a configuration take."""
    cpus, ranks = case.report.driver.cpus, case.layout.processes
    slots = max(cpus, _LOCAL_RANKS)
    if case.layout.use_gpu or not cpus or ranks <= slots:
        return []
    return [
        _error(
            "process slots",
            f"{ranks} ranks on the driver's machine are more processes than it has slots: {slots} "
            f"({cpus} CPUs, and {_LOCAL_RANKS} ranks are always allowed): set "
            f"cluster.processes={slots}",
        )
    ]


def _local_gpus(case: _Case) -> list[Finding]:
    if not case.layout.use_gpu:
        return []
    count = driver_gpus(case.conf, case.report, case.environ)
    findings = []
    if count < case.layout.processes:
        findings.append(
            _error(
                "GPUs",
                f"{case.layout.processes} ranks on the driver's machine need as many GPUs, it has "
                f"{count} ({DRIVER_GPUS} {case.conf.get(DRIVER_GPUS, 'not set')}): set "
                f"cluster.processes={max(1, count)}"
                + (", or cluster.use_gpu=false" if not count else ""),
            )
        )
    shown = case.environ.get(_VISIBLE, "").split(",")
    if _VISIBLE in case.environ and len(shown) < (_whole(case.conf.get(DRIVER_GPUS, "")) or 0):
        findings.append(
            _error(
                "visible GPUs",
                f"{_VISIBLE} is {case.environ[_VISIBLE]!r} in the driver's environment, but "
                f"{DRIVER_GPUS} is {case.conf[DRIVER_GPUS]}: remove {_VISIBLE}, or set "
                f"{DRIVER_GPUS} {len(shown)}",
            )
        )
    return findings


_Check = tuple[str, Callable[[_Case], list[Finding]], str]
"""A check's name, the check, and what is said where it finds nothing."""

_CLUSTER_CHECKS: tuple[_Check, ...] = (
    ("task slots", _slots, "{slots} task slots for {ranks} rank(s)"),
    ("dynamic allocation", _dynamic_allocation, "off"),
    ("autoscaling", _autoscaling, "off"),
    ("task GPUs", _task_gpus, "{gpus}"),
    ("visible GPUs", _preset_devices, "not set for all ranks"),
    ("encryption", _encryption, "not asked for between ranks"),
    ("Python memory", _python_memory, "not limited"),
    ("nodes", _silent_or_broken, "{nodes} node(s) have answered"),
    ("GPUs", _gpu_nodes, "{gpus}"),
)
_LOCAL_CHECKS: tuple[_Check, ...] = (
    ("process slots", _local_slots, "enough for {ranks} rank(s) on the driver's machine"),
    ("GPUs", _local_gpus, "{gpus}"),
    ("nodes", _nodes, "the driver's machine has told everything"),
)


def _whole(text: str) -> int | None:
    """A positive whole number as TorchDistributor reads it, else ``None``."""
    return int(text) if text.strip().isdecimal() and int(text) > 0 else None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])
