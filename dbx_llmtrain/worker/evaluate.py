"""The exact loss on held-out rows: every token counts once, training does not notice."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dbx_llmtrain.text.prepared import Split
from dbx_llmtrain.worker.data import Batch, share_batches
from dbx_llmtrain.worker.loss import inference
from dbx_llmtrain.worker.masking import Masking
from dbx_llmtrain.worker.world import World

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class EvalReport:
    """``loss`` is the mean over all ``trained_tokens`` of the split (not a number where there are
    none), ``perplexity`` its exp, ``rows`` the documents that were counted (a row that was cut
    counts once for each piece)."""

    loss: float
    trained_tokens: int
    rows: int
    perplexity: float


def evaluate(
    root: nn.Module,
    split: Split,
    world: World,
    *,
    micro_batch: int,
    padded: bool = False,
    pad_id: int = 0,
    masking: Masking | None = None,
    examples: NDArray[np.int64] | None = None,
) -> EvalReport:
    """Mean loss over every trained token of ``split``; the same on every rank, whatever the cut.

    Every rank calls it and runs the same number of forward passes. Weights, gradients, modes and
    random state are left as they were. ``padded``: see ``data.group``; ``masking`` hides the same
    tokens every time; ``examples``: only those of these numbers.
    """
    chosen = np.arange(len(split)) if examples is None else examples
    nll = torch.zeros((), dtype=torch.float64, device=world.device)
    trained = rows = 0
    with inference(root):
        for batch in _batches(split, chosen, world, micro_batch, padded, pad_id, masking):
            nll += root(**batch.to(world.device).inputs())
            trained += batch.trained
            rows += batch.rows
    # fp64 holds a count up to 2**53 exactly.
    counts = torch.tensor([trained, rows], dtype=torch.float64).to(world.device)
    totals = torch.cat([nll[None], counts])
    if world.size > 1:
        dist.all_reduce(totals)
    nll_sum, trained_sum, rows_sum = totals.tolist()
    documents = int(split.documents_count[chosen].sum())
    assert int(rows_sum) == documents, "a row was not counted exactly once"
    # With masked tokens the index has those that may be masked.
    expected = int(split.trained[chosen].sum())
    found = int(trained_sum)
    assert found <= expected if masking else found == expected, "a token was not counted once"
    loss = nll_sum / trained_sum if trained_sum else math.nan
    return EvalReport(loss, int(trained_sum), int(rows_sum), perplexity(loss))


def _batches(
    split: Split,
    chosen: NDArray[np.int64],
    world: World,
    micro_batch: int,
    padded: bool,
    pad_id: int,
    masking: Masking | None,
) -> Iterator[Batch]:
    """This rank's batches: examples of like length together, so that little is padded."""
    by_length = chosen[np.argsort(split.tokens[chosen], kind="stable")[::-1]]
    window = micro_batch * world.size
    for start in range(0, len(by_length), window):
        parts = np.array_split(by_length[start : start + window], world.size)
        yield from share_batches(
            split,
            parts,
            world.rank,
            micro_batch=micro_batch,
            padded=padded,
            pad_id=pad_id,
            masking=masking,
        )


def chosen_examples(split: Split, name: str, seed: int, most: int | None) -> NDArray[np.int64]:
    """Numbers of the examples of the split called ``name`` that stand for it where ``most`` of them
    are to be used: drawn by ``seed`` alone, so the same every time and of every length."""
    count = len(split)
    if most is None or most >= count:
        return np.arange(count)
    drawn = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return np.sort(drawn.choice(count, most, replace=False))


def combined(reports: Sequence[EvalReport]) -> EvalReport:
    """One report over all tokens of several splits: a split weighs as its trained tokens do."""
    if len(reports) == 1:
        return reports[0]
    parts = [report for report in reports if report.trained_tokens]
    trained = sum(report.trained_tokens for report in parts)
    nll = math.fsum(report.loss * report.trained_tokens for report in parts)
    loss = nll / trained if trained else math.nan
    rows = sum(report.rows for report in reports)
    return EvalReport(loss, trained, rows, perplexity(loss))


def perplexity(loss: float) -> float:
    """exp(loss), the mean taken first; infinite where that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
