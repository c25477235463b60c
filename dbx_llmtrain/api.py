"""The public functions. Each is a page of named calls in order; the logic is elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import click

from dbx_llmtrain import logs, tracking
from dbx_llmtrain.config import TrainConfig, require
from dbx_llmtrain.driver import (
    checks,
    cluster,
    deciding,
    evaluating,
    examples,
    exporting,
    forecasting,
    generating,
    lease,
    progress,
    registry,
    results,
    run_folder,
    running,
    signals,
    survey,
    user_metrics,
)
from dbx_llmtrain.driver import trial as rehearsal
from dbx_llmtrain.forecasts import Forecast
from dbx_llmtrain.outcomes import Evaluation, Exported, Generations, RegisteredModel
from dbx_llmtrain.previewing import Preview
from dbx_llmtrain.records import ClusterReport, PreparedData, RunPlan, TrainResult

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dbx_llmtrain.driver.formatters import Formatter
    from dbx_llmtrain.driver.user_metrics import Metrics


def probe(cfg: TrainConfig | None = None, *, spark: SparkSession | None = None) -> ClusterReport:
    """Every node's GPUs (by ``nvidia-smi``), CPU, memory, disk and package versions.

    Raises ``ClusterError`` where Spark cannot run tasks that reach the nodes.
    """
    session = cluster.session(spark)
    local_dir = require(cfg).cluster.local_dir if cfg is not None else None
    return cluster.probe(session, local_dir=local_dir)


def prepare(
    cfg: TrainConfig,
    *,
    data: Any = None,
    formatter: Formatter | None = None,
    spark: SparkSession | None = None,
) -> PreparedData:
    """Tokenise, mask and pack the data on Spark; ``train`` with the same settings finds the result.

    Needs no GPU and no weights: a small cluster will do, where ``checkpoint.dir`` (or
    ``data.cache_dir``) is storage that the one for training sees too. ``data`` takes the place of
    the configuration's sources: a Spark DataFrame or ``datasets.Dataset`` to train on, or a mapping
    of ``train``, ``eval`` and ``test`` to such. ``formatter`` gets every row as a dict and returns
    one of a supported shape, or ``None`` to leave it out. Raises ``ConfigError``, ``ClusterError``
    or ``DataError``.
    """
    cfg, session = checks.begin(cfg, spark, data, formatter, purpose="prepare")
    with _showing(cfg) as shown:
        return deciding.prepare(cfg, session, data, formatter, shown)[1]


def preview(
    cfg: TrainConfig,
    n: int = 3,
    *,
    split: str = "train",
    data: Any = None,
    formatter: Formatter | None = None,
    spark: SparkSession | None = None,
) -> Preview:
    """The first ``n`` examples of a split as the model sees them, with what is trained of them.

    ``split`` is ``train``, or where rows are held out ``eval`` (``eval-NAME`` for one of several)
    or ``test``. Prepares the data, or uses what is prepared; needs no GPU and no weights. The page
    is also kept beside the prepared data. ``data`` and ``formatter`` as in ``prepare``. Raises
    ``ConfigError``, ``ClusterError`` or ``DataError``.
    """
    cfg, session = checks.begin(cfg, spark, data, formatter, purpose="prepare", shown=(n, split))
    with _showing(cfg) as shown:
        model, prepared = deciding.prepare(cfg, session, data, formatter, shown)
        return examples.show_examples(cfg, model, prepared, count=n, split=split)


@overload
def plan(
    cfg: TrainConfig,
    *,
    cluster: None = None,
    data: Any = None,
    formatter: Formatter | None = None,
    spark: SparkSession | None = None,
) -> RunPlan: ...
@overload
def plan(cfg: TrainConfig, *, cluster: str) -> Forecast: ...
def plan(
    cfg: TrainConfig,
    *,
    cluster: str | None = None,
    data: Any = None,
    formatter: Formatter | None = None,
    spark: SparkSession | None = None,
) -> RunPlan | Forecast:
    """What ``train`` would run and why, what every strategy takes of memory, and how long it takes.
    Reads the model's files and prepares the data.

    With ``cluster``, such as ``2x8xH100-80GB`` (nodes x GPUs of each x kind-memory), the same for
    a cluster that does not exist yet, from the model's configuration alone: no Spark, no weights,
    no data. ``data`` and ``formatter`` as in ``prepare``. Raises ``ConfigError``, ``ClusterError``
    or ``DataError`` for what cannot work.
    """
    if cluster is not None:
        forecasting.refuse_others(data=data, formatter=formatter, spark=spark)
        return forecasting.forecast(require(cfg), cluster)
    cfg, session = checks.begin(cfg, spark, data, formatter, purpose="train")
    with _showing(cfg) as shown:
        case = survey.look(cfg, session, began=time.time())
        return deciding.decide(cfg, session, case, data, formatter, shown)


def train(
    cfg: TrainConfig,
    *,
    data: Any = None,
    formatter: Formatter | None = None,
    metrics: Metrics | None = None,
    trial: bool = False,
    spark: SparkSession | None = None,
) -> TrainResult:
    """Train on every GPU of the cluster (or on CPU) and return when every rank has finished.

    A run that was interrupted goes on from its newest complete checkpoint; one that is finished
    already returns its result. ``metrics`` gets the model and its tokenizer at every evaluation, on
    every rank, and returns numbers by name. ``trial`` rehearses the run in a folder of its own: two
    steps on the longest rows, one evaluation, one checkpoint, its resume, one export. ``data`` and
    ``formatter`` as in ``prepare``. Raises ``ConfigError``, ``ClusterError``, ``DataError``,
    ``StagingError``, and ``CheckpointError`` (the run's folder is in use, or it cannot go on from
    what is in it), before any GPU is used, and ``TrainingFailed`` with the first failing rank's
    traceback afterwards. SIGTERM, where nobody else handles it, is taken as Ctrl-C is: the ranks
    write a checkpoint, and ``SystemExit`` is raised.
    """
    began = time.time()
    begins: checks.Begins = "trial" if trial else "run"
    cfg, session = checks.begin(
        cfg, spark, data, formatter, purpose="train", metrics=metrics, begins=begins
    )
    with signals.terminated(by_default=True), _showing(cfg) as shown:
        case = survey.look(cfg, session, began=began, trial=trial)
        survey.tell_name(case.folder)
        with lease.held(case.folder) as holder:
            chosen = deciding.decide(cfg, session, case, data, formatter, shown)
            result = results.finished(chosen)
            if result is None:
                result = _train(session, chosen, metrics, holder, shown)
    if not progress.is_interactive():  # there the value of a cell is shown in any case
        click.echo(str(result))
    return result


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
    with signals.terminated(by_default=True), _showing(cfg) as shown:
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


@contextmanager
def _showing(cfg: TrainConfig) -> Iterator[progress.Progress]:
    """Messages and progress, as the configuration wants them shown."""
    settings = cfg.tracking
    with logs.shown(settings.log_level), progress.showing(settings.progress) as shown:
        yield shown


def _train(
    session: SparkSession,
    plan: RunPlan,
    metrics: Metrics | None,
    holder: lease.Held,
    shown: progress.Progress,
) -> TrainResult:
    """Do what was planned in a folder that this call holds; MLflow has it from beginning to end."""
    holder.begin()
    earlier = results.earlier_tracking(holder, plan)
    began = time.monotonic()
    with (
        run_folder.told_when_stopped(plan),
        tracking.driver_run(plan, earlier, others=(lease.Lost,)) as run,
    ):
        holder.track(run.plan() or earlier)
        plan = run.attach(plan)
        plan = user_metrics.ship(run_folder.clear(plan, keep=lease.LEASE), metrics)
        run_folder.write_start(plan)
        click.echo(str(plan))
        run.log_start(plan)
        running.tell_origin(plan, run)
        plan = running.closing(plan, time.monotonic() - began)
        go = partial(running.run, session, run=run, shown=shown, check=holder.check)
        outcome = rehearsal.rehearse(plan, go) if plan.trial else go(plan)
        result = results.write(outcome.plan, outcome.result, outcome.restarts)
        run.log_result(result)
        result = registry.log_trained(outcome.plan, result)
    return result
