"""The live block in a real browser: its curves and ranks are seen, it fits, nothing of it runs."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain.live_state import RankRow, Snapshot
from tests.notebooks.test_browser import EVIL, browser, run, title
from tests.unit.test_live_view import NOW, RUN, rows, taken

__all__ = ["browser"]

PROBE = """
<pre id="probe"></pre>
<script>
addEventListener("load", () => setTimeout(() => {
  const all = (selector) => [...document.querySelectorAll(".dbx-live " + selector)];
  const box = (element) => element.getBoundingClientRect();
  document.getElementById("probe").textContent = JSON.stringify({
    foreign: all("script, img, iframe, object, link, a").length,
    text: document.querySelector(".dbx-live").textContent,
    lines: all("polyline").length,
    cells: all(".ranks span").map((cell) => [box(cell).width, box(cell).height]),
    filled: box(all(".bar div")[0]).width / box(all(".bar")[0]).width,
    color: getComputedStyle(document.querySelector(".dbx-live")).color,
    ground: getComputedStyle(document.querySelector(".dbx-live")).backgroundColor,
    tooWide: document.documentElement.scrollWidth - innerWidth,
  });
}, 200));
</script>
"""


def probed(browser: str, folder: Path, found: Snapshot, *options: str) -> tuple[str, Any]:
    """The page's title at the end, and what its probe has found; a dark notebook."""
    path = folder / "notebook.html"
    path.write_text(
        '<!doctype html><html><head><meta charset="utf-8"><title>nothing ran</title></head>'
        f'<body style="background:#111;color:#eee">{found._repr_html_()}{PROBE}</body></html>',
        encoding="utf-8",
    )
    dom = run(browser, path, *options, "--dump-dom")
    (text,) = re.findall(r'<pre id="probe">(.*?)</pre>', dom, flags=re.DOTALL)
    assert text, "the probe has not run"
    head = dom.split("<body", 1)[0]  # dots of a curve have titles, too
    return title(head), json.loads(html.unescape(text))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", [4, 512])
def test_the_block_is_seen(browser: str, tmp_path: Path, ranks: int) -> None:
    found = taken(*RUN, world_size=ranks).snapshot(NOW, rows(ranks))
    _, seen = probed(browser, tmp_path, found)
    assert seen["lines"] == 2
    assert seen["filled"] == pytest.approx(0.4, abs=0.01)
    assert len(seen["cells"]) == (4 if ranks == 4 else 256)
    assert all(wide >= 8 and high >= 14 for wide, high in seen["cells"])
    assert (seen["color"], seen["ground"]) == ("rgb(31, 35, 40)", "rgb(255, 255, 255)")
    assert seen["tooWide"] <= 0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_nothing_of_a_name_runs(browser: str, tmp_path: Path) -> None:
    row = RankRow(rank=0, step=1, phase=EVIL, heard=NOW - 100, host=EVIL, at=EVIL)
    found = Snapshot(run_name=EVIL, now=NOW, phase=EVIL, step=1, total=2, ranks=(row,))
    name, seen = probed(browser, tmp_path, found)
    assert name == "nothing ran"
    assert seen["foreign"] == 0
    assert EVIL in seen["text"]
