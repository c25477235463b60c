"""A preview in a notebook, and as a page of its own. Pure.

No scripts, and every text is escaped: rows are from anywhere. The colours are set together with
their background, so that they can be read in light and dark notebooks, and what is trained is also
bold and underlined. Where a notebook removes the styles, the elements alone still tell it.
"""

from __future__ import annotations

import html

from dbx_llmtrain import preview_parts as parts
from dbx_llmtrain.preview_parts import Mark
from dbx_llmtrain.previewing import DocumentPreview, ExamplePreview, Preview
from dbx_llmtrain.text.pieces import Piece

LIGHT = {
    "ground": "#ffffff",
    "ink": "#1f2328",
    "line": "#c4cad1",
    "trained": "#0a3d91",
    "trained-ground": "#d6e6ff",
    "other": "#59626d",
}
DARK = {
    "ground": "#16191d",
    "ink": "#e4e8ec",
    "line": "#4a525c",
    "trained": "#d3e4ff",
    "trained-ground": "#1a4380",
    "other": "#a0a9b4",
}


def _scheme(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


# A dark notebook says so by an attribute of its body, whatever the system has.
_STYLE = f"""
.dbx-preview{{{_scheme(LIGHT)}}}
@media (prefers-color-scheme:dark){{.dbx-preview{{{_scheme(DARK)}}}}}
[data-jp-theme-light=true] .dbx-preview,.vscode-light .dbx-preview{{{_scheme(LIGHT)}}}
[data-jp-theme-light=false] .dbx-preview,.vscode-dark .dbx-preview{{{_scheme(DARK)}}}
.dbx-preview{{background:var(--ground);color:var(--ink);border:1px solid var(--line);
 border-radius:6px;padding:12px 16px;font:14px/1.45 system-ui,sans-serif;text-align:left}}
.dbx-preview h3{{font-size:16px;margin:0 0 6px}}
.dbx-preview h4{{font-size:14px;margin:18px 0 6px}}
.dbx-preview p{{margin:4px 0;color:var(--ink)}}
.dbx-preview .text{{font:13px/1.75 ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;
 white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:plaintext;color:var(--other);
 max-height:36em;overflow:auto;border-left:3px solid var(--line);padding:2px 0 2px 10px}}
.dbx-preview .head{{font-size:12px;color:var(--other);border-top:1px dashed var(--line);
 margin-top:8px;padding-top:4px}}
.dbx-preview b,.dbx-preview i{{font-style:normal;box-shadow:-1px 0 0 var(--line)}}
.dbx-preview b{{font-weight:600;color:var(--trained);background:var(--trained-ground);
 text-decoration:underline;text-underline-offset:3px;text-decoration-thickness:1px}}
.dbx-preview i{{font-weight:400;color:var(--other)}}
.dbx-preview kbd{{font:inherit;font-size:12px;color:inherit;background:transparent;
 border:1px solid currentColor;border-radius:4px;padding:0 3px;margin:0 1px;unicode-bidi:isolate;
 box-shadow:none;text-decoration:none;display:inline-block;line-height:1.3}}
.dbx-preview .space,.dbx-preview .tab{{position:relative}}
.dbx-preview .space::before,.dbx-preview .tab::before{{position:absolute;left:0;opacity:.75}}
.dbx-preview .space::before{{content:"\\b7"}}
.dbx-preview .tab::before{{content:"\\2192"}}
.dbx-preview .line::before{{content:"\\21b5";opacity:.75}}
.dbx-preview table{{border-collapse:collapse;margin:8px 0;font-size:13px;color:var(--ink)}}
.dbx-preview tr,.dbx-preview td,.dbx-preview th{{background:transparent;color:var(--ink)}}
.dbx-preview td,.dbx-preview th{{text-align:left;vertical-align:top;padding:1px 14px 1px 0;
 font-weight:400;border:0;overflow-wrap:anywhere}}
.dbx-preview th{{color:var(--other);white-space:nowrap}}
.dbx-preview .bar{{display:block;height:12px;min-width:1px;background:var(--trained)}}
.dbx-preview .bars td:last-child{{width:320px}}
"""


def preview_html(preview: Preview) -> str:
    """The preview as a fragment of HTML."""
    body = [
        f"<h3>{html.escape(parts.title(preview))}</h3>",
        _legend(preview),
        *(_example(preview, example) for example in preview.examples),
        "<h4>All of the data</h4>",
        _facts(preview),
        _histogram(preview),
    ]
    return f'<div class="dbx-preview"><style>{_STYLE}</style>{"".join(body)}</div>'


def preview_page(preview: Preview) -> str:
    """The preview as a page that a browser opens; it may run no script and load nothing."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{html.escape(parts.title(preview))}</title></head>"
        f"<body>{preview_html(preview)}</body></html>\n"
    )


def _legend(preview: Preview) -> str:
    trained, other = parts.words(preview)
    signs = "\u00b7 space, \u2192 tab, \u21b5 line break; a thin line begins every token."
    return (
        f'<p class="legend"><b>{trained}</b> &nbsp; <i>{other}</i> &nbsp; <i><kbd>token</kbd></i>'
        f" by its name; {signs} {html.escape(parts.legend(preview))}</p>"
    )


def _example(preview: Preview, example: ExamplePreview) -> str:
    count = len(example.documents) + example.hidden
    shown = [f"<h4>{html.escape(parts.example_title(preview, example))}</h4>"]
    for place, document in enumerate(example.documents, 1):
        if count > 1:
            head = html.escape(parts.document_title(preview, document, place, count))
            shown.append(f'<div class="head">{head}</div>')
        shown.append(_document(document))
    if example.hidden:
        more = html.escape(parts.hidden_documents(example.hidden))
        shown.append(f'<div class="head">{more}</div>')
    return "".join(shown)


def _document(document: DocumentPreview) -> str:
    shown = _pieces(document.pieces)
    if document.hidden:
        gap = html.escape(parts.hidden_tokens(document.hidden))
        shown += f'</div><div class="head">{gap}</div><div class="text" dir="auto">'
        shown += _pieces(document.tail)
    return f'<div class="text" dir="auto">{shown}</div>'


def _pieces(pieces: tuple[Piece, ...]) -> str:
    shown = []
    for piece, marks in zip(pieces, parts.marks(pieces), strict=True):
        element = "b" if piece.trained else "i"
        shown.append(f"<{element}>{''.join(map(_mark, marks))}</{element}>")
    return "".join(shown)


def _mark(mark: Mark) -> str:
    text = html.escape(mark.text)
    if mark.kind == "text":
        return text
    if mark.kind in ("space", "tab", "line"):
        return f'<span class="{mark.kind}">{text}</span>'
    return f'<kbd class="{mark.kind}">{html.escape(parts.readable(mark.text))}</kbd>'


def _facts(preview: Preview) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in parts.facts(preview)
    )
    return f"<table><tbody>{rows}</tbody></table>"


def _histogram(preview: Preview) -> str:
    bars = parts.histogram(preview.audit.lengths)
    if not bars:
        return ""
    rows = "".join(
        f"<tr><th>{label}</th><td>{count:,}</td>"
        f'<td><span class="bar" style="width:{100 * share:.1f}%"></span></td></tr>'
        for label, count, share in bars
    )
    return (
        f'<h4>Tokens of a training document</h4><table class="bars"><tbody>{rows}</tbody></table>'
    )
