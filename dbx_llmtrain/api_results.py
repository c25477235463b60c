"""The public functions about what a run leaves: evaluate, generate, export, register, load, log,
watch. Each is a page of named calls in order; the logic is elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import click

from dbx_llmtrain import tracking
from dbx_llmtrain.config import TrainConfig, require
from dbx_llmtrain.driver import (
    checks,
    evaluating,
    exporting,
    generating,
    progress,
    registry,
    results,
    run_folder,
    running,
    sending,
    showing,
    signals,
    survey,
    user_metrics,
    watching,
)
from dbx_llmtrain.live_state import Snapshot
from dbx_llmtrain.outcomes import Evaluation, Exported, Generations, Logged, RegisteredModel
from dbx_llmtrain.records import RunPlan, TrainResult

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dbx_llmtrain.driver.formatters import Formatter
    from dbx_llmtrain.driver.user_metrics import Metrics


def evaluate(
    cfg: TrainConfig,
    model: TrainResult | str | None = None,
    *,
    data: Any = None,
    formatter: Formatter | None = None,
    metrics: Metrics | None = None,
    spark: SparkSession | None = None,
) -> Evaluation:
    """The exact losses of a model on the held-out rows of ``cfg`` (``data.eval``, ``data.test``:
    whole sets), computed by all ranks; also the answers to ``train.sample_prompts`` and, by
    ``metrics``, numbers of your own (see ``train``).

    ``model``: the result of a run (its last checkpoint), a checkpoint of any strategy and number of
    ranks, a run folder (its newest one), an export or any model folder or hub id, or an adapter's
    folder; without it the model that ``cfg`` starts from. A checkpoint goes with the configuration
    of its run; another model takes the place of ``cfg.model``. Nothing of a run is touched: files
    go to ``evaluation-TIME-...`` in ``checkpoint.dir``, and to an MLflow run of that name in the
    same experiment (below the active run, where there is one), tagged
    ``dbx_llmtrain.purpose=evaluate``.

    Raises ``ConfigError`` for what is no model and where no rows are held out, ``CheckpointError``
    for a checkpoint that is not complete or of another model, before anything is started, and
    otherwise as ``train`` does.
    """
    began = time.time()
    target = evaluating.find(require(cfg), model)
    evaluating.require_rows(target.cfg, data)
    evaluating.reach(target, model)
    cfg, session = checks.begin(
        target.cfg, spark, data, formatter, purpose="train", metrics=metrics
    )
    with signals.terminated(by_default=True), showing.as_wanted(cfg) as shown:
        case = survey.look(cfg, session, began=began)
        chosen = evaluating.decide(target, session, case, data, formatter, shown)
        found = _evaluate(session, chosen, target, metrics, shown)
    if not progress.is_interactive():  # there the value of a cell is shown in any case
        click.echo(str(found))
    return found


def generate(
    model: TrainResult | str,
    prompts: Sequence[str | Sequence[Mapping[str, str]]],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int = 8,
    device: str | None = None,
) -> Generations:
    """Answers of a trained model, in this process, each as if its prompt had been the only one.

    ``model``: the result of a run or its folder (then its export), an export, an adapter (its base
    is opened too), or any folder or hub id of a causal language model. A prompt is a text or a list
    of messages (``role``, ``content``). A text is taken for a user's message where the model has a
    chat template and was trained on questions with answers (of other models that is assumed), else
    the model goes on with it.

    ``temperature`` 0 takes the likeliest token each time; otherwise one is drawn from the likeliest
    that make up ``top_p``, the same for the same ``seed`` and prompt. ``device``: ``cpu``,
    ``cuda``, or a GPU where there is one. Code that comes with a model runs only for the export in
    the folder of a run with ``model.trust_remote_code``. Raises ``ConfigError`` for what cannot be
    opened or asked, ``CheckpointError`` for a run without an export.
    """
    return generating.generate(
        model,
        prompts,
        device=device,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        batch_size=batch_size,
    )


def export(
    checkpoint: TrainResult | str,
    target: str | None = None,
    *,
    dtype: str | None = None,
    merge: bool = True,
    push_to_hub: str | None = None,
) -> Exported:
    """Make a Hugging Face folder of any checkpoint, in this process, without Spark or a GPU.

    ``checkpoint``: the result of a run (its last one), a run folder (its newest complete one) or a
    checkpoint in it. The folder of the model that the run started from has to be there as well.
    Without ``target`` it is written into the run folder, to ``export``, or ``export-step-...`` of a
    checkpoint that is not the newest; an earlier export there is replaced, anything else refused.

    ``dtype``: ``fp32``, ``bf16`` or ``fp16`` (default: as the model that was trained is stored).
    Adapters are merged in fp32; with ``merge=False`` the adapter alone is written, in peft's format
    (to ``adapter``). ``push_to_hub`` uploads the folder to ``ORG/NAME`` with the token in HF_TOKEN:
    a repository that is new is private, one that exists stays as it is.

    This machine needs memory for the model in fp32 (4 bytes a parameter) and local disk for the
    export. What was written is opened again and compared before it counts. Code that came with the
    model runs where the run's ``model.trust_remote_code`` is set. Raises ``CheckpointError``, and
    ``ConfigError`` for arguments that cannot be.
    """
    return exporting.export(checkpoint, target, dtype=dtype, merge=merge, push_to_hub=push_to_hub)


def register(
    model: TrainResult | str,
    name: str,
    *,
    alias: str | None = None,
) -> RegisteredModel:
    """Log a trained model to the MLflow run that trained it, and register it as ``name``.

    ``model``: the result of a run, a run folder, or an export in one. ``name``:
    ``catalog.schema.model`` in Unity Catalog, else a name of the tracking server's registry; with
    ``@alias`` behind it, or ``alias``. A model that its run has logged already is not logged again.

    The version answers by ``mlflow.pyfunc.load_model(found.uri)`` (chats with messages, where it
    was trained on chats) and in ``mlflow.pyfunc.spark_udf``. Raises ``ConfigError`` for a name or a
    model that cannot be, ``CheckpointError`` for a run that is not finished or has no export, and
    ``RegistryError`` where MLflow cannot do it.
    """
    return registry.register(model, name, alias=alias)


def load(run_dir: str) -> TrainResult:
    """The result of a finished run, from its folder: after the notebook was detached or restarted.

    Raises ``CheckpointError`` for a run that is not finished, with what is known of it: whether it
    is running, how it ended, its newest checkpoint, how to go on.
    """
    return results.load(run_dir)


def log(run_dir: TrainResult | str) -> Logged:
    """Send to MLflow what it lacks of a run that is over, from its folder: the server was away for
    a while or all the time, or the driver was killed.

    Metrics, parameters, tags, answers, files and how the run ended, as ``train`` or ``evaluate``
    sends them; each value of a metric once for a step, so that a second call sends nothing. A run
    that never was in MLflow gets one, whose id ``load`` then knows. The store is the one that is
    set (``MLFLOW_TRACKING_URI``, ``mlflow.set_tracking_uri``), else that of the run.

    Raises ``CheckpointError`` for a folder that is not of a run, and while the run goes on, and
    ``RegistryError`` where the server does not answer.
    """
    return sending.log(run_dir)


@overload
def watch(run_dir: TrainResult | str, *, once: Literal[False] = False) -> None: ...
@overload
def watch(run_dir: TrainResult | str, *, once: Literal[True]) -> Snapshot: ...
def watch(run_dir: TrainResult | str, *, once: bool = False) -> Snapshot | None:
    """Show a run from its folder, from any process that sees it: progress, losses, speed, where
    every rank is. While it runs this follows it, until it ends or the cell is interrupted (which is
    nothing to the run).

    With ``once`` the state of now is returned, which a notebook shows. Raises ``ConfigError`` for
    what is not the folder of a run.
    """
    if once:
        return watching.once(run_dir)
    watching.follow(run_dir)
    return None


def _evaluate(
    session: SparkSession,
    plan: RunPlan,
    target: evaluating.Target,
    metrics: Metrics | None,
    shown: progress.Progress,
) -> Evaluation:
    """Do what was planned; MLflow has it as a run of its own."""
    with tracking.driver_run(plan) as run:
        plan = user_metrics.ship(evaluating.ship(run.attach(plan)), metrics)
        run_folder.write_start(plan)
        click.echo(evaluating.begin_text(plan, target))
        run.log_start(plan)
        for key, value in evaluating.tags(target).items():
            run.set_tag(key, value)
        outcome = running.run(session, plan, run=run, shown=shown, check=lambda: None)
        return evaluating.write_result(outcome.plan, target, outcome.result)
