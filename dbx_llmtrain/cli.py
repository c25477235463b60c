"""The shell commands, and the wheel's entry point ``main``.

Exit codes: 0 done, 1 the run failed, 2 bad configuration or input, 3 the cluster cannot run it;
ended by a signal: 129 a closed terminal (SIGHUP), 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from dbx_llmtrain import api, cli_results, logs
from dbx_llmtrain.cli_session import as_typed, echo, output, shared_options, spark_session
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver import checks, signals
from dbx_llmtrain.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    LlmTrainError,
    StagingError,
    TrainingFailed,
)
from dbx_llmtrain.worker.failures import CONFIGURATION

_EPILOG = """Examples:

\b
  dbx-llmtrain probe
  dbx-llmtrain probe config.yaml --full
  dbx-llmtrain plan config.yaml train.learning_rate=1e-5
  dbx-llmtrain plan config.yaml --cluster 2x8xH100-80GB
  dbx-llmtrain preview config.yaml -n 5
  dbx-llmtrain prepare config.yaml
  dbx-llmtrain train config.yaml tracking.run_name=first
  dbx-llmtrain train config.yaml --trial
  dbx-llmtrain train config.yaml --master 'local-cluster[2,1,2048]'
  dbx-llmtrain evaluate config.yaml --model runs/first
  dbx-llmtrain generate runs/first 'What is a list?'
  dbx-llmtrain export runs/first/checkpoints/step-00000200 exported
  dbx-llmtrain register runs/first main.ml.answers --alias champion
  dbx-llmtrain log runs/first
  dbx-llmtrain watch runs/first

Settings are given as key.path=value and win over the file. Exit codes: 0 done, 1 the run
failed, 2 bad configuration or input, 3 the cluster cannot run it; ended by a signal: 129 a
closed terminal, 130 Ctrl-C, 143 SIGTERM.
"""


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
        with signals.terminated(), logs.without_notes():
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
    if isinstance(error, TrainingFailed) and error.cause == CONFIGURATION:
        return 2
    return 3 if isinstance(error, (ClusterError, StagingError)) else 1


@click.group(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dbx_llmtrain")
def cli() -> None:
    """Fine-tune Hugging Face language models on every GPU of a Spark cluster."""


for command in cli_results.COMMANDS:
    cli.add_command(command)


@cli.command(short_help="Train a model as CONFIG says.")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE]...")
@click.option(
    "--trial",
    is_flag=True,
    help="Rehearse it: two steps on the longest rows, one evaluation, checkpoint, resume, export.",
)
@shared_options
def train(
    config: Path,
    overrides: tuple[str, ...],
    trial: bool,
    master: str | None,
    conf: tuple[str, ...],
    as_json: bool,
) -> None:
    """Train a model as CONFIG (a YAML file) says, with settings of it replaced.

    \b
    dbx-llmtrain train config.yaml
    dbx-llmtrain train config.yaml --trial
    dbx-llmtrain train config.yaml train.max_steps=100 --master 'local-cluster[2,1,2048]'
    """
    cfg = checks.require(
        TrainConfig.from_yaml(config, *overrides),
        purpose="train",
        begins="trial" if trial else "run",
    )
    with output(as_json), spark_session(master, conf) as spark:
        result = api.train(cfg, trial=trial, spark=spark)
    if as_json:
        echo(result, as_json)


@cli.command(short_help="Tokenise and pack the data of CONFIG.")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE]...")
@shared_options
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
    with output(as_json), spark_session(master, conf) as spark:
        prepared = api.prepare(cfg, spark=spark)
    echo(prepared, as_json)


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
@shared_options
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
    cfg = TrainConfig.from_yaml(config, *overrides)
    with output(as_json), as_typed(n="-n", split="--split"):
        cfg = checks.require(cfg, purpose="prepare", shown=(count, split))
        with spark_session(master, conf) as spark:
            shown = api.preview(cfg, count, split=split, spark=spark)
    echo(shown, as_json)


@cli.command(short_help="Say what train would run, and why.")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE]...")
@click.option(
    "--cluster",
    "told",
    metavar="NxGxGPU",
    help="A cluster that is not there yet, such as 2x8xH100-80GB: nodes x GPUs of each x kind.",
)
@shared_options
def plan(
    config: Path,
    overrides: tuple[str, ...],
    told: str | None,
    master: str | None,
    conf: tuple[str, ...],
    as_json: bool,
) -> int:
    """Say what train would run with CONFIG, and why: strategy, memory, batch, steps, time. Prepares
    the data, trains nothing. With --cluster from the model's configuration alone, without Spark;
    then the exit code is 3 where nothing fits.

    \b
    dbx-llmtrain plan config.yaml cluster.processes=8
    dbx-llmtrain plan config.yaml --cluster 2x8xH100-80GB
    """
    if told is not None:
        if master or conf:
            raise click.UsageError("--cluster starts no Spark: leave --master and --conf")
        cfg = TrainConfig.from_yaml(config, *overrides)
        with as_typed(cluster="--cluster"):
            found = api.plan(cfg, cluster=told)
        echo(found, as_json)
        return 0 if found.fits else 3
    cfg = checks.require(TrainConfig.from_yaml(config, *overrides), purpose="train")
    with output(as_json), spark_session(master, conf) as spark:
        chosen = api.plan(cfg, spark=spark)
    echo(chosen, as_json)
    return 0


@cli.command(short_help="Show every node: GPUs, CPUs, memory, disk, versions.")
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE]...")
@click.option(
    "--full",
    is_flag=True,
    help="Also every check that train makes, the ranks' network and the run folder.",
)
@shared_options
def probe(
    config: Path | None,
    overrides: tuple[str, ...],
    full: bool,
    master: str | None,
    conf: tuple[str, ...],
    as_json: bool,
) -> int:
    """Show every node of the cluster: GPUs (by nvidia-smi), CPUs, memory, disk, versions. With
    --full also what is wrong with it, for a run of CONFIG where that is given, and how fast hosts
    talk; the exit code is 3 where something has to be changed.

    \b
    dbx-llmtrain probe
    dbx-llmtrain probe config.yaml --full
    dbx-llmtrain probe --master 'local-cluster[2,1,1024]' --json
    """
    cfg = TrainConfig.from_yaml(config, *overrides) if config is not None else None
    with output(as_json), spark_session(master, conf) as spark:
        report = api.probe(cfg, full=full, spark=spark)
    echo(report, as_json)
    return 3 if any(finding.level == "error" for finding in report.findings) else 0
