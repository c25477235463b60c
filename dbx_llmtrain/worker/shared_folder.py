"""Whether this machine can use a folder that all share: it is tried. Standard library only."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from dbx_llmtrain import storage

DRIVER = "the driver"
"""The file that the driver has written before others look."""
_APPEARS_S = 10.0
"""How long a file that another machine has written may take to be seen."""


def file_of(folder: Path, who: str) -> Path:
    """The file in which a machine (or ``DRIVER``) shows that it was there."""
    return folder / (re.sub(r"[^\w.-]", "_", who) + ".txt")


def exercise(folder: str, who: str) -> str:
    """Write a file, read, replace and list it; what cannot be done, or nothing.

    The folder itself is never made: one that is not there is not the driver's.
    """
    place = Path(folder)
    if who != DRIVER and (missing := see(folder, [DRIVER])):
        return missing
    path, doing = file_of(place, who), "written"
    try:
        path.write_text("first", encoding="utf-8")
        doing = "read"
        if path.read_text(encoding="utf-8") != "first":
            return f"{path} does not have what was written to it"
        doing = "replaced"
        storage.write_text(path, who)
        if path.read_text(encoding="utf-8") != who:
            return f"{path} has its old content after it was replaced"
        doing = "listed"
        if path.name not in os.listdir(place):
            return f"{path} is not listed in its folder"
    except OSError as error:
        return f"{path} cannot be {doing} ({error})"
    return ""


def see(folder: str, others: Sequence[str]) -> str:
    """Read the files of other machines; what is missing, or nothing."""
    place, deadline = Path(folder), time.monotonic() + _APPEARS_S
    problem = ""
    for who in others:
        while (problem := _missing(place, who)) and place.is_dir() and time.monotonic() < deadline:
            time.sleep(0.2)
        if problem:
            break
    return problem


def _missing(place: Path, who: str) -> str:
    path = file_of(place, who)
    try:
        found = path.read_text(encoding="utf-8")
    except OSError as error:
        return f"{path}, which {who} has written, cannot be read ({error.strerror})"
    return "" if found == who else f"{path} does not have what {who} has written"
