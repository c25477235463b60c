"""What is shown in a notebook: one block that is updated in place, for as long as a call lasts."""

from __future__ import annotations

import html
import time
from collections.abc import Callable
from typing import Any

from dbx_llmtrain import display_live
from dbx_llmtrain.driver.progress_views import Task

_FIRST_EVERY_S, _LAST_EVERY_S = 1.0, 10.0
_SHARE = 300
"""A block is drawn so often at most in the time that it has been there: a week is no more than some
ten thousands of drawings."""
_KEPT = 12
"""Tasks that are over and still told, at most."""


class HtmlView:
    """Tasks that are over in a line each, and the one that is shown now: training with its curves
    and ranks, everything else as a bar."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        from IPython.display import display

        self._display: Callable[..., Any] = display
        self._clock = clock
        self._handle: Any = None
        self._over: list[str] = []
        self._began = clock()
        self._drawn = float("-inf")
        self._task_began = 0.0

    def begin(self, task: Task) -> None:
        """Show another task."""
        self._task_began = self._clock()
        self._draw(task)

    def update(self, task: Task) -> None:
        """Show the task as it is now: once a second at most, later less often."""
        now = self._clock()
        every = min(_LAST_EVERY_S, max(_FIRST_EVERY_S, (now - self._began) / _SHARE))
        if now - self._drawn >= every:
            self._draw(task)

    def end(self, task: Task) -> None:
        """Leave it as it is at the end; a task that is followed by others is told in a line."""
        took = display_live.duration(self._clock() - self._task_began)
        how = "stopped after" if task.failed or task.phase == "failed" else "done in"
        line = f"{task.name}: {task.text()}, {how} {took}"
        if task.live is None:
            self._over = [*self._over, line][-_KEPT:]
            self._show("")
        else:
            self._draw(task)
            self._over = [*self._over, line][-_KEPT:]

    def close(self) -> None:
        """Nothing is left to do."""

    def _draw(self, task: Task) -> None:
        self._drawn = self._clock()
        text = f"{task.name}: {task.text()}"
        if task.live is not None:
            self._show(display_live.live_html(task.live()), text)
            return
        bar = display_live.bar_html(task.done / task.total) if task.total else ""
        self._show(display_live.block_html(f"<div>{html.escape(text)}</div>{bar}"), text)

    def _show(self, inner: str, text: str = "") -> None:
        over = "".join(f"<div>{html.escape(line)}</div>" for line in self._over)
        body = (f'<div style="color:#59626d">{over}</div>' if over else "") + inner
        if not inner:
            body = display_live.block_html(body)
        plain = "\n".join([*self._over, text]).strip()
        data = {"text/html": body, "text/plain": plain}
        if self._handle is None:
            self._handle = self._display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
