"""Masked language modelling on ranks; every rank runs every case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dbx_llmtrain.text.prepared import Split
from dbx_llmtrain.worker.evaluate import evaluate
from dbx_llmtrain.worker.masking import Masking
from tests import reference, tiny
from tests.dist.runs import Context, Run

MASKED: dict[str, Callable[[], Any]] = {
    "bert": tiny.bert,
    "roberta": tiny.roberta,
    "modernbert": tiny.modernbert,
}


def masked(context: Context) -> dict[str, Any]:
    """Gradient and loss of a step of masked tokens against the textbook, packed and not, and the
    held-out loss, for each number of ranks and cut."""
    rows = tiny.examples()
    masking = Masking(0, 0.3, 96, np.arange(5, 90))
    found = {}
    for name, build in MASKED.items():
        for packing in (False, True):
            cuts = {1, 3 if packing else 8 // context.world.size}
            for micro_batch in sorted(cuts):
                run = Run(
                    context,
                    rows,
                    model=build(),
                    micro_batch=micro_batch,
                    packing=packing,
                    masking=masking,
                )
                expected_loss, expected = masked_gradients(build(), run.split, masking, 0)
                held_out = evaluate(
                    run.root,
                    run.split,
                    context.world,
                    micro_batch=micro_batch,
                    padded=run.probed.padded,
                    masking=masking,
                )
                loss = run.back_propagate()
                counted = sum(batch.trained for batch in run.order.step(0).batches)
                total = run.order.step(0).trained_total
                exact, _ = masked_gradients(build(), run.split, masking, None)
                found[f"{name}-{packing}-{micro_batch}"] = {
                    "gradient": reference.difference(run.gradients(), expected),
                    "loss": abs(loss - expected_loss),
                    "held_out": abs(held_out.loss - exact),
                    "totals": sorted({total, *context.gather(total)}),
                    "counted": sum(context.gather(counted)),
                    "padded": run.probed.padded,
                }
    return found


def masked_gradients(
    model: Any, split: Split, masking: Masking, epoch: int | None
) -> tuple[float, dict[str, Tensor]]:
    """Mean loss over the hidden tokens of a split, one document at a time, and its gradient."""
    numbers = [number for example in range(len(split)) for number in split.numbers(example)]
    losses, count = [], 0
    for number in numbers:
        read, ids, chosen = map(torch.from_numpy, masking.hide(split, number, epoch))
        logits = model(input_ids=read[None]).logits[0, chosen].double()
        losses.append(nn.functional.cross_entropy(logits, ids[chosen], reduction="sum"))
        count += int(chosen.sum())
    loss = torch.stack(losses).sum() / count
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}
