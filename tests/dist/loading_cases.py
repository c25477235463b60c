"""Models without storage are filled: from files, at random, with new tokens, under adapters."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import lora
from dbx_llmtrain.worker.loss import LossModule
from dbx_llmtrain.worker.model import check_same_weights, load_model
from dbx_llmtrain.worker.parallel import make_strategy
from dbx_llmtrain.worker.weights import Fill
from dbx_llmtrain.worker.whole import whole
from tests import reference, sample, tiny
from tests.dist.runs import Context, Run

SOURCES = ("llama", "tied", "bf16", "gpt2", "bert", "mixtral")
"""Model folders that the test has written beside those of the ranks."""


def shared(context: Context) -> Path:
    return context.folder.parent


def plan_for(**sections: Any) -> RunPlan:
    return sample.run_plan(config=sample.config(**sections), attention="sdpa")


def filled(context: Context, folder: Path, plan: RunPlan) -> tuple[Fill, Any]:
    """A model that was built without storage, wrapped and filled."""
    fill = Fill(plan, folder, context.world)
    model = lora.adapt(fill.build(), plan)
    assert all(parameter.is_meta for parameter in model.parameters())
    strategy = make_strategy(
        context.parallel.kind,
        context.world,
        "fp32",
        parallel=context.parallel,
        train=plan.config.train,
        plan=plan.model_copy(
            update={"parallel": context.parallel, "world_size": context.world.size}
        ),
    )
    strategy.wrap(LossModule(model, masked=plan.config.data.objective == "mlm"), fill)
    check_same_weights(model, fill.digests)
    return fill, model


def state_of(model: Any) -> dict[str, Tensor]:
    return {name: whole(parameter).clone() for name, parameter in model.named_parameters()}


def digest(tensors: dict[str, Tensor]) -> str:
    text = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        text.update(name.encode() + tensor.detach().float().contiguous().numpy().tobytes())
    return text.hexdigest()


def from_files(context: Context) -> dict[str, Any]:
    """Against a model that transformers loads whole: parameters, buffers, ties, bytes asked for."""
    found = {}
    for name in SOURCES:
        folder = shared(context) / name
        data = {"train": "/data/train.jsonl"} | ({"objective": "mlm"} if name == "bert" else {})
        plan = plan_for(data=data)
        fill, model = filled(context, folder, plan)
        expected = load_model(folder, attention="sdpa", objective=plan.config.data.objective)
        weights, state = dict(expected.named_parameters()), state_of(model)
        buffers = dict(model.named_buffers())
        sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        found[name] = {
            "same": context.gather(
                weights.keys() == state.keys()
                and all(torch.equal(state[key], weights[key].detach()) for key in weights)
            ),
            "parameters": len(state),
            "buffers": context.gather(
                [
                    [str(buffer.dtype), torch.equal(buffer, buffers[key])]
                    for key, buffer in expected.named_buffers()
                ]
            ),
            "tied": ends[0].weight is ends[1].weight,
            "whole_on_rank": not isinstance(ends[0].weight, DTensor)
            and not hasattr(ends[0].weight, "ds_id"),
            "asked": sum(context.gather(fill.requested)) / sum(sizes),
            "notes": fill.notes,
            "use_cache": model.config.use_cache,
        }
    return found


def gradient(context: Context) -> dict[str, Any]:
    """The gradient of a filled model with tied weights and an odd vocabulary."""
    folder = shared(context) / "tied"
    fill = Fill(plan_for(), folder, context.world)
    run = Run(context, tiny.examples(), model=fill.build(), fill=fill)
    _, expected = reference.gradients(load_model(folder, attention="sdpa"), run.rows)
    run.back_propagate()
    return {"difference": reference.difference(run.gradients(), expected)}


def random(context: Context) -> dict[str, Any]:
    """Digests of models that start at random; they have to be the same for every launch."""
    found: dict[str, Any] = {}
    for name in ("llama", "tied", "gpt2", "mixtral"):
        for seed in (1, 2) if name == "llama" else (1,):
            plan = plan_for(model={"source": "/x", "init": "random"}, train={"seed": seed})
            torch.manual_seed(context.world.rank)
            fill, model = filled(context, shared(context) / f"{name}-config", plan)
            state = state_of(model)
            found[f"{name}-{seed}"] = context.gather(digest(state))
            found[f"{name}-{seed}-read"] = fill.requested
        found[f"{name}-std"] = {
            key: [float(tensor.mean()), float(tensor.std())] for key, tensor in state.items()
        }
    return found


def grown(context: Context) -> dict[str, Any]:
    """Rows of new tokens, by the folder and settings that the test has composed and staged."""
    found = {}
    for name, settings in json.loads((shared(context) / "grown.json").read_text()).items():
        folder = Path(settings.pop("folder"))
        torch.manual_seed(context.world.rank)
        plan = plan_for(model=settings)
        fill, model = filled(context, folder, plan)
        state = state_of(model)
        rows = {key: tensor for key, tensor in state.items() if len(tensor) == 112}
        found[name] = {
            "digests": context.gather(digest(state)),
            "rows": {key: tensor.tolist() for key, tensor in rows.items()},
            "vocab": model.config.get_text_config().vocab_size,
            "notes": fill.notes,
        }
    return found


def adapted(context: Context) -> dict[str, Any]:
    """Adapters over a base from files: the base as it is in them, the adapters alike."""
    folder = shared(context) / "tied"
    plan = plan_for(model={"source": "/x", "lora": {"r": 4}})
    _, model = filled(context, folder, plan)
    weights = dict(load_model(folder, attention="sdpa").named_parameters())
    state = state_of(model)
    base = {lora.original_name(name): name for name in state}
    adapters = {name: tensor for name, tensor in state.items() if "lora_" in name}
    return {
        "base": all(torch.equal(state[base[name]], weights[name].detach()) for name in weights),
        "adapters": context.gather(digest(adapters)),
        "count": len(adapters),
    }


def refused(context: Context) -> dict[str, Any]:
    """What is wrong with files is told by every rank, also where only one reads them."""
    found = {}
    for name in ("missing", "mixtral-missing", "untied"):
        try:
            filled(context, shared(context) / name, plan_for())
        except CheckpointError as error:
            found[name] = context.gather(str(error))
    return found


CASES = {
    "from_files": from_files,
    "gradient": gradient,
    "random": random,
    "grown": grown,
    "adapted": adapted,
    "refused": refused,
}
