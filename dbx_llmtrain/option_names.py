"""What other trainers call our options, and what they have that we do not offer, with the reason.

One table, read by the error for an unknown key, by the importer of other tools' configurations and
by the documentation. Keys are the other tool's names; nested names of DeepSpeed and NeMo are given
by their last part, which is what people type.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

HF, TRL, ACCELERATE, DEEPSPEED, NEMO = (
    "Hugging Face",
    "TRL",
    "Accelerate",
    "DeepSpeed",
    "NeMo",
)


@dataclass(frozen=True)
class ForeignOption:
    """One option of another trainer.

    ``ours`` is the dotted path of our field, or ``None`` when there is none; ``note`` then says
    why, and otherwise how the value differs.
    """

    name: str
    source: str
    ours: str | None
    note: str = ""

    def hint(self) -> str:
        """The sentence an error message shows for this name."""
        if self.ours is None:
            return f"{self.source}'s {self.name} has no counterpart here: {self.note}"
        return f"{self.source}'s name for {self.ours}" + (f" ({self.note})" if self.note else "")


def _rows(source: str, rows: Iterable[tuple[str, str | None, str]]) -> list[ForeignOption]:
    return [ForeignOption(name, source, ours, note) for name, ours, note in rows]


OPTIONS: tuple[ForeignOption, ...] = (
    *_rows(
        HF,
        [
            ("num_train_epochs", "train.epochs", ""),
            ("per_device_train_batch_size", "train.micro_batch_size", ""),
            ("warmup_ratio", "train.warmup", "a share of the run when below 1"),
            ("device_map", None, "every rank has one device; use parallel.kind to shard a model"),
        ],
    ),
)


def find(name: str) -> ForeignOption | None:
    """The entry for ``name``, whatever the case and the separators, or ``None``."""
    wanted = _canonical(name)
    return next((option for option in OPTIONS if _canonical(option.name) == wanted), None)


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The name of ``valid`` (dotted paths) that ``name`` most likely stands for."""
    choices = list(valid)
    leaves = {choice.rsplit(".", 1)[-1]: choice for choice in choices}
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.75)
    if close:
        return close[0]
    leaf = name.rsplit(".", 1)[-1]
    close = difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=0.7)
    return leaves[close[0]] if close else None


def _canonical(name: str) -> str:
    return name.rsplit(".", 1)[-1].replace("-", "").replace("_", "").lower()
