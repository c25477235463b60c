"""Checks of the machines that ranks run on: what they have, and what was tried there.

Pure: a report in, findings out. Every check says something, also where all is well.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dbx_llmtrain.display import many, size
from dbx_llmtrain.errors import Finding
from dbx_llmtrain.layout import Layout, nodes_of
from dbx_llmtrain.reports import ClusterReport, GpuInfo, NodeReport, PairSpeed

GIB = 1024**3
_HELD = GIB
"""More of a GPU than its driver takes for itself."""
_LITTLE_DISK = 10 * GIB
_LITTLE_MEMORY = 0.1
_SLOW = 0.5
"""Of the median of all pairs."""
_STRICT = ("torch", "transformers", "pyspark")
"""What all processes of a run have to have in the same version (major and minor)."""
_NEEDED = ("torch", "transformers", "safetensors")
_NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
_RUNTIMES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
_LIBRARY = "as a library of the cluster, or with %pip install, which reaches every node"


@dataclass(frozen=True)
class _Case:
    """``nodes`` are those of the ranks, as far as they have answered."""

    report: ClusterReport
    layout: Layout
    nodes: tuple[NodeReport, ...]

    @property
    def gpus(self) -> list[tuple[NodeReport, GpuInfo]]:
        """Those that the ranks may get; none where they need none."""
        use = self.layout.use_gpu
        return [(node, gpu) for node in self.nodes for gpu in node.gpus] if use else []


def check_nodes(report: ClusterReport, layout: Layout) -> list[Finding]:
    """What there is to say of the machines of the ranks. Of none that has answered: nothing."""
    nodes = tuple(node for node in nodes_of(layout, report) if node.cpus)
    if not nodes:
        return []
    case = _Case(report, layout, nodes)
    return [finding for check in _CHECKS for finding in check(case)]


def _alike(case: _Case) -> list[Finding]:
    check = "GPUs alike"
    if not case.gpus:
        return []
    kinds = _by((f"{gpu.name} with {size(gpu.memory_total)}", node) for node, gpu in case.gpus)
    counts = _by((many(len(node.gpus), "GPU"), node) for node in case.nodes)
    found = [
        Finding(
            "warning", check, f"{_listed(groups)}: {what}. Use one machine type for all workers"
        )
        for groups, what in (
            (kinds, "all ranks go at the pace of the slowest, and have room for what the smallest "
             "has"),
            (counts, "nodes have different numbers of GPUs"),
        )
        if len(groups) > 1
    ]  # fmt: skip
    return found or [Finding("ok", check, f"{many(len(case.gpus), 'GPU')}: {next(iter(kinds))}")]


def _held(case: _Case) -> list[Finding]:
    check = "GPU memory"
    if not case.gpus:
        return []
    found = []
    for node, gpu in case.gpus:
        if gpu.memory_used <= _HELD:
            continue
        holders = [process for process in node.gpu_processes if process.gpu == gpu.uuid]
        names = ", ".join(
            f"{process.name or 'a process'} (pid {process.pid}"
            + (f", {size(process.memory)})" if process.memory else ")")
            for process in holders
        )
        found.append(
            Finding(
                "warning",
                check,
                f"GPU {gpu.index} of {node.node} is not free: {size(gpu.memory_used)} of "
                f"{size(gpu.memory_total)} are held by "
                f"{names or 'processes that nvidia-smi does not name'}. End them (detach other "
                "notebooks, restart Python where a model was loaded), or restart the cluster",
            )
        )
    return found or [Finding("ok", check, "every GPU is free")]


def _drivers(case: _Case) -> list[Finding]:
    check = "CUDA"
    if not case.gpus:
        return []
    found = []
    versions = _by((gpu.driver, node) for node, gpu in case.gpus)
    if len(versions) > 1:
        text = f"GPU drivers differ: {_listed(versions)}. Use one runtime version for all workers"
        found.append(Finding("warning", check, text))
    for node in case.nodes:
        torch, built, newest = node.packages.get("torch", ""), torch_cuda(node), node.cuda
        if built == "cpu":
            found.append(
                Finding(
                    "warning",
                    check,
                    f"torch {torch} on {node.node} is built for CPUs alone and cannot use its "
                    f"GPUs: install a build for CUDA {_LIBRARY}",
                )
            )
        elif built and newest and _version(built)[:1] > _version(newest)[:1]:
            found.append(
                Finding(
                    "warning",
                    check,
                    f"torch {torch} on {node.node} is built for CUDA {built}, its driver "
                    f"({node.gpus[0].driver if node.gpus else 'none'}) runs CUDA up to {newest}: "
                    "use a newer runtime version, or a torch for that CUDA, unless CUDA's "
                    "compatibility package is installed",
                )
            )
    first = case.nodes[0]
    told = [f"driver {next(iter(versions))}"]
    told += [f"CUDA up to {first.cuda}"] if first.cuda else []
    told += [f"torch for {torch_cuda(first)}"] if torch_cuda(first) else []
    return found or [Finding("ok", check, ", ".join(told))]


def torch_cuda(node: NodeReport) -> str:
    """The CUDA that a node's torch is built for, by its packages' metadata: ``12.4``, ``cpu``, or
    empty where they do not tell."""
    local = node.packages.get("torch", "").partition("+")[2]
    if local == "cpu":
        return local
    if found := re.fullmatch(r"cu(\d+)(\d)", local):
        return f"{found[1]}.{found[2]}"
    runtimes = [node.packages[name] for name in _RUNTIMES if name in node.packages]
    return ".".join(runtimes[0].split(".")[:2]) if runtimes else ""


def _nccl(case: _Case) -> list[Finding]:
    check = "NCCL"
    if not case.gpus:
        return []
    versions = _by(
        (next((node.packages[name] for name in _NCCL if name in node.packages), "?"), node)
        for node in case.nodes
    )
    if len(versions) > 1:
        text = (
            f"{_listed(versions)} (?: not a package of its own): ranks with different versions do "
            f"not find each other. Install the same torch on every node, {_LIBRARY}"
        )
        return [Finding("error", check, text)]
    (version,) = versions
    told = "part of torch, not a package of its own" if version == "?" else version
    return [Finding("ok", check, told)]


def _python(case: _Case) -> list[Finding]:
    check, own = "Python", case.report.driver.python
    others = [node for node in case.nodes if _version(node.python)[:2] != _version(own)[:2]]
    if not others:
        return [Finding("ok", check, own)]
    groups = _by((node.python, node) for node in others)
    text = (
        f"{_listed(groups)}, the driver has {own}: set PYSPARK_PYTHON to the same version of "
        "Python on every node before the session is started"
    )
    return [Finding("error", check, text)]


def _packages(case: _Case) -> list[Finding]:
    check, found = "packages", []
    driver = case.report.driver
    machines = list({node.node: node for node in (driver, *case.nodes)}.values())
    for name in sorted({name for node in machines for name in node.packages}):
        if name.startswith("nvidia-"):
            continue  # as torch wants them
        versions = _by((node.packages[name], node) for node in machines if name in node.packages)
        lacking = [node.node for node in case.nodes if name not in node.packages]
        if name in _NEEDED and name in driver.packages and lacking:
            text = f"{name} is not installed on {_some(lacking)}: install it {_LIBRARY}"
            found.append(Finding("error", check, text))
        if len(versions) == 1:
            continue
        apart = len({_version(version)[:2] for version in versions}) > 1
        if apart or name in _STRICT:
            wanted = driver.packages.get(name) or max(versions, key=_version)
            text = f"{name} {_listed(versions)}: install {name}=={wanted} everywhere, {_LIBRARY}"
            level = "error" if apart and name in _STRICT else "warning"
            found.append(Finding(level, check, text))
    told = [f"{name} {driver.packages[name]}" for name in _NEEDED if name in driver.packages]
    return found or [Finding("ok", check, f"the same on every node ({', '.join(told)})")]


def _disk(case: _Case) -> list[Finding]:
    check = "local disk"
    found = [
        Finding(
            "warning",
            check,
            f"{node.node} has {size(node.disk_free)} free in {node.local_dir}: set "
            "cluster.local_dir to a bigger disk, or use machines with more",
        )
        for node in case.nodes
        if node.local_dir and node.disk_free < _LITTLE_DISK
    ]
    least = min(case.nodes, key=lambda node: node.disk_free)
    text = f"at least {size(least.disk_free)} free in {least.local_dir} ({least.node})"
    return found or [Finding("ok", check, text)]


def _memory(case: _Case) -> list[Finding]:
    check = "memory"
    found = [
        Finding(
            "warning",
            check,
            f"{node.node} has {size(node.memory_available)} of {size(node.memory_total)} left: end "
            "other jobs (notebooks, streams), or give Spark's executors less "
            "(spark.executor.memory)",
        )
        for node in case.nodes
        if node.memory_available < _LITTLE_MEMORY * node.memory_total
    ]
    least = min(case.nodes, key=lambda node: node.memory_available)
    text = f"at least {size(least.memory_available)} free ({least.node})"
    return found or [Finding("ok", check, text)]


def _network(case: _Case) -> list[Finding]:
    check = "network interface"
    hosts = {node.host for node in (case.report.driver, *case.nodes)}
    if case.layout.local_mode or len(hosts) == 1:
        return [Finding("ok", check, "all ranks are on one machine")]
    lost = [
        node.node
        for node in case.nodes
        if not node.interface and node.host != case.report.driver.host
    ]
    if lost:
        text = (
            f"{_some(lost)} cannot tell by which interface the driver is reached: where the ranks "
            "do not find each other, set cluster.env: {GLOO_SOCKET_IFNAME: eth0, "
            "NCCL_SOCKET_IFNAME: eth0}, with the interface that `ip addr` shows there"
        )
        return [Finding("warning", check, text)]
    groups = _by((node.interface, node) for node in case.nodes if node.interface)
    return [Finding("ok", check, _listed(groups))]


_CHECKS: tuple[Callable[[_Case], list[Finding]], ...] = (
    _alike, _held, _drivers, _nccl, _python, _packages, _disk, _memory, _network,
)  # fmt: skip


def check_folder(
    report: ClusterReport, layout: Layout, *, folder: str, unseen: str = ""
) -> list[Finding]:
    """The run folder, as driver and nodes have tried it. ``unseen``: what the driver misses of what
    the nodes have written."""
    check = "run folder"
    said = {"the driver": report.driver.tried.get(check) or unseen}
    said |= {node.node: node.tried.get(check, "") for node in nodes_of(layout, report)}
    problems = [f"{name}: {problem}" for name, problem in said.items() if problem]
    if problems:
        text = (
            f"{'; '.join(problems)}. Set checkpoint.dir to storage that the driver and every node "
            "can write, such as /Volumes/main/default/llm/runs (and grant READ VOLUME and WRITE "
            "VOLUME there)"
        )
        return [Finding("error", check, text)]
    return [Finding("ok", check, f"{folder}: written, read, replaced and listed by every node")]


def check_tracking(report: ClusterReport, layout: Layout) -> list[Finding]:
    """MLflow, as the nodes have asked it. Tracking never ends a run, so it is no error."""
    check = "MLflow"
    asked = [node for node in nodes_of(layout, report) if check in node.tried]
    groups = _by((node.tried[check], node) for node in asked if node.tried[check])
    if groups:
        text = (
            f"{_listed(groups)}: the run goes on without, and its metrics stay in events.jsonl. "
            "Set MLFLOW_TRACKING_URI and its credentials (MLFLOW_TRACKING_TOKEN, or "
            "DATABRICKS_HOST and DATABRICKS_TOKEN) in the driver's environment, and let the "
            "workers reach that address"
        )
        return [Finding("warning", check, text)]
    return [Finding("ok", check, f"answers to {many(len(asked), 'node')}")] if asked else []


def check_speeds(speeds: Sequence[PairSpeed]) -> list[Finding]:
    """How fast pairs of hosts are, and which are slower than half of the median."""
    check = "bandwidth"
    if not speeds:
        return [Finding("ok", check, "all ranks are on one host")]
    ordered = sorted(speeds, key=lambda pair: pair.bytes_per_second)
    median = ordered[len(ordered) // 2].bytes_per_second
    slow = [pair for pair in ordered if pair.bytes_per_second < _SLOW * median]
    if not slow:
        text = f"{many(len(speeds), 'pair')} of hosts, {size(ordered[0].bytes_per_second)}/s to "
        return [Finding("ok", check, text + f"{size(ordered[-1].bytes_per_second)}/s")]
    pairs = [f"{p.first} - {p.second} {size(p.bytes_per_second)}/s" for p in slow]
    common = set.intersection(*({pair.first, pair.second} for pair in slow))
    shared = f" ({', '.join(sorted(common))} is in all of them)" if len(slow) > 1 else ""
    text = (
        f"{_some(pairs)}{shared if common else ''}, less than half of the median of "
        f"{size(median)}/s: every step waits for the slowest. Replace that machine, or put all "
        "workers into one zone"
    )
    return [Finding("warning", check, text)]


def _by(items: Iterable[tuple[str, NodeReport]]) -> dict[str, list[str]]:
    """Nodes by what they have, each once."""
    groups: dict[str, list[str]] = defaultdict(list)
    for what, node in items:
        if node.node not in groups[what]:
            groups[what].append(node.node)
    return dict(groups)


def _listed(groups: dict[str, list[str]]) -> str:
    return ", ".join(f"{what} on {_some(nodes)}" for what, nodes in groups.items())


def _some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])
