"""The picture of a run's losses, from its events."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from dbx_llmtrain.display_curves import Curve, Curves, read_curves
from dbx_llmtrain.events import EVENTS_FILE, Event
from tests import sample

SVG = "{http://www.w3.org/2000/svg}"


def write(folder: Path, *events: tuple[str, int, dict[str, float], dict[str, str]]) -> None:
    lines = [
        Event(attempt="a", rank=0, kind=kind, time=0.0, step=step, n=1, metrics=metrics, data=data)  # type: ignore[arg-type]
        for kind, step, metrics, data in events
    ]
    text = "".join(line.model_dump_json() + "\n" for line in lines)
    (folder / EVENTS_FILE).write_text(text, encoding="utf-8")


def test_a_run_that_went_on_has_each_step_once(tmp_path: Path) -> None:
    checkpoints = [tmp_path / f"checkpoints/step-{step:08}" for step in (2, 4)]
    checkpoints[0].mkdir(parents=True)
    write(
        tmp_path,
        ("started", 0, {}, {}),
        ("eval", 0, {"eval_loss": 4.0, "eval_perplexity": 54.6}, {}),
        ("step", 1, {"loss": 3.9, "learning_rate": 0.1}, {}),
        ("step", 2, {"loss": 3.5}, {}),
        ("checkpoint", 2, {}, {"path": str(checkpoints[0])}),
        ("step", 3, {"loss": 99.0}, {}),
        ("checkpoint", 3, {}, {"path": str(tmp_path / "lost")}),
        ("started", 2, {}, {}),
        ("step", 3, {"loss": math.nan}, {}),
        ("step", 4, {"loss": 3.0}, {}),
        ("eval", 4, {"eval_loss": 3.2}, {}),
        ("eval", 4, {"best_eval_loss": 3.1}, {}),
        ("checkpoint", 4, {}, {"path": str(checkpoints[1])}),
    )
    found = read_curves(str(tmp_path), "first")
    assert found.curves == (
        Curve("loss", ((1, 3.9), (2, 3.5), (4, 3.0))),
        Curve("eval_loss", ((0, 4.0), (4, 3.2))),
    )
    assert (found.kept, found.gone) == ((2,), (4,))


def test_in_a_terminal_the_curves_are_signs(tmp_path: Path) -> None:
    write(
        tmp_path,
        *(("step", step, {"loss": 5.0 - step}, {}) for step in range(1, 5)),
        ("eval", 4, {"eval_loss": 1.5}, {}),
        ("checkpoint", 4, {}, {"path": str(tmp_path)}),
    )
    plot = sample.result(tmp_path).plot()
    lines = repr(plot).splitlines()
    assert lines[0] == f"Losses of {sample.result(tmp_path).run_name}"
    assert lines[1].endswith("|.")
    assert lines[12].rstrip().endswith(".")
    assert sum(line.count(".") for line in lines[1:13]) >= 4
    assert lines[-2].strip() == ". loss 1   o eval_loss 1.5"
    assert lines[-1].strip() == "checkpoints: 4"
    assert str(plot).isascii()


def test_in_a_notebook_they_are_a_picture(tmp_path: Path) -> None:
    plot = Curves(
        "Losses of <b>",
        (Curve("loss", tuple((step, 1 / step) for step in range(1, 5001))),
         Curve("eval_<b>_loss", ((0, 2.0), (5000, 1.0)))),
        kept=(5000,),
        gone=(2500, 9000),
    )  # fmt: skip
    root = ET.fromstring(plot._repr_svg_())
    lines = [element.get("points", "").split() for element in root.iter(f"{SVG}polyline")]
    assert len(lines[0]) <= 801
    assert lines[1] == ["64.0,50.7", "704.0,158.0"], "from the first step to the last"
    assert lines[0][-1].startswith("704.0,"), "the last point is drawn"
    dots = [dot for dot in root.iter(f"{SVG}circle") if dot.get("r") == "3.5"]
    assert [dot.get("fill") for dot in dots] == ["#1f2328", "#ffffff"]
    assert "eval_<b>_loss 1" in "".join(root.itertext())
    assert plot._repr_html_() == f"<div>{plot._repr_svg_()}</div>"


@pytest.mark.parametrize("value", [2.0, 0.0])
def test_one_point_is_a_picture_too(value: float) -> None:
    plot = Curves("One", (Curve("loss", ((1, value),)),))
    assert ". loss" in repr(plot)
    assert "NaN" not in plot._repr_svg_()
    ET.fromstring(plot._repr_svg_())


def test_a_run_without_steps_says_so(tmp_path: Path) -> None:
    plot = read_curves(str(tmp_path), "first")
    assert repr(plot) == "Losses of first: no step has been reported yet"
    assert "no step has been reported yet" in "".join(ET.fromstring(plot._repr_svg_()).itertext())
