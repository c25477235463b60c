"""The model, lent to code that is no part of training: to the generation of answers, and to a
user's own metrics. Whatever that does, training goes on as if nothing had been."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dbx_llmtrain.worker.generation import GENERATION_FILE, as_list, check_generation_config
from dbx_llmtrain.worker.loss import inference
from dbx_llmtrain.worker.model import is_whole
from dbx_llmtrain.worker.world import World

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def lend(
    root: nn.Module,
    model: Any,
    world: World,
    use: Callable[[Any], None],
    generation: dict[str, Any],
) -> None:
    """Call ``use`` with the Hugging Face model on every rank: in evaluation mode, without
    gradients, in the type that the run computes in, whatever the strategy makes of the weights.

    Where they are sharded, every call of the model is one of all ranks: ``generate`` goes on until
    the last rank's answers have ended. ``generation`` are the model's settings meanwhile. Modes,
    random states (Python, NumPy, torch) and shards are as before afterwards.
    """
    inputs = torch.zeros((1, 1), dtype=torch.int64, device=world.device)
    with _untouched(root), _configured(model, world, generation):
        root(input_ids=inputs, use=use)


def settings(folder: Path, end_tokens: tuple[int, ...], tokenizer: Any) -> dict[str, Any]:
    """The generation configuration that the export will have, and the ids that it may leave to
    ``config.json`` and the tokenizer."""
    found = check_generation_config(folder, end_tokens).content
    if found is None:
        file = folder / GENERATION_FILE
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ids = {key: found.get(key, config.get(key)) for key in _IDS}
    ends = ids["eos_token_id"]
    if ends is None:
        ends = ids["eos_token_id"] = tokenizer.eos_token_id
    if ids["pad_token_id"] is None:
        ids["pad_token_id"] = next(iter(as_list(ends)), None)
    # Marks of where a configuration comes from (``_from_model_config``) would have transformers 4
    # look for the one of the model.
    found = {key: value for key, value in found.items() if not key.startswith("_")}
    return found | {key: value for key, value in ids.items() if value is not None}


@contextmanager
def _untouched(root: nn.Module) -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with inference(root):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def _configured(model: Any, world: World, generation: dict[str, Any]) -> Iterator[None]:
    """``model.generate`` with these settings, in step with the other ranks where weights are
    sharded."""
    if not can_generate(model):
        yield
        return
    from transformers import GenerationConfig

    before = model.generation_config
    model.generation_config = GenerationConfig.from_dict({"use_cache": True, **generation})
    together = world.size > 1 and not all(map(is_whole, model.parameters()))
    if together:
        model.generate = functools.partial(model.generate, synced_gpus=True)
    try:
        yield
    finally:
        model.generation_config = before
        if together:
            del model.generate


def can_generate(model: Any) -> bool:
    """Whether transformers can generate with a model."""
    return hasattr(model, "generate") and bool(model.can_generate())
