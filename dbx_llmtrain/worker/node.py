"""What happens once per node: who it is, what it has, and what is called there.

Standard library and our pure modules only, because Spark tasks run this before anything else is
known to be installed on a node. A node is identified by ``node_id()`` and guarded by file locks;
``LOCAL_RANK`` is never asked, since it is 0 on every rank of a distributed run.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from dbx_llmtrain import storage
from dbx_llmtrain.errors import StagingError
from dbx_llmtrain.worker import builds, gpus, locks, room

NODE_VARIABLE = "DBX_LLMTRAIN_NODE"
_DATABRICKS_DISK = "/local_disk0"
_HOUR = 3600
_PACKAGES = (
    "torch", "transformers", "datasets", "tokenizers", "safetensors", "accelerate", "peft",
    "deepspeed", "mlflow", "mlflow-skinny", "pyspark", "pyarrow", "pandas", "numpy", "pydantic",
    "huggingface-hub", "bitsandbytes", "liger-kernel", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
    "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime",
)  # fmt: skip


class Capture:
    """A block whose exception is kept in ``error`` instead of raised (``BaseException`` passes)."""

    error: Exception | None = None

    def __enter__(self) -> Capture:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
            return True
        return False

    def text(self) -> str:
        """The exception's type and message; empty when there was none."""
        return f"{type(self.error).__name__}: {self.error}" if self.error else ""

    def traceback(self) -> str:
        """The traceback as Python prints it; empty when there was none."""
        return "".join(traceback.format_exception(self.error)) if self.error else ""


def node_id() -> str:
    """This machine's name: ``DBX_LLMTRAIN_NODE`` where it is set, else the host name."""
    return os.environ.get(NODE_VARIABLE) or socket.gethostname()


def private_dir() -> Path:
    """This user's own folder for small files, in the temporary folder; others cannot enter it."""
    folder = Path(tempfile.gettempdir()) / f"dbx_llmtrain-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid == os.getuid():
        return folder
    return Path(tempfile.mkdtemp(prefix="dbx_llmtrain-"))


def local_dir(setting: str | None = None) -> Path:
    """The folder for big files on this node's own disk, made if need be.

    ``setting`` is ``cluster.local_dir``; without it ``/local_disk0/dbx_llmtrain`` where this node
    can write it, else ``dbx_llmtrain`` in the temporary folder. Raises ``StagingError`` when
    nothing can be written.
    """
    if setting:
        candidates = [storage.local_path(setting)]
    else:
        temporary = Path(tempfile.gettempdir())
        candidates = [Path(_DATABRICKS_DISK, "dbx_llmtrain")] if _disk_exists() else []
        candidates += [temporary / "dbx_llmtrain", temporary / f"dbx_llmtrain-{os.getuid()}"]
    problems = []
    for folder in candidates:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            problems.append(f"{folder} cannot be written ({error})")
    cause = "; ".join(problems) + ": set cluster.local_dir to a folder that every node can write"
    raise StagingError("the node's own folder", {node_id(): cause})


def _disk_exists() -> bool:
    return Path(_DATABRICKS_DISK).is_dir()


def report(setting: str | None = None, driver_host: str | None = None) -> dict[str, Any]:
    """The fields of a ``NodeReport``. What cannot be read is said in ``problem``, never raised.

    ``setting`` is ``cluster.local_dir``; ``driver_host`` the driver's address, by which the node
    finds out which of its own addresses the cluster uses.
    """
    found, problem = gpus.read_gpus()
    problems = [problem] if problem else []
    folder, free = "", 0
    copies: list[dict[str, Any]] = []
    with Capture() as disk:
        path = local_dir(setting)
        folder, free = str(path), shutil.disk_usage(path).free
        copies = room.report(path)
    if disk.error:
        folder = setting or ""
        problems.append(disk.text())
    total, available = memory()
    return {
        "node": node_id(),
        "host": socket.gethostname(),
        "addresses": addresses(driver_host),
        "gpus": found,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_total": total,
        "memory_available": available,
        "local_dir": folder,
        "disk_free": free,
        "copies": copies,
        "python": platform.python_version(),
        "packages": _versions(),
        "tools": builds.find_tools(),
        "problem": "; ".join(problems),
    }


def _versions() -> dict[str, str]:
    """Versions of the packages that matter, from their metadata; nothing is imported."""
    found = {}
    for name in _PACKAGES:
        # What an interrupted installation has left has none, whatever the type says, or raises one
        # of several errors where the backport importlib_metadata has been imported.
        with suppress(importlib.metadata.PackageNotFoundError, FileNotFoundError, TypeError):
            version: str | None = importlib.metadata.version(name)
            if version:
                found[name] = version
    return found


def memory() -> tuple[int, int]:
    """Total and available bytes: the machine's, or the container's where that has a lower limit."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0, 0
    fields = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    total, available = (int(fields[name][0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is None:
        limit = _number("/sys/fs/cgroup/memory/memory.limit_in_bytes")
        used = _number("/sys/fs/cgroup/memory/memory.usage_in_bytes")
    if limit is not None and limit < total:
        total, available = limit, min(available, max(0, limit - (used or 0)))
    return total, available


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def addresses(toward: str | None = None) -> list[str]:
    """IP addresses of this machine, with the names and addresses that Spark was given for it."""
    spark_names = ("SPARK_LOCAL_IP", "SPARK_LOCAL_HOSTNAME", "SPARK_PUBLIC_DNS")
    found = {os.environ[name] for name in spark_names if os.environ.get(name)}
    found |= resolve(socket.gethostname())
    with Capture():
        tree = Path("/proc/net/fib_trie").read_text()
        found |= set(re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", tree))
    with Capture():
        six = Path("/proc/net/if_inet6").read_text().split("\n")
        found |= {_ipv6(line.split()[0]) for line in six if line.strip()}
    if toward:
        with Capture(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((toward, 9))  # UDP: nothing is sent, the kernel picks the source address
            found.add(probe.getsockname()[0])
    return sorted(found)


def resolve(host: str) -> set[str]:
    """``host`` itself and the IP addresses it stands for."""
    try:
        return {host} | {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return {host}


def _ipv6(digits: str) -> str:
    return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


def call(target: str, args: Sequence[Any]) -> dict[str, Any]:
    """Call ``module:function`` here and say how it went, in primitives: the outcome of this node.

    Keys: ``node``, ``host``, ``addresses``, ``value``, ``error`` and ``traceback`` (empty when the
    function returned). A ``StagingError`` of this node says its cause and needs no traceback.
    """
    value = None
    with Capture() as capture:
        module, _, name = target.partition(":")
        value = getattr(importlib.import_module(module), name)(*args)
    staging = capture.error if isinstance(capture.error, StagingError) else None
    return {
        "node": node_id(),
        "host": socket.gethostname(),
        "addresses": addresses(),
        "value": value,
        "error": "; ".join(staging.nodes.values()) if staging else capture.text(),
        "traceback": "" if staging else capture.traceback(),
    }


def once(
    job: str, done: Sequence[str], hold_s: float, target: str, args: Sequence[Any]
) -> dict[str, Any] | None:
    """Call ``target`` once on this node for this job, however many tasks of the job land on it.

    The other tasks wait for the first one and then ``hold_s`` seconds more, returning ``None``:
    while they hold their slots, Spark gives the remaining tasks to other nodes. ``done`` are the
    nodes that answered in an earlier round.
    """
    if node_id() not in done:
        folder = private_dir() / "jobs"
        with locks.file_lock(folder / f"{job}-{node_id()}".replace("/", "_")) as marker:
            marker.seek(0)
            if marker.read():
                os.utime(marker.fileno())  # this job still goes on
            else:
                outcome = call(target, args)
                marker.write("done")
                _remove_old(folder)
                return outcome
    time.sleep(hold_s)
    return None


def _remove_old(folder: Path) -> None:
    """Markers of jobs that ended. One that is locked belongs to a call that takes its time."""
    for path in folder.iterdir():
        with Capture():
            if time.time() - path.stat().st_mtime > _HOUR:
                with path.open(encoding="utf-8") as marker:
                    fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
