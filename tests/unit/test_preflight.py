"""Every check of the cluster and of Spark's settings, one by one and together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from dbx_llmtrain.driver import preflight
from dbx_llmtrain.errors import ClusterError, Finding
from dbx_llmtrain.reports import ClusterReport, GpuInfo, NodeReport

MASTER = "spark://host:7077"
GOOD = {"spark.master": MASTER, "spark.task.resource.gpu.amount": "1"}


@dataclass(frozen=True)
class Layout:
    processes: int = 2
    local_mode: bool = False
    use_gpu: bool = True


def machine(name: str, gpus: int = 1, **changes: Any) -> NodeReport:
    found = tuple(
        GpuInfo(index=i, uuid=f"{name}-{i}", name="H200", memory_total=1, memory_used=0, driver="5")
        for i in range(gpus)
    )
    values: dict[str, Any] = {
        "node": name, "host": name, "gpus": found, "cpus": 4, "memory_total": 1,
        "memory_available": 1, "local_dir": "/tmp", "disk_free": 1, "python": "3.12",
    }  # fmt: skip
    return NodeReport(**values | changes)


def cluster(**changes: Any) -> ClusterReport:
    values: dict[str, Any] = {
        "master": MASTER, "spark_version": "3.5.2", "local": False, "executors": ("a", "b"),
        "slots": 2, "driver": machine("driver"), "nodes": (machine("a"), machine("b")),
    }  # fmt: skip
    return ClusterReport(**values | changes)


def check(
    conf: dict[str, str] | None = None,
    report: ClusterReport | None = None,
    environ: dict[str, str] | None = None,
    **layout: Any,
) -> list[Finding]:
    settings = GOOD if conf is None else conf
    return preflight.check_conf(settings, report or cluster(), Layout(**layout), environ or {})


def only(findings: list[Finding]) -> str:
    assert len(findings) == 1, findings
    assert findings[0].level == "error"
    return findings[0].message


def test_a_good_cluster_has_no_findings() -> None:
    assert check() == []
    assert check({"spark.master": MASTER}, use_gpu=False) == []


def test_too_few_slots() -> None:
    message = only(check(report=cluster(slots=2), processes=3))
    assert "3 ranks need 3 task slots at once, the cluster has 2" in message
    assert "cluster.processes=2" in message
    assert "spark.task.resource.gpu.amount 1" in message


def test_dynamic_allocation() -> None:
    message = only(check(GOOD | {"spark.dynamicAllocation.enabled": "true"}))
    assert "Set spark.dynamicAllocation.enabled false" in message
    assert check(GOOD | {"spark.dynamicAllocation.enabled": "false"}) == []


@pytest.mark.parametrize(
    ("amount", "said"),
    [(None, "is not set"), ("0.5", "is 0.5"), ("0", "is 0"), ("x", "is x"), ("2", "below 4.2")],
)
def test_task_gpus(amount: str | None, said: str) -> None:
    conf = {"spark.master": MASTER}
    if amount is not None:
        conf["spark.task.resource.gpu.amount"] = amount
    message = only(check(conf))
    assert said in message
    assert "Set spark.task.resource.gpu.amount 1" in message or "Set it to 1" in message
    assert check(conf, use_gpu=False) == []


def test_several_gpus_a_task_on_newer_spark() -> None:
    conf = GOOD | {"spark.task.resource.gpu.amount": "2"}
    assert check(conf, cluster(spark_version="4.2.0", slots=1)) == []
    message = only(check(conf, cluster(spark_version="4.10.1"), processes=3))
    assert "no multiple" in message
    assert only(check(conf, cluster(spark_version="4.1.0"))).count("below 4.2") == 1


def test_preset_visible_devices() -> None:
    key = "spark.executorEnv.CUDA_VISIBLE_DEVICES"
    assert f"Remove {key}" in only(check(GOOD | {key: "0,1"}))
    assert check(GOOD | {key: "0,1"}, use_gpu=False) == []


def test_encryption() -> None:
    message = only(check(GOOD | {"spark.ssl.enabled": "true"}))
    assert "Set pytorch.spark.distributor.ignoreSsl true" in message
    agreed = {"spark.ssl.enabled": "true", "pytorch.spark.distributor.ignoreSsl": "true"}
    assert check(GOOD | agreed) == []


def test_memory_limit_of_python_workers() -> None:
    conf = GOOD | {"spark.executor.pyspark.memory": "2g"}
    assert "Remove spark.executor.pyspark.memory" in only(check(conf))
    assert [finding.level for finding in check(conf, use_gpu=False)] == ["warning"]


def test_silent_and_broken_nodes() -> None:
    assert "10.0.0.9 did not answer" in only(check(report=cluster(missing=("10.0.0.9",))))
    broken = machine("b", gpus=0, problem="nvidia-smi failed with exit code 9: NVML")
    report = cluster(nodes=(machine("a"), broken))
    assert "b cannot be used: nvidia-smi failed" in only(check(report=report))
    assert [finding.level for finding in check(report=report, use_gpu=False)] == ["warning"]
    silent = machine("b", gpus=0, cpus=0, problem="ImportError: x")
    assert "ImportError" in only(check(report=cluster(nodes=(silent,)), use_gpu=False))


def test_a_node_without_gpu() -> None:
    report = cluster(nodes=(machine("a"), machine("b", gpus=0)))
    assert "b has no GPU" in only(check(report=report))
    assert check(report=report, use_gpu=False) == []


LOCAL = {"spark.master": "local[4]"}


def local(gpus: int = 2) -> ClusterReport:
    driver = machine("driver", gpus)
    return cluster(master="local[4]", local=True, executors=(), driver=driver, nodes=(driver,))


def test_local_master_with_task_gpus_is_found_before_any_job() -> None:
    conf = LOCAL | {"spark.task.resource.gpu.amount": "1"}
    with pytest.raises(ClusterError, match=r"Remove spark\.task\.resource\.gpu\.amount"):
        preflight.require(preflight.check_before_jobs(conf))
    assert preflight.check_before_jobs(LOCAL) == []
    assert preflight.check_before_jobs(GOOD) == []
    assert "wait for ever" in only(check(conf, local(), local_mode=True))


def test_local_master_gives_no_gpus_to_tasks() -> None:
    assert "cluster.local_mode=true" in only(check(LOCAL, local(), local_mode=False))


def test_local_mode_with_fewer_gpus_than_ranks() -> None:
    assert check(LOCAL, local(), local_mode=True) == []
    message = only(check(LOCAL, local(gpus=1), local_mode=True))
    assert "cluster.processes=1" in message
    assert "use_gpu=false" in only(check(LOCAL, local(gpus=0), local_mode=True))
    managed = LOCAL | {"spark.driver.resource.gpu.amount": "1"}
    assert "spark.driver.resource.gpu.amount 1" in only(check(managed, local(), local_mode=True))
    shown = check(LOCAL, local(), {"CUDA_VISIBLE_DEVICES": "1"}, local_mode=True)
    assert "it has 1" in only(shown)
    assert (
        check(LOCAL, local(0), {"CUDA_VISIBLE_DEVICES": ""}, local_mode=True, use_gpu=False) == []
    )


@pytest.mark.parametrize(
    ("cpus", "processes", "slots"),
    [(4, 4, None), (4, 5, 4), (2, 64, 2), (1, 2, None), (1, 3, 2), (0, 9, None)],
)
def test_local_mode_with_more_processes_than_cpus(
    cpus: int, processes: int, slots: int | None
) -> None:
    driver = machine("driver", gpus=0, cpus=cpus)
    report = local().model_copy(update={"driver": driver, "nodes": (driver,)})
    found = check(LOCAL, report, processes=processes, local_mode=True, use_gpu=False)
    if slots is None:
        assert found == []
        return
    message = only(found)
    assert f"{processes} ranks on the driver's machine are more processes than" in message
    assert f"{slots} ({cpus} CPUs" in message
    assert f"set cluster.processes={slots}" in message


def test_local_mode_with_fewer_visible_devices_than_spark_gives() -> None:
    managed = LOCAL | {"spark.driver.resource.gpu.amount": "2"}
    shown = check(managed, local(), {"CUDA_VISIBLE_DEVICES": "3"}, local_mode=True)
    assert "spark.driver.resource.gpu.amount 1" in only(shown)


def test_local_mode_ignores_the_cluster() -> None:
    conf = {"spark.master": MASTER, "spark.dynamicAllocation.enabled": "true"}
    report = cluster(slots=0, missing=("a",), driver=machine("driver", gpus=2))
    assert check(conf, report, local_mode=True) == []


def test_everything_at_once() -> None:
    conf = {
        "spark.master": MASTER,
        "spark.dynamicAllocation.enabled": "TRUE",
        "spark.task.resource.gpu.amount": "0.5",
        "spark.executorEnv.CUDA_VISIBLE_DEVICES": "0",
        "spark.ssl.enabled": "true",
    }
    with pytest.raises(ClusterError) as caught:
        preflight.require(check(conf, processes=8))
    checks = [finding.check for finding in caught.value.findings]
    assert checks == [
        "task slots", "dynamic allocation", "task GPUs", "visible GPUs", "encryption",
    ]  # fmt: skip
    assert all(str(finding) in str(caught.value) for finding in caught.value.findings)


def test_warnings_alone_pass() -> None:
    preflight.require([Finding("warning", "x", "y"), Finding("ok", "x", "y")])
    with pytest.raises(ClusterError) as caught:
        preflight.require(
            [Finding("ok", "a", ""), Finding("warning", "b", ""), Finding("error", "c", "")]
        )
    assert [finding.check for finding in caught.value.findings] == ["b", "c"]


def test_promised_executors() -> None:
    assert preflight.promised_executors({}, "local-cluster[2,1,1024]") == 2
    assert preflight.promised_executors({"spark.executor.instances": "5"}, MASTER) == 5
    assert preflight.promised_executors({}, MASTER) is None


def test_autoscaling_is_a_warning() -> None:
    key = "spark.databricks.clusterUsageTags.clusterScalingType"
    (finding,) = check(GOOD | {key: "autoscaling"})
    assert (finding.level, finding.check) == ("warning", "autoscaling")
    assert "set a fixed number of workers" in finding.message
    assert check(GOOD | {key: "fixed_size"}) == []


@pytest.mark.parametrize("local_mode", [False, True])
def test_every_check_is_listed_where_nothing_is_wrong(local_mode: bool) -> None:
    report = local() if local_mode else cluster()
    layout = Layout(local_mode=local_mode)
    found = preflight.check_conf(GOOD, report, layout, {}, oks=True)
    assert {finding.level for finding in found} == {"ok"}
    checks = [finding.check for finding in found]
    assert len(checks) == len(set(checks)) == (3 if local_mode else 9)
    assert not any("{" in finding.message for finding in found)


def test_a_check_that_found_something_is_not_ok_too() -> None:
    found = preflight.check_conf(GOOD, cluster(slots=1), Layout(), {}, oks=True)
    assert [finding.level for finding in found if finding.check == "task slots"] == ["error"]
