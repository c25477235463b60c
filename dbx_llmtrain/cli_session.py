"""What the shell commands share: their common options, their output, and a Spark session."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import BaseModel

from dbx_llmtrain.errors import CheckpointError, ClusterError, ConfigError, Finding, Problem
from dbx_llmtrain.worker import node

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MASTERS = (
    r"local|local\[(\d+|\*)(,\s*\d+)?\]|local-cluster\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\]|"
    r"spark://\S+|yarn|k8s://\S+"
)


as_json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
"""What every command takes."""


def shared_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What all commands take that run on Spark."""
    for option in (
        as_json_option,
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


def echo(record: BaseModel, as_json: bool) -> None:
    """Print a record: its JSON, or what it shows of itself."""
    text = record.model_dump_json(indent=1) if as_json else str(record)
    # Rows have characters that a terminal of another encoding cannot show.
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    click.echo(text.encode(encoding, "backslashreplace").decode(encoding))


@contextlib.contextmanager
def output(as_json: bool) -> Iterator[None]:
    """With ``--json`` only the JSON goes to standard output; the rest goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def as_typed(**names: str) -> Iterator[None]:
    """Faults of arguments are told by the names that these have in the shell: ``merge`` as
    ``--no-merge``."""

    def typed(text: str) -> str:
        word = re.match(r"\w*", text)
        assert word is not None
        return f"{names.get(word[0], word[0])}{text[word.end() :]}"

    try:
        yield
    except ConfigError as error:
        named = [
            problem if "." in problem.path else Problem(typed(problem.path), problem.message)
            for problem in error.problems
        ]
        raise ConfigError(named) from error
    except CheckpointError as error:
        text = str(error)
        if any(text.startswith(f"{name}: ") for name in names):
            raise CheckpointError(typed(text)) from error
        raise


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
