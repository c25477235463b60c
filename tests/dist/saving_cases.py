"""What two ranks do while a checkpoint is being written, under every kind of strategy.

The run folder has the rules of a volume where there is a compiler to build them (``volumes``); a
gate then holds the writing up for as long as a case wants.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dbx_llmtrain import storage
from dbx_llmtrain.worker import checkpoint
from dbx_llmtrain.worker.saving import Saved, Saver, saving
from tests import sample, volumes
from tests.dist.checkpoint_cases import (
    IDENTITY,
    advance,
    draws,
    equal,
    everything,
    load,
    make,
    shared,
)
from tests.dist.runs import Context, Run

STRATEGIES = ("ddp", "fsdp", "zero2", "zero3")
ONE = "fsdp"
"""The strategy for what does not depend on it."""


def run_dir(context: Context, name: str) -> Path:
    """A run folder by the rules of a volume, where there is one."""
    volume = volumes.current()
    folder = (volume.folder if volume else shared(context) / "volume") / context.strategy / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def opened(
    context: Context, run: Run, name: str, *, scratch: Path | None = None, **policy: Any
) -> Iterator[tuple[Saver, Path, list[Saved]]]:
    """A saver for a run, its folder, and what it tells."""
    folder, told = run_dir(context, name), list[Saved]()
    config = sample.config(
        data={"train": "/data/train.jsonl", "eval": 0.1},
        train={"eval_every": 1},
        checkpoint=policy,
    )
    plan = run.plan.model_copy(update={"run_dir": str(folder), "config": config})
    scratch = scratch or context.folder / "scratch"
    with saving(plan, context.world, scratch, tell=told.append) as saver:
        yield saver, folder, told


def begin(saver: Saver, run: Run, folder: Path, step: int, **metrics: float) -> None:
    """Begin to save the run as it is after ``step``."""
    saver.save(
        storage.checkpoint_folder(folder, step),
        model=run.model,
        optimizer=run.optimizer,
        state={"step": step},
        identity=IDENTITY,
        metrics=metrics,
    )


@contextmanager
def held(context: Context, path: str = "gate") -> Iterator[None]:
    """Writing to the volume waits meanwhile (``full``: finds no room). Without a volume it goes
    on."""
    volume = volumes.current()
    file = getattr(volume, path) if volume else None
    dist.barrier()
    if file is not None and context.world.rank == 0:
        file.touch()
    dist.barrier()
    try:
        yield
    finally:
        dist.barrier()
        if file is not None and context.world.rank == 0:
            file.unlink()
        dist.barrier()


def moment(context: Context) -> dict[str, Any]:
    """Three steps, a checkpoint, and two steps more while it is written; then the same two by a run
    that goes on from it."""
    run = make(context, context.strategy)
    advance(run, 0, 3)
    stored = everything(run)
    with opened(context, run, "moment") as (saver, folder, told):
        with held(context):
            torch.manual_seed(100 + context.world.rank)
            begin(saver, run, folder, 3, eval_loss=2.5)
            rest = advance(run, 3, 5)
            drawn = draws()
            busy, early = saver.busy, list(told)
            saver.poll()
        saved = saver.wait()
        assert saved is not None
        newest = saver.newest()
    if context.world.rank == 0:
        torch.save(stored, shared(context) / f"{context.strategy}.pt")
    again = make(context, context.strategy, seed=5)
    state = load(again, saved.folder)
    at_load = equal(everything(again), stored)
    return {
        "busy": context.gather(busy and not early),
        "saved": context.gather(asdict(saved) | {"folder": str(saved.folder)}),
        "newest": newest == saved,
        "told": context.gather([one == saved for one in told]),
        "at_load": context.gather(at_load),
        "state": state,
        "rest": context.gather(advance(again, 3, 5) == rest),
        "end": context.gather(equal(everything(again), everything(run))),
        "draws": context.gather(draws() == drawn),
        "left": left(context),
    }


def left(context: Context) -> list[list[str]]:
    """What is on the local disk of every rank."""
    scratch = context.folder / "scratch"
    return context.gather([p.name for p in scratch.iterdir()] if scratch.is_dir() else [])


def in_turn(context: Context) -> dict[str, Any]:
    """Four checkpoints one after the other, of which the last and the best stay."""
    run = make(context, context.strategy)
    losses = [3.0, 1.0, 2.0, 4.0]
    with opened(context, run, "turn", keep_last=1, keep_best=1) as (saver, folder, told):
        for step, loss in enumerate(losses, 1):
            advance(run, step - 1, step)
            begin(saver, run, folder, step, eval_loss=loss)
        kept = everything(run)
        last = saver.wait()
    again = make(context, context.strategy, seed=5)
    load(again, storage.checkpoint_folder(folder, 4))
    return {
        "told": context.gather([(one.step, one.error) for one in told]),
        "last": last == told[-1],
        "kept": [path.name for path in storage.checkpoints(folder)],
        "torn": [path.name for path in storage.torn(folder)],
        "faults": [storage.verify(path) for path in storage.checkpoints(folder)],
        "equal": context.gather(equal(everything(again), kept)),
        "sizes": [one.bytes for one in told],
    }


def failing(context: Context) -> dict[str, Any]:
    """One rank's local disk, then its files' size, then shared storage fails, in the middle; each
    time training goes on, and so does saving."""
    run = make(context, context.strategy)
    scratch = context.folder / "scratch-of-this"
    if context.world.rank == 1:
        scratch.touch()
    found = {}
    with opened(context, run, "failing", scratch=scratch) as (saver, folder, told):
        begin(saver, run, folder, 1)
        losses = advance(run, 0, 1)
        found["scratch"] = saver.wait()
        if context.world.rank == 1:
            scratch.unlink()
        with file_size(2000 if context.world.rank == 1 else None):
            begin(saver, run, folder, 2)
            losses += advance(run, 1, 2)
            found["size"] = saver.wait()
        with held(context, "full"):
            begin(saver, run, folder, 3)
            losses += advance(run, 2, 3)
            found["full"] = saver.wait()
        begin(saver, run, folder, 4)
        losses += advance(run, 3, 4)
        found["then"] = saver.wait()
        newest = saver.newest()
    return {
        "errors": {name: context.gather(saved and saved.error) for name, saved in found.items()},
        "told": context.gather([one.error for one in told]),
        "folders": sorted(path.name for path in (folder / "checkpoints").iterdir()),
        "newest": newest.step if newest else None,
        "losses": context.gather(losses == advance(make(context, context.strategy), 0, 4)),
        "left": context.gather([path.name for path in scratch.iterdir()]),
    }


@contextmanager
def file_size(limit: int | None) -> Iterator[None]:
    """This process cannot write a file of more than so many bytes."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def broken(context: Context) -> dict[str, Any]:
    """The connection between the savers breaks, and the one between the trainers does not."""
    if context.strategy != ONE:
        return {}
    run = make(context, context.strategy)
    before = sockets()
    with opened(context, run, "broken") as (saver, folder, told):
        dist.barrier()
        if context.world.rank == 1:
            cut = [number for number in sockets() - before if shut_down(number)]
        dist.barrier()
        began = time.monotonic()
        begin(saver, run, folder, 1)
        saver.wait()
        took = time.monotonic() - began
        folders = [path.name for path in (folder / "checkpoints").glob("*")]
        begin(saver, run, folder, 2)
        saver.wait()
    return {
        "errors": context.gather([one.error for one in told]),
        "cut": sum(context.gather(len(cut) if context.world.rank == 1 else 0)),
        "seconds": max(context.gather(took)),
        "folders": folders,
        "complete": [path.name for path in storage.checkpoints(folder)],
    }


def sockets() -> set[int]:
    """The sockets of this process."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith("socket:"):
                found.add(int(link.name))
    return found


def shut_down(number: int) -> bool:
    """Break a socket's connection. Whether it had one."""
    with socket.socket(fileno=os.dup(number)) as end:
        try:
            end.getpeername()
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True


def given_up(context: Context) -> dict[str, Any]:
    """A run fails while a checkpoint is on its way, which storage holds up for longer than anybody
    waits; and one that comes through in time."""
    if context.strategy != ONE:
        return {}
    run = make(context, context.strategy)
    seconds, folders = [], []
    for name, gate in (("slow", True), ("quick", False)):
        with held(context) if gate else contextlib.nullcontext():
            with contextlib.suppress(ZeroDivisionError):
                with opened(context, run, name) as (saver, folder, told):
                    begin(saver, run, folder, 1)
                    began = time.monotonic()
                    raise ZeroDivisionError
            seconds.append(time.monotonic() - began)
            dist.barrier()
            folders.append(sorted(path.name for path in (folder / "checkpoints").glob("*")))
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join(20)
        dist.barrier()
        folders.append(sorted(path.name for path in (folder / "checkpoints").glob("*")))
    return {
        "seconds": context.gather(seconds),
        "folders": folders,
        "told": context.gather([(one.step, one.error) for one in told]),
    }


def weights(context: Context) -> dict[str, Any]:
    """The weights alone of every strategy's checkpoint so far."""
    found = {}
    files = {name: shared(context) / f"{name}.pt" for name in STRATEGIES}
    for origin in [name for name, file in files.items() if file.exists()]:
        stored = torch.load(files[origin])
        folder = run_dir(context, "").parent / origin / "moment"
        run = make(context, context.strategy, seed=9)
        fresh = everything(run)
        checkpoint.load_weights(
            storage.checkpoint_folder(folder, 3), model=run.model, world=run.world
        )
        now = everything(run)
        expected = {name: value for name, value in stored.items() if name.startswith("model.")}
        ours = {name: value for name, value in now.items() if name.startswith("model.")}
        others = {name: value for name, value in now.items() if not name.startswith("model.")}
        untouched = {name: value for name, value in fresh.items() if name in others}
        found[origin] = context.gather(equal(ours, expected) and equal(others, untouched))
    return found


CASES: dict[str, Callable[[Context], dict[str, Any]]] = {
    case.__name__: case for case in (moment, in_turn, failing, broken, given_up, weights)
}
