"""Driver program of ``test_two_nodes``: a Master and two Workers that stand for two machines.

Each Worker has its own address, node id, temporary folder and ``nvidia-smi``. Run with a folder;
writes what it saw to ``seen.json`` there.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver import cluster, launch, probing, staging
from dbx_llmtrain.errors import ClusterError, StagingError, TrainingFailed
from tests.spark import spark_env
from tests.spark.helpers import artifact, make_plan, trainers

SECRETS = {"TEST_SECRET": "s3cret-value"}
NODES = {"node-a": "127.0.0.2", "node-b": "127.0.0.3"}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Cluster:
    """The daemons, started one by one and ended together."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = spark_env.make_home(folder)
        self.port = free_port()
        self.url = f"spark://127.0.0.1:{self.port}"
        self.daemons: list[subprocess.Popen[bytes]] = []

    def daemon(self, kind: str, host: str, env: dict[str, str], *options: str) -> None:
        name = f"org.apache.spark.deploy.{kind.lower()}.{kind}"
        command = [str(self.home / "bin" / "spark-class"), name, "--host", host]
        environ = dict(os.environ) | {
            "SPARK_HOME": str(self.home),
            "SPARK_LOCAL_IP": host,
            "SPARK_DAEMON_MEMORY": "256m",
        }
        log = (self.folder / f"{kind}-{host}.log").open("wb")
        process = subprocess.Popen(
            [*command, "--webui-port", "0", *options], env=environ | env, stdout=log, stderr=log
        )
        self.daemons.append(process)

    def start_master(self) -> None:
        self.daemon("Master", "127.0.0.1", {}, "--port", str(self.port))
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "the Master did not start"
                time.sleep(0.2)

    def start_workers(self) -> None:
        for name, host in NODES.items():
            place = self.folder / name
            listing = place / "gpus.csv"
            smi = spark_env.write_script(
                place / "bin" / "nvidia-smi", spark_env.FAKE_SMI.format(listing=listing)
            )
            listing.write_text(spark_env.gpu_lines([f"{name}-gpu-0", f"{name}-gpu-1"]))
            (place / "tmp").mkdir()
            env = {
                "DBX_LLMTRAIN_NODE": name,
                "TMPDIR": str(place / "tmp"),
                "PATH": f"{smi.parent}{os.pathsep}{os.environ['PATH']}",
            }
            options = ("-c", "2", "-m", "1g", "--work-dir", str(place / "work"), self.url)
            self.daemon("Worker", host, env, *options)

    def stop(self) -> None:
        for process in reversed(self.daemons):
            process.terminate()
        for process in self.daemons:
            process.wait(30)


def session(folder: Path, url: str) -> Any:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(url).appName("two nodes")
    settings = spark_env.base_conf(folder) | {"spark.executor.cores": "2"}
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def stage(spark: Any, folder: Path) -> dict[str, Any]:
    source = folder / "source"
    source.mkdir()
    (source / "weights.bin").write_bytes(b"w" * 100_000)
    model, data = artifact(source), artifact(source, "data")
    staged = staging.stage_artifacts(spark, [model], local_mode=False, local_dir=None)
    (folder / "node-b" / "tmp" / "dbx_llmtrain" / "data").write_text("in the way")
    try:
        staging.stage_artifacts(spark, [data], local_mode=False, local_dir=None)
        failed: dict[str, str] = {}
    except StagingError as error:
        failed = error.nodes
    return {
        "staged": {name: folders[model.fingerprint] for name, folders in staged.items()},
        "failed": failed,
    }


def stage_beside_a_job(spark: Any, folder: Path) -> dict[str, Any]:
    """Stage while another job has every slot of one node."""
    source = folder / "more"
    source.mkdir()
    (source / "weights.bin").write_bytes(b"v" * 1000)
    marks = folder / "busy"
    marks.mkdir()

    def occupy() -> None:
        def sleep_on_b(number: int, marks: str = str(marks)) -> None:
            import os
            import pathlib
            import time

            if os.environ.get("DBX_LLMTRAIN_NODE") == "node-b":
                pathlib.Path(marks, str(number)).touch()
            until = time.monotonic() + 90
            while not pathlib.Path(marks, "over").exists() and time.monotonic() < until:
                # On the other node as long as it takes for both slots here to be taken.
                if len(os.listdir(marks)) == 2 and not pathlib.Path(marks, str(number)).exists():
                    return
                time.sleep(0.1)

        spark.sparkContext.parallelize(range(4), 4).foreach(sleep_on_b)

    busy = threading.Thread(target=occupy)
    busy.start()
    deadline = time.monotonic() + 60
    while len(list(marks.iterdir())) < 2:
        assert time.monotonic() < deadline, "the job did not start"
        time.sleep(0.1)
    try:
        found = staging.stage_artifacts(
            spark, [artifact(source)], local_mode=False, local_dir=None, timeout_s=10
        )
    finally:
        (marks / "over").touch()
        busy.join()
    return {"beside": sorted(found)}


def probe_fully(spark: Any, folder: Path) -> dict[str, Any]:
    """Every check, with four ranks on the processors of both nodes."""
    (folder / "a-model").mkdir()
    cfg = TrainConfig(
        model={"source": str(folder / "a-model")},
        data={"train": "none"},
        checkpoint={"dir": str(folder / "probed")},
        cluster={"use_gpu": False, "processes": 4, "env": {"GLOO_SOCKET_IFNAME": "lo"}},
    )
    return probing.probe_fully(cfg, spark).model_dump(mode="json")


def lose_an_executor(spark: Any, folder: Path) -> dict[str, Any]:
    plan = make_plan(folder / "lost", action="wait", ranks=4)
    killed: list[float] = []

    def kill_when_all_run() -> None:
        if not killed and len(trainers(plan)) == 4:
            os.kill(executor_of("127.0.0.3"), signal.SIGKILL)
            killed.append(time.time())

    try:
        launch.launch(spark, plan, SECRETS, module="rank_program", on_poll=kill_when_all_run)
        error = ""
    except TrainingFailed as failure:
        error = str(failure)
    secrets = [
        str(path) for path in folder.glob("node-*/tmp/**/*") if path.is_file()
        and b"s3cret-value" in path.read_bytes()
    ]  # fmt: skip
    after_s = time.time() - killed[0]
    return {"error": error, "after_s": after_s, "left": trainers(plan), "secrets": secrets}


def executor_of(host: str) -> int:
    """The executor's JVM on a Worker of ours: this application's Worker has its folder."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            ours = sys.argv[1].encode() in (path.parent / "environ").read_bytes()
        except OSError:
            continue
        if b"org.apache.spark.executor.CoarseGrainedExecutorBackend" in words and ours:
            if words[words.index(b"--hostname") + 1] == host.encode():
                return int(path.parent.name)
    raise AssertionError(f"no executor on {host}")


def main(folder: Path) -> None:
    found = Cluster(folder)
    os.environ["TMPDIR"] = str(folder)
    smi = spark_env.write_script(folder / "bin" / "nvidia-smi", "#!/bin/sh\nexit 0\n")
    spark_env.set_environment(os.environ, found.home, smi)
    seen: dict[str, Any] = {}
    try:
        found.start_master()
        spark = session(folder, found.url)
        spark.sparkContext.setLogLevel("ERROR")
        try:
            cluster.run_on_nodes(spark, "dbx_llmtrain.worker.node:node_id", timeout_s=3)
        except ClusterError as error:
            seen["no_executors"] = str(error)
        found.start_workers()
        seen["report"] = cluster.probe(spark).model_dump(mode="json")
        seen["full"] = probe_fully(spark, folder)
        seen |= stage(spark, folder)
        seen |= stage_beside_a_job(spark, folder)
        plan = make_plan(folder / "run", action="all_reduce", ranks=4)
        result = launch.launch(spark, plan, SECRETS, module="rank_program")
        seen["result"] = result.model_dump()
        records = [json.loads(path.read_text()) for path in (folder / "run/logs").glob("*.json")]
        seen["ranks"] = [record["node"] for record in records]
        seen["lost"] = lose_an_executor(spark, folder)
        spark.stop()
    finally:
        found.stop()
        (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
