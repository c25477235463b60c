"""What a cluster, data and a result look like in a terminal and in a notebook. Pure.

A page is a title with parts: sentences, and tables whose last column may be long. The same page
becomes ASCII text or escaped HTML.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dbx_llmtrain.records import Audit, PreparedData, TrainResult
from dbx_llmtrain.reports import ClusterReport, GpuInfo, NodeReport

_WIDTH = 100
_BAR = 40
_FIRST_METRICS = (
    *("initial_eval_loss", "eval_loss", "eval_perplexity", "best_eval_loss"),
    *("best_eval_perplexity", "test_loss", "test_perplexity", "best_test_loss"),
    *("best_test_perplexity", "train_loss", "tokens_per_second"),
)


@dataclass(frozen=True)
class Table:
    """Rows of text cells. ``headers`` may be empty: then the first column names the row."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Page:
    """A title, and sentences and tables in order."""

    title: str
    parts: tuple[str | Table, ...]


def cluster_text(report: ClusterReport) -> str:
    """The cluster as ASCII text."""
    return page_text(_cluster(report))


def cluster_html(report: ClusterReport) -> str:
    """The cluster as HTML."""
    return page_html(_cluster(report))


def result_text(result: TrainResult) -> str:
    """The result as ASCII text."""
    return page_text(_result(result))


def result_html(result: TrainResult) -> str:
    """The result as HTML."""
    return page_html(_result(result))


def data_text(data: PreparedData) -> str:
    """A prepared data set as ASCII text."""
    return page_text(_data(data))


def data_html(data: PreparedData) -> str:
    """A prepared data set as HTML."""
    return page_html(_data(data))


def size(count: float) -> str:
    """Bytes in a readable unit: ``1.5 GiB``."""
    value, unit = float(count), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def number(value: object) -> str:
    """A number for people: thousands separated, six digits of a fraction; anything else as is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.6g}"


def _cluster(report: ClusterReport) -> Page:
    nodes = report.nodes or (report.driver,)
    gpus = sum(len(node.gpus) for node in nodes)
    slots = f"{many(report.slots, 'task')} at once"
    if report.task_gpus is not None:
        slots += f", {report.task_gpus} GPU each"
    place = "no executors: ranks run on the driver's machine" if report.local else slots
    summary = (
        f"Spark {report.spark_version}, {many(len(nodes), 'node')}, {many(gpus, 'GPU')}, {place}"
    )
    # On one machine the driver's node is also a worker.
    listed = list({node.node: node for node in (report.driver, *report.nodes)}.values())
    rows = tuple(_node_row(node, node.node == report.driver.node) for node in listed)
    parts: list[str | Table] = [
        summary,
        Table(("node", "CPUs", "memory free", "disk free", "local folder", "GPUs"), rows),
    ]
    gpu_rows = tuple(_gpu_row(node, gpu) for node in listed for gpu in node.gpus)
    if gpu_rows:
        parts.append(
            Table(("node", "GPU", "name", "compute", "memory used", "driver", "uuid"), gpu_rows)
        )
    parts += _packages(listed)
    parts += [f"{node.node}: {node.problem}" for node in listed if node.problem]
    if report.missing:
        parts.append(f"Did not answer in time: {', '.join(report.missing)}")
    parts += _findings(report)
    return Page(f"Cluster {report.master}", tuple(parts))


def _findings(report: ClusterReport) -> list[str | Table]:
    """What was checked, errors first, and how fast hosts talk."""
    if not report.findings:
        return []
    order = ("error", "warning", "ok")
    found = sorted(report.findings, key=lambda finding: order.index(finding.level))
    counts = [sum(finding.level == level for finding in found) for level in order[:2]]
    rows = tuple((finding.level, finding.check, finding.message) for finding in found)
    parts: list[str | Table] = [
        f"{many(counts[0], 'error')}, {many(counts[1], 'warning')}:",
        Table(("", "check", "finding"), rows),
    ]
    if report.speeds:
        speeds = tuple((p.first, p.second, f"{size(p.bytes_per_second)}/s") for p in report.speeds)
        parts.append(Table(("host", "host", "speed"), speeds))
    return parts


def _node_row(node: NodeReport, is_driver: bool) -> tuple[str, ...]:
    names = list(dict.fromkeys(gpu.name for gpu in node.gpus))
    gpus = f"{len(node.gpus)} x {' / '.join(names)}" if node.gpus else "none"
    return (
        f"{node.node} (driver)" if is_driver else node.node,
        str(node.cpus),
        f"{size(node.memory_available)} of {size(node.memory_total)}",
        size(node.disk_free),
        node.local_dir,
        gpus,
    )


def _gpu_row(node: NodeReport, gpu: GpuInfo) -> tuple[str, ...]:
    memory = f"{size(gpu.memory_used)} of {size(gpu.memory_total)}"
    compute = gpu.capability or "not told"
    return (node.node, str(gpu.index), gpu.name, compute, memory, gpu.driver, gpu.uuid)


def _packages(nodes: Sequence[NodeReport]) -> list[str | Table]:
    """One sentence where all nodes have the same versions, else what differs, as a table."""
    found = [{"python": node.python, **node.packages} for node in nodes]
    names = list(dict.fromkeys(name for packages in found for name in packages))
    same = [name for name in names if len({packages.get(name) for packages in found}) == 1]
    parts: list[str | Table] = []
    if same:
        versions = ", ".join(f"{name} {found[0][name]}" for name in same)
        parts.append(f"On every node: {versions}")
    different = tuple(name for name in names if name not in same)
    if different:
        rows = tuple(
            (node.node, *(packages.get(name, "none") for name in different))
            for node, packages in zip(nodes, found, strict=True)
        )
        parts += ["Versions differ:", Table(("node", *different), rows)]
    return parts


def _result(result: TrainResult) -> Page:
    names = [name for name in _FIRST_METRICS if name in result.metrics]
    names += sorted(set(result.metrics) - set(names))
    metrics = tuple((name, _metric(name, result.metrics[name])) for name in names)
    facts = [
        ("run folder", result.run_dir),
        ("checkpoint", result.checkpoint),
        ("model", result.model_path),
        ("best checkpoint", result.best_checkpoint),
        ("best model", result.best_model_path),
        ("model in MLflow", result.model_uri),
        ("registered", result.registered),
        ("MLflow run", result.run_id),
    ]
    files = tuple((name, value) for name, value in facts if value)
    done = f"{many(result.steps, 'step')} done"
    if result.stop_reason:
        done += f", ended before the last one: {result.stop_reason}"
    if result.restarts:
        done += f", restarted {len(result.restarts)} times: {'; '.join(result.restarts)}"
    title = f"Result of {result.run_name}"
    audit = Table((), audit_rows(result.audit))
    remarks = _remarks(result.metrics)
    return Page(title, (done, *remarks, Table((), metrics), audit, Table((), files)))


def _remarks(metrics: Mapping[str, float]) -> list[str]:
    """What a reader of the numbers must not miss."""
    broken = [
        name for name in ("train_loss", "eval_loss") if not math.isfinite(metrics.get(name, 0.0))
    ]
    if broken:
        return [f"{' and '.join(broken)} is not finite: do not use the model"]
    first, last = metrics.get("initial_eval_loss"), metrics.get("eval_loss")
    if first is not None and last is not None and last > first:
        return [
            f"the loss on held-out rows ended above where it began ({number(first)} to "
            f"{number(last)}): the model became worse; try a lower train.learning_rate, fewer steps"
        ]
    return []


def _metric(name: str, value: float) -> str:
    return size(value) if name.endswith("_bytes") else number(value)


def _data(data: PreparedData) -> Page:
    facts: list[tuple[str, ...]] = [(role, source) for role, source in data.sources.items()]
    facts += [("format", data.format), ("folder", data.artifact.source)]
    facts += [("size", size(data.artifact.size))]
    splits = tuple(
        (name, *map(number, (info.rows, info.examples, info.tokens, info.trained)))
        for name, info in data.splits.items()
    )
    parts: list[str | Table] = [
        Table((), tuple(facts)),
        Table(("split", "documents", "examples", "tokens", "trained tokens"), splits),
        Table((), audit_rows(data.audit)),
        *overlaps(data),
    ]
    if data.audit.lengths:
        headers = ("tokens of a training document", "documents")
        parts.append(Table(headers, _length_rows(data.audit.lengths)))
    return Page("Prepared data", tuple(parts))


def _length_rows(lengths: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """The histogram of lengths, without the empty ends."""
    first = next(place for place, count in enumerate(lengths) if count)
    most = max(lengths)
    return tuple(
        (
            f"{number(2**place)} to {number(2 ** (place + 1) - 1)}",
            f"{number(count)} {'#' * round(_BAR * count / most)}".rstrip(),
        )
        for place, count in enumerate(lengths)
        if place >= first
    )


def row_counts(audit: Audit) -> list[tuple[str, str]]:
    """What became of the rows that were read."""
    rows = [
        ("rows read", rows_read(audit)),
        ("rows trained", number(audit.train_rows)),
        ("rows held out", number(audit.eval_rows)),
    ]
    if audit.test_rows:
        rows.append(("rows to test", number(audit.test_rows)))
    rows.append(("rows dropped", _counts(audit.dropped)))
    if audit.dropped_examples:
        rows.append(("examples dropped", _counts(audit.dropped_examples)))
    return [*rows, ("rows truncated", number(audit.truncated_rows))]


def audit_rows(audit: Audit) -> tuple[tuple[str, ...], ...]:
    """Where every row and token went, as the rows of a table."""
    packs = f"{number(audit.packs)}, {audit.packing_efficiency:.0%} filled"
    rows = [
        *row_counts(audit),
        ("tokens", f"{number(audit.tokens)}, of them {number(audit.trained_tokens)} trained"),
        ("tokens left out", tokens_left_out(audit)),
        ("examples", packs),
    ]
    return tuple(rows)


def rows_read(audit: Audit) -> str:
    """Rows read, and how they came from those of the sources where weights took them otherwise."""
    read, rows = audit.read_rows, audit.source_rows
    if not rows or read == rows:
        return number(read)
    if read % rows:
        return f"{number(read)}: {many(rows, 'row')}, by the weights of their sources"
    return f"{number(read)}: {many(rows, 'row')}, read {read // rows} times"


def tokens_left_out(audit: Audit) -> str:
    """Tokens that were encoded and are in no example, of all splits."""
    return (
        f"{number(audit.cut_tokens)} cut away, {number(audit.dropped_tokens)} of what was dropped"
    )


def overlaps(data: PreparedData) -> list[str]:
    """Held-out rows that are trained on: what they measure is no generalisation."""
    return [
        f"Warning: {number(info.rows_in_train)} of {many(info.rows, 'row')} of {name} are "
        "training rows too: their loss says nothing about rows that the model has not seen"
        for name, info in data.splits.items()
        if info.rows_in_train
    ]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number(rows)} {reason}" for reason, rows in counts.items()) or "0"


def many(count: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number(count)} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"


def page_text(page: Page) -> str:
    """A page as ASCII text."""
    parts = [_table_text(part) if isinstance(part, Table) else part for part in page.parts]
    return "\n\n".join([page.title + "\n" + "-" * len(page.title), *parts])


def _table_text(table: Table) -> str:
    """Columns as wide as their longest cell; the last one is wrapped."""
    rows = [table.headers, *table.rows] if table.headers else list(table.rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = sum(widths[:-1]) + 2 * (len(widths) - 1)
    lines = []
    for row in rows:
        start = "  ".join(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False))
        room = max(_WIDTH - left, 30)
        last = textwrap.wrap(row[-1], room, break_long_words=False, break_on_hyphens=False) or [""]
        lines += [f"{start}  {last[0]}".rstrip(), *(" " * left + more for more in last[1:])]
    if table.headers:
        lines.insert(1, "  ".join("-" * width for width in [*widths[:-1], min(widths[-1], 30)]))
    return "\n".join(lines)


def page_html(page: Page) -> str:
    """A page as HTML."""
    parts = [
        _table_html(part) if isinstance(part, Table) else f"<p>{html.escape(part)}</p>"
        for part in page.parts
    ]
    return f"<div><h4>{html.escape(page.title)}</h4>{''.join(parts)}</div>"


def _table_html(table: Table) -> str:
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.headers)
    head = f"<thead><tr>{cells}</tr></thead>" if table.headers else ""
    style = ' style="text-align:left"'
    rows = "".join(
        f"<tr>{''.join(f'<td{style}>{html.escape(cell)}</td>' for cell in row)}</tr>"
        for row in table.rows
    )
    return f"<table>{head}<tbody>{rows}</tbody></table>"
