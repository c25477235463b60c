"""What GPUs are and do: their memory, their speed by data sheet, and clusters told in words.

A cluster is told as ``2x8xH100-80GB``: nodes, GPUs of each, their kind and memory. Memory is what
``nvidia-smi`` says of such a GPU, in bytes; speed is that of dense matrix products, in FLOP/s.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dbx_llmtrain.errors import ConfigError, Problem
from dbx_llmtrain.reports import ClusterReport, GpuInfo, NodeReport

Precision = Literal["fp32", "bf16", "fp16"]
Capability = tuple[int, int]

BF16_FROM: Capability = (8, 0)
"""Compute capability from which tensor cores compute in bf16; older GPUs emulate it slowly."""

EXAMPLES = (
    "2x8xH100-80GB or 1x1xA10G-24GB (nodes x GPUs of each x kind-memory; any other GPU with its "
    "memory: 1x1xGPU-24GB)"
)
_MIB = 1024**2
_GIB = 1024**3
_TERA = 1e12
_MOST = 10_000


@dataclass(frozen=True)
class GpuKind:
    """A GPU by its data sheet. ``memory``: GB in its name to MiB by ``nvidia-smi``; the first is
    the usual one. Speeds in TFLOP/s without sparsity; ``tf32`` is what fp32 runs in where it is."""

    name: str
    memory: tuple[tuple[int, int], ...]
    capability: Capability
    half: float | None
    tf32: float | None
    fp32: float

    def speed(self, precision: Precision) -> float | None:
        """FLOP/s of matrix products; ``None`` where it does not compute in this precision."""
        if precision == "fp32":
            return (self.tf32 or self.fp32) * _TERA
        if self.half is None or (precision == "bf16" and self.capability < BF16_FROM):
            return None
        return self.half * _TERA


def _kinds(text: str) -> tuple[GpuKind, ...]:
    """The table below: name | GB=MiB ... | capability | fp16 and bf16 | tf32 | fp32."""
    kinds = []
    for line in text.strip().splitlines():
        name, memory, capability, half, tf32, fp32 = (cell.strip() for cell in line.split("|"))
        sizes = [pair.split("=") for pair in memory.split()]
        major, minor = capability.split(".")
        kinds.append(
            GpuKind(
                name=name,
                memory=tuple((int(size), int(mebibytes)) for size, mebibytes in sizes),
                capability=(int(major), int(minor)),
                half=float(half) if half != "-" else None,
                tf32=float(tf32) if tf32 != "-" else None,
                fp32=float(fp32),
            )
        )
    return tuple(kinds)


# From NVIDIA's data sheets: dense speeds with fp32 accumulation (half of those "with sparsity").
KINDS = _kinds(
    """
    B300          | 288=275040             | 10.3 | 2250 | 1100 | 75
    B200          | 192=183359 180=183359  | 10.0 | 2250 | 1100 | 75
    GB200         | 186=189471 192=189471  | 10.0 | 2500 | 1250 | 80
    GH200         | 96=97871 144=147456    | 9.0  | 990  | 495  | 67
    H200 NVL      | 141=143771             | 9.0  | 835  | 417  | 60
    H200          | 141=143771             | 9.0  | 989  | 495  | 67
    H100 NVL      | 94=95830               | 9.0  | 835  | 417  | 60
    H100 PCIE     | 80=81559               | 9.0  | 756  | 378  | 51
    H100          | 80=81559 96=97871      | 9.0  | 989  | 495  | 67
    H800          | 80=81559               | 9.0  | 989  | 495  | 67
    H20           | 96=97871 141=143771    | 9.0  | 148  | 74   | 44
    A100          | 80=81920 40=40960      | 8.0  | 312  | 156  | 19.5
    A800          | 80=81920 40=40960      | 8.0  | 312  | 156  | 19.5
    A30           | 24=24576               | 8.0  | 165  | 82   | 10.3
    A40           | 48=46068               | 8.6  | 150  | 75   | 37.4
    A10           | 24=23028               | 8.6  | 125  | 62.5 | 31.2
    A10G          | 24=23028               | 8.6  | 70   | 35   | 35
    A16           | 16=15356               | 8.6  | 18   | 9    | 4.5
    A2            | 16=15356               | 8.6  | 18   | 9    | 4.5
    RTX A6000     | 48=49140               | 8.6  | 155  | 77   | 38.7
    RTX 3090      | 24=24576               | 8.6  | 71   | 35.6 | 35.6
    L4            | 24=23034               | 8.9  | 121  | 60   | 30.3
    L40           | 48=46068               | 8.9  | 181  | 90   | 90.5
    L40S          | 48=46068               | 8.9  | 362  | 183  | 91.6
    RTX 6000 ADA  | 48=49140               | 8.9  | 364  | 182  | 91.1
    RTX 4090      | 24=24564               | 8.9  | 165  | 82.6 | 82.6
    RTX PRO 6000  | 96=97887               | 12.0 | 504  | 252  | 117
    RTX 5090      | 32=32607               | 12.0 | 210  | 105  | 105
    T4            | 16=15360               | 7.5  | 65   | -    | 8.1
    V100          | 16=16384 32=32768      | 7.0  | 125  | -    | 15.7
    P100          | 16=16384 12=12288      | 6.0  | 21   | -    | 10.6
    P40           | 24=24576               | 6.1  | -    | -    | 11.8
    P4            | 8=8192                 | 6.1  | -    | -    | 5.5
    M60           | 8=8192                 | 5.2  | -    | -    | 4.8
    K80           | 12=11441               | 3.7  | -    | -    | 4.1
    """
)


def find_kind(name: str) -> GpuKind | None:
    """The kind of a GPU that ``nvidia-smi`` or a user calls ``name``; ``None`` for an unknown one.

    Of several whose words are all in the name the one with the most words: an ``H100 PCIe`` is not
    the faster ``H100``.
    """
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    found = [kind for kind in KINDS if set(kind.name.split()) <= words]
    return max(found, key=lambda kind: len(kind.name.split()), default=None)


def capability(gpu: GpuInfo) -> Capability | None:
    """Compute capability as the GPU says it, else by its name; ``None`` where neither is known."""
    if gpu.capability:
        major, _, minor = gpu.capability.partition(".")
        return int(major), int(minor or 0)
    kind = find_kind(gpu.name)
    return kind.capability if kind else None


def speed(gpus: Sequence[GpuInfo], precision: Precision) -> float | None:
    """FLOP/s of the slowest of them, which the others wait for; ``None`` where one is unknown."""
    speeds = []
    for gpu in gpus:
        kind = find_kind(gpu.name)
        found = kind.speed(precision) if kind else None
        if found is None:
            return None
        speeds.append(found)
    return min(speeds, default=None)


def unknown_speed(gpus: Sequence[GpuInfo], precision: Precision) -> str:
    """Why ``speed`` gives none: a GPU that is not in the table, or does not compute like that."""
    kinds = [find_kind(gpu.name) for gpu in gpus]
    slow = sorted({kind.name for kind in kinds if kind and kind.speed(precision) is None})
    if slow:
        return f"{', '.join(slow)} only emulates {precision}, at an unknown speed"
    return "GPUs of unknown speed"


def describe_cluster(text: str) -> ClusterReport:
    """The cluster that ``text`` tells of (``2x8xH100-80GB``), as if it had been probed.

    ``1xA10G-24GB`` is one node with one GPU, ``H100`` alone takes its usual memory, and a kind that
    is not in the table needs its memory told. What nobody said (CPUs, host memory, disk, versions)
    is 0 or empty. Raises ``ConfigError``.
    """
    counts, kind, memory = _parts(text)
    nodes, gpus = counts
    report = NodeReport(
        node="node-1", host="node-1", cpus=0, memory_total=0, memory_available=0, local_dir="",
        disk_free=0, python="",
        gpus=tuple(
            GpuInfo(
                index=index, uuid="", name=kind, memory_total=memory, memory_used=0, driver="",
            )
            for index in range(gpus)
        ),
    )  # fmt: skip
    names = [f"node-{i + 1}" for i in range(nodes)]
    machines = tuple(report.model_copy(update={"node": name, "host": name}) for name in names)
    return ClusterReport(
        master=text, spark_version="", local=False, executors=tuple(names), slots=nodes * gpus,
        task_gpus="1", driver=report, nodes=machines,
    )  # fmt: skip


def _parts(text: str) -> tuple[tuple[int, int], str, int]:
    """Nodes and GPUs of each, the kind's name, and bytes of a GPU."""
    found = re.fullmatch(
        r"\s*(?:(\d+)\s*x\s*)?(?:(\d+)\s*x\s*)?([a-z][\w .-]*?)"
        r"(?:-(\d+)(?:\s*gi?b)?| (\d+)\s*gi?b)?\s*",
        text,
        re.IGNORECASE,
    )
    if found is None:
        raise _refuse(f"expected {EXAMPLES}, found {text!r}")
    first, second, kind, *sizes = found.groups()
    if re.search(r"-\s*\d|\d\s*[kmtp]i?b$", kind, re.IGNORECASE):
        raise _refuse(
            f"expected the memory of one GPU in whole GB, as in H100-80GB, found {text!r}"
        )
    counts = (int(first), int(second)) if second else (1, int(first or 1))
    if not all(0 < count <= _MOST for count in counts):
        raise _refuse(f"expected 1 to {_MOST:,} nodes and GPUs, found {text!r}")
    return counts, kind, _memory(kind, sizes[0] or sizes[1])


def _memory(kind: str, size: str | None) -> int:
    """Bytes of a GPU that is told as having ``size`` GB, as ``nvidia-smi`` would have them."""
    known = find_kind(kind)
    sizes = dict(known.memory) if known else {}
    if size is None and not sizes:
        names = ", ".join(each.name for each in KINDS)
        raise _refuse(
            f"no GPU of the name {kind} is known ({names}): say its memory, as in {kind}-48GB"
        )
    if size is None:
        return next(iter(sizes.values())) * _MIB
    if not 0 < int(size) <= _MOST:
        raise _refuse(f"expected the memory of one GPU in GB, found {size}GB")
    if sizes and int(size) not in sizes:
        there = " or ".join(f"{each}GB" for each in sizes)
        raise _refuse(f"{kind} has {there}, found {size}GB")
    return sizes[int(size)] * _MIB if sizes else int(size) * _GIB


def _refuse(message: str) -> ConfigError:
    return ConfigError([Problem("cluster", message)])
