"""Every check of the machines: what is well, what is not, and what to change."""

from __future__ import annotations

from typing import Any

import pytest

from dbx_llmtrain.driver import node_checks
from dbx_llmtrain.errors import Finding
from dbx_llmtrain.layout import Layout
from dbx_llmtrain.reports import ClusterReport, GpuInfo, GpuProcess, NodeReport, PairSpeed

GIB = 1024**3
PACKAGES = {"torch": "2.9.0+cu126", "transformers": "4.57.1", "pyspark": "4.0.0", "peft": "0.21.0"}
PACKAGES |= {"safetensors": "0.6.2", "nvidia-nccl-cu12": "2.27.3"}
RANKS = Layout(2, False, True, ())
ON_CPU = Layout(2, False, False, ())
LOCAL = Layout(2, True, True, ())


def gpu(node: str, **changes: Any) -> GpuInfo:
    values: dict[str, Any] = {
        "index": 0, "uuid": f"GPU-{node}", "name": "H200", "memory_total": 140 * GIB,
        "memory_used": GIB // 2, "driver": "550.54",
    }  # fmt: skip
    return GpuInfo(**values | changes)


def machine(name: str, **changes: Any) -> NodeReport:
    values: dict[str, Any] = {
        "node": name, "host": name, "gpus": (gpu(name),), "cpus": 8, "memory_total": 64 * GIB,
        "memory_available": 60 * GIB, "local_dir": "/local", "disk_free": 500 * GIB,
        "python": "3.12.3", "packages": PACKAGES, "cuda": "12.4", "interface": "eth0",
    }  # fmt: skip
    return NodeReport(**values | changes)


def cluster(*nodes: NodeReport, **changes: Any) -> ClusterReport:
    values: dict[str, Any] = {
        "master": "spark://host:7077", "spark_version": "4.0.0", "local": False,
        "executors": ("a", "b"), "slots": 2, "driver": machine("driver", gpus=()),
        "nodes": nodes or (machine("a"), machine("b")),
    }  # fmt: skip
    return ClusterReport(**values | changes)


def told(report: ClusterReport, check: str, layout: Layout = RANKS) -> list[Finding]:
    return [found for found in node_checks.check_nodes(report, layout) if found.check == check]


def only(findings: list[Finding], level: str) -> str:
    assert [finding.level for finding in findings] == [level], findings
    return findings[0].message


def test_every_check_says_something_of_a_good_cluster() -> None:
    findings = node_checks.check_nodes(cluster(), RANKS)
    assert {finding.level for finding in findings} == {"ok"}
    assert [finding.check for finding in findings] == [
        "GPUs alike", "GPU memory", "CUDA", "NCCL", "Python", "packages", "local disk", "memory",
        "network interface",
    ]  # fmt: skip


def test_without_gpus_nothing_is_said_of_them() -> None:
    checks = {finding.check for finding in node_checks.check_nodes(cluster(), ON_CPU)}
    assert checks == {"Python", "packages", "local disk", "memory", "network interface"}


def test_nodes_that_have_not_answered_are_told_elsewhere() -> None:
    silent = machine("b", cpus=0, gpus=(), problem="ImportError: x")
    assert node_checks.check_nodes(cluster(silent), RANKS) == []


def test_in_local_mode_the_drivers_machine_counts() -> None:
    report = cluster(driver=machine("driver", disk_free=GIB))
    assert "driver has 1.0 GiB free" in only(told(report, "local disk", LOCAL), "warning")
    assert only(told(report, "local disk"), "ok")


def test_gpus_that_differ() -> None:
    other = machine("b", gpus=(gpu("b", name="L4", memory_total=24 * GIB),))
    message = only(told(cluster(machine("a"), other), "GPUs alike"), "warning")
    assert "H200 with 140 GiB on a, L4 with 24.0 GiB on b" in message
    more = machine("b", gpus=(gpu("b"), gpu("b", index=1)))
    message = only(told(cluster(machine("a"), more), "GPUs alike"), "warning")
    assert "1 GPU on a, 2 GPUs on b" in message


def test_a_gpu_that_is_not_free_and_who_holds_it() -> None:
    busy = gpu("b", memory_used=40 * GIB)
    holder = GpuProcess(pid=4711, memory=39 * GIB, gpu="GPU-b", name="python")
    other = GpuProcess(pid=1, memory=GIB, gpu="GPU-elsewhere", name="Xorg")
    node = machine("b", gpus=(busy,), gpu_processes=(holder, other))
    message = only(told(cluster(machine("a"), node), "GPU memory"), "warning")
    assert "GPU 0 of b is not free: 40.0 GiB of 140 GiB" in message
    assert "python (pid 4711, 39.0 GiB)" in message
    assert "Xorg" not in message
    unknown = cluster(machine("a"), machine("b", gpus=(busy,)))
    assert "that nvidia-smi does not name" in only(told(unknown, "GPU memory"), "warning")


def test_a_process_whose_name_and_memory_are_not_to_be_seen() -> None:
    holder = GpuProcess(pid=4711, memory=0, gpu="GPU-b")
    node = machine("b", gpus=(gpu("b", memory_used=40 * GIB),), gpu_processes=(holder,))
    assert "a process (pid 4711)." in only(told(cluster(node), "GPU memory"), "warning")


def test_drivers_that_differ() -> None:
    other = machine("b", gpus=(gpu("b", driver="535.1"),))
    message = only(told(cluster(machine("a"), other), "CUDA"), "warning")
    assert "550.54 on a, 535.1 on b" in message


@pytest.mark.parametrize(
    ("packages", "cuda"),
    [
        ({"torch": "2.9.0+cu130"}, "13.0"),
        ({"torch": "2.6.0+cu124"}, "12.4"),
        ({"torch": "2.9.0", "nvidia-cuda-runtime-cu12": "12.8.90"}, "12.8"),
        ({"torch": "2.9.0", "nvidia-cuda-runtime": "13.0.48"}, "13.0"),
        ({"torch": "2.9.0+cpu"}, "cpu"),
        ({"torch": "2.9.0"}, ""),
        ({}, ""),
    ],
)
def test_the_cuda_of_a_torch(packages: dict[str, str], cuda: str) -> None:
    assert node_checks.torch_cuda(machine("a", packages=packages)) == cuda


def test_a_torch_that_its_driver_cannot_run() -> None:
    packages = PACKAGES | {"torch": "2.9.0+cu130"}
    message = only(told(cluster(machine("a", packages=packages)), "CUDA"), "warning")
    assert "built for CUDA 13.0" in message
    assert "(550.54) runs CUDA up to 12.4" in message
    # Within a major version any driver will do.
    packages = PACKAGES | {"torch": "2.9.0+cu128"}
    assert only(told(cluster(machine("a", packages=packages)), "CUDA"), "ok")
    packages = PACKAGES | {"torch": "2.9.0+cpu"}
    message = only(told(cluster(machine("a", packages=packages)), "CUDA"), "warning")
    assert "built for CPUs alone" in message


def test_nccl_that_differs() -> None:
    other = machine("b", packages=PACKAGES | {"nvidia-nccl-cu12": "2.21.5"})
    message = only(told(cluster(machine("a"), other), "NCCL"), "error")
    assert "2.27.3 on a, 2.21.5 on b" in message
    bare = {name: version for name, version in PACKAGES.items() if "nccl" not in name}
    assert "part of torch" in only(told(cluster(machine("a", packages=bare)), "NCCL"), "ok")


def test_python_that_differs_from_the_drivers() -> None:
    report = cluster(machine("a"), machine("b", python="3.11.2"))
    message = only(told(report, "Python"), "error")
    assert "3.11.2 on b, the driver has 3.12.3: set PYSPARK_PYTHON" in message
    assert only(told(cluster(machine("b", python="3.12.1")), "Python"), "ok")


@pytest.mark.parametrize(
    ("name", "version", "level"),
    [
        ("torch", "2.8.1+cu126", "error"),
        ("torch", "2.9.1+cu126", "warning"),
        ("transformers", "5.0.0", "error"),
        ("pyspark", "4.1.0", "error"),
        ("peft", "0.22.0", "warning"),
        ("peft", "0.21.3", "ok"),
    ],
)
def test_packages_that_differ(name: str, version: str, level: str) -> None:
    report = cluster(machine("a"), machine("b", packages=PACKAGES | {name: version}))
    message = only(told(report, "packages"), level)
    if level != "ok":
        assert f"{name} {PACKAGES[name]} on driver, a, {version} on b" in message
        assert f"install {name}=={PACKAGES[name]} everywhere" in message


def test_a_package_that_a_node_lacks() -> None:
    bare = {name: version for name, version in PACKAGES.items() if name != "transformers"}
    message = only(told(cluster(machine("a"), machine("b", packages=bare)), "packages"), "error")
    assert message.startswith("transformers is not installed on b: install it as a library")
    # One that not even the driver knows by its metadata comes with the runtime.
    driver = machine("driver", packages={})
    assert only(told(cluster(machine("a", packages={}), driver=driver), "packages"), "ok")


def test_little_disk_and_memory() -> None:
    report = cluster(machine("a", disk_free=3 * GIB, memory_available=2 * GIB), machine("b"))
    assert "a has 3.0 GiB free in /local" in only(told(report, "local disk"), "warning")
    assert "a has 2.0 GiB of 64.0 GiB left" in only(told(report, "memory"), "warning")


def test_the_interface_toward_the_driver() -> None:
    assert only(told(cluster(), "network interface"), "ok") == "eth0 on a, b"
    report = cluster(machine("a"), machine("b", interface=""))
    message = only(told(report, "network interface"), "warning")
    assert "b cannot tell" in message
    assert "GLOO_SOCKET_IFNAME" in message
    one = cluster(machine("a", interface=""), driver=machine("a"))
    assert "one machine" in only(told(one, "network interface"), "ok")
    assert "one machine" in only(told(cluster(), "network interface", LOCAL), "ok")


# What was tried -------------------------------------------------------------------------------


def test_the_run_folder() -> None:
    fine = {"run folder": ""}
    report = cluster(machine("a", tried=fine), machine("b", tried=fine))
    (finding,) = node_checks.check_folder(report, RANKS, folder="/Volumes/x")
    assert (finding.level, finding.check) == ("ok", "run folder")
    assert finding.message.startswith("/Volumes/x: written, read")
    blind = machine("b", tried={"run folder": "/runs/f cannot be written"})
    report = cluster(machine("a", tried=fine), blind)
    (finding,) = node_checks.check_folder(report, RANKS, folder="/runs")
    assert finding.level == "error"
    assert finding.message.startswith("b: /runs/f cannot be written. Set checkpoint.dir")
    # Ranks on the driver's machine do not need it on the others.
    (finding,) = node_checks.check_folder(report, LOCAL, folder="/runs")
    assert finding.level == "ok"


def test_a_run_folder_that_the_driver_does_not_share() -> None:
    report = cluster(driver=machine("driver", tried={"run folder": "no right to write"}))
    (finding,) = node_checks.check_folder(report, LOCAL, folder="/runs")
    assert "the driver: no right to write" in finding.message
    unseen = "f, which a has written, cannot be read"
    (finding,) = node_checks.check_folder(cluster(), RANKS, folder="/runs", unseen=unseen)
    assert f"the driver: {unseen}" in finding.message
    assert finding.level == "error"


def test_mlflow_from_the_nodes() -> None:
    assert node_checks.check_tracking(cluster(), RANKS) == []
    fine = {"MLflow": ""}
    report = cluster(machine("a", tried=fine), machine("b", tried=fine))
    (finding,) = node_checks.check_tracking(report, RANKS)
    assert (finding.level, finding.message) == ("ok", "answers to 2 nodes")
    refused = machine("b", tried={"MLflow": "RestException: 403"})
    (finding,) = node_checks.check_tracking(cluster(machine("a", tried=fine), refused), RANKS)
    assert finding.level == "warning"
    assert finding.message.startswith("RestException: 403 on b: the run goes on without")


def speeds(**pairs: float) -> list[PairSpeed]:
    return [PairSpeed(first=n[0], second=n[1], bytes_per_second=v) for n, v in pairs.items()]


def test_slow_pairs_are_named() -> None:
    assert node_checks.check_speeds([])[0].message == "all ranks are on one host"
    assert node_checks.check_speeds(speeds(ab=5e8))[0].level == "ok"
    (finding,) = node_checks.check_speeds(speeds(ab=1e9, ac=1.2e9, bc=6e8))
    assert finding.level == "ok"
    assert finding.message == "3 pairs of hosts, 572 MiB/s to 1.1 GiB/s"
    (finding,) = node_checks.check_speeds(
        speeds(ab=1e9, ac=1e9, bc=1e9, ad=1e8, bd=1e8, cd=9e8)
    )  # fmt: skip
    assert finding.level == "warning"
    assert "a - d 95.4 MiB/s, b - d 95.4 MiB/s (d is in all of them)" in finding.message
    (finding,) = node_checks.check_speeds(speeds(ab=1e9, ac=1e9, bc=1e8))
    assert finding.message.startswith("b - c 95.4 MiB/s, less than half")
