"""Writing checkpoints while training goes on.

At a step's end every rank copies its part to host memory, which is all that training waits for. A
thread then writes it to local disk and copies the files to shared storage, in a process group of
its own; rank 0 writes the manifest when all have, and deletes what is not kept. One checkpoint at
most is on its way. One that fails does not end the run: it is told, and its folder is gone.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dbx_llmtrain import compat, storage
from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import keeping, writing
from dbx_llmtrain.worker.checkpoint import stored_tensors, together
from dbx_llmtrain.worker.rng import random_states
from dbx_llmtrain.worker.snapshot import Snapshot
from dbx_llmtrain.worker.world import World

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""How long a run that failed waits for the checkpoint on its way."""

_LONGEST = timedelta(minutes=30)
"""How much longer than another one a rank may take to write its part."""

_WRITTEN_BY = ("dbx_llmtrain", "torch", "transformers")


@dataclass(frozen=True)
class Saved:
    """What came of a checkpoint, the same on every rank; an empty ``error``: it is complete.

    ``seconds_stalled`` is what training waited for it, ``seconds`` the time until it was complete,
    both of rank 0; ``bytes`` are those of all files.
    """

    folder: Path
    step: int
    error: str = ""
    seconds_stalled: float = 0.0
    seconds: float = 0.0
    bytes: int = 0


@contextmanager
def saving(
    plan: RunPlan,
    world: World,
    scratch: Path,
    *,
    tell: Callable[[Saved], None],
    publish: Callable[[], None] = lambda: None,
) -> Iterator[Saver]:
    """A ``Saver`` for a run; all ranks call it. ``scratch`` is on local disk, ``tell`` hears what
    came of each checkpoint, in this thread. ``publish`` is called in another one, on rank 0, before
    a checkpoint is complete: what was said of the run by then is not to be lost.

    At the end the checkpoint on its way is waited for; after an exception for ``PATIENCE_S``
    seconds, and then it is given up and its folder removed.
    """
    saver = Saver(plan, world, scratch, tell, publish)
    try:
        yield saver
    except BaseException:
        saver.give_up()
        raise
    saver.close()


class Saver:
    """Writes the checkpoints of a run. All ranks call its methods, at the same steps."""

    def __init__(
        self,
        plan: RunPlan,
        world: World,
        scratch: Path,
        tell: Callable[[Saved], None],
        publish: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._run_dir = storage.local_path(plan.run_dir)
        self._world = world
        self._scratch = scratch
        self._tell = tell
        self._publish = publish
        self._snapshot = Snapshot(world)
        self._group = _own_group()
        self._under_way: _Write | None = None
        self._last: Saved | None = None
        self._newest: Saved | None = None

    def save(
        self,
        folder: Path,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
        identity: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> None:
        """Begin to write the checkpoint of this moment into ``folder``, when the one before is
        done.

        ``state`` (JSON, with the ``step``) is what ``checkpoint.load`` returns, ``identity`` (JSON)
        what a run that goes on must have in common with this one, ``metrics`` what it is judged by.
        Does not raise for what goes wrong with storage or memory: see ``Saved.error``.
        """
        began = time.monotonic()
        self.wait()
        saved = Saved(folder, int(state.get("step", 0)))
        manifest = self._description() | {
            "step": saved.step,
            "metrics": dict(metrics),
            "state": dict(state),
            "identity": dict(identity),
            "groups": [_settings(group) for group in optimizer.param_groups],
        }
        # As text: what it is made of changes while it is written.
        contents = writing.Contents(
            self._snapshot, json.dumps(random_states(self._world.device)), json.dumps(manifest)
        )

        def copy() -> writing.Room:
            self._snapshot.take(stored_tensors(model, optimizer))
            return writing.measure(contents, self._world.node, self._scratch, self._run_dir)

        try:
            what = f"the checkpoint {folder} cannot be copied to memory"
            rooms = together(copy, self._world, what)
            writing.check_room(rooms, folder, self._run_dir, self._scratch)
        except CheckpointError as error:
            took = time.monotonic() - began
            self._conclude(replace(saved, error=str(error), seconds_stalled=took, seconds=took))
            return
        saved = replace(saved, seconds_stalled=time.monotonic() - began)
        self._under_way = _Write(
            saved, began, lambda given_up: self._write(saved, contents, given_up)
        )

    def poll(self) -> None:
        """On rank 0, tell of the checkpoint on its way if it is done. Waits for nothing, and need
        not be called by all ranks."""
        write = self._under_way
        if self._world.rank == 0 and write is not None and write.done and not write.told:
            write.told = True
            self._tell(write.outcome)

    def wait(self) -> Saved | None:
        """What came of the checkpoint on its way, when it is done, or of the last one."""
        if self._under_way is not None:
            self._under_way.join()
            self._agree(self._under_way)
        return self._last

    @property
    def busy(self) -> bool:
        """Whether this rank is writing one."""
        return self._under_way is not None and not self._under_way.done

    def newest(self) -> Saved | None:
        """The last one that is complete, as of the last ``save`` or ``wait``."""
        return self._newest

    def close(self) -> None:
        """Wait for the checkpoint on its way, and leave the process group."""
        self.wait()
        dist.destroy_process_group(self._group)

    def give_up(self) -> None:
        """Wait for ``PATIENCE_S`` seconds at most; what is then not complete is removed."""
        write = self._under_way
        if write is None:
            return
        write.join(PATIENCE_S)
        self.poll()
        if not write.done:
            write.given_up.set()
            if self._world.rank == 0:
                storage.remove(write.outcome.folder)

    def _agree(self, write: _Write) -> None:
        """All ranks take what rank 0 found: it has written the manifest, or not. A process group
        that broke, as a rank took too long, is replaced."""
        everyone: list[Any] = [None] * self._world.size
        dist.all_gather_object(everyone, (write.outcome, write.broken))
        self._under_way = None
        if any(broken for _, broken in everyone):
            self._group = _own_group()
        self._conclude(everyone[0][0], told=write.told)

    def _conclude(self, saved: Saved, *, told: bool = False) -> None:
        self._last = saved
        if not saved.error:
            self._newest = saved
        if not told:
            self._tell(saved)

    def _description(self) -> dict[str, Any]:
        """What a manifest says of the run."""
        plan = self._plan
        return {
            "config": plan.config.to_dict(),
            "strategy": plan.strategy,
            "fingerprints": {
                "model": plan.model.artifact.fingerprint,
                "data": plan.data.artifact.fingerprint,
            },
            "world_size": self._world.size,
            "versions": {name: str(compat.installed(name)) for name in _WRITTEN_BY},
        }

    def _write(self, saved: Saved, contents: writing.Contents, given_up: threading.Event) -> int:
        """In the thread: write the checkpoint, and delete those that are no longer kept. Returns
        its bytes."""
        if self._world.rank == 0:
            self._publish()
        size = writing.write(
            saved.folder,
            contents,
            world=self._world,
            group=self._group,
            scratch=self._scratch,
            given_up=given_up,
        )
        if self._world.rank == 0:
            keeping.prune(self._run_dir, self._plan.config.checkpoint, protect=[saved.folder])
        return size


class _Write:
    """A checkpoint on its way: its thread, and then what came of it.

    ``broken``: the ranks could not agree, as one of them took too long or is no more.
    """

    def __init__(
        self, saved: Saved, began: float, action: Callable[[threading.Event], int]
    ) -> None:
        self.outcome = replace(saved, error="it was never completed")
        self.broken = False
        self.told = False
        self.given_up = threading.Event()
        self._began = began
        self._action = action
        # A daemon: a process that has to end does not wait for storage that does not answer.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether ``outcome`` is final."""
        return not self._thread.is_alive()

    def join(self, patience_s: float | None = None) -> None:
        """Wait until it is done, or for so long."""
        self._thread.join(patience_s)

    def _run(self) -> None:
        found: dict[str, Any]
        try:
            found = {"bytes": self._action(self.given_up), "error": ""}
        except CheckpointError as error:
            found = {"error": str(error)}
        except Exception as error:
            logger.debug("the ranks cannot agree on a checkpoint", exc_info=True)
            self.broken = True
            found = {"error": f"the ranks cannot agree: {type(error).__name__}: {error}"}
        self.outcome = replace(self.outcome, seconds=time.monotonic() - self._began, **found)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Those of an optimizer's group of parameters."""
    return {
        key: value
        for key, value in group.items()
        if isinstance(value, int | float | str | tuple | None)
    }


def _own_group() -> dist.ProcessGroup:
    """A process group for host memory that nothing else uses."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_LONGEST)
    return group
