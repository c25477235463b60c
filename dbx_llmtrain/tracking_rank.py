"""What rank 0 logs to the MLflow run by itself."""

from __future__ import annotations

import logging
import os
import shlex
from functools import partial

from dbx_llmtrain.credentials import collect
from dbx_llmtrain.events import Event
from dbx_llmtrain.records import TrackingPlan
from dbx_llmtrain.tracking_courier import Courier
from dbx_llmtrain.tracking_sender import Sender
from dbx_llmtrain.tracking_store import Run

logger = logging.getLogger(__name__)


class RankTracker:
    """Rank 0's side: a thread logs the events, where the driver does not. Does nothing without a
    plan. No method raises or waits for the server, except ``close``, for at most its time-out.
    ``run_dir`` is where the events are kept as well.
    """

    def __init__(self, plan: TrackingPlan | None, run_dir: str = "") -> None:
        self._run_dir = run_dir
        self._courier: Courier | None = None
        if plan is not None and plan.by_rank:
            run = Run(plan.uri, plan.run_id)
            self._sender = Sender(run, collect(os.environ))
            self._courier = Courier(run, self._sender)

    def log(self, event: Event) -> None:
        """Hand an event over. When too many wait it is left out, and counted."""
        if self._courier is not None:
            self._courier.feed(partial(self._sender.add, event))

    def close(self, timeout: float = 30.0) -> bool:
        """Send what is left; whether all of it has been sent within ``timeout`` seconds. What has
        not been is told once, with how it can be sent later."""
        if self._courier is None or self._courier.settle(timeout, final=True):
            return True
        count, _ = self._courier.left_out()
        logger.warning("%s", later(self._run_dir, count, ()))
        return False


def later(run_dir: str, count: int, names: tuple[str, ...]) -> str:
    """What a run lacks in MLflow, and the command that makes up for it."""
    lacks = ", ".join([*([f"{count:,} values"] if count else []), *names]) or "the last values"
    return f"MLflow: the run lacks {lacks}; {how_to_send(run_dir)}"


def how_to_send(run_dir: str) -> str:
    """The command that logs what a run folder has, in a clause."""
    command = f"`dbx-llmtrain log {shlex.quote(run_dir)}`"
    return f"{command} (in a notebook llm.log) sends what is missing, once the server answers again"
