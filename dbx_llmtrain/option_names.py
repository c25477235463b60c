"""What other trainers call our options, and what they have that we do not offer, with the reason.

One list, read by the error for an unknown key, by the importer of other tools' configurations and
by the documentation.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from dbx_llmtrain.option_tables import PEFT as PEFT
from dbx_llmtrain.option_tables import TABLES


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


def _read(source: str, table: str) -> list[ForeignOption]:
    options = []
    for line in table.strip().splitlines():
        names, arrow, ours = line.partition(" -> ")
        path, _, note = ours.partition(" ; ")
        if not arrow:
            names, _, note = line.partition(" -- ")
        for name in names.split(","):
            options.append(ForeignOption(name.strip(), source, path.strip() or None, note.strip()))
    return options


OPTIONS: tuple[ForeignOption, ...] = tuple(
    option for source, table in TABLES for option in _read(source, table)
)


def find(name: str) -> list[ForeignOption]:
    """The entries for ``name``, whatever the case and the separators: one for every trainer that
    has it.

    All parts of an entry's name have to be the last ones of ``name``, as many as possible; failing
    that, its last part alone, except where that says nothing. Within ``fsdp_config`` the prefix
    ``fsdp_`` may be left out.
    """
    wanted = _canonical(name)
    fitting = [(o, _canonical(o.name)) for o in OPTIONS]
    whole = [(o, parts) for o, parts in fitting if wanted[-len(parts) :] == parts]
    if whole:
        longest = max(len(parts) for _, parts in whole)
        return [o for o, parts in whole if len(parts) == longest]
    if "fsdpconfig" in wanted[:-1] and not wanted[-1].startswith("fsdp"):
        return find(f"fsdp_{name.rpartition('.')[2]}")
    if wanted[-1] in ("enabled", "type", "name", "device", "library", "filenames"):
        return []
    return [o for o, parts in fitting if parts[-1] == wanted[-1]]


def has_inner(name: str) -> bool:
    """Whether ``name`` is a mapping of options of another trainer, such as ``fsdp_config``."""
    last = _canonical(name)[-1]
    return any(last in _canonical(option.name) for option in OPTIONS)


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


def _canonical(name: str) -> list[str]:
    return name.replace("-", "").replace("_", "").lower().split(".")
