"""The shell commands as a shell runs them: a process of their own, with a Spark of its own."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

import dbx_llmtrain
from dbx_llmtrain.records import PreparedData
from dbx_llmtrain.reports import ClusterReport
from tests import tiny

# The session of the other tests must not lend its settings to these processes.
FOREIGN = ("SPARK_HOME", "SPARK_CONF_DIR", "SPARK_LOCAL_IP", "PYSPARK_PYTHON", "PYTHONPATH")
PACKAGE = {"PYTHONPATH": str(Path(dbx_llmtrain.__file__).parents[1])}
GROUP = """
import signal, sys
from dbx_llmtrain.cli import main

# A shell's jobs in the background ignore them, and so do their children.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
main(sys.argv[1:])
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Run ``dbx-llmtrain`` with arguments in an empty folder."""
    for name in FOREIGN:
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(Path(sys.executable).with_name("dbx-llmtrain")), *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
        )

    return run


def test_probe_prints_json_alone_on_standard_output(shell) -> None:  # type: ignore[no-untyped-def]
    done = shell("probe", "--json", "--master", "local[1]", "--conf", "spark.app.name=mine")
    assert done.returncode == 0, done.stderr
    report = ClusterReport.model_validate_json(done.stdout)
    assert report.local
    assert report.master == "local[1]"


@pytest.mark.slow
def test_a_local_cluster_is_started_and_leaves_nothing(shell) -> None:  # type: ignore[no-untyped-def]
    import pyspark

    work = Path(pyspark.__file__).parent / "work"
    before = set(work.glob("*"))
    done = shell("probe", "--master", "local-cluster[1,1,512]")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Cluster local-cluster[1,1,512]\n")
    assert set(work.glob("*")) <= before


def test_input_that_cannot_be_trained_on_is_code_2(shell, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    config = "model: {source: missing-folder/}\ndata: {train: rows.jsonl}\n"
    (tmp_path / "config.yaml").write_text(config)
    (tmp_path / "rows.jsonl").write_text('{"text": "the cat sat"}\n')
    done = shell("train", "config.yaml", "--master", "local[1]")
    assert done.returncode == 2, done.stderr
    assert "error: " in done.stderr
    assert "missing-folder" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_data_is_prepared_in_local_mode_too(shell, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    tiny.model_folder(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"text": "the cat sat"}\n' * 20)
    config = "model: {source: model}\ndata: {train: rows.jsonl, max_length: 64}\n"
    (tmp_path / "config.yaml").write_text(config)
    options = ("--json", "--master", "local[2]", f"cluster.local_dir={tmp_path}/local")
    done = shell("prepare", "config.yaml", *options)
    assert done.returncode == 0, done.stderr
    data = PreparedData.model_validate_json(done.stdout)
    assert data.audit.train_rows == 20
    assert Path(data.artifact.source).parent == tmp_path / "runs" / ".cache" / "data"


STOPPED = """
import sys
from pyspark.sql import SparkSession
import dbx_llmtrain as llm

cfg = llm.TrainConfig.from_yaml("config.yaml", *sys.argv[1:])
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
process = spark.sparkContext._gateway.proc
for end in (spark.stop, process.kill):
    if end == process.kill:
        spark = SparkSession.builder.master("local[1]").getOrCreate()
    end()
    for call in (llm.plan, llm.prepare, llm.probe):
        try:
            call(cfg, spark=spark)
        except llm.ClusterError as error:
            print(error.findings[0].check, error.findings[0].message)
"""


@pytest.mark.slow
def test_a_session_that_has_been_stopped_is_told(tmp_path: Path) -> None:
    tiny.model_folder(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"text": "the cat sat"}\n' * 20)
    (tmp_path / "config.yaml").write_text("model: {source: model}\ndata: {train: rows.jsonl}\n")
    env = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, "data.max_length=64"],
        cwd=tmp_path, env=env | PACKAGE, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 6, done.stdout
    assert all(
        line.startswith("spark session this Spark session has been stopped: ") for line in lines
    )


NOISE = (
    "Loading weights",
    "Writing model shards",
    "Setting accelerator to CPU",
    "OMP_NUM_THREADS",
    "Successfully registered",
    "Created version",
    "local training with",
    "preparing: 0 rows",
    "[Stage ",
)
"""What libraries say of their own work, and what says nothing."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_says_nothing_of_the_work_of_libraries(  # type: ignore[no-untyped-def]
    shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    tiny.model_folder(tmp_path / "model")
    rows = "".join(f'{{"text": "the cat sat {number}"}}\n' for number in range(20))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "config.yaml").write_text(
        "model: {source: model}\ndata: {train: rows.jsonl, eval: 0.2, max_length: 64}\n"
        "train: {max_steps: 2}\ntracking: {run_name: mine, register_as: answers}\n"
        f"cluster: {{local_dir: {tmp_path}/local, processes: 2, use_gpu: false, "
        "env: {GLOO_SOCKET_IFNAME: lo}}\n"
    )
    done = shell("train", "config.yaml", "--master", "local[2]")
    assert done.returncode == 0, done.stderr
    assert "models:/answers/1" in done.stdout, done.stderr
    asked = shell("generate", "runs/mine", "the cat", "--max-new-tokens", "2")
    exported = shell("export", "runs/mine", "exported", "--dtype", "bf16")
    registered = shell("register", "exported", "small")
    helped = shell("--help")
    for each in (done, asked, exported, registered, helped):
        assert each.returncode == 0, each.stderr
        assert not [noise for noise in NOISE if noise in each.stdout + each.stderr]
    assert "models:/small/1" in registered.stdout


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_whole_group_ends_a_run_well(
    tmp_path: Path, number: int, code: int
) -> None:
    """As ``timeout``, a scheduler or a closed terminal sends it: to the JVM too."""
    tiny.model_folder(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"text": "the cat sat"}\n' * 20)
    (tmp_path / "config.yaml").write_text(
        "model: {source: model}\ndata: {train: rows.jsonl, max_length: 64}\n"
        "train: {max_steps: 1000000}\ncheckpoint: {every: 3}\ntracking: {run_name: mine}\n"
        f"cluster: {{local_dir: {tmp_path}/local}}\n"
    )
    env = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", GROUP, "train", "config.yaml", "--master", "local[1]"],
            cwd=tmp_path, env=env | PACKAGE, stdout=said, stderr=said, start_new_session=True,
        )  # fmt: skip
    try:
        checkpoints, until = tmp_path / "runs" / "mine" / "checkpoints", time.monotonic() + 180
        while not list(checkpoints.glob("*/manifest.json")) and time.monotonic() < until:
            assert process.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.2)
        os.killpg(process.pid, number)
        assert process.wait(timeout=120) == code
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    told = (tmp_path / "said").read_text()
    assert "KeyboardInterrupt" not in told
    # Ctrl-C leaves the launcher alive, which prints its own account of a rank that was told to end.
    assert number == signal.SIGINT or "Traceback" not in told
    assert "stopping 1 rank(s), please wait ..." in told
    assert "mine has been stopped; the newest checkpoint is " in told
    assert "the same run goes on from there with tracking.run_name=mine" in told
    with closing(sqlite3.connect(tmp_path / "runs" / "mlflow.db")) as store:
        assert store.execute("select name, status from runs").fetchall() == [("mine", "KILLED")]
