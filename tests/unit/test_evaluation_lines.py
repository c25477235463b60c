"""What a rank prints of an evaluation, and what goes into its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from dbx_llmtrain.events import EVENTS_FILE, read_events
from dbx_llmtrain.outcomes import Sample
from dbx_llmtrain.worker.evaluate import EvalReport
from dbx_llmtrain.worker.reporting import reporting
from tests import sample


def report(loss: float) -> EvalReport:
    return EvalReport(loss, 97, 7, 3.0)


def test_sets_own_metrics_and_answers_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    long = Sample(prompt="p " * 60, text="t " * 300, tokens=128, stopped=False)
    nothing = Sample(prompt="two\nlines", text="", tokens=1, stopped=True)
    with reporting(sample.run_plan(tmp_path), 0) as reporter:
        reporter.evaluated({"eval": report(2.0), "eval_code": report(1.0)}, {"accuracy": 0.25})
        reporter.evaluated({"best_eval": report(1.5), "best_test": report(1.25)})
        reporter.evaluated({}, {"accuracy": 0.5})
        reporter.sampled([long, nothing])
    lines = capfd.readouterr().out.splitlines()
    assert lines[:6] == [
        "step 0: held-out loss 2.0000 over 7 rows",
        "step 0: held-out code loss 1.0000 over 7 rows",
        "step 0: accuracy 0.25",
        "step 0: held-out (best model) loss 1.5000 over 7 rows",
        "step 0: test (best model) loss 1.2500 over 7 rows",
        "step 0: accuracy 0.5",
    ]
    assert all(len(line) < 300 for line in lines)
    assert lines[6].startswith("step 0: ... ")
    assert lines[6].endswith(" t ...")
    assert lines[7] == "step 0: two lines -> (nothing)"
    kept = [event for event in read_events(tmp_path / EVENTS_FILE) if event.kind != "phase"]
    assert [event.kind for event in kept] == ["eval", "eval", "eval", "samples"]
    assert kept[0].metrics["accuracy"] == 0.25
    assert kept[0].data == {"rows": 7, "trained_tokens": 97}
    assert set(kept[1].metrics) == {
        "best_eval_loss", "best_eval_perplexity", "best_test_loss", "best_test_perplexity",
    }  # fmt: skip
    assert kept[2].data == {}
    assert kept[3].data["samples"] == [long.model_dump(), nothing.model_dump()]
