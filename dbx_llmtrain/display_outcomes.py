"""What evaluations, answers, exports and registered models look like in a terminal and a notebook.
Pure."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dbx_llmtrain.display import Page, Table, many, number, page_html, page_text, size

if TYPE_CHECKING:
    from dbx_llmtrain.outcomes import (
        Evaluation,
        Exported,
        Generations,
        Logged,
        RegisteredModel,
        Sample,
    )

_CUT = "cut at its longest"


def evaluation_text(found: Evaluation) -> str:
    """Metrics, one a line, and the answers."""
    return "\n\n".join([page_text(_evaluation(found)), *map(_answer, found.samples)])


def evaluation_html(found: Evaluation) -> str:
    """The same for a notebook."""
    return page_html(_evaluation(found)) + _answers(found.samples)


def generations_text(found: Generations) -> str:
    """Prompts and answers."""
    return "\n\n".join(map(_answer, found.samples))


def generations_html(found: Generations) -> str:
    """The same for a notebook."""
    return f"<div><h4>Answers of {html.escape(found.model)}</h4>{_answers(found.samples)}</div>"


def exported_text(found: Exported) -> str:
    """Where it is, and of what it was made."""
    return page_text(_exported(found))


def exported_html(found: Exported) -> str:
    """The same for a notebook."""
    return page_html(_exported(found))


def registered_text(found: RegisteredModel) -> str:
    """What it is called, and how it is loaded."""
    return page_text(_registered(found))


def registered_html(found: RegisteredModel) -> str:
    """The same for a notebook."""
    return page_html(_registered(found))


def logged_text(found: Logged) -> str:
    """How much was sent, and where it is."""
    return page_text(_logged(found))


def logged_html(found: Logged) -> str:
    """The same for a notebook."""
    return page_html(_logged(found))


def _logged(found: Logged) -> Page:
    sent = many(found.values, "value") if found.values else "nothing: it had all of them"
    facts = [
        ("MLflow run", f"{found.run_id}, {found.status}{' (new)' if found.created else ''}"),
        ("sent", sent),
        ("see it", found.page),
    ]
    return Page(f"Logged {found.run_dir}", (Table((), tuple(facts)),))


def _evaluation(found: Evaluation) -> Page:
    over = f"{many(found.rows, 'row')}, {many(found.trained_tokens, 'trained token')}"
    metrics = tuple((name, number(value)) for name, value in found.metrics.items())
    parts: list[str | Table] = [over, Table((), metrics)] if metrics else [over]
    if found.run_id:
        parts.append(f"MLflow run {found.run_id}")
    return Page(f"Evaluation of {found.model}", tuple(parts))


def _exported(found: Exported) -> Page:
    kind = "the adapter by itself" if found.adapter else "the whole model"
    facts = [
        ("folder", found.path),
        ("what", f"{kind}, {found.dtype}, {size(found.bytes)}"),
        ("made of", f"{found.source}, after step {number(found.step)}"),
    ]
    if found.hub:
        facts.append(("on the hub", found.hub))
    return Page("Exported model", (Table((), tuple(facts)),))


def _registered(found: RegisteredModel) -> Page:
    facts = [("name", found.name), ("version", found.version)]
    if found.alias:
        facts.append(("alias", found.alias))
    facts += [("flavor", found.flavor), ("load", f'mlflow.pyfunc.load_model("{found.uri}")')]
    if found.tracking_uri:
        facts.append(("in", found.tracking_uri))
    if found.run_id:
        facts.append(("MLflow run", found.run_id))
    facts += sorted(found.tags.items())
    return Page("Registered model", (Table((), tuple(facts)),))


def _answer(sample: Sample) -> str:
    end = "" if sample.stopped else f" [{_CUT}]"
    return f"> {_plain(sample.prompt)}\n{_plain(sample.text)}{end}"


def _plain(text: str) -> str:
    """A text in a terminal: what would steer it is replaced, models write anything."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in text)


def _answers(samples: Sequence[Sample]) -> str:
    """A table of prompts and answers, their line breaks kept."""
    if not samples:
        return ""
    style = ' style="text-align:left;vertical-align:top;white-space:pre-wrap"'
    rows = "".join(
        f"<tr><td{style}>{html.escape(sample.prompt)}</td><td{style}>{html.escape(sample.text)}"
        f"</td><td{style}>{number(sample.tokens)}{'' if sample.stopped else f', {_CUT}'}</td></tr>"
        for sample in samples
    )
    head = "<tr><th>prompt</th><th>answer</th><th>tokens</th></tr>"
    return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"
