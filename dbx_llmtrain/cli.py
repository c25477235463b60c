"""The shell commands, and the wheel's entry point ``main``.

Exit codes: 0 done, 1 the run failed, 2 bad configuration or input, 3 the cluster cannot run it;
ended by a signal: 129 a closed terminal (SIGHUP), 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dbx_llmtrain import api
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver import checks, signals
from dbx_llmtrain.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    Finding,
    LlmTrainError,
    StagingError,
)
from dbx_llmtrain.records import Record
from dbx_llmtrain.worker import node

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_EPILOG = """Examples:

\b
  dbx-llmtrain probe
  dbx-llmtrain plan config.yaml train.learning_rate=1e-5
  dbx-llmtrain preview config.yaml -n 5
  dbx-llmtrain prepare config.yaml
  dbx-llmtrain train config.yaml tracking.run_name=first
  dbx-llmtrain train config.yaml --master 'local-cluster[2,1,2048]'

Settings are given as key.path=value and win over the file. Exit codes: 0 done, 1 the run
failed, 2 bad configuration or input, 3 the cluster cannot run it; ended by a signal: 129 a
closed terminal, 130 Ctrl-C, 143 SIGTERM.
"""


_MASTERS = (
    r"local|local\[(\d+|\*)(,\s*\d+)?\]|local-cluster\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\]|"
    r"spark://\S+|yarn|k8s://\S+"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Returns when it is done and leaves by ``SystemExit`` otherwise.

    It does not exit with 0: a Databricks wheel task calls this function, not a shell.
    """
    code = run(arguments)
    if code:
        sys.exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; errors are printed without a Python traceback."""
    try:
        with signals.terminated():
            returned = cli.main(arguments, prog_name="dbx-llmtrain", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("stopped", err=True)
        return signals.exit_code(signal.SIGINT)
    except LlmTrainError as error:
        click.echo(f"error: {error}", err=True)
        return exit_code(error)
    return returned if isinstance(returned, int) else 0


def exit_code(error: LlmTrainError) -> int:
    """The exit code that an error of ours has."""
    if isinstance(error, (ConfigError, DataError, CheckpointError)):
        return 2
    return 3 if isinstance(error, (ClusterError, StagingError)) else 1


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What all commands take."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
        click.option("--conf", multiple=True, metavar="K=V", help="A Spark setting; repeatable."),
        click.option(
            "--master",
            help="Spark master of a session of its own, such as local[*], local-cluster[2,1,2048] "
            "(two executors, one core and 2,048 MiB each) or spark://host:7077. "
            "Default: the active session, else one of this machine.",
        ),
    ):
        command = option(command)
    return command


@click.group(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dbx_llmtrain")
def cli() -> None:
    """Fine-tune Hugging Face language models on every GPU of a Spark cluster."""


@cli.command(short_help="Train a model as CONFIG says.")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE]...")
@_options
def train(
    config: Path,
    overrides: tuple[str, ...],
    master: str | None,
    conf: tuple[str, ...],
    as_json: bool,
) -> None:
    """Train a model as CONFIG (a YAML file) says, with settings of it replaced.

    \b
    dbx-llmtrain train config.yaml
    dbx-llmtrain train config.yaml train.max_steps=100 --master 'local-cluster[2,1,2048]'
    """
    cfg = checks.require(TrainConfig.from_yaml(config, *overrides), purpose="train")
    with _output(as_json), spark_session(master, conf) as spark:
        result = api.train(cfg, spark=spark)
    if as_json:
        _echo(result, as_json)


@cli.command(short_help="Tokenise and pack the data of CONFIG.")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE]...")
@_options
def prepare(
    config: Path,
    overrides: tuple[str, ...],
    master: str | None,
    conf: tuple[str, ...],
    as_json: bool,
) -> None:
    """Tokenise and pack the data of CONFIG, without GPUs; train finds the result.

    \b
    dbx-llmtrain prepare config.yaml data.max_length=4096
    """
    cfg = checks.require(TrainConfig.from_yaml(config, *overrides), purpose="prepare")
    with _output(as_json), spark_session(master, conf) as spark:
        prepared = api.prepare(cfg, spark=spark)
    _echo(prepared, as_json)


@cli.command(short_help="Show rows as the model sees them.")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE]...")
@click.option("-n", "count", default=3, show_default=True, metavar="N", help="Examples to show.")
@click.option(
    "--split",
    default="train",
    show_default=True,
    help="train, eval, eval-NAME or test.",
)
@_options
def preview(
    config: Path,
    overrides: tuple[str, ...],
    count: int,
    split: str,
    master: str | None,
    conf: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show the first examples of CONFIG as the model sees them: every token, and whether it is
    trained. Prepares the data, without GPUs; NO_COLOR turns the colours off.

    \b
    dbx-llmtrain preview config.yaml -n 5 data.train_on=all
    """
    cfg = checks.require(
        TrainConfig.from_yaml(config, *overrides), purpose="prepare", shown=(count, split)
    )
    with _output(as_json), spark_session(master, conf) as spark:
        shown = api.preview(cfg, count, split=split, spark=spark)
    _echo(shown, as_json)


@cli.command(short_help="Say what train would run, and why.")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE]...")
@_options
def plan(
    config: Path,
    overrides: tuple[str, ...],
    master: str | None,
    conf: tuple[str, ...],
    as_json: bool,
) -> None:
    """Say what train would run with CONFIG, and why. Prepares the data, trains nothing.

    \b
    dbx-llmtrain plan config.yaml cluster.processes=8
    """
    cfg = checks.require(TrainConfig.from_yaml(config, *overrides), purpose="train")
    with _output(as_json), spark_session(master, conf) as spark:
        chosen = api.plan(cfg, spark=spark)
    _echo(chosen, as_json)


@cli.command(short_help="Show every node: GPUs, CPUs, memory, disk, versions.")
@_options
def probe(master: str | None, conf: tuple[str, ...], as_json: bool) -> None:
    """Show every node of the cluster: GPUs (by nvidia-smi), CPUs, memory, disk, versions.

    \b
    dbx-llmtrain probe
    dbx-llmtrain probe --master 'local-cluster[2,1,1024]' --json
    """
    with _output(as_json), spark_session(master, conf) as spark:
        report = api.probe(spark=spark)
    _echo(report, as_json)


def _echo(record: Record, as_json: bool) -> None:
    text = record.model_dump_json(indent=1) if as_json else str(record)
    # Rows have characters that a terminal of another encoding cannot show.
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    click.echo(text.encode(encoding, "backslashreplace").decode(encoding))


@contextlib.contextmanager
def _output(as_json: bool) -> Iterator[None]:
    """With ``--json`` only the JSON goes to standard output; the rest goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def spark_session(master: str | None, conf: Sequence[str]) -> Iterator[SparkSession]:
    """The active session or Databricks' own, else a new one that is stopped at the end.

    Raises ``click.BadParameter`` for a ``--conf`` without ``=``, and ``ClusterError`` without
    pyspark or Java, or when a session is there and another one was asked for.
    """
    settings = _settings(conf)
    if importlib.util.find_spec("pyspark") is None:
        raise _cannot("pyspark", "is not installed: pip install 'dbx_llmtrain[spark]'")
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is None and "DATABRICKS_RUNTIME_VERSION" in os.environ:
        active = SparkSession.builder.getOrCreate()
    if active is not None:
        if master or settings:
            raise _cannot("--master", "a Spark session is there already: leave --master and --conf")
        yield active
        return
    session = _start(master or "local[*]", settings)
    try:
        yield session
    finally:
        _stop(session)


def _start(master: str, settings: dict[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    if not re.fullmatch(_MASTERS, master):
        raise _cannot(
            "--master",
            f"expected local[N], local-cluster[N,CORES,MIB], spark://HOST:PORT, yarn or k8s://..., "
            f"found {master!r}",
        )
    _require_java()
    builder = SparkSession.builder.appName("dbx-llmtrain").master(master)
    for name, value in {**_defaults(master), **settings}.items():
        builder = builder.config(name, value)
    with node.Capture() as capture:
        session: SparkSession = builder.getOrCreate()
        session.sparkContext.setLogLevel("ERROR")
        _quiet_end(session)
        return session
    raise _cannot("Spark", f"cannot be started: {_cause(capture.error)}") from capture.error


def _quiet_end(session: SparkSession) -> None:
    """Print no traceback where the JVM is ended first, as by a signal to both: neither of Spark's
    own server for accumulators, nor of py4j's lost connections, which their callers raise anyway.
    py4j logs those with the root logger."""
    server = getattr(session.sparkContext, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = lambda *_: None
    logging.getLogger().addFilter(lambda record: "py4j" not in Path(record.pathname).parts)


def _require_java() -> None:
    """Raise ``ClusterError`` where Spark would not find a Java: it takes JAVA_HOME's, if set."""
    home = os.environ.get("JAVA_HOME")
    if home and not os.access(Path(home) / "bin" / "java", os.X_OK):
        raise _cannot(
            "java", f"is not in JAVA_HOME ({home}/bin/java): set it to a Java 17, or unset it"
        )
    if not home and shutil.which("java") is None:
        raise _cannot("java", "is not installed: Spark needs Java 17 (openjdk-17-jre-headless)")


def _cause(error: Exception | None) -> str:
    """An exception in one line; of Java's its message, not where it was thrown."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    java = next((line[1:].strip() for line in lines if line.startswith(":")), None)
    return java or f"{type(error).__name__}: {lines[0]}"


def _defaults(master: str) -> dict[str, str]:
    """Settings of a session of ours; on one machine everything stays on the loopback address."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    if not master.startswith("local"):
        return settings
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    shape = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*]", master)
    if shape:
        # The workers start executors with it; pip's pyspark does not set it.
        os.environ.setdefault("SPARK_HOME", _spark_home())
        settings["spark.executor.memory"] = f"{shape[3]}m"
    return settings


def _spark_home() -> str:
    spec = importlib.util.find_spec("pyspark")
    places = spec.submodule_search_locations if spec else None
    return next(iter(places or []), "")


def _stop(session: SparkSession) -> None:
    """Stop the session and remove what its executors left beside pyspark (local-cluster only)."""
    context = session.sparkContext
    folder = Path(os.environ.get("SPARK_HOME", "")) / "work" / context.applicationId
    cluster = context.master.startswith("local-cluster")
    # The signal that ends this process may have ended the JVM before it.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    with node.Capture():
        session.stop()
    if cluster:
        shutil.rmtree(folder, ignore_errors=True)


def _settings(conf: Sequence[str]) -> dict[str, str]:
    settings = {}
    for item in conf:
        name, equals, value = item.partition("=")
        if not (name and equals):
            raise click.BadParameter(f"{item!r}: expected K=V", param_hint="--conf")
        settings[name] = value
    return settings


def _cannot(check: str, message: str) -> ClusterError:
    return ClusterError([Finding("error", check, message)])
