"""A run while it lasts, as text and as one block of a notebook. Pure, and of bounded size.

Every text is escaped, there are no scripts. The colours are set together with their background, so
that they can be read in light and dark notebooks.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from dbx_llmtrain.display import many, number, size
from dbx_llmtrain.display_curves import Curve, Curves
from dbx_llmtrain.live_state import ENDS, LATE_S, SILENT_S, RankRow, Snapshot

CELLS = 64
"""Ranks that have a cell of their own; more of them share one."""
_MOST_CELLS = 256
_NAMED = 4
_SLOW = 1.25
"""A rank is slow whose work takes so many times as long as that of the one in the middle."""
_WAITS = 0.1
"""Data are slow when a rank waits for them for so much of a step."""
_FINE, _LATE, _SILENT, _OVER = "#1a7f37", "#bf8700", "#cf222e", "#8a94a0"
_BLOCK = (
    "background:#ffffff;color:#1f2328;border:1px solid #c4cad1;border-radius:6px;padding:10px 14px;"
    "font:13px/1.5 system-ui,sans-serif;text-align:left;max-width:760px"
)
_GREY = "color:#59626d"
_CELL = (
    "display:inline-block;margin:1px;border-radius:2px;color:#ffffff;font-size:11px;"
    "text-align:center;"
)
_NAMED_CELL, _SMALL_CELL = "min-width:22px;line-height:18px", "width:8px;height:14px"


def duration(seconds: float) -> str:
    """Seconds in a unit for people: ``4.2 s``, ``40 s``, ``14 min``, ``2 h 5 min``."""
    whole = max(0, round(seconds))
    if whole < 10:
        return f"{max(0.0, seconds):.1f} s"
    if whole < 90:
        return f"{whole} s"
    minutes = round(whole / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60:,} h {minutes % 60} min"


def slow_notes(metrics: dict[str, float]) -> list[str]:
    """Who or what makes the others wait, by the ranks' own times."""
    notes = []
    step = metrics.get("seconds_per_step", 0.0)
    waited = metrics.get("data_wait_seconds", 0.0)
    if step and waited > _WAITS * step:
        notes.append(f"waits {waited:.2g} s of {step:.2g} s a step for data")
    slowest, median = metrics.get("slowest_rank_seconds"), metrics.get("median_rank_seconds")
    if slowest and median and slowest > _SLOW * median and "slowest_rank" in metrics:
        notes.append(
            f"rank {metrics['slowest_rank']:.0f} is slow: {slowest:.2g} s a step, others "
            f"{median:.2g} s"
        )
    return notes


def live_text(shown: Snapshot) -> str:
    """The run in a few lines."""
    lines = [f"{shown.run_name}: {_where(shown)}"]
    lines += [f"  {line}" for line in (_numbers(shown), *slow_notes(shown.metrics)) if line]
    if shown.saved_step is not None:
        lines.append(f"  {_saved(shown)}")
    lines += [f"  {line}" for line in _rank_lines(shown)]
    if shown.curves:
        plot = repr(_curves(shown)).split("\n", 1)[-1]
        lines += [f"  {line}" for line in plot.splitlines()]
    return "\n".join(lines)


def live_html(shown: Snapshot) -> str:
    """The run as one block."""
    head = f"<b>{html.escape(shown.run_name)}</b>: {html.escape(_where(shown))}"
    parts = [f"<div>{head}</div>"]
    if shown.total:
        parts.append(bar_html(shown.step / shown.total))
    for line in (_numbers(shown), *slow_notes(shown.metrics)):
        parts += [f"<div>{html.escape(line)}</div>"] if line else []
    if shown.saved_step is not None:
        parts.append(f'<div style="{_GREY}">{html.escape(_saved(shown))}</div>')
    if shown.ranks:
        parts.append(_strip(shown))
        parts += [f'<div style="{_GREY}">{html.escape(line)}</div>' for line in _rank_lines(shown)]
    if shown.curves:
        parts.append(_curves(shown)._repr_svg_())
    return block_html("".join(parts))


def block_html(inner: str) -> str:
    """The frame around what is shown."""
    return f'<div class="dbx-live" style="{_BLOCK}">{inner}</div>'


def bar_html(share: float) -> str:
    """A bar that is filled by ``share``."""
    percent = 100 * min(1.0, max(0.0, share))
    return (
        '<div class="bar" style="background:#e6eaef;height:8px;border-radius:4px;margin:4px 0">'
        f'<div style="background:#0a5bd3;height:8px;border-radius:4px;width:{percent:.1f}%"></div>'
        "</div>"
    )


def _where(shown: Snapshot) -> str:
    parts = [shown.ended or shown.phase]
    if shown.total:
        parts.append(f"step {number(shown.step)} of {number(shown.total)}")
    if shown.seconds_left is not None and not shown.ended:
        about = "about " if shown.estimated else ""
        by = " by the plan's estimate" if shown.estimated else ""
        parts.append(f"{about}{duration(shown.seconds_left)} left{by}")
    return ", ".join(parts)


def _numbers(shown: Snapshot) -> str:
    metrics = shown.metrics
    parts = [f"{name} {metrics[name]:.4g}" for name in ("loss", "eval_loss") if name in metrics]
    if "learning_rate" in metrics:
        parts.append(f"learning rate {metrics['learning_rate']:.3g}")
    if metrics.get("tokens_per_second"):
        parts.append(f"{metrics['tokens_per_second']:,.0f} tokens/s")
    if metrics.get("seconds_per_step"):
        parts.append(f"{metrics['seconds_per_step']:.3g} s a step")
    if shown.mfu is not None:
        parts.append(f"MFU {shown.mfu:.0%}")
    if metrics.get("memory_bytes"):
        parts.append(f"memory {size(metrics['memory_bytes'])}")
    return ", ".join(parts)


def _saved(shown: Snapshot) -> str:
    ago = duration(max(0.0, shown.now - (shown.saved_at or shown.now)))
    return f"checkpoint of step {number(shown.saved_step)}, complete {ago} ago"


def _curves(shown: Snapshot) -> Curves:
    found = tuple(Curve(name, points) for name, points in shown.curves.items() if points)
    return Curves("Losses", found)


def _age(row: RankRow, now: float) -> float:
    return 0.0 if row.phase in ENDS else max(0.0, now - row.heard)


def _rank_lines(shown: Snapshot) -> list[str]:
    """How many ranks are at what, and those of which nothing was heard for long."""
    groups: dict[tuple[str, int], int] = {}
    for row in shown.ranks:
        groups[row.phase, row.step] = groups.get((row.phase, row.step), 0) + 1
    common = sorted(groups.items(), key=lambda item: -item[1])
    told = [f"{count} {phase} (step {number(step)})" for (phase, step), count in common[:_NAMED]]
    told += ["others elsewhere"] if len(common) > _NAMED else []
    lines = [f"{many(shown.world_size, 'rank')}: {', '.join(told)}"] if told else []
    if shown.ended:
        return lines
    late = [row for row in shown.ranks if _age(row, shown.now) > LATE_S]
    late.sort(key=lambda row: row.heard)
    for row in late[:_NAMED]:
        host = f" on {row.host}" if row.host else ""
        at = f", in {row.at}" if row.at else ""
        lines.append(
            f"rank {row.rank}{host}: not heard for {duration(_age(row, shown.now))} "
            f"({row.phase}, step {number(row.step)}{at})"
        )
    if len(late) > _NAMED:
        lines.append(f"{len(late) - _NAMED} more ranks not heard for {duration(LATE_S)}")
    return lines


def _strip(shown: Snapshot) -> str:
    """A cell for each rank, or for as many of many ranks as fit, coloured by its worst."""
    rows = shown.ranks
    each = 1 if len(rows) <= CELLS else -(-len(rows) // _MOST_CELLS)
    groups = [rows[start : start + each] for start in range(0, len(rows), each)]
    cells = "".join(_cell(group, shown, named=len(rows) <= CELLS) for group in groups)
    look = _NAMED_CELL if len(rows) <= CELLS else _SMALL_CELL
    style = f"<style>.dbx-live .ranks span{{{_CELL}{look}}}</style>"
    return f'{style}<div class="ranks" style="margin:6px 0;line-height:0">{cells}</div>'


def _cell(rows: Sequence[RankRow], shown: Snapshot, *, named: bool) -> str:
    worst = max(rows, key=lambda row: _age(row, shown.now))
    age = _age(worst, shown.now)
    colour = _SILENT if age > SILENT_S else _LATE if age > LATE_S else _FINE
    if shown.ended or all(row.phase in ENDS for row in rows):
        colour = _OVER
    first, last = rows[0].rank, rows[-1].rank
    name = f"rank {first}" if first == last else f"ranks {first} to {last}, the worst {worst.rank}"
    heard = "" if colour == _OVER else f", heard {duration(age)} ago"
    title = f"{name}: {worst.phase}, step {worst.step}{heard}"
    slow = first <= shown.metrics.get("slowest_rank", -1) <= last and slow_notes(shown.metrics)
    edge = ";outline:2px solid #bf8700" if slow else ""
    return (
        f'<span title="{html.escape(title)}" style="background:{colour}{edge}">'
        f"{first if named else ''}</span>"
    )
