"""How much memory of its own a rank takes to load a model of some size, and how much it reads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dbx_llmtrain.worker.loss import LossModule
from dbx_llmtrain.worker.parallel import make_strategy
from dbx_llmtrain.worker.weights import Fill
from tests import sample
from tests.dist.runs import Context


def anonymous() -> int:
    """Bytes of memory that belong to no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return int(kilobytes) * 1024


@contextmanager
def peak() -> Iterator[list[int]]:
    """The most that is taken within, looked at every two milliseconds."""
    found, over = [anonymous()], threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            found[0] = max(found[0], anonymous())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
        found[0] = max(found[0], anonymous())


def loading(context: Context, init: str) -> dict[str, Any]:
    gc.collect()
    model = {"source": "/x", "init": init}
    plan = sample.run_plan(config=sample.config(model=model), attention="sdpa")
    before = anonymous()
    with peak() as most:
        fill = Fill(plan, context.folder.parent / "model", context.world)
        strategy = make_strategy(
            context.parallel.kind, context.world, "fp32", parallel=context.parallel
        )
        strategy.wrap(LossModule(fill.build()), fill)
    return {
        "taken": context.gather(most[0] - before),
        "asked": context.gather(fill.requested),
    }


CASES = {
    "pretrained": lambda context: loading(context, "pretrained"),
    "random": lambda context: loading(context, "random"),
}
