"""A trained model, whole in this process, from a checkpoint of any strategy and number of ranks.

No process group and no GPU: on the driver, on a machine that never saw the run, or on rank 0 after
the others have gone.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import adapters, checkpoint, lora
from dbx_llmtrain.worker.export import Collected, reference_batch, source_dtype
from dbx_llmtrain.worker.loss import inference
from dbx_llmtrain.worker.model import build, named_weights
from dbx_llmtrain.worker.parallel.common import materialise
from dbx_llmtrain.worker.weights import Fill
from dbx_llmtrain.worker.world import World

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_ALONE = World(
    rank=0, size=1, local_rank=0, node="", host="", device="cpu", ranks_on_host=1
)  # fmt: skip


def collect(folder: Path, plan: RunPlan, source: Path, dtype: str | None = None) -> Collected:
    """What ``export.collect`` gathers of a running model, from the checkpoint in ``folder`` of the
    run ``plan``; ``source`` is the folder that was trained. ``dtype`` is ``fp32``, ``bf16``,
    ``fp16`` or ``None``: the source's.

    Takes the memory of the model in fp32 (4 bytes a parameter), and while an adapter is merged that
    of a layer more. Raises ``CheckpointError`` for a checkpoint that is damaged or of another
    model, and for values that ``dtype`` has no room for.
    """
    wanted = source_dtype(source) if dtype is None else DTYPES[dtype]
    model = rebuild(plan, source, checkpoint.read_weights(folder))
    input_ids = reference_batch(model)
    with inference(model):
        logits: Tensor = model(input_ids=input_ids).logits.float()
    tensors = {
        name: tensor.detach()
        for name, tensor in named_weights(model)
        if not adapters.is_frozen_copy(name)
    }
    model.to("meta")  # what is held now is held by ``tensors`` alone
    adapter = None
    if lora.is_adapted(model):
        weights, adapter = adapters.split(model, tensors, wanted)
    else:
        weights = {}
        for name in list(tensors):
            tensor = tensors.pop(name)
            weights[name] = tensor.to(wanted) if tensor.is_floating_point() else tensor
    if adapter is not None and dtype is not None:
        adapter = adapters.rounded(adapter, wanted)
    for tensors in (weights, adapter.tensors if adapter else {}):
        _check_range(tensors, logits, wanted)
    return Collected(weights, input_ids, logits, wanted, plan.config.data.objective, adapter)


def rebuild(plan: RunPlan, source: Path, weights: dict[str, Tensor]) -> nn.Module:
    """The model that was trained, in fp32 on the CPU, with ``weights`` as its checkpoint has them:
    all of them, or the trained ones of a model with adapters, whose base is that of ``source``.

    Raises ``CheckpointError`` for weights of another model.
    """
    config = plan.config
    if config.model.lora is None:
        model = build(
            source,
            attention=plan.attention,
            objective=config.data.objective,
            trusted=config.model.trust_remote_code,
        )
    else:
        settings = config.model.model_copy(update={"load_in_4bit": False})
        config = config.model_copy(update={"model": settings})
        plan = plan.model_copy(update={"config": config, "precision": "fp32", "use_gpu": False})
        fill = Fill(plan, source, _ALONE)
        model = lora.adapt(fill.build(), plan)
        materialise(model, "cpu")
        fill(model)
    _place(model, weights)
    return model


def _place(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Put tensors into a model without a copy; what shares a tensor shares it afterwards."""
    adapted = lora.is_adapted(model)
    held = {
        name: tensor for name, tensor in named_weights(model) if tensor.requires_grad or not adapted
    }
    faults = [f"{name} is only in one of them" for name in sorted(held.keys() ^ weights.keys())]
    faults += [
        f"{name} is {tuple(weights[name].shape)} there and {tuple(tensor.shape)} here"
        for name, tensor in held.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    if faults:
        raise CheckpointError(f"the checkpoint is of another model: {', '.join(faults[:8])}")
    made = {
        id(tensor): nn.Parameter(weights[name], requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else weights[name]
        for name, tensor in held.items()
    }
    for part in model.modules():
        for tensors in (part._parameters, part._buffers):
            for key, tensor in tensors.items():
                if id(tensor) in made:
                    tensors[key] = made[id(tensor)]


def _check_range(weights: dict[str, Tensor], logits: Tensor, dtype: torch.dtype) -> None:
    """Raise for weights that became infinite; those that were so before show in the logits."""
    if dtype != torch.float16 or not logits.isfinite().all():
        return
    infinite = [
        name
        for name, tensor in weights.items()
        if tensor.is_floating_point() and not tensor.isfinite().all()
    ]
    if infinite:
        raise CheckpointError(
            f"{', '.join(infinite[:4])}: some values are beyond those of fp16 (65504): export in "
            "bf16 or fp32"
        )
