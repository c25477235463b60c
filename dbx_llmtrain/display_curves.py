"""A run's losses over its steps, of its events: SVG in a notebook, ASCII elsewhere."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dbx_llmtrain.display import number
from dbx_llmtrain.events import EVENTS_FILE, read_events

_WIDTH, _HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 40, 44
_COLOURS = ("#8a94a0", "#0a5bd3", "#c2410c", "#15803d", "#7e22ce", "#0e7490")
_COLUMNS, _LINES = 64, 12
_SIGNS = ".o*+x#"
TRAINING = "loss"
"""The loss of the steps themselves; the others are of held-out rows."""
BEST = "best_"
"""What the losses of the best model begin with: numbers of the result, and no curves."""
_POINTS = 800
"""Points of a curve that are drawn at most."""
_Scale = Callable[[float], float]
T = TypeVar("T")


@dataclass(frozen=True)
class Curve:
    """A loss by steps, in their order."""

    name: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True, repr=False)
class Curves:
    """The losses of a run; its checkpoints by their steps, those that are still there and those
    that are not."""

    title: str
    curves: tuple[Curve, ...]
    kept: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return _text(self)

    def _repr_svg_(self) -> str:
        return _svg(self)

    def _repr_html_(self) -> str:
        return f"<div>{_svg(self)}</div>"


def read_curves(run_dir: str, run_name: str) -> Curves:
    """The curves of a run folder. What a later attempt did again takes the place of what it was.

    A value that is not a number is left out, as are metrics that are no loss.
    """
    found: dict[str, dict[int, float]] = {}
    saved: dict[int, Path] = {}
    for event in read_events(Path(run_dir) / EVENTS_FILE):
        if event.kind == "started":
            found = {name: _until(event.step, values) for name, values in found.items()}
            saved = _until(event.step, saved)
        elif event.kind == "checkpoint" and "path" in event.data:
            saved[event.step] = Path(event.data["path"])
        elif event.kind in ("step", "eval"):
            for name, value in event.metrics.items():
                drawn = name.endswith("loss") and not name.startswith(BEST)
                if drawn and math.isfinite(value):
                    found.setdefault(name, {})[event.step] = value
    kept = tuple(step for step, path in sorted(saved.items()) if path.is_dir())
    return Curves(
        title=f"Losses of {run_name}",
        curves=tuple(
            Curve(name, tuple(sorted(found[name].items())))
            for name in sorted(found, key=lambda name: (name != TRAINING, name))
            if found[name]
        ),
        kept=kept,
        gone=tuple(step for step in sorted(saved) if step not in kept),
    )


def _until(last: int, values: dict[int, T]) -> dict[int, T]:
    return {step: value for step, value in values.items() if step <= last}


def _ranges(curves: Sequence[Curve], room: float) -> tuple[float, float, float, float]:
    """First and last step, lowest and highest loss with ``room`` (a share) around them; none is
    empty."""
    points = [point for curve in curves for point in curve.points]
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high = min(values), max(values)
    around = (high - low) * room if high > low else abs(high) * 0.05 or 1.0
    return min(steps), max(max(steps), min(steps) + 1), low - around, high + around


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Every n-th point and the last."""
    every = math.ceil(len(points) / _POINTS)
    return [*points[:-1:every], points[-1]]


def _text(plot: Curves) -> str:
    if not plot.curves:
        return f"{plot.title}: no step has been reported yet"
    first, last, low, high = _ranges(plot.curves, 0.0)
    canvas = [[" "] * _COLUMNS for _ in range(_LINES)]
    for place, curve in enumerate(plot.curves):
        for step, value in curve.points:
            column = round((step - first) / (last - first) * (_COLUMNS - 1))
            line = round((high - value) / (high - low) * (_LINES - 1))
            canvas[line][column] = _SIGNS[place % len(_SIGNS)]
    labels = {0: f"{high:.4g}", _LINES // 2: f"{(low + high) / 2:.4g}", _LINES - 1: f"{low:.4g}"}
    left = max(map(len, labels.values()))
    lines = [
        f"{labels.get(place, ''):>{left}} |{''.join(line)}".rstrip()
        for place, line in enumerate(canvas)
    ]
    begin, end = number(int(first)), f"step {number(int(last))}"
    legend = "   ".join(
        f"{_SIGNS[place % len(_SIGNS)]} {curve.name} {curve.points[-1][1]:.4g}"
        for place, curve in enumerate(plot.curves)
    )
    lines += [
        " " * left + " +" + "-" * _COLUMNS,
        " " * (left + 2) + begin + end.rjust(_COLUMNS - len(begin)),
        " " * (left + 2) + legend,
    ]
    if plot.kept:
        lines.append(" " * (left + 2) + f"checkpoints: {', '.join(map(number, plot.kept))}")
    return "\n".join([plot.title, *lines])


def _svg(plot: Curves) -> str:
    parts = [
        f'<text x="{_LEFT}" y="18" font-weight="bold" font-size="13">'
        f"{html.escape(plot.title)}</text>"
    ]
    if plot.curves:
        parts += _drawing(plot)
    else:
        parts.append(f'<text x="{_LEFT}" y="60">no step has been reported yet</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="system-ui,sans-serif" font-size="11" '
        f'fill="#1f2328"><rect width="100%" height="100%" fill="#ffffff"/>{"".join(parts)}</svg>'
    )


def _drawing(plot: Curves) -> list[str]:
    first, last, low, high = _ranges(plot.curves, 0.05)
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    base = _TOP + tall

    def x(step: float) -> float:
        return round(_LEFT + (step - first) / (last - first) * wide, 1)

    def y(value: float) -> float:
        return round(_TOP + (high - value) / (high - low) * tall, 1)

    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        value, step = low + share * (high - low), first + share * (last - first)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + wide}" y1="{y(value)}" y2="{y(value)}" '
            f'stroke="#dde2e7"/><text x="{_LEFT - 6}" y="{y(value) + 4}" text-anchor="end">'
            f'{value:.3g}</text><text x="{x(step)}" y="{base + 26}" text-anchor="middle">'
            f"{number(round(step))}</text>"
        )
    for steps, fill in ((plot.kept, "#1f2328"), (plot.gone, "#ffffff")):
        parts += [
            f'<circle cx="{x(step)}" cy="{base + 8}" r="3.5" fill="{fill}" stroke="#1f2328">'
            f"<title>checkpoint of step {step}</title></circle>"
            for step in steps
            if first <= step <= last
        ]
    for place, curve in enumerate(plot.curves):
        parts += _curve(curve, _COLOURS[place % len(_COLOURS)], place, x, y)
    parts.append(
        f'<text x="{_LEFT + wide / 2}" y="{_HEIGHT - 4}" text-anchor="middle">step (dots: '
        "checkpoints, filled where they are still there)</text>"
    )
    return parts


def _curve(curve: Curve, colour: str, place: int, x: _Scale, y: _Scale) -> list[str]:
    """The line of a curve, a dot for each point where they are few, and its name above."""
    points = _thinned(curve.points)
    path = " ".join(f"{x(step)},{y(value)}" for step, value in points)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>']
    if len(points) <= 60:
        parts += [
            f'<circle cx="{x(step)}" cy="{y(value)}" r="2.2" fill="{colour}">'
            f"<title>{html.escape(curve.name)} {value:.4g}, step {step}</title></circle>"
            for step, value in points
        ]
    name = html.escape(f"{curve.name} {curve.points[-1][1]:.4g}")
    left = _LEFT + 150 * (place % 4)
    line = 32 + 11 * (place // 4)
    parts.append(f'<text x="{left}" y="{line}" fill="{colour}">&#9644; {name}</text>')
    return parts
