"""The learning rate of every optimizer step: warm-up, a stable part, and a fall to a floor.

Pure arithmetic, for the plan, which says what will be, and for the ranks, which do it.
"""

from __future__ import annotations

import math
from fractions import Fraction

from dbx_llmtrain.model_sections import OptimConfig

WSD_SHARE = 0.1
"""Share of the run in which ``wsd`` falls, where it is not given."""


def steps_of_share(share: float, total_steps: int) -> int:
    """A share of the run in whole steps, rounded up: 0.1 of 70 is 7, although 0.1 * 70 > 7."""
    return math.ceil(Fraction(str(share)) * total_steps)


def steps_of_decay(train: OptimConfig, *, warmup_steps: int, total_steps: int) -> int | None:
    """The steps in which the rate falls: as given (a share of the run is rounded up), or by the
    schedule all after the warm-up, or with ``wsd`` the last tenth of the run. ``None``: it never
    falls. May be more than the run has left, and then the floor is not reached.
    """
    if train.schedule == "constant":
        return None
    after = max(1, total_steps - max(warmup_steps, 1))
    wanted = train.decay_steps
    if wanted is None:
        return (
            after if train.schedule != "wsd" else min(after, steps_of_share(WSD_SHARE, total_steps))
        )
    return steps_of_share(wanted, total_steps) if wanted < 1 else int(wanted)


def learning_rate(
    step: int,
    train: OptimConfig,
    *,
    warmup_steps: int,
    total_steps: int,
    decay_steps: int | None = None,
) -> float:
    """The learning rate of optimizer step ``step``, counted from 1 without those that were skipped.

    Warm-up: ``peak * step / warmup_steps``, so the first step already learns and step
    ``warmup_steps`` has the peak; without a warm-up the first step has it. Then, with ``t`` steps
    since the fall began, ``share = min(1, t / decay_steps)`` and the floor ``min_learning_rate``:

    - ``constant``: the peak.
    - ``linear``: ``floor + (peak - floor) * (1 - share)``.
    - ``cosine``: ``floor + (peak - floor) * (1 + cos(pi * share)) / 2``.
    - ``wsd``: as ``linear``.

    The fall begins with the warm-up's last step (the first one without), with ``wsd`` so that it
    ends with the run. The floor is reached ``decay_steps`` later and held: by default at the last
    step. A floor of 0 is reached one step after that (``share = t / (decay_steps + 1)``), since a
    step at a rate of 0 would be lost. ``decay_steps``: as ``steps_of_decay`` gives it, which is
    also what ``None`` stands for.
    """
    peak, floor = train.learning_rate, min(train.min_learning_rate, train.learning_rate)
    if step <= warmup_steps:
        return peak * step / warmup_steps
    length = decay_steps or steps_of_decay(
        train, warmup_steps=warmup_steps, total_steps=total_steps
    )
    if length is None or train.schedule == "constant":
        return peak
    begin = max(warmup_steps, 1)
    if train.schedule == "wsd":
        begin = max(begin, total_steps - length)
        length = max(1, total_steps - begin)
    share = min(1.0, max(0, step - begin) / (length + (floor == 0)))
    left = (1 + math.cos(math.pi * share)) / 2 if train.schedule == "cosine" else 1 - share
    return floor + (peak - floor) * left


def highest_rate(train: OptimConfig, *, warmup_steps: int, total_steps: int) -> float:
    """The highest learning rate of a run: the peak, unless the warm-up is longer than the run."""
    return train.learning_rate * min(1.0, total_steps / max(1, warmup_steps))
