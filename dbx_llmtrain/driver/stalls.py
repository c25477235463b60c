"""A run that does not move: noticed by the ranks' heartbeats, and told with who is stuck where."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dbx_llmtrain import storage
from dbx_llmtrain.display_live import duration
from dbx_llmtrain.driver.monitor import LiveState, RankState
from dbx_llmtrain.errors import TrainingFailed
from dbx_llmtrain.live_state import ENDS
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import requests, stacks

logger = logging.getLogger(__name__)

STACKS_S = 15.0
"""How long the ranks may take to write their stacks."""
_AWAY_S = 10.0
"""When nobody has looked for so long this process was held up itself, and could not hear others."""
_SILENT = 0.75
"""A rank is silent that was not heard for this share of ``cluster.stall_timeout``."""
_COMPILING_S = 1800.0
"""A model that is compiled in its first step may stand still for so long in any case."""
_NAMED = 6
_WAITING = re.compile(
    r"torch/distributed/|in (all_reduce|all_gather|reduce_scatter|broadcast|barrier|wait|monitored"
    r"_barrier|all_to_all|gather|recv|send|_engine_run_backward|synchronize)\w*$"
)
"""Where a rank is that waits for others, by its place: a gradient is shared within ``backward``."""


@dataclass(frozen=True)
class Stall:
    """Nothing has moved for ``seconds``. ``silent`` ranks were not heard for most of it; the others
    answer and stand still."""

    seconds: float
    silent: tuple[int, ...]
    still: tuple[int, ...]


def find(
    ranks: Mapping[int, RankState],
    world_size: int,
    *,
    now: float,
    timeout: float,
    since: float = float("-inf"),
) -> Stall | None:
    """Whether the ranks stand still at ``now`` (of ``time.monotonic()``); ``None`` while one of
    them has moved in the last ``timeout`` seconds, before any was heard, and when all have ended.

    What was before ``since`` does not count.
    """
    running = [
        rank for rank in range(world_size) if rank not in ranks or ranks[rank].phase not in ENDS
    ]
    failed = any(one.phase == "failed" for one in ranks.values())
    if not ranks or not running or failed:
        return None
    last = max(since, *(one.moved for one in ranks.values()))
    if now - last < timeout:
        return None
    silent = tuple(
        rank
        for rank in running
        if rank not in ranks or now - max(ranks[rank].heard, since) >= _SILENT * timeout
    )
    still = tuple(rank for rank in running if rank not in silent)
    return Stall(now - last, silent, still)


def limit(plan: RunPlan, ranks: Mapping[int, RankState]) -> float:
    """Seconds that a run may stand still, where its ranks are."""
    timeout = plan.config.cluster.stall_timeout
    began = max((one.step for one in ranks.values()), default=0)
    first = began <= (storage.step_of(Path(plan.resume_from)) or 0 if plan.resume_from else 0)
    return max(timeout, _COMPILING_S) if plan.config.model.compile and first else timeout


@dataclass
class Guard:
    """Looks at the ranks of an attempt now and then; see ``check``."""

    plan: RunPlan
    live: LiveState
    clock: Callable[[], float] = time.monotonic
    _since: float = float("-inf")
    _looked: float | None = None
    _asked: str = ""
    _deadline: float = 0.0
    _run_dir: Path = field(init=False)

    def __post_init__(self) -> None:
        self._run_dir = storage.local_path(self.plan.run_dir)

    def check(self) -> None:
        """To be called about twice a second. Where nothing moves any more the ranks are asked for
        their stacks; when those are there, or have not come in time, raises ``TrainingFailed``."""
        now = self.clock()
        if self._looked is not None and now - self._looked > _AWAY_S:
            self._since = now
        self._looked = now
        ranks = self.live.ranks()
        timeout = limit(self.plan, ranks)
        found = find(ranks, self.plan.world_size, now=now, timeout=timeout, since=self._since)
        if found is None:
            self._withdraw()
            return
        if not self._asked:
            self._ask(found)
            self._deadline = now + STACKS_S
            return
        texts = _read(self.plan, self._run_dir, self._asked)
        if now >= self._deadline or set(found.still) <= set(texts):
            self._withdraw()
            raise failure(self.plan, found, ranks, texts)

    def _ask(self, found: Stall) -> None:
        self._asked = uuid.uuid4().hex
        logger.warning(
            "no rank has moved for %s: they are asked for their stacks", duration(found.seconds)
        )
        with suppress(OSError):
            storage.write_text(self._run_dir / requests.STACKS, self._asked)

    def _withdraw(self) -> None:
        if self._asked:
            self._asked = ""
            with suppress(OSError):
                (self._run_dir / requests.STACKS).unlink()


def _read(plan: RunPlan, run_dir: Path, asked: str) -> dict[int, str]:
    """The stacks that are there, by rank: those that were asked for, and watchdogs'."""
    texts = {}
    for path in (run_dir / "logs").glob("rank-*.stacks.txt"):
        with suppress(OSError):
            text = path.read_text(encoding="utf-8", errors="replace")
            found = re.match(rf"rank (\d+), attempt {plan.attempt}, (.*)", text)
            if found and (asked in found[2] or stacks.BY_WATCHDOG in found[2]):
                texts[int(found[1])] = text
    return texts


def failure(
    plan: RunPlan, found: Stall, ranks: Mapping[int, RankState], texts: Mapping[int, str]
) -> TrainingFailed:
    """The error for a run that stands still: the silent ranks by name, and where the others are."""
    places = {rank: _place(rank, ranks, texts) for rank in (*found.silent, *found.still)}
    suspects = suspected(found, places, texts)
    one = suspects[0] if len(suspects) == 1 or found.silent else None
    lines = [f"no rank has moved for {duration(found.seconds)} (cluster.stall_timeout)"]
    lines += [f"silent: {_told(rank, ranks, places, found)}" for rank in found.silent[:_NAMED]]
    if len(found.silent) > _NAMED:
        lines.append(f"silent: {len(found.silent) - _NAMED} more ranks")
    lines += _groups(found, ranks, places)
    known = ranks.get(one) if one is not None else None
    return TrainingFailed(
        "\n  ".join(lines),
        rank=one,
        host=known.host or None if known else None,
        step=max(0, known.step) if known else None,
        traceback=stacks.main_stack(texts[one]) if one is not None and one in texts else "",
        advice=_advice(plan, found, suspects, frozenset(texts)),
        cause="stalled",
    )


def suspected(found: Stall, places: Mapping[int, str], texts: Mapping[int, str]) -> tuple[int, ...]:
    """The ranks that the others wait for, as far as can be told: silent ones, else those that do
    not wait in a collective, else the few that are elsewhere than most."""
    if found.silent:
        return found.silent
    waiting = {
        rank
        for rank in found.still
        if _WAITING.search(places[rank]) or "torch/distributed/" in _innermost(texts.get(rank, ""))
    }
    others = tuple(rank for rank in found.still if rank not in waiting)
    if waiting and others:
        return others
    groups: dict[str, list[int]] = {}
    for rank in found.still:
        groups.setdefault(places[rank], []).append(rank)
    fewest = min(groups.values(), key=len)
    return tuple(fewest) if 2 * len(fewest) < len(found.still) else ()


def _innermost(text: str) -> str:
    """The last lines of the main thread's stack: where it is, and what it was called by."""
    return "\n".join(stacks.main_stack(text).splitlines()[-12:])


def _place(rank: int, ranks: Mapping[int, RankState], texts: Mapping[int, str]) -> str:
    """The rank's stack knows better: a rank that hangs in C code cannot say it."""
    told = stacks.place_in(texts[rank]) if rank in texts else ""
    return told or (ranks[rank].at if rank in ranks else "")


def _told(
    rank: int, ranks: Mapping[int, RankState], places: Mapping[int, str], found: Stall
) -> str:
    state = ranks.get(rank)
    if state is None:
        return f"rank {rank}, never heard"
    host = f" on {state.host}" if state.host else ""
    at = f", in {places[rank]}" if places[rank] else ""
    return f"rank {rank}{host}, last heard in {_phase(state)}, after step {max(0, state.step)}{at}"


def _phase(state: RankState) -> str:
    return f"phase '{state.phase or 'starting'}'"


def _groups(found: Stall, ranks: Mapping[int, RankState], places: Mapping[int, str]) -> list[str]:
    """The ranks that answer, those that are at the same place together, the fewest first."""
    groups: dict[tuple[str, int, str], list[int]] = {}
    for rank in found.still:
        state = ranks[rank]
        groups.setdefault((_phase(state), max(0, state.step), places[rank]), []).append(rank)
    lines = []
    for (phase, step, place), members in sorted(groups.items(), key=lambda item: len(item[1])):
        names = ", ".join(map(str, members[:_NAMED]))
        names += f" ... ({len(members)})" if len(members) > _NAMED else ""
        host = f" on {ranks[members[0]].host}" if len(members) == 1 else ""
        at = f", in {place}" if place else ""
        lines.append(f"rank{'s' if members[1:] else ''} {names}{host}: {phase}, step {step}{at}")
    more = len(lines) - _NAMED
    return lines[:_NAMED] + ([f"{more} more groups of ranks elsewhere"] if more > 0 else [])


def _advice(plan: RunPlan, found: Stall, suspects: tuple[int, ...], hanging: frozenset[int]) -> str:
    parts = []
    if set(found.silent) & hanging:
        parts.append(
            "a rank whose interpreter hangs is in a call of native code that never gives the "
            "interpreter back: its stack says in which"
        )
    elif found.silent:
        parts.append(
            "a silent rank does not even send its heartbeat: its process is stopped (SIGSTOP, a "
            "debugger), or its machine hangs, was lost or cut off; the others only wait for it"
        )
    elif suspects:
        named = ", ".join(map(str, suspects[:_NAMED]))
        parts.append(f"look at what rank {named} does: the others wait in a collective")
    folder = Path(plan.run_dir) / "logs"
    parts.append(f"the stacks of all ranks that answered are in {folder}/rank-*.stacks.txt")
    seconds = plan.config.cluster.stall_timeout
    parts.append(
        f"if this takes that long by its nature, raise cluster.stall_timeout (now {seconds:g} s)"
    )
    return "; ".join(parts)
