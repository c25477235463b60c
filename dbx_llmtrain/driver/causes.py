"""The Python exception of a Spark task behind Spark's own, in one line."""

from __future__ import annotations

import re

_ERROR_LINE = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b.*)$", re.MULTILINE)
_OF_SPARK = re.compile(r"(org|java|scala|py4j)\.|[\w.]*\bPythonException\b")
_TRACE = "Traceback (most recent call last)"


def of_worker(error: BaseException) -> str | None:
    """What a worker's Python code raised; ``None`` where Spark's error tells of none."""
    _, _, trace = str(error).partition(_TRACE)
    lines: list[str] = _ERROR_LINE.findall(trace)
    ours = [line for line in lines if not _OF_SPARK.match(line)]
    return ours[-1].strip() if ours else None


def first_line(error: BaseException) -> str:
    """The first line of a message that has any, else the error's class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
