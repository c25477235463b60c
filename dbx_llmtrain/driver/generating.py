"""Answers of a trained model, in this process."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbx_llmtrain import addresses, logs, storage
from dbx_llmtrain.custom_code import private_modules
from dbx_llmtrain.driver import hub
from dbx_llmtrain.driver.exporting import PLAN, read_plan
from dbx_llmtrain.driver.sources import HUB_ID
from dbx_llmtrain.errors import CheckpointError, ConfigError, Problem
from dbx_llmtrain.outcomes import DATA_FORMAT, Generations
from dbx_llmtrain.records import TrainResult

_ADAPTER_CONFIG = "adapter_config.json"
_EXPORT = "export"
_INSTEAD = "make one of it with llm.export (dbx-llmtrain export)"


@dataclass(frozen=True)
class Found:
    """A model to generate with: a folder or a hub id. ``trusted``: its run was told that the code
    that comes with it may run; ``data_format`` of the rows it was trained on, where that is known.
    """

    source: str
    trusted: bool = False
    data_format: str | None = None


def generate(
    model: TrainResult | str | Path,
    prompts: Sequence[str | Sequence[Mapping[str, str]]],
    *,
    device: str | None = None,
    **settings: Any,
) -> Generations:
    """See ``api.generate``; ``settings`` are the fields of ``worker.generate.Sampling``."""
    problems = [*_prompt_problems(prompts), *_setting_problems(settings)]
    if problems:
        raise ConfigError(problems)
    found = find_model(model)
    _check_hub(found)
    with logs.without_notes(), logs.without_bars(), private_modules(None, wanted=found.trusted):
        from dbx_llmtrain.worker import generate as worker

        opened = worker.open_model(
            found.source, device=device, trusted=found.trusted, data_format=found.data_format
        )
        samples = worker.answer(opened, prompts, worker.Sampling(**settings))
    return Generations(model=found.source, samples=tuple(samples))


def find_model(given: TrainResult | str | Path) -> Found:
    """What to generate with: the export of a result or of a run folder, or any model's folder or
    hub id. Raises ``CheckpointError`` for a run without an export, ``ConfigError`` otherwise."""
    if isinstance(given, TrainResult):
        return _of_run(storage.local_path(given.run_dir), given.model_path)
    if not isinstance(given, str | Path) or not str(given).strip():
        raise _refuse(f"expected a TrainResult, a folder or a hub id, found {given!r}")
    if why := addresses.refusal(str(given), ", or a hub id"):
        raise _refuse(why)
    path = storage.local_path(given).absolute()
    if path.is_file():
        raise _refuse(f"{given} is a file: expected a folder or a hub id")
    if not path.exists():
        return _of_hub(str(given), path)
    if any((path / name).is_file() for name in ("config.json", _ADAPTER_CONFIG)):
        return _folder(path)
    if (path / PLAN).is_file():
        return _of_run(path, None)
    if storage.step_of(path) is not None:
        raise CheckpointError(f"{path} is a checkpoint, and no model to generate with: {_INSTEAD}")
    raise _refuse(f"{path} holds no model: expected a config.json (or a run folder's {PLAN})")


def _of_hub(name: str, path: Path) -> Found:
    """A model of the hub, of which there is no folder here."""
    if "/" in name and HUB_ID.fullmatch(name):
        return Found(name)
    raise _refuse(
        f"there is no folder {path}, and {name!r} is no hub id, which has an owner (ORG/NAME)"
    )


def _check_hub(found: Found) -> None:
    """Raise ``ConfigError`` where the model, or the base of the adapter, is one of the hub that
    cannot be had: whoever opens it would be asked to wait long to learn that."""
    name, revision, told = found.source, None, ""
    adapter = Path(name) / _ADAPTER_CONFIG
    if adapter.is_file():
        content = json.loads(adapter.read_text(encoding="utf-8"))
        name, revision = str(content.get("base_model_name_or_path")), content.get("revision")
        told = f"the base of the adapter {found.source}: "
    if Path(name).exists() or not HUB_ID.fullmatch(name):
        return
    try:
        hub.check_there(name, revision)
    except ConfigError as error:
        instead = ". Use the run's merged export instead" if told else ""
        raise _refuse(f"{told}{error.problems[0].message}{instead}") from error


def _of_run(run_dir: Path, export: str | None) -> Found:
    folder = storage.local_path(export) if export else run_dir / _EXPORT
    if storage.read_manifest(folder) is None:
        raise CheckpointError(f"the run in {run_dir} has no complete export ({folder}): {_INSTEAD}")
    return _folder(folder)


def _folder(path: Path) -> Found:
    """A model's folder. What its run says of it counts where it lies in the run's folder."""
    manifest = storage.read_manifest(path) or {}
    trusted = False
    if (path.parent / PLAN).is_file():
        trusted = read_plan(path.parent).config.model.trust_remote_code
    formats = manifest.get(DATA_FORMAT)
    return Found(str(path), trusted, str(formats) if formats else None)


def _refuse(message: str) -> ConfigError:
    return ConfigError([Problem("model", message)])


def _prompt_problems(prompts: object) -> list[Problem]:
    """What is wrong with prompts that shows without a model."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence) or not prompts:
        message = f"expected a list with one prompt or more, found {prompts!r:.80}"
        return [Problem("prompts", message)]
    expected = "expected a text, or messages with role and content"
    return [
        Problem(f"prompts[{number}]", f"{expected}, found {prompt!r:.80}")
        for number, prompt in enumerate(prompts)
        if not _is_prompt(prompt)
    ]


def _is_prompt(prompt: object) -> bool:
    if isinstance(prompt, str):
        return bool(prompt.strip())
    return (
        isinstance(prompt, Sequence)
        and bool(prompt)
        and all(
            isinstance(message, Mapping)
            and all(isinstance(message.get(key), str) for key in ("role", "content"))
            for message in prompt
        )
    )


def _setting_problems(settings: Mapping[str, Any]) -> list[Problem]:
    """Settings that cannot be."""
    problems = []
    for name, least in (("max_new_tokens", 1), ("batch_size", 1), ("seed", 0)):
        value = settings.get(name, least)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            problems.append(
                Problem(name, f"expected a whole number of at least {least}, found {value!r}")
            )
    temperature, top_p = settings.get("temperature", 0), settings.get("top_p", 1)
    if not _is_number(temperature) or not 0 <= temperature < math.inf:
        message = f"expected a number, 0 (the likeliest token) or more, found {temperature!r}"
        problems.append(Problem("temperature", message))
    if not _is_number(top_p) or not 0 < top_p <= 1:
        message = f"expected a number above 0 and at most 1, found {top_p!r}"
        problems.append(Problem("top_p", message))
    return problems


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
