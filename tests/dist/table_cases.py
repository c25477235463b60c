"""The parity table: every strategy gives the textbook's gradient, however a step is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dbx_llmtrain.text.prepared import Example
from dbx_llmtrain.worker.data import Batch
from tests import reference, tiny
from tests.dist.runs import Context, Run

MODELS: dict[str, Callable[[], Any]] = {
    "untied": tiny.llama,
    "tied": lambda: tiny.llama(tied=True),
    "gpt2": tiny.gpt2,
    "mixtral": lambda: tiny.mixtral(output_router_logits=True),
}


def combinations() -> list[tuple[str, bool, bool]]:
    """Model, packed, and whether each micro-batch is one example: every pair of options once.

    Numbers of ranks and strategies differ between launches; each runs all of these.
    """
    return [
        (name, packing, (number + packing) % 2 == 0)
        for number, name in enumerate(MODELS)
        for packing in (False, True)
    ]


def table(context: Context) -> dict[str, Any]:
    """Gradient, loss and norm of a step of 8 rows against the textbook, for each combination."""
    size = context.world.size
    found = {}
    for name, packing, single in combinations():
        micro_batch = 1 if single else 3 if packing else 8 // size
        run = Run(
            context,
            tiny.examples(),
            model=MODELS[name](),
            packing=packing,
            micro_batch=micro_batch,
            optimizer="sgd",
            learning_rate=0.1,
        )
        start = run.state()
        expected_loss, expected = reference.step_gradients(MODELS[name](), documents(context, run))
        loss = run.back_propagate()
        norm = run.clip()
        gradients = run.gradients()
        (report,) = run.steps()
        found[f"{name}-{'packed' if packing else 'padded'}-{'one' if single else 'whole'}"] = {
            "gradient": reference.difference(gradients, expected),
            "weights": reference.difference(run.state(), _stepped(start, expected)),
            "reported": abs(report.loss - loss) + abs(report.grad_norm - norm),
            "loss": abs(loss - expected_loss),
            "norm": abs(norm - reference.norm(expected)),
            "ranks_norms": len(set(context.gather(norm))),
            "parameters": len(list(run.model.parameters())),
            "parameters_alone": len(list(MODELS[name]().parameters())),
            "examples": len(run.split),
            "batches": [len(batches) for batches in context.gather(run.order.step(0).batches)],
            "probe": context.gather([run.probed.padded, run.probed.own_logits]),
        }
    return found


def _stepped(weights: dict[str, Tensor], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """SGD at 0.1 with the gradient's norm clipped to 1 (Adam's step hides a wrong scale)."""
    rate = 0.1 / max(1.0, reference.norm(gradients))
    return {name: weight - rate * gradients[name] for name, weight in weights.items()}


def documents(context: Context, run: Run) -> list[list[Example]]:
    """The documents of each micro-batch of a run's first step, of all ranks."""
    ranks = context.gather([_documents(batch) for batch in run.order.step(0).batches])
    return [batch for rank in ranks for batch in rank]


def _documents(batch: Batch) -> list[Example]:
    rows: list[Example] = []
    for ids, labels, segments in zip(batch.input_ids, batch.labels, batch.segment_ids, strict=True):
        rows.extend(
            Example(_list(ids[segments == number]), _list(labels[segments == number] != -100))
            for number in range(1, int(segments.max()) + 1)
        )
    return rows


def _list(tensor: Tensor) -> list[Any]:
    values: list[Any] = torch.atleast_1d(tensor).tolist()
    return values


CASES: dict[str, Callable[[Context], dict[str, Any]]] = {"table": table}
"""Where nothing else is asked."""
