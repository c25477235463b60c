"""What the configured strategy needs on the nodes, one refusal at a time, each with its line."""

from __future__ import annotations

from typing import Any

import pytest

from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver.strategy_checks import check_strategy
from dbx_llmtrain.errors import Finding
from dbx_llmtrain.layout import Layout
from dbx_llmtrain.reports import ClusterReport, NodeReport
from tests import sample

ALL = {
    "deepspeed": "0.19.8",
    "peft": "0.21.2",
    "bitsandbytes": "0.49.0",
    "liger-kernel": "0.8.5",
}
TOOLS = ("g++", "ninja", "libaio")


def machine(
    name: str, gpus: int = 2, *, without: tuple[str, ...] = (), **packages: str
) -> NodeReport:
    found = {name: version for name, version in (ALL | packages).items() if name not in without}
    tools = tuple(tool for tool in TOOLS if tool not in without)
    return sample.node(name, gpus=gpus).model_copy(update={"packages": found, "tools": tools})


def check(
    cfg: dict[str, Any], *nodes: NodeReport, ranks: int | None = None, use_gpu: bool = True
) -> list[Finding]:
    workers = nodes or (machine("a"), machine("b"))
    report: ClusterReport = sample.cluster(*workers)
    count = sum(len(node.gpus) for node in workers) if use_gpu else len(workers)
    layout = Layout(ranks or count, False, use_gpu, ())
    sections = {"model": {"source": "m"}, "data": {"train": "a.jsonl"}} | cfg
    return check_strategy(TrainConfig(**sections), report, layout)


def only(findings: list[Finding]) -> str:
    assert len(findings) == 1, findings
    assert findings[0].level == "error"
    return findings[0].message


ZERO = {"parallel": {"kind": "deepspeed", "stage": 2}}
LORA = {"model": {"source": "m", "lora": {}}}
QLORA = {"model": {"source": "m", "lora": {}, "load_in_4bit": True}, "parallel": {"kind": "ddp"}}
LIGER = {"model": {"source": "m", "use_liger_kernel": True}, "parallel": {"kind": "ddp"}}
EIGHT = {"train": {"optimizer": "adamw_8bit"}, "parallel": {"kind": "ddp"}}


def test_of_nodes_that_did_not_answer_nothing_is_said() -> None:
    """A busy cluster: every executor's host is missing, which is a finding of its own."""
    silent = sample.cluster(nodes=(), missing=("10.0.0.1",))
    cfg = TrainConfig(model={"source": "m"}, data={"train": "a.jsonl"})
    assert check_strategy(cfg, silent, Layout(2, False, False, ())) == []


@pytest.mark.parametrize("cfg", [{}, ZERO, LORA, QLORA, EIGHT, LIGER])
def test_nodes_that_have_everything_have_no_findings(cfg: dict[str, Any]) -> None:
    assert check(cfg) == []


@pytest.mark.parametrize(
    ("cfg", "package", "setting"),
    [
        (ZERO, "deepspeed", "parallel.kind: deepspeed"),
        (LORA, "peft", "model.lora"),
        (QLORA, "bitsandbytes", "model.load_in_4bit"),
        (EIGHT, "bitsandbytes", "train.optimizer: adamw_8bit"),
        (LIGER, "liger-kernel", "model.use_liger_kernel"),
    ],
)
def test_a_package_that_a_worker_lacks(cfg: dict[str, Any], package: str, setting: str) -> None:
    nodes = (machine("a"), machine("b", without=(package,)))
    message = only(check(cfg, *nodes))
    assert message.startswith(f"{setting} needs {package}>=0.")
    assert "which is not installed on b: install it as a library of the cluster" in message
    assert f"%pip install '{package}>=" in message
    assert check({}, *nodes) == [], "nobody asked for it"


def test_a_package_that_is_too_old_on_a_worker() -> None:
    nodes = [machine(name, deepspeed="0.9.5") for name in "abcde"]
    message = only(check(ZERO, machine("z"), *nodes))
    expected = "is too old on a (0.9.5), b (0.9.5), c (0.9.5) and 2 more"
    assert "needs deepspeed>=0.19.8" in message
    assert expected in message


@pytest.mark.parametrize(
    ("cfg", "path"), [(QLORA, "load_in_4bit"), (EIGHT, "adamw_8bit"), (LIGER, "use_liger_kernel")]
)
def test_what_needs_a_gpu_without_one(cfg: dict[str, Any], path: str) -> None:
    message = only(check(cfg, machine("a", 0), machine("b", 0), use_gpu=False))
    assert path in message or path in str(check(cfg, machine("a", 0), use_gpu=False))
    assert "needs GPUs, and this run has none" in message or "need GPUs, and this run" in message


@pytest.mark.parametrize("tool", ["g++", "ninja"])
def test_an_offloaded_optimizer_without_what_builds_its_operator(tool: str) -> None:
    offload = {"parallel": {"kind": "deepspeed", "stage": 2, "offload_optimizer": "cpu"}}
    assert check(offload) == []
    lacking = machine("b", without=(tool,))
    message = only(check(offload, machine("a"), lacking))
    assert f"needs DeepSpeed's cpu_adam, which b cannot build without {tool}" in message
    assert "or set parallel.offload_optimizer=none" in message
    built = lacking.model_copy(update={"tools": ("cpu_adam",)})
    assert check(offload, built, built) == []
    theirs = {**offload["parallel"], "config": {"zero_force_ds_cpu_optimizer": False}}
    assert check({"parallel": theirs}, machine("a"), lacking) == [], "torch's AdamW needs none"


def test_nvme_without_libaio() -> None:
    nvme = {"parallel": {"kind": "deepspeed", "stage": 3, "offload_params": "nvme"}}
    assert check(nvme) == []
    message = only(check(nvme, machine("a"), machine("b", without=("libaio",))))
    assert "nvme needs DeepSpeed's async_io, which b cannot build without libaio" in message
    assert "libaio-dev" in message
    assert "offload to cpu" in message


def test_hybrid_needs_several_hosts_with_as_many_ranks_each() -> None:
    hybrid = {"parallel": {"kind": "fsdp", "shard": "hybrid"}}
    assert check(hybrid) == []
    assert "all ranks are on one host: set parallel.shard=full" in only(
        check(hybrid, machine("a", 4))
    )
    uneven = only(check(hybrid, machine("a", 4), machine("b", 2)))
    assert "the hosts have uneven numbers of ranks (4, 2)" in uneven
    fewer = only(check(hybrid, machine("a", 4), machine("b", 4), ranks=6))
    assert "is not known before the launch" in fewer
