"""What a node is used for while a run goes on: CPU, memory, disk, network, GPUs.

MLflow's own monitor is not used: it logs by itself, from the machine that it runs on. So every node
would need a way to the store, which a file of the driver has not, and credentials, and two more
packages. Here the first rank of every node looks, and the driver, which has the run, logs what it
hears from them. Standard library only.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import gpus
from dbx_llmtrain.worker.world import World

EVERY_S = 10.0
MANY = 10_000
"""After so many samples (28 hours) they are taken half as often, and so on."""
_FIRST_S = 1.0
"""The first sample is of this time: a short run has one, too."""
_TRIES = 3
"""After so many times without an answer ``nvidia-smi`` is not asked any more."""
_FAULTS = (OSError, ValueError, LookupError, ArithmeticError)
"""What a system that tells it in another way can cause."""

Tell = Callable[[str, Mapping[str, float]], None]


@contextmanager
def sampled(plan: RunPlan, world: World, tell: Tell, *, every: float = EVERY_S) -> Iterator[None]:
    """On the first rank of a node, with ``tracking.system_metrics``: a thread gives ``tell`` the
    node and what it is used for, now and then, for as long as the block lasts."""
    if not plan.config.tracking.system_metrics or world.nodes.index(world.node) != world.rank:
        yield
        return
    sampler, over = Sampler(Path(plan.local_dir or tempfile.gettempdir())), threading.Event()

    def work() -> None:
        taken = 0
        while not over.wait(pause(taken, every)):
            tell(world.node, sampler.read())
            taken += 1

    thread = threading.Thread(target=work, name="usage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(0.5)


def pause(taken: int, every: float = EVERY_S) -> float:
    """Seconds until the next sample, when so many have been taken."""
    return every * 2 ** (taken // MANY) if taken else min(_FIRST_S, every)


class Sampler:
    """Reads what a node is used for; rates and shares are since it was read last. Never raises:
    what the system does not tell is left out."""

    def __init__(self, folder: Path, proc: Path = Path("/proc")) -> None:
        self._folder = folder
        self._proc = proc
        self._asked = 0
        self._seen = time.monotonic()
        self._times = self._traffic = (0, 0)
        with suppress(*_FAULTS):
            self._times = self._cpu_times()
        with suppress(*_FAULTS):
            self._traffic = self._bytes_moved()

    def read(self) -> dict[str, float]:
        """Numbers by the end of their metric's name."""
        found: dict[str, float] = {}
        for part in (self._cpu, self._memory, self._disk, self._network, self._gpus):
            with suppress(*_FAULTS):
                found |= part()
        return found

    def _cpu(self) -> dict[str, float]:
        before, self._times = self._times, self._cpu_times()
        busy, total = (now - then for now, then in zip(self._times, before, strict=True))
        return {"cpu_percent": 100 * busy / total}

    def _cpu_times(self) -> tuple[int, int]:
        """Ticks of all processors in which they worked, and all there were."""
        first = (self._proc / "stat").read_text(encoding="ascii").split("\n", 1)[0]
        ticks = [int(word) for word in first.split()[1:9]]  # guests are counted among the users
        idle = ticks[3] + ticks[4]
        return sum(ticks) - idle, sum(ticks)

    def _memory(self) -> dict[str, float]:
        lines = (self._proc / "meminfo").read_text(encoding="ascii").splitlines()
        sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in map(_parted, lines)}
        total, free = sizes["MemTotal"], sizes["MemAvailable"]
        return {"memory_used_bytes": total - free, "memory_percent": 100 * (total - free) / total}

    def _disk(self) -> dict[str, float]:
        there = next(path for path in (self._folder, *self._folder.parents) if path.exists())
        usage = shutil.disk_usage(there)
        return {"disk_used_bytes": usage.used, "disk_free_bytes": usage.free}

    def _network(self) -> dict[str, float]:
        before, self._traffic = self._traffic, self._bytes_moved()
        then, self._seen = self._seen, time.monotonic()
        received, sent = (
            (after - first) / (self._seen - then)
            for after, first in zip(self._traffic, before, strict=True)
        )
        return {
            "network_received_bytes_per_second": received,
            "network_sent_bytes_per_second": sent,
        }

    def _bytes_moved(self) -> tuple[int, int]:
        """Bytes that all interfaces but the loopback have received and sent."""
        lines = (self._proc / "net" / "dev").read_text(encoding="ascii").splitlines()[2:]
        counts = [rest.split() for name, _, rest in map(_parted, lines) if name.strip() != "lo"]
        return sum(int(each[0]) for each in counts), sum(int(each[8]) for each in counts)

    def _gpus(self) -> dict[str, float]:
        if self._asked >= _TRIES:
            return {}
        used = gpus.read_use()
        self._asked = 0 if used else self._asked + 1
        found: dict[str, float] = {}
        for index, percent, taken, total in used:
            found[f"gpu{index}_percent"] = percent
            found[f"gpu{index}_memory_used_bytes"] = taken
            found[f"gpu{index}_memory_percent"] = 100 * taken / total
        return found


def _parted(line: str) -> tuple[str, str, str]:
    return line.partition(":")
