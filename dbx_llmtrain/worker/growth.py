"""Rows of the vocabulary that the weight files do not have: they start as the mean of the others,
the same on every rank whatever it holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dbx_llmtrain.worker.world import World

_CHUNK_BYTES = 16 * 1024 * 1024


class Source(Protocol):
    """Where the tensors of a model come from, by the model's own names."""

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows (see ``parts``) of a tensor, on the CPU, in the type that they are stored in."""
        ...


class Grown:
    """A source whose tensors ``means`` (name to a row) have ``rows`` rows: those behind them, and
    those of the tokens ``anew``, are that mean."""

    def __init__(
        self, source: Source, rows: int, anew: tuple[int, ...], means: Mapping[str, Tensor]
    ) -> None:
        self._source, self._rows, self._anew, self._means = source, rows, anew, means

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """See ``Source``."""
        mean = self._means.get(name)
        if mean is None:
            return self._source.rows(name, start, stop)
        known = max(start, min(stop, self._rows))
        found = torch.empty((stop - start, *mean.shape))
        if known > start:
            found[: known - start] = self._source.rows(name, start, known)
        found[known - start :] = mean
        for token in self._anew:
            if start <= token < stop:
                found[token - start] = mean
        return found


def mean_row(
    source: Source | None,
    name: str,
    shape: tuple[int, ...],
    anew: tuple[int, ...],
    world: World,
) -> Tensor:
    """The mean of a tensor's rows in fp32, without those of the tokens ``anew``.

    Rank 0 reads and sums them (in fp64, in their order) and sends it to the others, so that it is
    the same number everywhere.

    ``shape`` is the tensor's in its file; ``source`` may be ``None`` on the other ranks.
    """
    total = torch.zeros(shape[1:], dtype=torch.float64)
    if world.rank == 0:
        assert source is not None
        for start, stop in chunks(0, shape[0], shape):
            rows = source.rows(name, start, stop).double()
            kept = [row for row in range(start, stop) if row not in set(anew)]
            total += rows[[row - start for row in kept]].sum(dim=0) if anew else rows.sum(dim=0)
    others = shape[0] - sum(token < shape[0] for token in anew)
    mean = (total / others).float()
    if world.size > 1:
        sent = mean.to(world.device)
        dist.broadcast(sent, 0)
        mean = sent.cpu()
    return mean


def chunks(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Rows ``start`` up to ``stop`` of a tensor of this shape, at most 16 MB in fp32 at a time."""
    step = max(1, _CHUNK_BYTES // (4 * max(1, math.prod(shape[1:]))))
    for first in range(start, stop, step):
        yield first, min(stop, first + step)
