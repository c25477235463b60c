"""Evaluating a model by itself: which one is meant, how its ranks run, what comes of it."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbx_llmtrain import addresses, batches, layout, lora_fields, resuming, storage
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver import deciding, hub, inputs, registered, run_folder, sources
from dbx_llmtrain.driver.run_folder import PLAN, RunFolder
from dbx_llmtrain.errors import CheckpointError, ConfigError, Problem
from dbx_llmtrain.events import EVENTS_FILE, read_events
from dbx_llmtrain.forecasts import Decision
from dbx_llmtrain.model_sections import ModelConfig, ParallelConfig
from dbx_llmtrain.outcomes import ROWS, TOKENS, Evaluation, RankResult, Sample
from dbx_llmtrain.records import ModelInfo, PreparedData, RunPlan, TrainResult

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dbx_llmtrain.driver.formatters import Formatter
    from dbx_llmtrain.driver.progress import Progress
    from dbx_llmtrain.driver.survey import Survey

ADAPTER_CONFIG = "adapter_config.json"
RESULT = "evaluation.json"
_SAME = ("model", "lora", "load_in_4bit", "objective")
"""What of a run's identity decides whose weights a checkpoint holds."""
_KEPT = ("attention", "trust_remote_code", "use_liger_kernel")
"""Fields of ``model`` that are for any model; the others are of the one that is configured."""
_ROOM = 0.5
"""Of a rank's memory that weights and the buffers of DDP may fill; the rest is for logits."""


@dataclass(frozen=True)
class Target:
    """The model that is evaluated. ``cfg`` is the configuration to evaluate it with: its ``model``
    is the one whose files are read. ``weights``: a checkpoint, or an adapter's folder, whose
    weights take the place of those in the files. ``told``: how people call it."""

    cfg: TrainConfig
    told: str
    weights: Path | None = None


def find(cfg: TrainConfig, model: TrainResult | str | Path | None) -> Target:
    """What is meant by ``evaluate(cfg, model)``; nothing is started or downloaded.

    Raises ``ConfigError`` for what is no model, ``CheckpointError`` for a checkpoint that is not
    complete or of another model than ``cfg`` has, and for a run that has left neither.
    """
    cfg = _without_deepspeed(cfg)
    if model is None:
        return Target(cfg, cfg.model.source or "the model of model.config")
    if isinstance(model, TrainResult):
        paths = [path for path in (model.checkpoint, model.model_path) if path]
        there = [path for path in paths if storage.read_manifest(storage.local_path(path))]
        if not there:
            raise CheckpointError(
                f"the run {model.run_name} has left neither a checkpoint nor an export that is "
                f"complete (looked for {', '.join(paths) or 'none'})"
            )
        model = there[0]
    if not isinstance(model, str | Path) or not str(model).strip():
        raise _refuse(f"expected a TrainResult, a folder or a hub id, found {model!r}")
    if why := addresses.refusal(str(model), ", or a hub id"):
        raise _refuse(why)
    path = storage.local_path(model).absolute()
    if path.is_dir():
        return _folder(cfg, path)
    _check_source(str(model))
    if not path.exists() and "/" not in str(model):
        raise _refuse(
            f"there is no folder {path}, and {str(model)!r} is no hub id, which has an owner "
            "(ORG/NAME)"
        )
    return Target(_of(cfg, {"source": str(model)}), str(model))


def reach(target: Target, model: TrainResult | str | Path | None) -> None:
    """Raise ``ConfigError`` where ``model`` is a hub id or a registered model, and the hub or the
    registry does not have it or cannot be reached: asked before anything is started."""
    source = target.cfg.model.source
    if model is None or source != str(model) or storage.local_path(source).exists():
        return
    try:
        if registered.is_registered(source):
            runs = storage.local_path(target.cfg.checkpoint.dir or layout.BESIDE)
            registered.check_there(source, runs)
        else:
            hub.check_there(source)
    except ConfigError as error:
        raise _refuse(error.problems[0].message) from error


def _folder(cfg: TrainConfig, path: Path) -> Target:
    if storage.step_of(path) is not None or "identity" in (storage.read_manifest(path) or {}):
        return _checkpoint(cfg, path)
    if _is_adapter(path):
        return _adapter(cfg, path)
    if (path / "config.json").is_file():
        return Target(_of(cfg, {"source": str(path)}), str(path))
    newest = storage.latest_checkpoint(path)
    if newest is not None:
        return _checkpoint(cfg, newest)
    if (path / "export" / "config.json").is_file():
        return _folder(cfg, path / "export")
    if (path / PLAN).is_file():
        raise CheckpointError(f"the run in {path} has left no complete checkpoint and no export")
    raise _refuse(
        f"{path} is no model: expected a checkpoint (step-NNNNNNNN), a run folder, or a folder "
        f"with config.json or {ADAPTER_CONFIG}"
    )


def _is_adapter(path: Path) -> bool:
    return (path / ADAPTER_CONFIG).is_file()


def _checkpoint(cfg: TrainConfig, path: Path) -> Target:
    manifest = storage.read_manifest(path)
    if manifest is None:
        raise CheckpointError(
            f"model: {path} is not a complete checkpoint: it has no valid {storage.MANIFEST}, or a "
            "file that this names is missing"
        )
    lora = cfg.model.lora.model_dump(mode="json") if cfg.model.lora else None
    ours = {
        "lora": lora,
        "load_in_4bit": cfg.model.load_in_4bit,
        "objective": cfg.data.objective,
    }
    _require_same(manifest, ours, path)
    return Target(cfg, str(path), path)


def _require_same(manifest: Mapping[str, Any], ours: Mapping[str, Any], path: Path) -> None:
    """Raise for a checkpoint whose weights do not belong on the configuration's model."""
    identity = manifest.get("identity", {})
    if changed := resuming.differences(identity, ours):
        raise CheckpointError(
            f"the checkpoint {path} is of another model than the configuration's: "
            f"{'; '.join(changed)}. Give the configuration of its run, which is in config.yaml of "
            "the run folder"
        )


def _adapter(cfg: TrainConfig, path: Path) -> Target:
    """An adapter on the base that it names, or on the configured model where that is the one."""
    try:
        content = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        base = str(content["base_model_name_or_path"])
        lora = _lora(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _refuse(f"{path / ADAPTER_CONFIG} cannot be read: {error!r}") from error
    changed: dict[str, Any] = {"lora": lora}
    if base == cfg.model.source:
        changed = {**cfg.to_dict().get("model", {}), **changed}
    else:
        _check_source(base)
        changed |= {"source": base, "revision": content.get("revision")}
    return Target(_of(cfg, changed), str(path), path)


def _lora(content: Mapping[str, Any]) -> dict[str, Any]:
    """``model.lora`` of peft's file: the fields that a run can have, as far as they were set."""
    names = dict(lora_fields.OURS)
    names |= {name: name for name in ("r", "target_modules", *lora_fields.PASSED_ON)}
    del names["init_lora_weights"]  # every value is in the file
    found = {ours: content.get(peft) for ours, peft in names.items()}
    return {name: value for name, value in found.items() if value not in (None, {}, False, "none")}


def _check_source(source: str) -> None:
    """Raise ``ConfigError`` for what is neither a file that holds a model nor a hub id."""
    try:
        sources.find_model(ModelConfig(source=source))
    except ConfigError as error:
        raise _refuse(error.problems[0].message) from None


def _of(cfg: TrainConfig, model: dict[str, Any]) -> TrainConfig:
    """The configuration with another model."""
    given = cfg.to_dict()
    kept = {name: value for name, value in given.get("model", {}).items() if name in _KEPT}
    model = {name: value for name, value in (kept | model).items() if value is not None}
    return TrainConfig.from_dict(given | {"model": model})


def _without_deepspeed(cfg: TrainConfig) -> TrainConfig:
    """DeepSpeed's savings are of optimizer and gradients, and there are none."""
    if cfg.parallel.kind != "deepspeed":
        return cfg
    given = cfg.to_dict()
    return TrainConfig.from_dict({**given, "parallel": {"kind": "auto"}})


def require_rows(cfg: TrainConfig, data: Any) -> None:
    """Raise ``ConfigError`` where no rows are held out: asked before anything is started."""
    given = inputs.check_given(cfg.data, data)
    if {"eval", "test"} & given.keys() or cfg.data.eval is not None or cfg.data.test is not None:
        return
    raise ConfigError(
        [
            Problem(
                "data.eval",
                "missing: there is nothing to evaluate on. Set data.eval (or data.test) to a "
                "source, or to the share of the training rows that the run has held out",
            )
        ]
    )


def own_folder(cfg: TrainConfig, folder: RunFolder, now: datetime.datetime) -> RunFolder:
    """A folder of the evaluation's own beside the runs': nothing of a run is touched."""
    name = f"evaluation-{now:%Y%m%d-%H%M%S}-{folder.attempt[:4]}"
    if cfg.tracking.run_name:
        name = f"{cfg.tracking.run_name}-{name}"
    return dataclasses.replace(folder, name=name, path=folder.path.parent / name, why="")


def decide(
    target: Target,
    session: SparkSession,
    case: Survey,
    data: Any,
    formatter: Formatter | None,
    shown: Progress,
) -> RunPlan:
    """Resolve the model, prepare the data, plan; see ``make_plan`` for what it raises."""
    folder = own_folder(target.cfg, case.folder, datetime.datetime.now())
    cache = run_folder.make_cache(target.cfg, folder)
    model, prepared = deciding.model_and_data(target.cfg, session, cache, data, formatter, shown)
    return make_plan(target, case, folder, model, prepared)


def tags(target: Target) -> dict[str, str]:
    """Of the MLflow run, beside those of every run."""
    return tags_of(target.told)


def tags_of(model: str) -> dict[str, str]:
    """The same, of a model as its evaluation names it."""
    return {"dbx_llmtrain.purpose": "evaluate", "dbx_llmtrain.evaluated": model}


def make_plan(
    target: Target, case: Survey, folder: RunFolder, model: ModelInfo, data: PreparedData
) -> RunPlan:
    """How the ranks evaluate. Raises ``CheckpointError`` for the checkpoint of another model, and
    ``ConfigError`` where the data have left no row to evaluate, or a disk has no room."""
    cfg, ranks = target.cfg, case.layout.processes
    if not data.eval_splits and "test" not in data.splits:
        raise ConfigError([Problem("data.eval", "no row is left to evaluate: hold out more")])
    precision, why = layout.choose_precision(cfg, case.report, case.layout)
    artifacts = (model.artifact, data.artifact)
    layout.check_disks(case.layout, case.report, artifacts)
    place = layout.find_place(case.layout, case.report, artifacts)
    parallel, reason = _parallel(cfg, place, model)
    decisions = (
        *case.layout.decisions,
        Decision(name="train.precision", value=precision, reason=why),
        Decision(name="parallel.kind", value=parallel.kind, reason=reason),
    )
    micro = cfg.train.eval_micro_batch_size or batches.micro_batch(cfg, ranks).most
    assert parallel.kind != "auto"
    plan = RunPlan(
        purpose="evaluate",
        attempt=folder.attempt,
        run_name=folder.name,
        run_dir=str(folder.path),
        config=cfg,
        world_size=ranks,
        local_mode=case.layout.local_mode,
        use_gpu=case.layout.use_gpu,
        strategy=parallel.kind,
        precision=precision,
        parallel=parallel,
        attention=cfg.model.attention,
        global_batch_size=micro * ranks,
        micro_batch_size=micro,
        accumulation=1,
        examples=data.train_examples,
        steps_per_epoch=1,
        total_steps=0,
        warmup_steps=0,
        local_dir=cfg.cluster.local_dir,
        model=model,
        data=data,
        weights_from=str(target.weights) if target.weights else None,
        decisions=decisions,
    )
    if target.weights is not None and not _is_adapter(target.weights):
        found = resuming.identity(plan)
        manifest = storage.read_manifest(target.weights) or {}
        _require_same(manifest, {name: found[name] for name in _SAME}, target.weights)
    return plan


def _parallel(
    cfg: TrainConfig, place: layout.Place, model: ModelInfo
) -> tuple[ParallelConfig, str]:
    """One process, every rank the whole model where that fits, else sharded."""
    if place.ranks == 1:
        return ParallelConfig(kind="single"), "one process"
    wanted = cfg.parallel
    if wanted.kind == "ddp" or (wanted.kind == "fsdp" and wanted.shard != "hybrid"):
        return wanted, "as configured"
    if cfg.model.load_in_4bit:
        return ParallelConfig(kind="ddp"), "weights in 4 bits are not sharded"
    count = model.parameters
    room = place.device_memory or place.host_memory // place.busiest
    if wanted.kind != "fsdp" and count is not None and 8 * count < _ROOM * room:
        return ParallelConfig(kind="ddp"), "every rank has room for the model"
    return ParallelConfig(kind="fsdp"), "the model is sharded over the ranks"


def ship(plan: RunPlan) -> RunPlan:
    """The plan with an adapter's files where every rank sees them: in the run folder."""
    if plan.weights_from is None or not _is_adapter(Path(plan.weights_from)):
        return plan
    target = storage.local_path(plan.run_dir) / "adapter"
    for name in (ADAPTER_CONFIG, "adapter_model.safetensors"):
        storage.copy_file(Path(plan.weights_from) / name, target / name)
    return plan.model_copy(update={"weights_from": str(target)})


def begin_text(plan: RunPlan, target: Target) -> str:
    """What is about to be done, in a line."""
    names = [*plan.data.eval_splits, *(["test"] if "test" in plan.data.splits else [])]
    rows = sum(plan.data.splits[name].rows for name in names)
    return (
        f"evaluating {target.told} on {rows} rows ({', '.join(names)}): {plan.world_size} rank(s), "
        f"{plan.strategy}, {plan.precision}; its files are in {plan.run_dir}"
    )


def write_result(plan: RunPlan, target: Target, result: RankResult) -> Evaluation:
    """What the ranks have found; also kept as ``evaluation.json``."""
    metrics = dict(result.metrics)
    rows, tokens = int(metrics.pop(ROWS, 0)), int(metrics.pop(TOKENS, 0))
    run_dir = storage.local_path(plan.run_dir)
    found = Evaluation(
        model=target.told,
        metrics=metrics,
        rows=rows,
        trained_tokens=tokens,
        samples=_samples(run_dir, plan.attempt),
        run_id=plan.tracking.run_id if plan.tracking else None,
    )
    storage.write_text(run_dir / RESULT, found.model_dump_json(indent=1))
    return found


def _samples(run_dir: Path, attempt: str) -> tuple[Sample, ...]:
    """The answers, from the log of the ranks."""
    events = read_events(run_dir / EVENTS_FILE, attempt=attempt)
    given = [event.data.get("samples", ()) for event in events if event.kind == "samples"]
    return tuple(Sample.model_validate(each) for each in (given[-1] if given else ()))


def _refuse(message: str) -> ConfigError:
    return ConfigError([Problem("model", message)])
