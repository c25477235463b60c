from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dbx_llmtrain import cli, cli_session, errors
from dbx_llmtrain.errors import ClusterError, LlmTrainError
from dbx_llmtrain.outcomes import Generations
from tests import tiny


def test_help_has_examples_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert "dbx-llmtrain train config.yaml --master 'local-cluster[2,1,2048]'" in text
    words = " ".join(text.split())
    assert "Exit codes: 0 done, 1 the run failed, 2 bad" in words
    assert "129 a closed terminal, 130 Ctrl-C, 143 SIGTERM" in words
    for command in cli.cli.commands:
        assert cli.run([command, "-h"]) == 0
        text = capsys.readouterr().out
        assert f"dbx-llmtrain {command}" in text
        assert "--json" in text
        alone = ("generate", "export", "register", "log", "watch")
        assert ("--master" in text) == (command not in alone)


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
        (["generate"], "Missing argument 'PATH'"),
        (["generate", "x", "--file", "no-such-file"], "No such file or directory"),
        (["generate", "x", "y", "--temperature", "warm"], "'warm' is not a valid float"),
        (["register", "x"], "Missing argument 'NAME'"),
        (["export"], "Missing argument 'PATH'"),
        (["evaluate"], "Missing argument 'CONFIG'"),
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
        (errors.TrainingFailed("x", cause="out_of_memory"), 1),
        (errors.TrainingFailed("x", cause="configuration"), 2),
        (errors.CheckpointError("x"), 2),
        (errors.SubmitError("x"), 1),
        (errors.RegistryError("x"), 1),
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
    assert cli_session._cause(ValueError(text)) == told


def test_a_session_whose_jvm_is_gone_is_stopped_quietly() -> None:
    class Gone:
        applicationId, master = "x", "local[1]"

        @property
        def sparkContext(self) -> Gone:
            return self

        def stop(self) -> None:
            raise ConnectionRefusedError("the JVM is gone")

    cli_session._stop(Gone())  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [KeyboardInterrupt, cli.click.Abort])
def test_ctrl_c_is_code_130(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli.api, "probe", stop)
    monkeypatch.setattr(cli, "spark_session", lambda *_: contextlib.nullcontext())
    assert cli.run(["probe"]) == 130
    assert capsys.readouterr().err.endswith("stopped\n")


def test_a_master_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ClusterError, match=r"--master: expected local\[N\].*'localcluster\[1\]'"):
        cli_session._start("localcluster[1]", {})


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
    found = cli_session._defaults("local-cluster[2,1,2048]")
    assert found["spark.executor.memory"] == "2048m"
    assert found["spark.driver.host"] == "127.0.0.1"
    assert found["spark.ui.enabled"] == "false"
    assert (Path(os.environ["SPARK_HOME"]) / "bin" / "spark-class").exists()
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    assert "spark.driver.host" not in cli_session._defaults("spark://host:7077")


def test_lost_connections_to_the_jvm_are_not_printed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.root, "filters", [])
    cli_session._quiet_end(SimpleNamespace(sparkContext=SimpleNamespace()))  # type: ignore[arg-type]
    path = "/somewhere/site-packages/py4j/java_gateway.py"
    logging.root.handle(logging.LogRecord("root", logging.ERROR, path, 1, "lost", None, None))
    logging.root.error("anything else")
    assert [record.message for record in caplog.records] == ["anything else"]


def test_a_plan_for_a_cluster_in_words_needs_no_java_and_no_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    model = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 97,
             "num_hidden_layers": 2, "num_attention_heads": 4}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(model))
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {{source: {tmp_path}}}\ndata: {{train: no-such-file.jsonl}}\n")
    arguments = ["plan", str(path), "train.max_steps=10", "--cluster", "2x8xH100-80GB"]
    assert cli.run(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("Forecast for 2x8xH100-80GB\n")
    assert "ddp *" in text
    assert cli.run([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["world_size"], told["nodes"], told["parallel"]["kind"]) == (16, 2, "ddp")
    assert cli.run([*arguments, "--master", "local[1]"]) == 2
    assert "--cluster starts no Spark: leave --master and --conf" in capsys.readouterr().err
    assert cli.run(["plan", str(path), "--cluster", "many"]) == 2
    assert "no GPU of the name many is known" in capsys.readouterr().err
    large = [*arguments[:2], "train.micro_batch_size=100000", "data.max_length=2048"]
    assert cli.run([*large, "--cluster", "1x1xT4"]) == 3
    assert "Nothing fits. What would:" in capsys.readouterr().out
    hybrid = [*arguments[:2], "parallel.kind=fsdp", "parallel.shard=hybrid"]
    assert cli.run([*hybrid, "--cluster", "1x8xH100"]) == 3
    assert "all ranks are on one host" in capsys.readouterr().err


def test_a_wrong_configuration_is_not_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"model: {{source: {tmp_path}/gone/}}\ndata: {{train: {tmp_path}/none.jsonl}}\n"
    )
    assert cli.run(["evaluate", str(path), "--model", "runs/first"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "none.jsonl" in told.err


def given(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    """Standard input that is no terminal."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))


def test_without_a_prompt_nothing_is_generated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given(monkeypatch, b"\n  \n")
    assert cli.run(["generate", "somewhere"]) == 2
    assert "no prompt: give one, --file, or lines" in capsys.readouterr().err


def test_a_file_of_prompts_that_is_no_text_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts").write_bytes(b"what\xff\n")
    assert cli.run(["generate", "somewhere", "--file", str(tmp_path / "prompts")]) == 2
    assert "--file: expected UTF-8 text" in capsys.readouterr().err
    given(monkeypatch, b"\xff\n")
    assert cli.run(["generate", "somewhere"]) == 2
    assert "expected UTF-8 text" in capsys.readouterr().err


def test_a_model_answers_prompts_of_arguments_files_and_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny.model_folder(tmp_path / "model"))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the dog sat\n\n on the log \n", encoding="utf-8")
    few = ["--max-new-tokens", "3", "--device", "cpu"]
    capsys.readouterr()  # libraries that say something when they are imported
    assert cli.run(["generate", model, "the cat sat", "--file", str(prompts), *few, "--json"]) == 0
    found = Generations.model_validate_json(capsys.readouterr().out)
    assert [sample.prompt for sample in found.samples] == [
        "the cat sat",
        "the dog sat",
        "on the log",
    ]
    assert all(0 < sample.tokens <= 3 for sample in found.samples)
    given(monkeypatch, b"the cat sat\n")
    assert cli.run(["generate", model, *few]) == 0
    text = capsys.readouterr().out
    assert text.startswith("> the cat sat\n" + found[0])
    drawn = [*few, "--temperature", "5", "--seed", "1", "--batch-size", "1", "--top-p", "0.9"]
    assert cli.run(["generate", model, "the cat sat", *drawn, "--json"]) == 0
    assert Generations.model_validate_json(capsys.readouterr().out).texts != found.texts[:1]
    assert cli.run(["generate", str(tmp_path), "the cat"]) == 2
    assert "holds no model" in capsys.readouterr().err


def test_only_a_checkpoint_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["export", str(tmp_path)]) == 2
    assert "expected a run folder" in capsys.readouterr().err
    assert cli.run(["export", str(tmp_path), "--dtype", "int3"]) == 2
    assert "found 'int3'" in capsys.readouterr().err
    assert cli.run(["export", str(tmp_path), "--push-to-hub", "no-owner"]) == 2
    assert "- --push-to-hub: expected ORG/NAME" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["generate", "nosuch", "x"], "PATH: there is no folder"),
        (["generate", "x", ""], "PROMPT[0]: expected a text"),
        (["generate", "x", "y", "--max-new-tokens", "0"], "--max-new-tokens: expected a whole"),
        (["generate", "x", "y", "--top-p", "0"], "--top-p: expected a number above 0"),
        (["export", "x", "s3://y"], "TARGET: expected a path that the driver"),
        (["export", "x", "--dtype", "int3"], "--dtype: expected one of fp32, bf16, fp16"),
        (["register", "x", "a/b"], "NAME: expected a model's name"),
        (["register", "nosuch", "a"], "PATH: there is no folder"),
        (["evaluate", "c.yaml", "--model", "nosuch"], "--model: there is no folder"),
        (["preview", "c.yaml", "-n", "0"], "-n: expected a whole number"),
        (["preview", "c.yaml", "--split", "x"], "--split: expected"),
        (["plan", "c.yaml", "--cluster", "many"], "--cluster: "),
    ],
)
def test_faults_of_options_are_told_by_the_names_that_were_typed(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.model_folder(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"text": "the cat"}\n' * 9)
    (tmp_path / "c.yaml").write_text(
        "model: {source: model}\ndata: {train: rows.jsonl, eval: 0.5, max_length: 64}\n"
    )
    assert cli.run(arguments) == 2
    assert f"- {told}" in capsys.readouterr().err
