"""The GPUs of this node as ``nvidia-smi`` reports them. Standard library only."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from typing import Any

_QUERY = "index,uuid,name,memory.total,memory.used,driver_version"
_CAPABILITY = "compute_cap"
"""Not known to the ``nvidia-smi`` of drivers before 510."""
_IS_CAPABILITY = re.compile(r"\d+\.\d+").fullmatch
_MIB = 1024 * 1024
_TIMEOUT_S = 30.0


def read_gpus() -> tuple[list[dict[str, Any]], str]:
    """Every GPU as the fields of a ``GpuInfo``, and what went wrong (empty when nothing did).

    A machine without ``nvidia-smi`` or without GPUs is a normal answer: no GPU, no problem.
    """
    command = shutil.which("nvidia-smi")
    if command is None:
        return [], ""
    try:
        run = _ask(command, f"{_QUERY},{_CAPABILITY}")
        if run.returncode and _CAPABILITY.encode() in run.stdout + run.stderr:
            run = _ask(command, _QUERY)
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi did not answer within {_TIMEOUT_S:.0f} s: a GPU or its driver hangs"
    except OSError as error:
        return [], f"nvidia-smi cannot be run: {error}"
    text = run.stdout.decode("utf-8", errors="replace")
    if "No devices were found" in text:
        return [], ""
    if run.returncode != 0:
        said = (run.stderr.decode("utf-8", errors="replace") or text).strip()[:500]
        return [], f"nvidia-smi failed with exit code {run.returncode}: {said}"
    return parse_gpus(text)


def _ask(command: str, query: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [command, f"--query-gpu={query}", "--format=csv,noheader,nounits"],
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=False,
    )


def parse_gpus(text: str) -> tuple[list[dict[str, Any]], str]:
    """``nvidia-smi``'s CSV (memory in MiB) as the fields of ``GpuInfo`` (memory in bytes).

    A line that cannot be read is reported in the second value; the others still count.
    """
    found: list[dict[str, Any]] = []
    bad: list[str] = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if not row:
            continue
        if len(row) not in (6, 7) or not row[0].strip().isdecimal():
            bad.append(", ".join(row))
            continue
        index, uuid, name, total, used, driver, *more = (cell.strip() for cell in row)
        capability = more[0] if more and _IS_CAPABILITY(more[0]) else None
        found.append(
            {
                "index": int(index),
                "uuid": uuid,
                "name": name,
                "memory_total": _bytes(total),
                "memory_used": _bytes(used),
                "driver": driver,
                "capability": capability,
            }
        )
    return found, f"nvidia-smi printed lines of an unknown form: {'; '.join(bad)}" if bad else ""


def _bytes(mebibytes: str) -> int:
    """GPUs that share the host's memory report ``[N/A]``, which becomes 0."""
    return int(mebibytes) * _MIB if mebibytes.isdecimal() else 0
