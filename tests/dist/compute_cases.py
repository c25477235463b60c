"""What the ranks do with checkpointed and compiled blocks, and with experts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dbx_llmtrain.text.prepared import Example
from dbx_llmtrain.worker import compute
from dbx_llmtrain.worker.parallel.fsdp import transformer_blocks
from tests import reference, tiny
from tests.dist.runs import Context, Run, whole

COEFFICIENT = 0.5


def llama(drop: float) -> Any:
    return tiny.llama(attention_dropout=drop)


def gpt2(drop: float) -> Any:
    return tiny.gpt2(resid_pdrop=drop, embd_pdrop=drop, attn_pdrop=drop)


def mixtral(drop: float, *, asked: bool = True) -> Any:
    return tiny.mixtral(
        attention_dropout=drop, output_router_logits=asked, router_aux_loss_coef=COEFFICIENT
    )


MODELS: dict[str, Callable[[float], Any]] = {"llama": llama, "gpt2": gpt2, "mixtral": mixtral}


def _gradients(context: Context, model: Any, rows: list[Example], **how: Any) -> dict[str, Tensor]:
    """Whole gradients of a step, the same random numbers in each."""
    run = Run(context, rows, model=model, **how)
    torch.manual_seed(11 + context.world.rank)
    run.back_propagate()
    found = {
        name: whole(p.grad).clone() for name, p in run.model.named_parameters() if p.requires_grad
    }
    run.optimizer.zero_grad(set_to_none=True)
    return found


def checkpointing(context: Context) -> dict[str, Any]:
    """On against off: every model, frozen or not, with and without dropout."""
    rows, found = tiny.examples(), {}
    for name, build in MODELS.items():
        for frozen in (False, True):
            for drop in (0.0, 0.1):
                gradients = []
                for every in (0, 1):
                    model = build(drop)
                    model.get_input_embeddings().weight.requires_grad_(not frozen)
                    if every:
                        compute.recompute_blocks(transformer_blocks(model), every)
                    gradients.append(_gradients(context, model, rows))
                found[f"{name}-{frozen}-{drop}"] = reference.difference(*gradients)
    return found


def low_precision(context: Context) -> dict[str, Any]:
    """The same in the types that compute is done in."""
    rows, found = tiny.examples(), {}
    for precision in ("bf16", "fp16"):
        gradients = []
        for every in (0, 1):
            model = llama(0.1)
            if every:
                compute.recompute_blocks(transformer_blocks(model), every)
            gradients.append(_gradients(context, model, rows, precision=precision))
        size = max(float(gradient.abs().max()) for gradient in gradients[0].values())
        found[precision] = reference.difference(*gradients) / size
    return found


def compiled(context: Context) -> dict[str, Any]:
    """Traced blocks, built by no compiler, with and without checkpointing."""
    rows, found = tiny.examples(), {}
    expected = _gradients(context, llama(0.0), rows)
    for every in (0, 1):
        model = llama(0.0)
        names = [name for name, _ in model.named_parameters()]
        blocks = transformer_blocks(model)
        compute.compile_blocks(blocks, "eager")
        if every:
            compute.recompute_blocks(blocks, every)
        with warnings.catch_warnings():
            # Of torch's own tracing, which looks at every attribute.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
            gradients = _gradients(context, model, rows)
        found[str(every)] = {
            "gradient": reference.difference(gradients, expected),
            "names": [name for name, _ in model.named_parameters()] == names,
        }
    return found


def router(context: Context) -> dict[str, Any]:
    """What the router loss adds to a step's gradient, for identical rows and for unlike ones."""
    size, found = context.world.size, {}
    same, unlike = tiny.examples((12,)) * 8, tiny.examples()
    cuts = [("same", same, 8 // size), ("same", same, 1), ("unlike", unlike, 1)]
    for kind, rows, micro_batch in cuts:
        with_loss, without = (
            _gradients(context, mixtral(0.0, asked=asked), rows, micro_batch=micro_batch)
            for asked in (True, False)
        )
        part = {name: gradient - without[name] for name, gradient in with_loss.items()}
        found[f"{kind}-{micro_batch}"] = {
            "difference": reference.difference(part, _by_hand(rows)),
            "size": reference.norm(part),
        }
    return found


def _by_hand(rows: list[Example]) -> dict[str, Tensor]:
    """The gradient of the model's own router loss of each row, weighed by its trained tokens."""
    model = mixtral(0.0)
    counts = [sum(row.trained[1:]) for row in rows]
    for row, count in zip(rows, counts, strict=True):
        ids = torch.tensor([row.input_ids])
        own = model(input_ids=ids, output_router_logits=True)
        (COEFFICIENT * own.aux_loss * (count / sum(counts))).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }


CASES: dict[str, Callable[[Context], dict[str, Any]]] = {
    case.__name__: case for case in (checkpointing, low_precision, compiled, router)
}
