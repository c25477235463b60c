"""What a preview looks like, in text and in HTML, whatever is in the rows."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from dbx_llmtrain.preview_html import preview_html, preview_page
from dbx_llmtrain.preview_text import preview_text
from dbx_llmtrain.previewing import DocumentPreview, ExamplePreview, Preview, wants_colour
from dbx_llmtrain.records import Audit
from dbx_llmtrain.text.pieces import Piece

SCRIPT = "<script>document.title='ran'</script><img src=x onerror=alert(1)>"
ESCAPE = "\x1b[2J\x1b]0;title\x07"


def document(*pieces: Piece, **changes: Any) -> DocumentPreview:
    settings: dict[str, Any] = {
        "row": "0123456789abcdef" * 2,
        "start": 0,
        "tokens": sum(piece.tokens for piece in pieces),
        "trained": sum(piece.tokens for piece in pieces if piece.trained),
        "trained_ends": 1,
        "pieces": pieces,
    }
    return DocumentPreview(**(settings | changes))


def preview(*documents: DocumentPreview, hidden: int = 0, **changes: Any) -> Preview:
    example = ExamplePreview(
        number=16,
        tokens=sum(part.tokens for part in documents),
        trained=sum(part.trained for part in documents),
        trained_ends=len(documents),
        documents=documents,
        hidden=hidden,
    )
    audit = Audit(
        read_rows=1010,
        train_rows=1000,
        eval_rows=7,
        dropped={"nothing to train on": 3},
        truncated_rows=5,
        tokens=20000,
        trained_tokens=5000,
        trained_end_tokens=995,
        packs=312,
        packing_efficiency=0.97,
        lengths=(0, 0, 0, 10, 40, 20),
    )
    settings: dict[str, Any] = {
        "model": "some/model",
        "split": "train",
        "objective": "sft",
        "mlm_probability": 0.15,
        "max_length": 64,
        "format": "messages",
        "sources": {"train": "rows.jsonl"},
        "folder": "/cache/data/x",
        "count": 312,
        "examples": (example,),
        "audit": audit,
        "packs": {"train": 312, "eval": 4},
        "page": "/cache/data/x/preview.html",
    }
    return Preview(**(settings | changes))


def one(text: str, *, trained: bool = False) -> Preview:
    return preview(document(Piece("<s>", False, "token"), Piece(text, trained)))


def body(text: str) -> str:
    """The example in the text of a preview."""
    return text.split("=== ")[1].split("\n", 1)[1].split("\n\n")[0]


class Page(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self.open: list[str] = []
        self.unbalanced = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.unbalanced |= self.open.pop() != tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


SOME = (
    Piece("<s>", False, "token"),
    Piece("Hi", False),
    Piece(" you", True),
    Piece("\n", True),
    Piece("</s>", True, "token"),
)


def test_plain_text_has_brackets_around_what_is_trained() -> None:
    shown = preview_text(preview(document(*SOME)), colour=False)
    assert body(shown) == ("\u27e8<s>\u27e9Hi\u27e6 you\u21b5\n\u27e8</s>\u27e9\u27e7")
    assert "\x1b" not in shown
    assert shown.startswith("Examples of train: the first of 312, in the order of training\n---")
    assert "Example 17 of 312: 5 tokens, 3 trained, 1 end token trained\n" in shown


SIGNS = "\u00b7\u2192\u21b5\u27e6\u27e7\u27e8\u27e9"


def test_no_row_and_no_token_can_write_a_mark() -> None:
    codes = [f"U+{ord(sign):04X}" for sign in SIGNS]
    shown = body(preview_text(one(SIGNS), colour=False))
    assert shown == "\u27e8<s>\u27e9" + "".join(f"\u27e8{code}\u27e9" for code in codes)
    coloured = body(preview_text(one(SIGNS), colour=True))
    assert not set(coloured) & set(SIGNS)
    assert all(f"\x1b[7m{code}\x1b[0m" in coloured for code in codes)
    token = preview(document(Piece(f"<{SIGNS}>", True, "token")))
    assert body(preview_text(token, colour=False)) == f"\u27e6\u27e8<{''.join(codes)}>\u27e9\u27e7"


def test_a_terminal_has_colours_that_end_before_the_line_does() -> None:
    shown = body(preview_text(preview(document(*SOME)), colour=True))
    assert "\x1b[1;4;36m you\x1b[0m" in shown
    assert "\x1b[90mHi\x1b[0m" in shown
    assert "\x1b[1;4;36m\x1b[7m</s>\x1b[0m" in shown
    assert "\x1b[90m\x1b[7m<s>\x1b[0m" in shown
    assert "\u21b5\x1b[0m\n" in shown


def test_a_terminal_never_obeys_a_row() -> None:
    for colour in (False, True):
        shown = body(preview_text(one(f"a{ESCAPE}b\r\x9bc"), colour=colour))
        rest = re.sub(r"\x1b\[(?:90|7|0)m", "", shown)
        assert not set(rest) & {"\x1b", "\x07", "\r", "\x9b"}
        for name in ("U+001B", "U+0007", "U+000D", "U+009B"):
            assert name in rest
    named = preview(document(Piece("<\x1b[2J>", False, "token")))
    assert "\x1b[2J" not in preview_text(named, colour=True)
    source = one("a").model_copy(update={"sources": {"train": "rows\x1b[2J.jsonl"}})
    assert "\x1b" not in preview_text(source, colour=False)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a b", "a b"),
        ("a  b", "a\u00b7\u00b7b"),
        ("a \nb", "a\u00b7\u21b5\nb"),
        (" a", "\u00b7a"),
        ("a\tb", "a\u2192\tb"),
        ("a\u00a0b", "a\u27e8U+00A0\u27e9b"),
        ("a\u202eb", "a\u27e8U+202E\u27e9b"),
        ("a\u200bb", "a\u27e8U+200B\u27e9b"),
        ("\u0645\u06cc\u200c\u0634\u0648\u062f", "\u0645\u06cc\u200c\u0634\u0648\u062f"),
        ("\u732b\u3000\u304c", "\u732b\u3000\u304c"),
        ("\U0001f469\u200d\U0001f680", "\U0001f469\u200d\U0001f680"),
        ("e\u0301", "e\u0301"),
    ],
)
def test_whitespace_and_what_shows_nothing_is_seen(text: str, shown: str) -> None:
    assert body(preview_text(one(text), colour=False)) == f"\u27e8<s>\u27e9{shown}"


def test_a_space_is_judged_by_the_neighbouring_pieces() -> None:
    pieces = [Piece("a", False), Piece(" ", False), Piece("b", False), Piece(" ", False)]
    end = Piece("</s>", False, "token")
    shown = body(preview_text(preview(document(*pieces, end)), colour=False))
    assert shown == "a b\u00b7\u27e8</s>\u27e9"


def test_html_shows_the_text_and_runs_nothing_of_it() -> None:
    name = Piece(SCRIPT, True, "token")
    found = preview(
        document(Piece(SCRIPT, False), Piece(SCRIPT, True), name, row=SCRIPT),
        document(*SOME),
        sources={SCRIPT: SCRIPT},
        model=SCRIPT,
        folder=SCRIPT,
        page=None,
        problem=SCRIPT,
        format=SCRIPT,
    )
    for text in (preview_html(found), preview_page(found)):
        page = Page(text)
        assert not page.unbalanced
        assert page.open == []
        assert not {"script", "img", "iframe", "link", "a"} & set(page.elements)
        assert not [name for name in page.attributes if name.startswith("on") or name == "src"]
        assert page.text.count(SCRIPT) >= 7
    assert "default-src 'none'" in preview_page(found)


def test_html_marks_tokens_by_elements_that_need_no_style() -> None:
    text = preview_html(preview(document(*SOME)))
    assert '<i><kbd class="token">&lt;s&gt;</kbd></i><i>Hi</i><b> you</b>' in text
    assert '<b><span class="line">\n</span></b><b><kbd class="token">&lt;/s&gt;</kbd></b>' in text
    assert 'dir="auto"' in text


@pytest.mark.parametrize("show", [lambda p: preview_text(p, colour=False), preview_html])
def test_packs_show_their_documents_and_what_is_left_out(show: Any) -> None:
    long = document(*SOME, start=64, tokens=2000, trained=900, hidden=800, tail=SOME)
    text = show(preview(document(*SOME), long, hidden=3))
    assert "Example 17 of 312: 5 documents, 2,005 tokens, 903 trained, 2 end tokens" in text
    first = "document 1 of 5, row 01234567: 5 tokens, 3 trained, 1 end token trained"
    assert first in text
    assert "document 2 of 5, row 01234567 from token 64 on: 2,000 tokens, 900 trained" in text
    assert "800 tokens not shown here" in text
    assert "3 more documents in this example" in text


@pytest.mark.parametrize("show", [lambda p: preview_text(p, colour=False), preview_html])
def test_the_audit_is_below(show: Any) -> None:
    text = show(preview(document(*SOME)))
    for part in (
        "rows.jsonl",
        "1,010",
        "3 nothing to train on",
        "20,000, of them 5,000 (25.0%) trained",
        "995",
        "312 train, 4 eval; train is 97% filled",
        "/cache/data/x/preview.html",
        "16 to 31",
    ):
        assert part in text, part
    assert "4 to 7" not in text


def both(found: Preview) -> tuple[str, str]:
    return preview_text(found, colour=False), preview_html(found)


def test_the_histogram_has_bars() -> None:
    found = preview(document(*SOME))
    lines = preview_text(found, colour=False).splitlines()[-3:]
    assert [line.count("#") for line in lines] == [10, 40, 20]
    widths = re.findall(r'class="bar" style="width:([\d.]+)%"', preview_html(found))
    assert widths == ["25.0", "100.0", "50.0"]
    empty = found.model_copy(update={"audit": found.audit.model_copy(update={"lengths": ()})})
    heading = "okens of a training document"
    for told, without in zip(*(both(one) for one in (found, empty)), strict=True):
        assert heading in told
        assert heading not in without


def test_masked_language_modelling_has_its_own_words() -> None:
    found = preview(document(*SOME), objective="mlm")
    for text in (preview_text(found, colour=False), preview_html(found)):
        assert "may be masked" in text
        assert "15% of the tokens that may be masked are predicted" in text
        assert "end token" not in text
        assert "of them 5,000 (25.0%) to mask" in text


def test_the_title_says_how_many_are_shown() -> None:
    found = preview(document(*SOME))
    two = found.model_copy(update={"examples": found.examples * 2})
    assert ": the first 2 of 312, in" in preview_text(two, colour=False)
    assert ": all 2, in" in preview_html(two.model_copy(update={"count": 2}))
    assert ": the only one, in" in preview_html(found.model_copy(update={"count": 1}))


def test_a_page_that_could_not_be_kept_is_told() -> None:
    found = preview(document(*SOME), page=None, problem="x/preview.html: Permission denied")
    assert "not kept: x/preview.html: Permission denied" in preview_text(found, colour=False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environ", "colours"),
    [
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {}, False),
        (None, {}, False),
        (object(), {}, False),
    ],
)
def test_who_sees_colours(stream: Any, environ: dict[str, str], colours: bool) -> None:
    assert wants_colour(stream, environ) is colours


def test_a_preview_shows_itself_as_its_output_can(monkeypatch: pytest.MonkeyPatch) -> None:
    found = preview(document(*SOME))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", Terminal())
    assert str(found) == preview_text(found, colour=True)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert repr(found) == str(found) == preview_text(found, colour=False)
    assert found._repr_html_() == preview_html(found)
    assert Preview.model_validate_json(found.model_dump_json()) == found


def luminance(colour: str) -> float:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["LIGHT", "DARK"])
def test_the_colours_can_be_read(scheme: str) -> None:
    from dbx_llmtrain import preview_html as module

    colours = getattr(module, scheme)
    ground = colours["ground"]
    for name in ("ink", "other", "trained"):
        assert contrast(colours[name], ground) >= 5, name
    assert contrast(colours["trained"], colours["trained-ground"]) >= 7
    assert contrast(colours["other"], colours["trained"]) >= 1.5
