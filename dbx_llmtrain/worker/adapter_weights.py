"""An adapter's folder (peft's format) back onto a model with adapters, whatever wraps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.worker.adapters import PREFIX, WEIGHTS
from dbx_llmtrain.worker.parts import part_of


def put_adapter(folder: Path, model: Any) -> None:
    """Give the trained parameters of ``model`` the values in the folder. Every rank calls it; each
    reads the file and takes what it holds.

    Raises ``CheckpointError`` where the file has other tensors than the model's adapters, or in
    other shapes.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    stored = _names_in_file(model, list(trained))
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        there = set(file.keys())
        lacking = sorted({stored[name] for name in trained} - there)
        more = sorted(there - set(stored.values()))
        if lacking or more:
            raise CheckpointError(
                f"the adapter {folder} does not fit the model: it lacks {_some(lacking)}, and has "
                f"{_some(more)} besides"
            )
        for name, parameter in trained.items():
            _put(parameter, file.get_tensor(stored[name]), f"{folder}: {stored[name]}")


def _names_in_file(model: Any, names: list[str]) -> dict[str, str]:
    """What peft calls the parameters in its file."""
    from peft import get_peft_model_state_dict

    marks = {name: torch.empty(0) for name in names}
    chosen = get_peft_model_state_dict(model, state_dict=marks, save_embedding_layers=False)
    by_mark = {id(mark): f"{PREFIX}{name}" for name, mark in chosen.items()}
    return {name: by_mark.get(id(mark), f"{PREFIX}{name}") for name, mark in marks.items()}


def _put(parameter: Tensor, value: Tensor, where: str) -> None:
    part = part_of(parameter)
    value = value if value.ndim else value.reshape(1)
    if tuple(value.shape) != part.shape:
        raise CheckpointError(f"{where} is {tuple(value.shape)}, the model has {part.shape}")
    part.put(0, value)
    part.finish()


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (" ..." if len(names) > 4 else "") if names else "nothing"
