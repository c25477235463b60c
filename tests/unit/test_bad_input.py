"""What a user can get wrong before there is a Spark: the shell's answer, and the exception's.

Faults that need a session to show are in ``tests/spark/test_bad_input.py``.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import dbx_llmtrain as llm
from dbx_llmtrain import cli
from dbx_llmtrain.errors import ConfigError

GOOD = "model: {source: /models/x}\ndata: {train: rows.jsonl}\n"


@pytest.mark.parametrize(
    ("text", "overrides", "told"),
    [
        (GOOD + "modle: {}\n", [], ["1 problem", "modle: unknown key: did you mean model"]),
        (GOOD + "train: {epoch: 1}\n", [], ["train.epoch: unknown key: ", "train.epochs"]),
        (GOOD, ["train.epoch=1"], ["train.epoch: unknown key: ", "train.epochs"]),
        (GOOD, ["train.learning_rate"], ["train.learning_rate", "key.path=value"]),
        (GOOD, ["train.epochs=many"], ["train.epochs: expected", "found 'many'"]),
        (GOOD + "train: [1]\n", [], ["train: expected a mapping of fields, found list"]),
        ("model: {source: /models/x}\n", [], ["data.train: missing"]),
        ("{}\n", [], ["1 problem", "model.source: missing"]),
        ("", [], ["is empty: expected model and data sections"]),
        ("model: {source: [\n", [], ["is not valid YAML"]),
        ("- 1\n- 2\n", [], ["expected sections model, data, ", "found list"]),
        (
            GOOD + "train: {epochs: 0}\ncluster: {processes: -1}\ncheckpoint: {evry: 2}\n",
            ["data.max_length=x"],
            [
                "4 problems",
                "train.epochs: expected greater than 0, found 0",
                "cluster.processes: expected",
                "checkpoint.evry: unknown key: did you mean checkpoint.every?",
                "data.max_length: expected",
            ],
        ),
        (
            "model: {source: x, attention: flash_attention_2, lora: {lora_alpha: 8}}\n"
            "data: {train: y}\n",
            ["cluster.env.MY_TOKEN=s3cr3t", "data.columns.promt=x"],
            [
                "4 problems",
                "model.lora.lora_alpha: unknown key: PEFT's name for model.lora.alpha",
                "model.attention: expected 'auto', 'sdpa' or 'eager', found 'flash_attention_2'",
                "cluster.env.MY_TOKEN: looks like a secret",
                "data.columns.promt: unknown name",
            ],
        ),
    ],
)  # fmt: skip
def test_a_wrong_configuration_is_told_by_the_shell(
    text: str,
    overrides: list[str],
    told: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    for command in ("train", "plan"):
        assert cli.run([command, str(path), *overrides]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith("error: ")
        for words in told:
            assert words in output.err
        assert "Traceback" not in output.err
        assert "s3cr3t" not in output.err


@pytest.mark.parametrize("name", ["missing.yaml", "folder", "binary.yaml"])
def test_a_configuration_that_cannot_be_read(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary.yaml").write_bytes(b"model: \xff\xfe")
    assert cli.run(["train", str(tmp_path / name)]) == 2
    told = capsys.readouterr().err
    assert name in told
    assert ("no file" if name == "missing.yaml" else "cannot be read") in told


@pytest.mark.parametrize("call", [llm.train, llm.plan, llm.probe], ids=lambda call: call.__name__)
@pytest.mark.parametrize("given", [{"model": {"source": "x"}}, "config.yaml", 7])
def test_something_else_than_a_configuration(call: Any, given: Any) -> None:
    with pytest.raises(ConfigError, match="expected a TrainConfig, found") as caught:
        call(given, spark=object())
    assert cli.exit_code(caught.value) == 2


WITHOUT_A_SESSION = """
import sys
import dbx_llmtrain as llm

cfg = llm.TrainConfig(model={"source": "x"}, data={"train": "table:a.b.c"})
for call in (llm.train, llm.plan, llm.probe):
    try:
        call(cfg)
    except llm.ClusterError as error:
        print(error.findings[0].check, error.findings[0].message)
"""


def test_without_a_spark_session(tmp_path: Path) -> None:
    """In a process of its own: this one may have a session already."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_SESSION],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all(
        "there is no active Spark session: make one first, or pass" in line for line in lines
    )
    assert not list(tmp_path.iterdir())


def test_a_spark_connect_session_is_refused() -> None:
    connect = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    cfg = llm.TrainConfig(model={"source": "x"}, data={"train": "table:a.b.c"})
    with pytest.raises(llm.ClusterError, match="a classic compute with dedicated access") as caught:
        llm.train(cfg, spark=connect)
    assert cli.exit_code(caught.value) == 3


def test_without_pyspark_the_functions_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    cfg = llm.TrainConfig(model={"source": "x"}, data={"train": "table:a.b.c"})
    with pytest.raises(
        llm.ClusterError, match=r"pyspark cannot be imported .*dbx_llmtrain\[spark\]"
    ):
        llm.plan(cfg)


class WithoutExecutors:
    """A Spark context whose executors never register."""

    master = "spark://host:7077"
    applicationId = "without-executors"

    def getConf(self) -> Any:
        return self

    def get(self, name: str, default: str | None = None) -> str | None:
        return {"spark.driver.host": "driver"}.get(name, default)

    def getAll(self) -> list[tuple[str, str]]:
        return []

    def __getattr__(self, name: str) -> Any:
        """Whatever of the JVM is asked: the driver alone is there, and no task can run."""
        answers = {"getExecutorInfos": [self], "host": "driver", "maxNumConcurrentTasks": 0}
        return lambda *_: answers.get(name, self)

    _jsc = property(lambda self: self)


def test_a_cluster_whose_executors_never_come() -> None:
    from dbx_llmtrain.driver import cluster

    with pytest.raises(llm.ClusterError, match="no executor of spark://host:7077 has registered"):
        cluster.wait_for_executors(WithoutExecutors(), time.monotonic() + 0.3)  # type: ignore[arg-type]


def test_the_default_tracking_store_needs_more_than_mlflow_skinny(tmp_path: Path) -> None:
    # In a process of its own: an mlflow that was imported without sqlalchemy stays without it.
    code = (
        "import sys; from pathlib import Path; sys.modules['sqlalchemy'] = None\n"
        "from dbx_llmtrain import tracking_store\n"
        "tracking_store.store_uri(Path(sys.argv[1]), has_parent=False)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "runs")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "ModuleNotFoundError: " in ended.stderr
    assert "pip install mlflow, or set MLFLOW_TRACKING_URI" in ended.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("s3://bucket/rows.jsonl", "found an address (s3:): 's3://bucket/rows.jsonl'"),
        ("s3a://bucket/rows/*", "found an address (s3a:)"),
        ("gs://bucket/rows.parquet", "found an address (gs:)"),
        ("abfss://c@account.dfs.core.windows.net/rows.csv", "found an address (abfss:)"),
        ("s3:/bucket/rows", "found an address (s3:)"),
        ("https://host/rows.jsonl", "found a web address"),
        ("http://host/rows", "found a web address"),
        ("file:///data/rows.jsonl", "leave out the file:"),
        ("hf://datasets/org/rows", "leave out the hf://"),
    ],
)
def test_an_address_is_refused_where_a_path_is_needed(path: str, told: str) -> None:
    def config(**data: Any) -> None:
        llm.TrainConfig(model={"source": "x"}, data={"train": "y.jsonl"} | data)

    for data, name in (
        ({"train": path}, "data.train"),
        ({"train": ["y.jsonl", {"path": path}]}, "data.train.1"),
        ({"eval": {"a": path}}, "data.eval.a"),
        ({"test": path}, "data.test"),
        ({"cache_dir": path}, "data.cache_dir"),
    ):
        with pytest.raises(ConfigError) as caught:
            config(**data)
        (problem,) = caught.value.problems
        assert problem.path == name
        assert told in problem.message
        if "address" in told:
            assert "a path that the driver and every node can open" in problem.message
            assert "/Volumes/" in problem.message
            assert ("table:catalog.schema.name" in problem.message) == (name != "data.cache_dir")


@pytest.mark.parametrize("path", ["scratch", "./scratch", "../x", "s3://bucket/x"])
def test_a_nodes_own_folder_is_an_absolute_path(path: str) -> None:
    sections: Any = {"model": {"source": "x"}, "data": {"train": "y"}}
    with pytest.raises(
        ConfigError, match=r"cluster\.local_dir: expected an absolute path"
    ) as caught:
        llm.TrainConfig(**sections, cluster={"local_dir": path})
    assert repr(path) in str(caught.value)
    for good in ("/local_disk0/x", "~/x"):
        llm.TrainConfig(**sections, cluster={"local_dir": good})


@pytest.mark.parametrize("path", ["s3://bucket/table", "dbfs:/rows.jsonl", "C:/rows.jsonl", "a:b"])
def test_what_may_be_a_path_or_a_table_is_looked_for(path: str) -> None:
    llm.TrainConfig(model={"source": "x"}, data={"train": path})
