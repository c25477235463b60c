"""Which processes run where, on what, and in which precision: from the configuration and the probe.
Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dbx_llmtrain import batches, hardware
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.display import size
from dbx_llmtrain.errors import ConfigError, Problem
from dbx_llmtrain.forecasts import Decision
from dbx_llmtrain.memory import usable
from dbx_llmtrain.records import Artifact
from dbx_llmtrain.reports import ClusterReport, GpuInfo, NodeReport

BESIDE = "runs"
"""Where run folders lie if the configuration does not say: in the working directory."""

HOST_SHARE = 0.9
"""Of a node's free memory, what a run may take: the rest is for the system and Spark."""


@dataclass(frozen=True)
class Layout:
    """Which processes run where. Decided before anything is staged or launched."""

    processes: int
    local_mode: bool
    use_gpu: bool
    decisions: tuple[Decision, ...]


@dataclass(frozen=True)
class Place:
    """What a rank finds where it runs: on the worst of the nodes, in bytes; 0 is not known.

    ``per_node`` are the ranks of every node that has some, as far as the launcher can know them
    (``certain``). ``device_memory`` is what tensors may fill of a GPU; on CPUs 0. ``host_memory``
    is what is free now, less a reserve, of a node's ``host_total``. ``missing`` are
    packages and tools that a node lacks; ``told`` clusters, which nobody probed, lack nothing.
    """

    device: Literal["cuda", "cpu"]
    per_node: tuple[int, ...]
    certain: bool
    device_memory: int
    host_memory: int
    host_total: int
    disk: int
    missing: frozenset[str]
    told: bool = False

    @property
    def ranks(self) -> int:
        """All of them."""
        return sum(self.per_node)

    @property
    def busiest(self) -> int:
        """Ranks of the node that has most."""
        return max(self.per_node)

    @property
    def nodes(self) -> int:
        """Nodes with as many ranks as the busiest that hold all ranks."""
        return max(1, self.ranks // self.busiest)

    def uneven(self) -> str:
        """Why a model cannot be sharded within a host and replicated over hosts; empty: it can."""
        if len(self.per_node) == 1:
            return "all ranks are on one host"
        if len(set(self.per_node)) == 1 and self.certain:
            return ""
        if self.ranks % len(self.per_node) or self.certain:
            counts = ", ".join(map(str, self.per_node))
            return f"the hosts have uneven numbers of ranks ({counts})"
        return "which hosts the ranks come to is not known before the launch"


NEEDED = ("deepspeed", "peft", "bitsandbytes", "g++", "ninja", "libaio", "cpu_adam", "async_io")
"""Packages, tools and built operators that some way to train needs."""


def choose_layout(cfg: TrainConfig, cluster: ClusterReport) -> Layout:
    """Number of ranks, their machine and device, from the probe.

    Raises ``ConfigError`` where the batch cannot be cut for that many ranks: the earliest moment
    at which that is known.
    """
    local, why_local = _local_mode(cfg, cluster)
    use_gpu, why_gpu = _use_gpu(cfg, cluster, local)
    processes, why_processes = _processes(cfg, cluster, local, use_gpu)
    if problems := batches.contradictions(cfg, processes):
        raise ConfigError(problems)
    decisions = (
        Decision(name="cluster.local_mode", value=local, reason=why_local),
        Decision(name="cluster.use_gpu", value=use_gpu, reason=why_gpu),
        Decision(name="cluster.processes", value=processes, reason=why_processes),
    )
    return Layout(processes, local, use_gpu, decisions)


def checkpoint_dir(cfg: TrainConfig, cluster: ClusterReport, *, on_databricks: bool) -> str:
    """Where run folders lie: as configured, or ``./runs`` where one machine is the whole cluster.

    Raises ``ConfigError`` on a cluster whose nodes would not see the driver's own folder.
    """
    if cfg.checkpoint.dir:
        return cfg.checkpoint.dir
    elsewhere = [node.host for node in cluster.nodes if node.host != cluster.driver.host]
    if not on_databricks and not elsewhere:
        return BESIDE
    where = "on Databricks" if on_databricks else f"with workers on {', '.join(elsewhere[:3])}"
    raise ConfigError(
        [
            Problem(
                "checkpoint.dir",
                f"missing: {where} the run folder has to lie on storage that the driver and every "
                "node see; set it to a volume, such as /Volumes/main/default/llm/runs",
            )
        ]
    )


def nodes_of(layout: Layout, cluster: ClusterReport) -> tuple[NodeReport, ...]:
    """The machines that ranks run on."""
    return (cluster.driver,) if layout.local_mode else cluster.nodes


def gpus_of(layout: Layout, cluster: ClusterReport) -> list[GpuInfo]:
    """The GPUs that ranks may get."""
    return [gpu for node in nodes_of(layout, cluster) for gpu in node.gpus]


def disk_room(node: NodeReport, artifacts: Sequence[Artifact] = ()) -> int:
    """Bytes that copies of the artifacts and all else can take of a node's disk: what is free, what
    copies take that nobody uses, since those are removed where room is needed, and what is there of
    the artifacts themselves."""
    own = {f"{artifact.kind}/{artifact.fingerprint}" for artifact in artifacts}
    return node.disk_free + sum(
        copy.size for copy in node.copies if not copy.in_use or copy.name in own
    )


def check_disks(layout: Layout, cluster: ClusterReport, artifacts: Sequence[Artifact]) -> None:
    """Raise ``ConfigError`` that names every node whose disk has no room for the artifacts."""
    needed = sum(artifact.size for artifact in artifacts)
    short = [
        f"{node.node} has {size(room)} for them in {node.local_dir} ({size(node.disk_free)} free, "
        f"{size(room - node.disk_free)} in copies that can be removed or used again)"
        for node in nodes_of(layout, cluster)
        if node.disk_free and (room := disk_room(node, artifacts)) < needed
    ]
    if short:
        parts = " and ".join(f"{size(each.size)} of {each.kind}" for each in artifacts)
        message = (
            f"every node needs {size(needed)} of its own disk for copies ({parts}), but "
            f"{'; '.join(short)}: use nodes with bigger disks, set it to a folder on a bigger one, "
            "or delete what else lies on that disk"
        )
        raise ConfigError([Problem("cluster.local_dir", message)])


def find_place(
    layout: Layout,
    cluster: ClusterReport,
    artifacts: Sequence[Artifact] = (),
    *,
    told: bool = False,
) -> Place:
    """What the ranks find, from the probe; ``artifacts`` will be on their disks. ``told``: nobody
    probed, ``cluster`` is from words."""
    nodes = nodes_of(layout, cluster)
    per_node, certain = _ranks_per_node(layout, cluster)
    gpus = gpus_of(layout, cluster) if layout.use_gpu else []
    there = [{*node.packages, *node.tools} for node in nodes]
    missing = {name for name in NEEDED if not all(name in found for found in there)}
    return Place(
        device="cuda" if layout.use_gpu else "cpu",
        per_node=per_node,
        certain=certain,
        device_memory=min((usable(gpu.memory_total) for gpu in gpus), default=0),
        host_memory=int(HOST_SHARE * min(node.memory_available for node in nodes)),
        host_total=min(node.memory_total for node in nodes),
        disk=min(disk_room(node, artifacts) for node in nodes),
        missing=frozenset() if told else frozenset(missing),
        told=told,
    )


def memory_decision(place: Place, gpus: Sequence[GpuInfo]) -> Decision | None:
    """How much of a GPU a run may fill, and why not all."""
    if not place.device_memory:
        return None
    total = min(gpu.memory_total for gpu in gpus)
    names = ", ".join(sorted({gpu.name for gpu in gpus}))
    why = f"95% of {size(total)} ({names}), less 1.1 GiB for the CUDA context, cuBLAS and NCCL"
    return Decision(name="GPU memory", value=size(place.device_memory), reason=why)


def _ranks_per_node(layout: Layout, cluster: ClusterReport) -> tuple[tuple[int, ...], bool]:
    """Ranks on every node that has some, and whether that is certain: Spark does not promise where
    the tasks of less ranks than slots run; then the first nodes are taken to be full."""
    if layout.local_mode:
        return (layout.processes,), True
    if layout.use_gpu:
        slots = [len(node.gpus) for node in cluster.nodes]
    else:
        slots = [
            sum(address in (node.host, *node.addresses) for address in cluster.executors)
            for node in cluster.nodes
        ]
    left, found = layout.processes, []
    for count in sorted((count for count in slots if count), reverse=True):
        found.append(min(count, left))
        left -= found[-1]
    if left > 0:  # more slots than were found on the nodes
        return (*found[:-1], (found or [0])[-1] + left), False
    return tuple(count for count in found if count), layout.processes == sum(slots)


def _local_mode(cfg: TrainConfig, cluster: ClusterReport) -> tuple[bool, str]:
    if cfg.cluster.local_mode != "auto":
        return cfg.cluster.local_mode, "as configured"
    if cluster.local:
        return True, f"Spark runs on this machine alone ({cluster.master})"
    return False, f"{len(cluster.executors)} executors on {len(cluster.nodes)} node(s)"


def _use_gpu(cfg: TrainConfig, cluster: ClusterReport, local: bool) -> tuple[bool, str]:
    if cfg.cluster.use_gpu != "auto":
        return cfg.cluster.use_gpu, "as configured"
    gpus = _gpu_count(cluster, local)
    where = "the driver's machine" if local else "the workers"
    return gpus > 0, f"{gpus} GPU(s) on {where}"


def _gpu_count(cluster: ClusterReport, local: bool) -> int:
    nodes = (cluster.driver,) if local else cluster.nodes
    return sum(len(node.gpus) for node in nodes)


def _processes(
    cfg: TrainConfig, cluster: ClusterReport, local: bool, use_gpu: bool
) -> tuple[int, str]:
    if cfg.cluster.processes != "auto":
        return cfg.cluster.processes, "as configured"
    if cfg.parallel.kind == "single":
        return 1, "parallel.kind is single"
    if use_gpu:
        gpus = _gpu_count(cluster, local)
        count = gpus if local else cluster.slots
        return max(1, count), f"one for every GPU ({gpus} found, {cluster.slots} task slots)"
    if local:
        return 1, "CPU in local mode: one process uses every core"
    return max(1, len(cluster.executors)), "CPU: one for every executor"


def choose_precision(
    cfg: TrainConfig, cluster: ClusterReport, layout: Layout
) -> tuple[hardware.Precision, str]:
    """What the ranks compute in, and why. ``auto`` is bf16 only where every GPU computes in it:
    torch's own check also counts those that emulate it."""
    if cfg.train.precision != "auto":
        why = "as configured; weights and optimizer state are fp32"
        if cfg.train.precision == "bf16" and (slow := _emulating(cluster, layout)):
            why = (
                f"Warning: {slow} does not compute in bf16, only from 8.0: it emulates bf16, which "
                f"is slow; set train.precision=fp16 or fp32; {why}"
            )
        return cfg.train.precision, why
    if not layout.use_gpu:
        return "fp32", "CPU"
    gpus = gpus_of(layout, cluster)
    names = sorted({gpu.name for gpu in gpus})
    for gpu in gpus:
        if hardware.capability(gpu) is None:
            return "fp32", f"the compute capability of {gpu.name} is not known"
    if slow := _emulating(cluster, layout):
        return "fp32", (
            f"{slow} does not compute in bf16, only from 8.0; train.precision=fp16 is faster there"
        )
    return "bf16", f"{', '.join(names)}; weights and optimizer state are fp32"


def _emulating(cluster: ClusterReport, layout: Layout) -> str:
    """A GPU that is known to be too old for bf16, with its compute capability; else empty."""
    for gpu in gpus_of(layout, cluster) if layout.use_gpu else []:
        found = hardware.capability(gpu)
        if found is not None and found < hardware.BF16_FROM:
            return f"{gpu.name} (compute capability {'.'.join(map(str, found))})"
    return ""
