"""Paths that are addresses of remote storage: nodes open files by a path of theirs."""

from __future__ import annotations

import re

from dbx_llmtrain.secret_text import hide

VOLUME = "/Volumes/catalog/schema/volume/..."
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # one letter is a drive
_PATHS = ("dbfs", "models")
"""Schemes that others deal with."""
REGISTRY = "models:/"
_REGISTERED = re.compile(r"models:/([^/@\s]+)(?:@([^/@\s]+)|/(\d+))")
_NO_TABLES = ("file", "http", "https", "hf", "ftp")
_OF_FILES = re.compile(
    r"[*?\[]|\.(jsonl?|csv|tsv|parquet|txt|arrow|avro|gz|zst|zip|bz2|xz)/?$", re.I
)


def scheme(path: str) -> str | None:
    """``s3`` of ``s3://bucket/file``; ``None`` for a path."""
    found = _SCHEME.match(path)
    name = found[1].lower() if found else None
    return None if name in _PATHS else name


def registered(source: str) -> tuple[str, str | None, str | None] | None:
    """Name, alias and version of ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION``; ``None`` for
    anything else."""
    found = _REGISTERED.fullmatch(source)
    return (found[1], found[2], found[3]) if found else None


def may_be_table(path: str) -> bool:
    """Whether an address can be that of a Delta table, which Spark opens."""
    name = scheme(path)
    whole = name is not None and path[len(name) :].startswith("://")
    return whole and name not in _NO_TABLES and not _OF_FILES.search(path)


def refusal(path: str, instead: str = "") -> str | None:
    """Why an address cannot be used as a path, and what can; ``None`` for a path.

    ``instead`` is what else is possible.
    """
    name = scheme(path)
    if name is None:
        return None
    shown = repr(hide(path)[:120])
    if name == "file":
        return f"expected a path, found {shown}: leave out the {name}:"
    if name == "hf":
        return f"expected the name alone (such as org/name), found {shown}: leave out the {name}://"
    what = "a web address" if name in ("http", "https", "ftp") else f"an address ({name}:)"
    return (
        f"expected a path that the driver and every node can open (a volume: {VOLUME}, or a mount)"
        f"{instead}, found {what}: {shown}"
    )
