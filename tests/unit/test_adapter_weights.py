"""An adapter's folder back onto a model with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.worker import lora
from dbx_llmtrain.worker.adapter_weights import put_adapter
from tests import sample, tiny


def adapted(seed: int = 0, **fields: Any) -> Any:
    """A model with adapters whose values depend on the seed."""
    settings = {"r": 2, "target_modules": ["q_proj", "embed_tokens"]} | fields
    model = {"source": "/models/tiny", "lora": settings}
    found: Any = lora.adapt(tiny.llama(), sample.run_plan(config=sample.config(model=model)))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    return found


def saved(folder: Path, model: Any) -> Path:
    """The adapter as peft itself writes it."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    folder.mkdir()
    save_file(
        {f"base_model.model.{name}": value.contiguous() for name, value in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    return folder


@pytest.mark.parametrize(
    "fields", [{}, {"use_dora": True, "target_modules": ["q_proj"]}, {"modules_to_save": ["norm"]}]
)
def test_what_peft_has_written_is_what_the_model_holds(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    trained, other = adapted(1, **fields), adapted(2, **fields)
    put_adapter(saved(tmp_path / "adapter", trained), other)
    theirs = dict(trained.named_parameters())
    names = [name for name, parameter in other.named_parameters() if parameter.requires_grad]
    assert len(names) > 3
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, theirs[name]), name


def test_an_adapter_of_another_shape_or_other_layers_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "adapter", adapted())
    with pytest.raises(CheckpointError, match=r"is \(2, 97\), the model has \(4, 97\)"):
        put_adapter(folder, adapted(r=4, target_modules=["q_proj", "embed_tokens"]))
    with pytest.raises(
        CheckpointError, match=r"it lacks base_model\.model.*v_proj.*, and has .*q_proj.* besides"
    ):
        put_adapter(folder, adapted(target_modules=["v_proj", "embed_tokens"]))
