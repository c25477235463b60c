"""GPUs by their names, and clusters told in words."""

from __future__ import annotations

import pytest

from dbx_llmtrain import hardware
from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.reports import GpuInfo

MIB = 1024**2


def gpu(name: str, capability: str | None = None) -> GpuInfo:
    return GpuInfo(
        index=0, uuid="", name=name, memory_total=1, memory_used=0, driver="", capability=capability
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIE"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 ADA"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA Fake", None),
        ("Quadro RTX 6000", None),
    ],
)
def test_a_gpu_is_known_by_the_words_of_its_name(name: str, kind: str | None) -> None:
    found = hardware.find_kind(name)
    assert (found.name if found else None) == kind


def test_capability_is_what_the_gpu_says_else_what_its_name_says() -> None:
    assert hardware.capability(gpu("NVIDIA H100 80GB HBM3", "9.0")) == (9, 0)
    assert hardware.capability(gpu("NVIDIA Fake", "12.1")) == (12, 1)
    assert hardware.capability(gpu("Tesla T4")) == (7, 5)
    assert hardware.capability(gpu("NVIDIA Fake")) is None


def test_speed_is_that_of_the_slowest_in_this_precision() -> None:
    h100, a100, t4 = gpu("NVIDIA H100 80GB HBM3"), gpu("NVIDIA A100-SXM4-40GB"), gpu("Tesla T4")
    assert hardware.speed([h100], "bf16") == 989e12
    assert hardware.speed([h100, a100], "bf16") == 312e12
    assert hardware.speed([a100], "fp32") == 156e12, "in TF32"
    assert hardware.speed([t4], "fp32") == 8.1e12
    assert hardware.speed([t4], "fp16") == 65e12
    assert hardware.speed([t4], "bf16") is None, "it only emulates that"
    assert hardware.speed([h100, gpu("NVIDIA Fake")], "bf16") is None
    assert hardware.speed([], "bf16") is None


@pytest.mark.parametrize(
    ("text", "nodes", "gpus", "name", "mebibytes"),
    [
        ("2x8xH100-80GB", 2, 8, "H100", 81559),
        ("1x1xA10G-24GB", 1, 1, "A10G", 23028),
        ("1xA10G-24GB", 1, 1, "A10G", 23028),
        ("2x8xH100-80", 2, 8, "H100", 81559),
        ("8xH100", 1, 8, "H100", 81559),
        ("H200", 1, 1, "H200", 143771),
        ("8 x 8 x H200-141GB", 8, 8, "H200", 143771),
        ("4x8xA100-40GB", 4, 8, "A100", 40960),
        ("1x4xMyGPU-48GB", 1, 4, "MyGPU", 48 * 1024),
        ("1x2xrtx 4090", 1, 2, "rtx 4090", 24564),
    ],
)
def test_a_cluster_in_words(text: str, nodes: int, gpus: int, name: str, mebibytes: int) -> None:
    report = hardware.describe_cluster(text)
    assert [len(node.gpus) for node in report.nodes] == [gpus] * nodes
    assert len({node.node for node in report.nodes}) == nodes
    assert {g.name for node in report.nodes for g in node.gpus} == {name}
    assert {g.memory_total for node in report.nodes for g in node.gpus} == {mebibytes * MIB}
    assert (report.slots, report.local) == (nodes * gpus, False)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "expected 2x8xH100-80GB or 1x1xA10G-24GB"),
        ("2x8", "expected 2x8xH100-80GB or 1x1xA10G-24GB"),
        ("2x8xH100-8", "has 80GB or 96GB"),
        ("0x8xH100", "expected 1 to 10,000 nodes and GPUs"),
        ("20000x8xH100", "expected 1 to 10,000 nodes and GPUs"),
        ("1x8xH100-40GB", "H100 has 80GB or 96GB, found 40GB"),
        ("1x8xMyGPU", "no GPU of the name MyGPU is known"),
        ("1x8xMyGPU-0GB", "expected the memory of one GPU in GB, found 0GB"),
        ("1x8xH100-80TB", "expected the memory of one GPU in whole GB, as in H100-80GB"),
        ("1x8xH100-80.5GB", "in whole GB"),
        ("1x8xH100 80TB", "in whole GB"),
        ("1x24GB", "any other GPU with its memory: 1x1xGPU-24GB"),
    ],
)
def test_a_cluster_in_wrong_words_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hardware.describe_cluster(text)
    (problem,) = caught.value.problems
    assert problem.path == "cluster"
    assert told in problem.message


def test_every_kind_of_the_table_is_found_by_its_own_name() -> None:
    for kind in hardware.KINDS:
        assert hardware.find_kind(f"NVIDIA {kind.name}") is kind
        assert kind.memory
        assert (kind.speed("bf16") is None) == (kind.capability < (8, 0))
