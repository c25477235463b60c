"""The shell commands for what a run has left: evaluate, generate, export, register, log,
watch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

import click

from dbx_llmtrain import api_results
from dbx_llmtrain.cli_session import (
    as_json_option,
    as_typed,
    echo,
    output,
    shared_options,
    spark_session,
)
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver import checks, evaluating

_GENERATE = {
    **{name: f"--{name.replace('_', '-')}" for name in (
        "max_new_tokens", "temperature", "top_p", "seed", "batch_size", "device",
    )},
    "model": "PATH",
    "prompts": "PROMPT",
}  # fmt: skip
_EXPORT = {
    "checkpoint": "PATH",
    "target": "TARGET",
    "dtype": "--dtype",
    "merge": "--no-merge",
    "push_to_hub": "--push-to-hub",
}


@click.command(short_help="The exact loss of a model on the held-out rows of CONFIG.")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE]...")
@click.option(
    "--model",
    metavar="PATH",
    help="A checkpoint, a run folder, an export, any model folder or hub id. "
    "Default: the model that CONFIG starts from.",
)
@shared_options
def evaluate(
    config: Path,
    overrides: tuple[str, ...],
    model: str | None,
    master: str | None,
    conf: tuple[str, ...],
    as_json: bool,
) -> None:
    """Compute the exact loss of a model on the held-out rows of CONFIG, on all ranks.

    \b
    dbx-llmtrain evaluate config.yaml
    dbx-llmtrain evaluate config.yaml --model runs/first
    """
    cfg = checks.require(TrainConfig.from_yaml(config, *overrides), purpose="train")
    with output(as_json), as_typed(model="--model"):
        evaluating.reach(evaluating.find(cfg, model), model)
        with spark_session(master, conf) as spark:
            found = api_results.evaluate(cfg, model, spark=spark)
    if as_json:
        echo(found, as_json)


@click.command(short_help="Let a trained model answer prompts.")
@click.argument("path")
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@click.option(
    "--file",
    type=click.File("r", encoding="utf-8"),
    help="A file with one prompt a line; - is standard input.",
)
@click.option("--max-new-tokens", default=256, show_default=True, metavar="N")
@click.option(
    "--temperature", default=0.0, show_default=True, help="0: always the likeliest token."
)
@click.option("--top-p", default=1.0, show_default=True, help="Draw from this share of them.")
@click.option("--seed", default=0, show_default=True, help="Of what is drawn.")
@click.option("--batch-size", default=8, show_default=True, help="Prompts at once.")
@click.option("--device", help="cpu or cuda. Default: a GPU where there is one.")
@as_json_option
def generate(
    path: str,
    prompts: tuple[str, ...],
    file: TextIO | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    batch_size: int,
    device: str | None,
    as_json: bool,
) -> None:
    """Let the model in PATH (a run folder, an export, an adapter) answer prompts, without Spark.

    Without a PROMPT they are read from --file, or from standard input, one a line.

    \b
    dbx-llmtrain generate runs/first 'What is a list?' 'What is a dict?'
    dbx-llmtrain generate runs/first --file prompts.txt --json
    """
    asked = [*prompts, *_lines(file, alone=not prompts)]
    if not asked:
        raise click.UsageError("no prompt: give one, --file, or lines on standard input")
    with output(as_json), as_typed(**_GENERATE):
        found = api_results.generate(
            path,
            asked,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            batch_size=batch_size,
            device=device,
        )
    echo(found, as_json)


@click.command(short_help="Make a Hugging Face folder of a checkpoint.")
@click.argument("path")
@click.argument("target", required=False)
@click.option("--push-to-hub", metavar="ORG/NAME", help="Also upload it to this hub repository.")
@click.option("--dtype", help="Of the weights: bf16, fp16 or fp32.")
@click.option("--no-merge", is_flag=True, help="The adapter of a LoRA run by itself, not merged.")
@as_json_option
def export(
    path: str,
    target: str | None,
    push_to_hub: str | None,
    dtype: str | None,
    no_merge: bool,
    as_json: bool,
) -> None:
    """Make a Hugging Face folder of PATH (a checkpoint or a run folder), without Spark or GPU.

    \b
    dbx-llmtrain export runs/first
    dbx-llmtrain export runs/first/checkpoints/step-00000200 exported --dtype bf16
    """
    with output(as_json), as_typed(**_EXPORT):
        found = api_results.export(
            path, target, dtype=dtype, merge=not no_merge, push_to_hub=push_to_hub
        )
    echo(found, as_json)


@click.command(short_help="Register a trained model in MLflow.")
@click.argument("path")
@click.argument("name")
@click.option("--alias", help="A name for this version, such as champion.")
@as_json_option
def register(path: str, name: str, alias: str | None, as_json: bool) -> None:
    """Log the model of PATH (a run folder) to MLflow and register it as NAME.

    \b
    dbx-llmtrain register runs/first main.ml.answers --alias champion
    """
    with output(as_json), as_typed(model="PATH", name="NAME", alias="--alias"):
        found = api_results.register(path, name, alias=alias)
    echo(found, as_json)


@click.command(short_help="Show a run while it lasts, and afterwards.")
@click.argument("run_dir")
@click.option("--once", is_flag=True, help="Show it as it is now, and end.")
@as_json_option
def watch(run_dir: str, once: bool, as_json: bool) -> None:
    """Show the run in RUN_DIR, from any machine that sees the folder, until it ends or Ctrl-C is
    pressed, which is nothing to the run. --json prints the state of now.

    \b
    dbx-llmtrain watch runs/first
    dbx-llmtrain watch runs/first --once
    """
    with as_typed(run_dir="RUN_DIR"):
        if once or as_json:
            echo(api_results.watch(run_dir, once=True), as_json)
        else:
            api_results.watch(run_dir)


@click.command(short_help="Send to MLflow what it lacks of a run.")
@click.argument("run_dir")
@as_json_option
def log(run_dir: str, as_json: bool) -> None:
    """Send to MLflow what it lacks of the run in RUN_DIR, which is over: where the tracking server
    was away, or the driver was killed. A second call sends nothing.

    \b
    dbx-llmtrain log runs/first
    """
    with output(as_json):
        found = api_results.log(run_dir)
    echo(found, as_json)


COMMANDS = (evaluate, generate, export, register, log, watch)


def _lines(file: TextIO | None, *, alone: bool) -> list[str]:
    """The prompts of a file; of standard input where nothing else was given and something comes."""
    if file is None:
        if not alone or sys.stdin is None or sys.stdin.isatty():
            return []
        file = sys.stdin
    try:
        return [line.strip() for line in file if line.strip()]
    except UnicodeDecodeError as error:
        raise click.BadParameter(f"expected UTF-8 text: {error}", param_hint="--file") from error
