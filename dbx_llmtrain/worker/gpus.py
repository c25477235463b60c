"""The GPUs of this node as ``nvidia-smi`` reports them. Standard library only."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

_QUERY = "index,uuid,name,memory.total,memory.used,driver_version"
_CAPABILITY = "compute_cap"
"""Not known to the ``nvidia-smi`` of drivers before 510."""
_IS_CAPABILITY = re.compile(r"\d+\.\d+").fullmatch
_PROCESSES = "pid,used_memory,gpu_uuid"
_CUDA = re.compile(r"CUDA (?:UMD )?Version:\s*(\d+\.\d+)")
"""In the head of the table that ``nvidia-smi`` prints by itself."""
_USE = "index,utilization.gpu,memory.used,memory.total"
_AS_CSV = ("--format=csv,noheader,nounits",)
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
        run = _ask(command, f"--query-gpu={_QUERY},{_CAPABILITY}", *_AS_CSV)
        if run.returncode and _CAPABILITY.encode() in run.stdout + run.stderr:
            run = _ask(command, f"--query-gpu={_QUERY}", *_AS_CSV)
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


def _ask(command: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [command, *arguments], capture_output=True, timeout=_TIMEOUT_S, check=False
    )


def _said(*arguments: str) -> str:
    """What ``nvidia-smi`` prints; nothing where it is not there, fails, or has no such option."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        run = _ask(command, *arguments)
    except (subprocess.TimeoutExpired, OSError):
        return ""
    return "" if run.returncode else run.stdout.decode("utf-8", errors="replace")


def read_cuda() -> str:
    """The newest CUDA that this node's driver can run, such as ``12.4``; empty: not known."""
    found = _CUDA.search(_said())
    return found[1] if found else ""


def read_processes() -> list[dict[str, Any]]:
    """Who holds memory of the GPUs, as the fields of a ``GpuProcess``. An ``nvidia-smi`` that
    cannot tell, or not in a container, gives none."""
    return parse_processes(_said(f"--query-compute-apps={_PROCESSES}", *_AS_CSV))


def read_use() -> list[tuple[int, float, int, int]]:
    """How busy every GPU is: its index, percent of the time in which it worked, bytes of its memory
    that are taken, and all there are. One that does not tell is left out."""
    rows = [line.split(", ") for line in _said(f"--query-gpu={_USE}", *_AS_CSV).splitlines()]
    return [
        (int(row[0]), float(row[1]), int(row[2]) * _MIB, int(row[3]) * _MIB)
        for row in rows
        if len(row) == 4 and all(cell.strip().isdecimal() for cell in row)
    ]


def parse_processes(text: str) -> list[dict[str, Any]]:
    """``nvidia-smi``'s CSV of processes; lines of another form are left out."""
    return [
        {"pid": int(row[0]), "memory": _bytes(row[1].strip()), "gpu": row[2].strip(),
         "name": _name(int(row[0]))}
        for row in csv.reader(text.splitlines(), skipinitialspace=True)
        if len(row) == 3 and row[0].strip().isdecimal()
    ]  # fmt: skip


def _name(pid: int) -> str:
    """The command of a process of this machine; empty where it is not to be seen from here."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return Path(words[0].decode("utf-8", errors="replace")).name


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
