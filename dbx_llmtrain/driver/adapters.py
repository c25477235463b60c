"""``model.lora`` against the peft that is installed on the driver, or what we know of peft."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dbx_llmtrain import lora_fields
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver.model_config import empty_model, load_config
from dbx_llmtrain.errors import ConfigError, Problem
from dbx_llmtrain.model_sections import ModelConfig


def check(cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` for fields of ``model.lora`` that peft does not have, and for values
    that it refuses. (``check_model`` has what depends on the model.)"""
    lora = cfg.model.lora
    if lora is None or not lora.model_extra:
        return
    kind = _peft_config()
    known: Iterable[str] = lora_fields.PASSED_ON
    if kind is not None:
        known = {field.name for field in dataclasses.fields(kind)}
    if problems := lora_fields.unknown(lora, known):
        raise ConfigError(problems)
    if kind is None:
        return
    values = lora_fields.arguments(lora)
    if values["target_modules"] == lora_fields.ALL_LINEAR:
        values["target_modules"] = None  # the ranks put names in its place where layers are chosen
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind(**values)
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError([Problem(lora_fields.PATH, f"peft refuses it: {error}")]) from error


def check_model(config: ModelConfig, folder: Path, *, objective: str = "sft") -> None:
    """Raise ``ConfigError`` for layers of ``model.lora`` that the model does not have. ``folder``
    has its ``config.json``; the model is built without storage, no weight is read."""
    lora = config.lora
    if lora is None or (lora.target_modules == lora_fields.ALL_LINEAR and not lora.model_extra):
        return
    from dbx_llmtrain.worker.parallel.fsdp import transformer_blocks

    name, trusted = config.source or "model.config", config.trust_remote_code
    loaded = load_config(folder, name, trusted=trusted, objective=objective)
    model = empty_model(loaded, folder, name, trusted=trusted, objective=objective)
    modules = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if problems := lora_fields.misses(lora, modules, parameters, len(transformer_blocks(model))):
        raise ConfigError(problems)


def _peft_config() -> Any:
    """peft's class, ``None`` where peft cannot be imported: it has to be on the nodes only."""
    try:
        from peft import LoraConfig
    except ImportError:
        return None
    return LoraConfig
