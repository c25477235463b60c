"""A preview in a real browser: nothing of a row runs, and everybody sees what is trained."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain.driver.sources import resolve_model
from dbx_llmtrain.model_sections import ModelConfig
from dbx_llmtrain.preview_html import preview_html
from dbx_llmtrain.previewing import Preview
from tests import tiny
from tests.unit.test_preview_examples import config, show

EVIL = "<script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">"
ROWS = [
    (f"{EVIL} said the user", f"</div></style>{EVIL} said the model"),
    ("What is the answer?", "\tforty  two\n    and an indented line"),
    ("\u0645\u0627 \u0647\u064a\u061f", "\u05e9\u05dc\u05d5\u05dd"),
    ("\u65e5\u672c\u306e\u9996\u90fd", "\u6771\u4eac\u3067\u3059\u3002"),
    ("one long word", "w" * 400),
]

PROBE = """
<pre id="probe"></pre>
<script>
addEventListener("load", () => setTimeout(() => {
  const all = (selector) => [...document.querySelectorAll(".dbx-preview " + selector)];
  const style = (element, before) => {
    const found = getComputedStyle(element, before);
    return {
      color: found.color,
      background: found.backgroundColor,
      weight: found.fontWeight,
      line: found.textDecorationLine,
      border: found.borderTopStyle,
      content: found.content,
      style: found.fontStyle,
    };
  };
  const first = (selector, before) => style(all(selector)[0], before);
  const box = document.querySelector(".dbx-preview");
  document.getElementById("probe").textContent = JSON.stringify({
    foreign: all("script, img, iframe, object, link, a").length,
    text: all(".text").map((element) => element.textContent),
    trained: first(".text b"),
    other: first(".text i"),
    token: first(".text kbd.token"),
    trainedToken: first(".text b kbd.token"),
    frame: style(box),
    space: first(".text .space", "::before").content,
    tab: first(".text .tab", "::before").content,
    line: first(".text .line", "::before").content,
    bars: all(".bar").map((element) => element.getBoundingClientRect().width),
    tooWide: document.documentElement.scrollWidth - innerWidth,
  });
}, 200));
</script>
"""


@pytest.fixture(scope="module")
def browser() -> str:
    names = [os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"]
    found = next((path for path in map(shutil.which, filter(None, names)) if path), None)
    if found is None:
        pytest.skip("no Chromium or Chrome: tools/browser.sh finds or installs one")
    return found


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Preview:
    """A preview of real prepared data."""
    folder = tmp_path_factory.mktemp("rows")
    source = ModelConfig(source=str(tiny.model_folder(folder / "model")))
    model = resolve_model(source, folder / "cache", weights=False)
    chats = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a, b in ROWS
    ]
    found, _ = show(config(folder, model, chats, max_length=1200), model)
    assert sum(len(example.documents) for example in found.examples) == len(ROWS)
    return found


def run(browser: str, page: Path, *options: str) -> str:
    """What the browser prints when it has opened a page and all that it started has ended."""
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--hide-scrollbars", "--window-size=1000,1600",
            "--virtual-time-budget=3000", f"--user-data-dir={page.parent / 'profile'}",
            *options, page.as_uri(),
        ],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def title(dom: str) -> str:
    (found,) = re.findall(r"<title>(.*?)</title>", dom, flags=re.DOTALL)
    return html.unescape(found)


def notebook(folder: Path, fragment: str, *, light: bool = True) -> Path:
    """A page as JupyterLab has it: a theme named on the body, outputs inside, scripts allowed."""
    path = folder / "notebook.html"
    ground = "#fff" if light else "#111"
    path.write_text(
        '<!doctype html><html><head><meta charset="utf-8"><title>nothing ran</title></head>'
        f'<body data-jp-theme-light="{str(light).lower()}" style="background:{ground}">'
        f"{fragment}{PROBE}</body></html>",
        encoding="utf-8",
    )
    return path


def probe(browser: str, page: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """The page's title at the end, and what its probe has found."""
    dom = run(browser, page, *options, "--dump-dom")
    (found,) = re.findall(r'<pre id="probe">(.*?)</pre>', dom, flags=re.DOTALL)
    assert found, "the probe has not run"
    return title(dom), json.loads(html.unescape(found))


def contrast(one: str, other: str) -> float:
    from tests.unit.test_preview_pages import contrast as of

    def as_hex(colour: str) -> str:
        return "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", colour)[:3])

    return of(as_hex(one), as_hex(other))


@pytest.mark.timeout(240)
def test_nothing_of_a_row_runs_and_its_text_is_there(
    browser: str, shown: Preview, tmp_path: Path
) -> None:
    name, found = probe(browser, notebook(tmp_path, preview_html(shown)))
    assert name == "nothing ran"
    assert found["foreign"] == 0
    text = "".join(found["text"])
    for row in ROWS:
        for part in row:
            assert part in text
    unescaped, _ = probe(browser, notebook(tmp_path, preview_html(shown) + EVIL))
    assert unescaped == "ran", "this page would show it"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("light", [True, False], ids=["light", "dark"])
def test_trained_and_masked_look_different(
    browser: str, shown: Preview, tmp_path: Path, light: bool
) -> None:
    _, found = probe(browser, notebook(tmp_path, preview_html(shown), light=light))
    trained, other, frame = found["trained"], found["other"], found["frame"]
    assert trained["color"] != other["color"]
    assert trained["background"] != other["background"]
    assert (trained["line"], other["line"]) == ("underline", "none")
    assert int(trained["weight"]) > int(other["weight"])
    assert other["style"] == "normal"
    assert contrast(trained["color"], trained["background"]) >= 7
    assert contrast(other["color"], frame["background"]) >= 4.5
    assert (contrast(frame["background"], "rgb(255, 255, 255)") < 1.5) is light
    assert found["token"]["border"] == found["trainedToken"]["border"] == "solid"
    assert found["trainedToken"]["color"] == trained["color"]
    signs = [found[name] for name in ("space", "tab", "line")]
    assert signs == ['"\u00b7"', '"\u2192"', '"\u21b5"']


@pytest.mark.timeout(240)
def test_it_fits_a_narrow_output(browser: str, shown: Preview, tmp_path: Path) -> None:
    page = notebook(tmp_path, preview_html(shown))
    _, found = probe(browser, page, "--window-size=600,900")
    assert found["tooWide"] <= 0
    counts = [count for count in shown.audit.lengths if count]
    longest = max(found["bars"])
    drawn = [width for width in found["bars"] if width > 1.5]
    assert [round(width / longest * max(counts)) for width in drawn] == counts


@pytest.mark.timeout(240)
def test_the_kept_page_opens_and_is_seen(browser: str, shown: Preview, tmp_path: Path) -> None:
    page = tmp_path / "preview.html"
    page.write_bytes(Path(str(shown.page)).read_bytes())
    dom = run(browser, page, "--dump-dom")
    assert title(dom).startswith("Examples of train: ")
    assert html.escape(EVIL, quote=False) in re.sub(r"</?[bi]>", "", dom)
    picture = tmp_path / "page.png"
    run(browser, page, f"--screenshot={picture}")
    head = picture.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">2I", head[16:]) == (1000, 1600)
    assert picture.stat().st_size > 20_000, "an empty page compresses to less"
