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
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dbx_llmtrain.worker.order import Arrangement

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dbx_llmtrain.text.split import Document, Split
    from dbx_llmtrain.worker.masking import Masking

    Labelled = tuple[NDArray[np.int64], NDArray[np.int64]]

IGNORED = -100
"""Label of a token that is not trained (Hugging Face's convention)."""

Numbers = list[int]
"""Numbers of documents that are laid end to end in one row of a batch."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch, right-padded and trimmed to its longest row: B rows of L tokens.

    ``input_ids``, ``labels``, ``position_ids`` and ``segment_ids`` are (B, L) int64. Labels are not
    shifted: ``labels[b, t]`` is token t or ``IGNORED``, and a document's first token is ignored.
    Positions restart with every document. Segments count the documents of a row from 1; 0 is
    padding. ``positions`` (K,) int64 are the places in the flattened batch that predict a trained
    token (the place before it; with masked tokens the token's own); they are found here, on the
    host, because a GPU would have to wait for the count.

    ``rows`` documents (a row that was cut counts once for each piece), ``tokens`` without padding,
    ``trained`` labels (K).
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
    return lay_out([[_labelled(document) for document in row] for row in examples], pad_id)


def _labelled(document: Document) -> Labelled:
    ids, trained = document
    labels = np.where(trained, ids, IGNORED).astype(np.int64)
    labels[0] = IGNORED
    return ids.astype(np.int64), labels


def lay_out(examples: Sequence[Sequence[Labelled]], pad_id: int, *, shift: int = 1) -> Batch:
    """As ``collate``, from what the model reads of each document and its labels. ``shift`` is how
    many places before a label the model predicts it: 1, and 0 for masked tokens."""
    lengths = [sum(len(ids) for ids, _ in documents) for documents in examples]
    shape = (len(examples), max(lengths))
    input_ids = np.full(shape, pad_id, np.int64)
    labels = np.full(shape, IGNORED, np.int64)
    position_ids = np.zeros(shape, np.int64)
    segment_ids = np.zeros(shape, np.int64)
    for row, documents in enumerate(examples):
        start = 0
        for segment, (ids, targets) in enumerate(documents, start=1):
            place = slice(start, start + len(ids))
            input_ids[row, place] = ids
            position_ids[row, place] = np.arange(len(ids))
            segment_ids[row, place] = segment
            labels[row, place] = targets
            start = place.stop
    count = sum(map(len, examples))
    return _batch(input_ids, labels, position_ids, segment_ids, rows=count, shift=shift)


def empty_batch(pad_id: int) -> Batch:
    """Two tokens without a label: what a rank runs while another one still has rows."""
    padding = np.full((1, 2), pad_id, np.int64)
    nothing = np.full((1, 2), IGNORED, np.int64)
    return _batch(
        padding, nothing, np.arange(2)[None, :], np.zeros((1, 2), np.int64), rows=0, shift=1
    )


def _batch(
    input_ids: NDArray[np.int64],
    labels: NDArray[np.int64],
    position_ids: NDArray[np.int64],
    segment_ids: NDArray[np.int64],
    *,
    rows: int,
    shift: int,
) -> Batch:
    row, place = np.nonzero(labels[:, shift:] != IGNORED)
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
    """Example numbers of a step (from 0) of a shuffled epoch of ``n`` examples of one length."""
    order = Arrangement(seed).epoch(epoch, np.ones(n, np.int64), global_batch)
    return order[step_in_epoch * global_batch :][:global_batch]


def shares(examples: NDArray[np.int64], world_size: int) -> list[NDArray[np.int64]]:
    """Which examples each rank computes; sizes differ by at most one and may be 0."""
    return list(np.array_split(examples, world_size))


def group(
    split: Split, share: NDArray[np.int64], micro_batch: int, padded: bool
) -> list[list[Numbers]]:
    """The micro-batches of a share: each a list of batch rows, each a list of document numbers.

    Normally a batch row is one example, ``micro_batch`` of them at a time. ``padded`` puts every
    document in a batch row of its own, longest first, and cuts so that a micro-batch with its
    padding has no more tokens than ``micro_batch`` examples of the split's longest.
    """
    examples = [list(split.numbers(int(example))) for example in share]
    if not padded:
        return [examples[i : i + micro_batch] for i in range(0, len(examples), micro_batch)]
    capacity = micro_batch * int(split.tokens.max(initial=1))
    documents = sorted(chain.from_iterable(examples), key=split.length, reverse=True)
    batches: list[list[Numbers]] = []
    longest = 0
    for document in documents:
        if not batches or (len(batches[-1]) + 1) * longest > capacity:
            batches.append([])
            longest = split.length(document)
        batches[-1].append([document])
    return batches


def share_batches(
    split: Split,
    parts: Sequence[NDArray[np.int64]],
    rank: int,
    *,
    micro_batch: int,
    padded: bool = False,
    pad_id: int = 0,
    masking: Masking | None = None,
    epoch: int | None = None,
) -> list[Batch]:
    """The micro-batches of ``rank``; every rank gets the same number, filled up with empty ones.

    ``parts`` are the shares of all ranks. The number is the busiest rank's, known from the index.
    ``masking`` hides tokens as in ``epoch`` (``None``: as in every evaluation).
    """
    mine = group(split, parts[rank], micro_batch, padded)
    if padded:
        count = max(len(group(split, part, micro_batch, padded)) for part in parts)
    else:
        count = -(-max(len(part) for part in parts) // micro_batch)

    def labelled(number: int) -> Labelled:
        if masking is None:
            return _labelled(split.document(number))
        read, ids, chosen = masking.hide(split, number, epoch)
        return read, np.where(chosen, ids, IGNORED)

    shift = 1 if masking is None else 0
    batches = [
        lay_out([[labelled(number) for number in row] for row in batch], pad_id, shift=shift)
        for batch in mine
    ]
    return batches + [empty_batch(pad_id)] * (count - len(batches))


@dataclass(frozen=True)
class StepBatches:
    """What one rank computes in one optimizer step, and the step's totals over all ranks.

    ``trained_total`` is N, the number of trained tokens that the step's loss is a mean over;
    ``rows_total`` counts documents, as ``Batch.rows`` does.
    """

    batches: list[Batch]
    trained_total: int
    tokens_total: int
    rows_total: int


@dataclass(frozen=True)
class Order:
    """The batches of every step of a run, for one rank. ``padded``: see ``group``.

    ``shuffle``, ``group_by_length`` and ``longest_first``: see ``Arrangement``. The data set can be
    read at any place, so there is nothing to run through when a run is resumed, and no shards or
    reading processes whose number could change which rows are seen.
    """

    split: Split
    seed: int
    global_batch: int
    micro_batch: int
    rank: int = 0
    world_size: int = 1
    padded: bool = False
    pad_id: int = 0
    shuffle: bool = True
    group_by_length: bool = False
    longest_first: int = False
    masking: Masking | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch; the last one may be short, none is left out."""
        return -(-len(self.split) // self.global_batch)

    def examples(self, step: int) -> NDArray[np.int64]:
        """Example numbers of a step of the run, counted from 0, over all ranks."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        start = step_in_epoch * self.global_batch
        return _epoch(self, epoch)[start : start + self.global_batch]

    def step(self, step: int) -> StepBatches:
        """The micro-batches of this rank in a step of the run, counted from 0."""
        examples = self.examples(step)
        epoch = step // self.steps_per_epoch
        batches = share_batches(
            self.split,
            shares(examples, self.world_size),
            self.rank,
            micro_batch=self.micro_batch,
            padded=self.padded,
            pad_id=self.pad_id,
            masking=self.masking,
            epoch=epoch,
        )
        return StepBatches(
            batches=batches,
            trained_total=self._trained(examples, epoch),
            tokens_total=int(self.split.tokens[examples].sum()),
            rows_total=int(self.split.documents_count[examples].sum()),
        )

    def _trained(self, examples: NDArray[np.int64], epoch: int) -> int:
        """Known on every rank without asking the others: from the index, or by drawing all masks of
        the step (less than 100 microseconds a document)."""
        if self.masking is None:
            return int(self.split.trained[examples].sum())
        return sum(self.masking.count(self.split, int(number), epoch) for number in examples)


@lru_cache(maxsize=2)
def _epoch(order: Order, epoch: int) -> NDArray[np.int64]:
    """The examples of an epoch in their order."""
    arrangement = Arrangement(order.seed, order.shuffle, order.group_by_length, order.longest_first)
    found = arrangement.epoch(epoch, order.split.tokens, order.global_batch)
    found.setflags(write=False)
    return found
