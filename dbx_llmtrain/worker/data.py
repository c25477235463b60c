"""From the prepared data set to the batches of one rank: deterministic, resumable, exact.

The rows of a step depend on (seed, epoch, step, global batch) alone; the number of ranks only
decides who computes which. Every number that ranks have to agree on (micro-batches of a step,
trained tokens of the whole step) is read from the index that all of them hold, so nothing has to be
exchanged before a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dbx_llmtrain.text.prepared import Document, Split

IGNORED = -100
"""Label of a token that is not trained (Hugging Face's convention)."""

Rows = list[int]
"""Row numbers (documents) that are laid end to end in one row of a batch."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch, right-padded and trimmed to its longest row: B rows of L tokens.

    ``input_ids``, ``labels``, ``position_ids`` and ``segment_ids`` are (B, L) int64. Labels are not
    shifted: ``labels[b, t]`` is token t or ``IGNORED``, and a document's first token is ignored.
    Positions restart with every document. Segments count the documents of a row from 1; 0 is
    padding. ``positions`` (K,) int64 are the places in the flattened batch that predict a trained
    token; they are found here, on the host, because a GPU would have to wait for the count.

    ``rows`` documents, ``tokens`` without padding, ``trained`` labels (K).
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    segment_ids: Tensor
    positions: Tensor
    rows: int
    tokens: int
    trained: int

    def to(self, device: str) -> Batch:
        """The batch on another device; from pinned memory and without waiting where that is one."""
        if device == "cpu":
            return self
        moved = {
            field.name: getattr(self, field.name).pin_memory().to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)

    def inputs(self) -> dict[str, Tensor]:
        """The arguments of ``LossModule.forward``."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "segment_ids": self.segment_ids,
            "labels": self.labels,
            "positions": self.positions,
        }


def collate(examples: Sequence[Sequence[Document]], pad_id: int) -> Batch:
    """Lay the documents of each example end to end, one example per row of the batch."""
    lengths = [sum(len(ids) for ids, _ in documents) for documents in examples]
    shape = (len(examples), max(lengths))
    input_ids = np.full(shape, pad_id, np.int64)
    labels = np.full(shape, IGNORED, np.int64)
    position_ids = np.zeros(shape, np.int64)
    segment_ids = np.zeros(shape, np.int64)
    for row, documents in enumerate(examples):
        start = 0
        for segment, (ids, trained) in enumerate(documents, start=1):
            place = slice(start, start + len(ids))
            input_ids[row, place] = ids
            position_ids[row, place] = np.arange(len(ids))
            segment_ids[row, place] = segment
            labels[row, place] = np.where(trained, ids, IGNORED)
            labels[row, start] = IGNORED
            start = place.stop
    return _batch(input_ids, labels, position_ids, segment_ids, sum(map(len, examples)))


def empty_batch(pad_id: int) -> Batch:
    """Two tokens without a label: what a rank runs while another one still has rows."""
    padding = np.full((1, 2), pad_id, np.int64)
    nothing = np.full((1, 2), IGNORED, np.int64)
    return _batch(padding, nothing, np.arange(2)[None, :], np.zeros((1, 2), np.int64), 0)


def _batch(
    input_ids: NDArray[np.int64],
    labels: NDArray[np.int64],
    position_ids: NDArray[np.int64],
    segment_ids: NDArray[np.int64],
    rows: int,
) -> Batch:
    row, place = np.nonzero(labels[:, 1:] != IGNORED)
    positions = row * labels.shape[1] + place
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(position_ids),
        segment_ids=torch.from_numpy(segment_ids),
        positions=torch.from_numpy(positions),
        rows=rows,
        tokens=int((segment_ids > 0).sum()),
        trained=len(positions),
    )


def step_examples(
    seed: int, epoch: int, step_in_epoch: int, n: int, global_batch: int
) -> NDArray[np.int64]:
    """Example numbers of a step (from 0) of an epoch of ``n`` examples; the last step is short."""
    start = step_in_epoch * global_batch
    return _permutation(seed, epoch, n)[start : start + global_batch]


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, n: int) -> NDArray[np.int64]:
    """The order of an epoch. The bit generator is named, so numpy's default may change."""
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(n)
    order.setflags(write=False)
    return order


def shares(examples: NDArray[np.int64], world_size: int) -> list[NDArray[np.int64]]:
    """Which examples each rank computes; sizes differ by at most one and may be 0."""
    return list(np.array_split(examples, world_size))


def group(
    split: Split, share: NDArray[np.int64], micro_batch: int, padded: bool
) -> list[list[Rows]]:
    """The micro-batches of a share: each a list of batch rows, each a list of row numbers.

    Normally a batch row is one example, ``micro_batch`` of them at a time. ``padded`` puts every
    document in a batch row of its own, longest first, and cuts so that a micro-batch with its
    padding has no more tokens than ``micro_batch`` examples of the split's longest.
    """
    if not padded:
        examples = [split.rows(int(example)).tolist() for example in share]
        return [examples[i : i + micro_batch] for i in range(0, len(examples), micro_batch)]
    capacity = micro_batch * int(split.tokens.max(initial=1))
    documents = [int(row) for example in share for row in split.rows(int(example))]
    documents.sort(key=split.row_length, reverse=True)
    batches: list[list[Rows]] = []
    longest = 0
    for row in documents:
        if not batches or (len(batches[-1]) + 1) * longest > capacity:
            batches.append([])
            longest = split.row_length(row)
        batches[-1].append([row])
    return batches


def share_batches(
    split: Split,
    parts: Sequence[NDArray[np.int64]],
    rank: int,
    *,
    micro_batch: int,
    padded: bool = False,
    pad_id: int = 0,
) -> list[Batch]:
    """The micro-batches of ``rank``; every rank gets the same number, filled up with empty ones.

    ``parts`` are the shares of all ranks. The number is the busiest rank's, known from the index.
    """
    mine = group(split, parts[rank], micro_batch, padded)
    if padded:
        count = max(len(group(split, part, micro_batch, padded)) for part in parts)
    else:
        count = -(-max(len(part) for part in parts) // micro_batch)
    batches = [
        collate([[split.document(row) for row in rows] for rows in batch], pad_id) for batch in mine
    ]
    return batches + [empty_batch(pad_id)] * (count - len(batches))


@dataclass(frozen=True)
class StepBatches:
    """What one rank computes in one optimizer step, and the step's totals over all ranks.

    ``trained_total`` is N, the number of trained tokens that the step's loss is a mean over.
    """

    batches: list[Batch]
    trained_total: int
    tokens_total: int
    rows_total: int


@dataclass(frozen=True)
class Order:
    """The batches of every step of a run, for one rank. ``padded``: see ``group``."""

    split: Split
    seed: int
    global_batch: int
    micro_batch: int
    rank: int = 0
    world_size: int = 1
    padded: bool = False
    pad_id: int = 0

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch; the last one may be short, none is left out."""
        return -(-len(self.split) // self.global_batch)

    def examples(self, step: int) -> NDArray[np.int64]:
        """Example numbers of a step of the run, counted from 0, over all ranks."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        return step_examples(self.seed, epoch, step_in_epoch, len(self.split), self.global_batch)

    def step(self, step: int) -> StepBatches:
        """The micro-batches of this rank in a step of the run, counted from 0."""
        examples = self.examples(step)
        batches = share_batches(
            self.split,
            shares(examples, self.world_size),
            self.rank,
            micro_batch=self.micro_batch,
            padded=self.padded,
            pad_id=self.pad_id,
        )
        return StepBatches(
            batches=batches,
            trained_total=int(self.split.trained[examples].sum()),
            tokens_total=int(self.split.tokens[examples].sum()),
            rows_total=int(self.split.documents_count[examples].sum()),
        )
