"""Checks of what the configured strategy, adapters and optimizer need on the nodes.

Pure: configuration and reports in, findings out. They are made before the data is prepared.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dbx_llmtrain import choosing, optimizers, zero_config
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.errors import Finding
from dbx_llmtrain.layout import Layout, Place, find_place, nodes_of
from dbx_llmtrain.reports import ClusterReport, NodeReport

_error = partial(Finding, "error")
_NAMED = 3

# The floors of pyproject.toml.
_FLOORS = {
    "deepspeed": tuple(map(int, zero_config.MINIMUM.split("."))),
    "peft": (0, 21),
    "bitsandbytes": (0, 43),
    "liger-kernel": (0, 5),
}


@dataclass(frozen=True)
class _Case:
    cfg: TrainConfig
    nodes: tuple[NodeReport, ...]
    place: Place


def check_strategy(
    cfg: TrainConfig, report: ClusterReport, layout: Layout, *, told: bool = False
) -> list[Finding]:
    """Everything that the configuration asks for and these nodes do not have or cannot do. Of a
    cluster that is only ``told`` in words, packages and tools are not known: nothing is missing.
    Where no node has answered (``preflight`` tells that) nothing is known of any."""
    if not nodes_of(layout, report):
        return []
    case = _Case(cfg, nodes_of(layout, report), find_place(layout, report, told=told))
    checks = [check for check in _CHECKS if not (told and check in _OF_NODES)]
    return [finding for check in checks for finding in check(case)]


def _packages(case: _Case) -> list[Finding]:
    needed = {
        "deepspeed": "parallel.kind: deepspeed" if case.cfg.parallel.kind == "deepspeed" else "",
        "peft": "model.lora" if case.cfg.model.lora else "",
        "bitsandbytes": _bitsandbytes(case.cfg) if case.place.device == "cuda" else "",
        "liger-kernel": _liger(case.cfg) if case.place.device == "cuda" else "",
    }
    findings = []
    for package, setting in needed.items():
        if not setting:
            continue
        lacking = [node.node for node in case.nodes if package not in node.packages]
        floor = _FLOORS[package]
        old = [
            f"{node.node} ({node.packages[package]})"
            for node in case.nodes
            if _version(node.packages.get(package, "99")) < floor
        ]
        wanted = f"{package}>={'.'.join(map(str, floor))}"
        for names, fault in ((lacking, "is not installed on"), (old, "is too old on")):
            if names:
                findings.append(
                    _error(
                        package,
                        f"{setting} needs {wanted}, which {fault} {_some(names)}: install it as a "
                        f"library of the cluster, or with %pip install '{wanted}'"
                        f"{_instead(package)}",
                    )
                )
    return findings


def _instead(package: str) -> str:
    others = {"deepspeed": ", or set parallel.kind=fsdp", "peft": ", or remove model.lora"}
    return others.get(package, ", or do without")


def _bitsandbytes(cfg: TrainConfig) -> str:
    if cfg.model.load_in_4bit:
        return "model.load_in_4bit"
    eight = optimizers.name_of(cfg.train.optimizer) == "adamw_8bit"
    return "train.optimizer: adamw_8bit" if eight else ""


def _liger(cfg: TrainConfig) -> str:
    return "model.use_liger_kernel" if cfg.model.use_liger_kernel is True else ""


def _without_gpu(case: _Case) -> list[Finding]:
    if case.place.device == "cuda":
        return []
    findings = []
    if case.cfg.model.load_in_4bit:
        findings.append(
            _error(
                "model.load_in_4bit",
                "4-bit weights need GPUs, and this run has none: set model.load_in_4bit=false "
                "(model.lora works without), or use GPU machines",
            )
        )
    if case.cfg.model.use_liger_kernel is True:
        findings.append(
            _error(
                "model.use_liger_kernel",
                "Liger's kernels need GPUs, and this run has none: set model.use_liger_kernel=auto",
            )
        )
    problems = optimizers.strategy_problems(case.cfg.train, "single", use_gpu=False)
    return findings + [_error(problem.path, problem.message) for problem in problems]


def _operators(case: _Case) -> list[Finding]:
    """What DeepSpeed compiles on the nodes before the first step."""
    parallel = case.cfg.parallel
    if parallel.kind != "deepspeed":
        return []
    own = zero_config.read(parallel.config)
    findings = []
    needs = {
        "cpu_adam": (
            zero_config.needs_cpu_adam(parallel, own),
            "parallel.offload_optimizer",
            "apt-get install g++, pip install ninja), or set parallel.offload_optimizer=none",
        ),
        "async_io": (
            zero_config.uses_nvme(parallel),
            "nvme",
            "apt-get install g++ libaio-dev, pip install ninja), or offload to cpu",
        ),
    }
    for operator, (needed, setting, advice) in needs.items():
        lacking = choosing.missing_for_operator(operator, case.place.missing)
        if needed and lacking:
            nodes = [node.node for node in case.nodes if not _can_build(operator, node)]
            findings.append(
                _error(
                    "DeepSpeed's operators",
                    f"{setting} needs DeepSpeed's {operator}, which {_some(nodes)} cannot build "
                    f"without {lacking}: install that in an init script of the cluster ({advice}",
                )
            )
    return findings


def _can_build(operator: str, node: NodeReport) -> bool:
    known = {"g++", "ninja", "libaio", operator}
    return not choosing.missing_for_operator(operator, frozenset(known - {*node.tools}))


def _hosts(case: _Case) -> list[Finding]:
    parallel = case.cfg.parallel
    if parallel.kind != "fsdp" or parallel.shard != "hybrid" or not (why := case.place.uneven()):
        return []
    return [
        _error(
            "parallel.shard",
            f"hybrid shards within a host and replicates over hosts, but {why}: set "
            "parallel.shard=full, or cluster.processes and the workers so that there are several "
            "hosts with as many ranks each",
        )
    ]


_CHECKS: tuple[Callable[[_Case], list[Finding]], ...] = (
    _packages,
    _without_gpu,
    _operators,
    _hosts,
)
_OF_NODES = (_packages, _operators)
"""What only a probe of the nodes can answer."""


def _some(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
