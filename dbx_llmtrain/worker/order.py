"""Which examples an epoch has in which order. A whole epoch is ordered at once, in a fraction of a
second per million examples, so that any step can be looked up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

GROUPED_STEPS = 50
"""Lengths are compared within so many steps at a time: enough that a step's examples are of about
one length, and few enough that every epoch has other steps."""


@dataclass(frozen=True)
class Arrangement:
    """How examples are ordered: at random by ``seed`` and epoch, or as they are stored.

    ``group_by_length``: examples of about the same length are put in the same step, and the steps
    come in random order. ``longest_first``: the longest examples make up the very first step, or
    so many steps; at random the longest one is in the first in any case, so that a lack of memory
    shows at once. An epoch has every example exactly once either way, and only its last step is
    short.
    """

    seed: int
    shuffle: bool = True
    group_by_length: bool = False
    longest_first: int = False

    def epoch(self, epoch: int, tokens: NDArray[np.int64], per_step: int) -> NDArray[np.int64]:
        """Example numbers in the order of an epoch; ``tokens`` are the examples' lengths. The bit
        generators are named, so numpy's default may change."""
        if not self.shuffle:
            return np.arange(len(tokens))
        draw = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        order = draw.permutation(len(tokens))
        first = order[:0]
        if self.longest_first and epoch == 0:
            first = np.argsort(-tokens, kind="stable")[: self.longest_first * per_step]
            order = order[~np.isin(order, first)]
        if self.group_by_length:
            order = _grouped(order, tokens, per_step, draw)
        if epoch == 0 and not len(first):
            _put_longest_in_first_step(order, tokens, per_step, whole=self.group_by_length)
        return np.concatenate([first, order])


def _grouped(
    order: NDArray[np.int64], tokens: NDArray[np.int64], per_step: int, draw: np.random.Generator
) -> NDArray[np.int64]:
    """``order`` with its steps made of like lengths; the short last step stays the last."""
    window = GROUPED_STEPS * per_step
    for start in range(0, len(order), window):
        part = order[start : start + window]
        order[start : start + window] = part[np.argsort(-tokens[part], kind="stable")]
    whole = len(order) // per_step
    steps = order[: whole * per_step].reshape(whole, per_step)
    return np.concatenate([steps[draw.permutation(whole)].ravel(), order[whole * per_step :]])


def _put_longest_in_first_step(
    order: NDArray[np.int64], tokens: NDArray[np.int64], per_step: int, *, whole: bool
) -> None:
    """Swap the longest example, or the ``whole`` step that it is in, with the first one. Nothing is
    drawn for it, so the rest of the order is as if it had not been done; nothing at all is done
    where the first step has an example of that length."""
    if not len(order):
        return
    place = int(np.argmax(tokens[order]))  # the first of several
    if place < per_step:
        return
    start = place - place % per_step
    if whole and start + per_step <= len(order):
        step = order[start : start + per_step].copy()
        order[start : start + per_step] = order[:per_step]
        order[:per_step] = step
    else:
        order[[0, place]] = order[[place, 0]]
