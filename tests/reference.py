"""What loss and gradients should be: the formula of the textbook, one row at a time.

Nothing of the package's loss, batches or masks is used here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dbx_llmtrain.text.prepared import Example


def row_loss(model: Any, row: Example) -> tuple[Tensor, int]:
    """Summed loss of a row over its trained tokens, shifted by one, and their number."""
    ids = torch.tensor([row.input_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
    trained = torch.tensor(row.trained[1:], dtype=torch.bool)
    return cross_entropy(logits[trained], ids[0, 1:][trained], reduction="sum"), int(trained.sum())


def mean_loss(model: Any, rows: Iterable[Example]) -> Tensor:
    """Mean over all trained tokens of all rows."""
    parts = [row_loss(model, row) for row in rows]
    return torch.stack([loss for loss, _ in parts]).sum() / sum(count for _, count in parts)


def gradients(model: Any, rows: Sequence[Example]) -> tuple[float, dict[str, Tensor]]:
    """The mean loss and its gradient by parameter name; the model's own gradients are cleared."""
    model.zero_grad(set_to_none=True)
    loss = mean_loss(model, rows)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad(set_to_none=True)
    return float(loss.detach()), found


def step_gradients(
    model: Any, micro_batches: Sequence[Sequence[Example]]
) -> tuple[float, dict[str, Tensor]]:
    """As ``gradients`` for a step that is cut into micro-batches. The cut matters to a router loss
    only (``output_router_logits``), which is a mean over the documents of a micro-batch, weighed by
    the micro-batch's share of the trained tokens. It is in the gradient, not in the loss."""
    if not getattr(model.config, "output_router_logits", False):
        return gradients(model, [row for rows in micro_batches for row in rows])
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    total = sum(sum(row.trained[1:]) for rows in micro_batches for row in rows)
    token_loss = balance = torch.zeros((), dtype=torch.float64)
    config = model.config
    for rows in micro_batches:
        layers: list[list[Tensor]] = [[] for _ in range(config.num_hidden_layers)]
        for row in rows:
            ids = torch.tensor([row.input_ids])
            output = model(input_ids=ids, use_cache=False, output_router_logits=True)
            trained = torch.tensor(row.trained[1:], dtype=torch.bool)
            logits, targets = output.logits[0, :-1].double()[trained], ids[0, 1:][trained]
            token_loss = token_loss + cross_entropy(logits, targets, reduction="sum") / total
            for layer, router in zip(layers, output.router_logits, strict=True):
                layer.append(router)
        weight = sum(sum(row.trained[1:]) for row in rows) / total
        if weight:
            gates = tuple(torch.cat(layer) for layer in layers)
            experts = (config.num_local_experts, config.num_experts_per_tok)
            balance = balance + weight * load_balancing_loss_func(gates, *experts)
    (token_loss + config.router_aux_loss_coef * balance).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad(set_to_none=True)
    return float(token_loss.detach()), found


def difference(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Largest absolute difference of two sets of tensors with the same names."""
    assert first.keys() == second.keys(), first.keys() ^ second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def norm(tensors: Mapping[str, Tensor]) -> float:
    """Euclidean norm of all tensors together."""
    return float(torch.sqrt(sum((t.double() ** 2).sum() for t in tensors.values())))
