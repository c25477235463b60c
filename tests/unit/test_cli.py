from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dbx_llmtrain import cli, errors
from dbx_llmtrain.errors import ClusterError, LlmTrainError


def test_help_has_examples_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert "dbx-llmtrain train config.yaml --master 'local-cluster[2,1,2048]'" in text
    words = " ".join(text.split())
    assert "Exit codes: 0 done, 1 the run failed, 2 bad" in words
    assert "129 a closed terminal, 130 Ctrl-C, 143 SIGTERM" in words
    for command in ("train", "plan", "prepare", "preview", "probe"):
        assert cli.run([command, "-h"]) == 0
        text = capsys.readouterr().out
        assert f"dbx-llmtrain {command}" in text
        assert "--master" in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import dbx_llmtrain

    assert cli.run(["--version"]) == 0
    assert dbx_llmtrain.__version__ in capsys.readouterr().out


def test_a_wrong_configuration_is_told_before_spark_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {source: x}\ndata: {train: y}\ntrain: {num_train_epochs: 1}\n")
    assert cli.run(["train", str(path), "train.seed=-1"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: 2 problems in the configuration:")
    assert "train.seed: expected greater than or equal to 0, found -1" in told.err
    assert "Traceback" not in told.err
    assert cli.run(["plan", str(tmp_path / "missing.yaml")]) == 2
    assert "no file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'"),
        (["train"], "Missing argument 'CONFIG'"),
        (["probe", "--conf", "nonsense"], "'nonsense': expected K=V"),
        (["probe", "--no-such-option"], "No such option"),
    ],
)
def test_wrong_usage(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.TrainingFailed("x"), 1),
        (errors.CheckpointError("x"), 2),
        (errors.SubmitError("x"), 1),
        (errors.ConfigError([]), 2),
        (errors.DataError("x"), 2),
        (errors.ClusterError([]), 3),
        (errors.StagingError("x", {}), 3),
    ],
)
def test_exit_codes(error: LlmTrainError, code: int) -> None:
    assert cli.exit_code(error) == code


def test_the_entry_point_leaves_with_the_code_only_when_it_failed() -> None:
    cli.main(["--version"])
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "missing.yaml"])
    assert caught.value.code == 2


def test_without_java_it_says_what_to_install(tmp_path: Path) -> None:
    """In a process of its own: this one may have a Spark session already."""
    env = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    ended = subprocess.run(
        [sys.executable, "-m", "dbx_llmtrain", "probe"],
        env=env | {"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 3
    assert "openjdk-17-jre-headless" in ended.stderr


def test_a_java_home_without_java_is_told_in_a_sentence(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "dbx_llmtrain", "probe"],
        env=dict(os.environ) | {"JAVA_HOME": str(tmp_path)}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert ended.returncode == 3
    told = f"java: is not in JAVA_HOME ({tmp_path}/bin/java): set it to a Java 17, or unset it"
    assert told in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_java_that_does_not_start_spark_is_told_in_a_sentence(tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\nexit 1\n")
    java.chmod(0o755)
    ended = subprocess.run(
        [sys.executable, "-m", "dbx_llmtrain", "probe"],
        env=dict(os.environ) | {"JAVA_HOME": str(tmp_path)}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert ended.returncode == 3
    assert "Spark: cannot be started: " in ended.stderr
    assert "JAVA_GATEWAY_EXITED" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("An error occurred\n: org.x.SparkException: no such host\n\tat a.b(C.java:1)\n",
         "org.x.SparkException: no such host"),
        ("first\nsecond", "ValueError: first"),
        ("", "ValueError: ValueError('')"),
    ],
)  # fmt: skip
def test_the_cause_of_spark_that_does_not_start_is_one_line(text: str, told: str) -> None:
    assert cli._cause(ValueError(text)) == told


def test_a_session_whose_jvm_is_gone_is_stopped_quietly() -> None:
    class Gone:
        applicationId, master = "x", "local[1]"

        @property
        def sparkContext(self) -> Gone:
            return self

        def stop(self) -> None:
            raise ConnectionRefusedError("the JVM is gone")

    cli._stop(Gone())  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [KeyboardInterrupt, cli.click.Abort])
def test_ctrl_c_is_code_130(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli.api, "probe", stop)
    monkeypatch.setattr(cli, "spark_session", lambda *_: cli.contextlib.nullcontext())
    assert cli.run(["probe"]) == 130
    assert capsys.readouterr().err.endswith("stopped\n")


def test_a_master_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ClusterError, match=r"--master: expected local\[N\].*'localcluster\[1\]'"):
        cli._start("localcluster[1]", {})


def test_without_pyspark_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['pyspark'] = None\n"
        "from dbx_llmtrain.cli import main; main(['probe'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert "pip install 'dbx_llmtrain[spark]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_settings_of_a_local_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPARK_HOME", "SPARK_LOCAL_IP", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    found = cli._defaults("local-cluster[2,1,2048]")
    assert found["spark.executor.memory"] == "2048m"
    assert found["spark.driver.host"] == "127.0.0.1"
    assert found["spark.ui.enabled"] == "false"
    assert (Path(cli.os.environ["SPARK_HOME"]) / "bin" / "spark-class").exists()
    assert cli.os.environ["PYSPARK_PYTHON"] == sys.executable
    assert "spark.driver.host" not in cli._defaults("spark://host:7077")


def test_lost_connections_to_the_jvm_are_not_printed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.root, "filters", [])
    cli._quiet_end(SimpleNamespace(sparkContext=SimpleNamespace()))  # type: ignore[arg-type]
    path = "/somewhere/site-packages/py4j/java_gateway.py"
    logging.root.handle(logging.LogRecord("root", logging.ERROR, path, 1, "lost", None, None))
    logging.root.error("anything else")
    assert [record.message for record in caplog.records] == ["anything else"]
