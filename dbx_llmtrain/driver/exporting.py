"""A checkpoint of any run to a Hugging Face folder, in this process: no Spark, no GPU, no ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dbx_llmtrain import addresses, logs, storage
from dbx_llmtrain.custom_code import private_modules
from dbx_llmtrain.driver import uploading
from dbx_llmtrain.errors import CheckpointError, ConfigError, Problem
from dbx_llmtrain.outcomes import KIND, Exported
from dbx_llmtrain.records import FileEntry, RunPlan, TrainResult
from dbx_llmtrain.worker import node

DTYPES = ("fp32", "bf16", "fp16")
PLAN = "plan.json"


def export(
    checkpoint: TrainResult | str | Path,
    target: str | Path | None = None,
    *,
    dtype: str | None = None,
    merge: bool = True,
    push_to_hub: str | None = None,
) -> Exported:
    """See ``api.export``."""
    _check(target, dtype, push_to_hub)
    folder = find_checkpoint(checkpoint)
    run_dir = folder.parents[1]
    plan = read_plan(run_dir)
    adapted = plan.config.model.lora is not None
    if not merge and not adapted:
        message = "the run trained no adapter (model.lora) that could stay unmerged: leave it out"
        raise ConfigError([Problem("merge", message)])
    place = default_target(folder, "export" if merge else "adapter")
    place = place if target is None else storage.local_path(target).absolute()
    _refuse_others_files(place)
    if push_to_hub is not None:
        uploading.check_access(push_to_hub)
    trusted = plan.config.model.trust_remote_code
    from dbx_llmtrain.worker import exports

    with tempfile.TemporaryDirectory(prefix="export-", dir=_local_dir(plan)) as name:
        scratch = Path(name)
        source = _base(plan, scratch / "base", run_dir)
        with (
            logs.without_notes(),
            logs.without_bars(),
            private_modules(scratch, wanted=trusted),
        ):
            written = exports.export_checkpoint(
                folder, plan, place, source=source, scratch=scratch, dtype=dtype, merge=merge
            )
    step = storage.step_of(folder) or 0
    hub = None
    if push_to_hub is not None:
        hub = uploading.upload(place, push_to_hub, f"{plan.run_name} after step {step}")
    return Exported(
        path=str(place),
        source=str(folder),
        step=step,
        dtype=written,
        bytes=sum(path.stat().st_size for path in storage.list_files(place)),
        adapter=not merge,
        hub=hub,
    )


def find_checkpoint(given: TrainResult | str | Path) -> Path:
    """The folder of a checkpoint: the one that was given, the last one of a result, the newest
    complete one of a run folder. Raises ``CheckpointError`` where there is none."""
    if isinstance(given, TrainResult):
        if given.checkpoint is None:
            raise CheckpointError(f"the run {given.run_name} has left no checkpoint")
        given = given.checkpoint
    if not isinstance(given, str | Path) or not str(given).strip():
        message = f"expected a TrainResult, or the path of a checkpoint or run, found {given!r}"
        raise ConfigError([Problem("checkpoint", message)])
    path = storage.local_path(given).absolute()
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path}: expected a run folder or a checkpoint")
    if storage.step_of(path) is not None:
        if storage.read_manifest(path) is None:
            raise CheckpointError(
                f"{path} is no complete checkpoint: it has no valid {storage.MANIFEST}, or a file "
                "that this names is missing. Give its run folder, for the newest complete one"
            )
        return path
    newest = storage.latest_checkpoint(path)
    if newest is not None:
        return newest
    if (path / PLAN).is_file():
        raise CheckpointError(f"the run in {path} has no complete checkpoint yet")
    instead = ", which holds a model already" if (path / "config.json").is_file() else ""
    raise CheckpointError(
        f"expected a run folder (with {PLAN}) or a checkpoint in it (step-NNNNNNNN), found {path}"
        f"{instead}"
    )


def read_plan(run_dir: Path) -> RunPlan:
    """What a run was planned as. Raises ``CheckpointError`` where that cannot be read."""
    path = run_dir / PLAN
    try:
        return RunPlan.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is not there: a checkpoint is read in its run folder (RUN/"
            f"{storage.CHECKPOINTS}/step-NNNNNNNN), which says what was trained"
        ) from None
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise CheckpointError(
            f"{path} cannot be read; another version of dbx_llmtrain may have written it: {error}"
        ) from error


def _check(target: object, dtype: object, push_to_hub: object) -> None:
    """Raise ``ConfigError`` for arguments that cannot be right, all of them."""
    problems = []
    if dtype is not None and dtype not in DTYPES:
        message = f"expected one of {', '.join(DTYPES)}, or nothing for the source's, found "
        problems.append(Problem("dtype", f"{message}{dtype!r}"))
    if target is not None and (why := addresses.refusal(str(target))):
        problems.append(Problem("target", why))
    if target is not None and not str(target).strip():
        problems.append(Problem("target", "is empty: expected a folder"))
    if push_to_hub is not None:
        problems += uploading.problems(push_to_hub)
    if problems:
        raise ConfigError(problems)


def default_target(checkpoint: Path, kind: str = "export") -> Path:
    """Where the export of a checkpoint goes by default: into the run folder, under the name that
    training gives the last model's, or with the step in it."""
    run_dir = checkpoint.parents[1]
    last = storage.latest_checkpoint(run_dir) == checkpoint
    return run_dir / (kind if last else f"{kind}-{checkpoint.name}")


def _refuse_others_files(target: Path) -> None:
    """Raise unless ``target`` is free, or holds an earlier export and nothing else."""
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"target: {target} is a file: expected a folder, or none yet")
    manifest: Any = storage.read_manifest(target) or {}
    ours = {storage.MANIFEST} if KIND in manifest else set()
    ours |= {FileEntry.model_validate(entry).path for entry in manifest.get("files", ()) if ours}
    names = (path.relative_to(target).as_posix() for path in storage.list_files(target))
    others = [name for name in names if name not in ours]
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise CheckpointError(
            f"target: {target} holds files that are not of an earlier export: "
            f"{', '.join(others[:3])}{more}. Give another folder, or remove them"
        )


def _local_dir(plan: RunPlan) -> Path:
    """A folder on this machine's own disk: the run's where there is one here, too."""
    setting = plan.local_dir
    return node.local_dir(setting if setting and Path(setting).is_dir() else None)


def _base(plan: RunPlan, folder: Path, run_dir: Path) -> Path:
    """The files of the model that was trained as one folder of links, without a copy. Its weights
    have to be there for adapters only.

    Raises ``CheckpointError`` for a file that is gone, or is another one than was trained.
    """
    artifact, adapted = plan.model.artifact, plan.config.model.lora is not None
    for entry in artifact.files:
        path = storage.place(Path(artifact.source), entry)
        needed = adapted or ".safetensors" not in entry.path
        if needed and not path.is_file():
            raise CheckpointError(
                f"the model that the run started from is gone: there is no {path}. Put "
                f"{plan.model.source} back there; a model that was downloaded, converted or "
                f"composed is made again by llm.plan with {run_dir / 'config.yaml'}"
            )
        if needed and storage.hash_file(path) != entry.sha256:
            raise CheckpointError(
                f"{path} is not the file that the run started from (its hash is another one): put "
                "that one back"
            )
        if path.is_file():
            link = folder / entry.path
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.absolute())
    return folder
