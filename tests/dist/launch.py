"""Start real ranks, run every case in them once, and read what they found."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from tests.dist import warm

TIMEOUT = 150
"""Seconds for a launch with all its cases (a quiet machine needs about ten)."""
_FOLLOWING_S = 15.0
"""How long ranks may go on when another one has failed."""


def launch(
    strategies: str, world_size: int, folder: Path, cases: str = "tests.dist.cases", nodes: int = 1
) -> dict[str, Any]:
    """Results of a module's ``CASES`` by name, from ranks that torchrun starts (one: nobody).

    Several strategies are given with commas, and the results then are by strategy. The ranks are
    dealt to ``nodes`` in turn. Raises ``AssertionError`` with the ranks' output when they fail or
    take too long.
    """
    out = folder / "results.json"
    program = ["tests.dist.rank", cases, strategies, str(nodes), str(folder), str(out)]
    run_ranks(program, world_size, {}, TIMEOUT)
    results: dict[str, Any] = json.loads(out.read_text())
    threads = {"threads": results.pop("threads")}
    return results if "," in strategies else results[strategies] | threads


class Launched(Mapping[str, Any]):
    """What the cases of a module found, by strategy. ``launches`` are strategies (with commas) and
    numbers of ranks; each is made when one of its strategies is first asked for."""

    def __init__(
        self, launches: Sequence[tuple[str, int]], cases: str, folders: pytest.TempPathFactory
    ) -> None:
        self._launches, self._cases, self._folders = launches, cases, folders
        self._known: dict[str, Any] = {}

    def __getitem__(self, strategy: str) -> Any:
        if strategy not in self._known:
            names, size = next(one for one in self._launches if strategy in one[0].split(","))
            folder = self._folders.mktemp(names.replace(",", "-"))
            found = launch(names, size, folder, self._cases)
            self._known |= found if "," in names else {names: found}
        return self._known[strategy]

    def __iter__(self) -> Iterator[str]:
        return (name for names, _ in self._launches for name in names.split(","))

    def __len__(self) -> int:
        return len(list(iter(self)))


def some_slow(strategies: Iterable[str], quick: Container[str]) -> list[Any]:
    """As parameters: the ``quick`` ones are for every run of the tests, the others for the full
    one."""
    slow = pytest.mark.slow
    return [name if name in quick else pytest.param(name, marks=slow) for name in strategies]


def run_ranks(
    program: Sequence[str], world_size: int, environment: dict[str, str], timeout: float
) -> None:
    """Run a module with its arguments on that many ranks, with one thread each. Raises
    ``AssertionError`` with their output when they fail or take more than ``timeout`` seconds."""
    own: list[dict[str, str]] = [{}]
    if world_size > 1:
        shared = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        own = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    with tempfile.TemporaryDirectory() as folder:
        _run(
            [(program, os.environ | environment | of_rank) for of_rank in own],
            [Path(folder) / f"output-{rank}" for rank in range(world_size)],
            timeout,
            codes=(0,) * world_size,
        )


def free_port() -> int:
    """One that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def two_ranks(
    folder: Path,
    plans: Sequence[Path | str],
    environment: dict[str, str],
    *,
    codes: tuple[int, int] = (0, 0),
) -> None:
    """Run every plan folder's ``plan-0.json`` and ``plan-1.json``, one after the other, on two
    ranks at once (``main_rank``). Raises ``AssertionError`` with their output when they do not end
    with these exit ``codes``."""
    _run(
        [(["tests.dist.main_rank", rank, *map(str, plans)], environment) for rank in ("0", "1")],
        [folder / f"output-{rank}" for rank in ("0", "1")],
        TIMEOUT,
        codes=codes,
    )


def _run(
    programs: Sequence[tuple[Sequence[str], dict[str, str]]],
    outputs: Sequence[Path],
    timeout: float,
    *,
    codes: tuple[int, ...],
) -> None:
    """Run modules with their arguments side by side, each in its environment. When one has failed
    that was not expected to, the others are ended soon."""
    for output in outputs:
        output.write_bytes(b"")
    processes = [
        warm.start(program[0], program[1:], {"OMP_NUM_THREADS": "1"} | environment, output)
        for (program, environment), output in zip(programs, outputs, strict=True)
    ]
    deadline = time.monotonic() + timeout
    try:
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            wait([process.sentinel for process in processes if process.is_alive()], timeout=1.0)
            ended = [process.exitcode for process in processes]
            if any(code not in (None, due) for code, due in zip(ended, codes, strict=True)):
                deadline = min(deadline, time.monotonic() + _FOLLOWING_S)
        found = tuple(process.exitcode for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    text = "".join(output.read_text(errors="replace") for output in outputs)
    assert found == codes, f"exit codes {found} (None: after {timeout:g} s), not {codes}:\n{text}"
