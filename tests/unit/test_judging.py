"""What an evaluation means: the list of the best, and when more steps are not worth it."""

from __future__ import annotations

import math

import pytest

from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.errors import ConfigError
from tests import sample

torch = pytest.importorskip("torch", reason="a rank's modules need torch")

from dbx_llmtrain.worker import judging  # noqa: E402
from dbx_llmtrain.worker.jobs import Progress  # noqa: E402


def config(**sections: object) -> TrainConfig:
    data = {"train": "/data/train.jsonl", "eval": 0.1}
    train = {"eval_every": 1} | dict(sections.pop("train", {}))  # type: ignore[call-overload]
    return sample.config(data=data, train=train, **sections)


def judged(cfg: TrainConfig, *values: float, progress: Progress | None = None) -> list[str]:
    """What is said of each evaluation: ``best``, why it is enough, or nothing."""
    progress = progress or Progress()
    found = []
    for value in values:
        progress.step += 1
        verdict = judging.judge(cfg, progress, {"eval_loss": value})
        found.append(verdict.enough or ("best" if verdict.keep else ""))
    return found


def test_the_best_two_in_their_order() -> None:
    cfg, progress = config(checkpoint={"keep_best": 2}), Progress()
    found = judged(cfg, 3.0, 4.0, 5.0, 2.0, 3.0, 2.5, progress=progress)
    assert found == ["best", "best", "", "best", "", "best"]
    assert progress.bests == [(4, 2.0), (6, 2.5)]


def test_more_may_be_better() -> None:
    checkpoint = {"keep_best": 1, "metric": "accuracy"}
    cfg, progress = config(checkpoint=checkpoint), Progress()
    for step, value in enumerate((0.5, 0.4, 0.7), start=1):
        progress.step = step
        judging.judge(cfg, progress, {"eval_loss": 1.0, "accuracy": value})
    assert progress.bests == [(3, 0.7)]


def test_what_is_no_number_is_never_among_the_best_and_counts_as_no_better() -> None:
    cfg, progress = config(checkpoint={"keep_best": 1}, train={"early_stopping": 2}), Progress()
    found = judged(cfg, math.nan, math.nan, progress=progress)
    assert found[0] == ""
    assert found[1] == "train.early_stopping: eval_loss was no number in 2 evaluations"
    assert progress.bests == []


def test_patience_is_counted_from_the_best_value() -> None:
    cfg = config(train={"early_stopping": {"patience": 2, "min_delta": 0.1}})
    found = judged(cfg, 3.0, 2.95, 2.8, 2.75, 2.71)
    assert found[:4] == ["", "", "", ""]
    assert found[4] == (
        "train.early_stopping: eval_loss has not become better than 2.8 by at "
        "least 0.1 in 2 evaluations in a row"
    )


def test_a_step_is_judged_once() -> None:
    cfg = config(checkpoint={"keep_best": 3}, train={"early_stopping": 5})
    progress = Progress(step=4)
    judging.judge(cfg, progress, {"eval_loss": 2.0})
    assert judging.judge(cfg, progress, {"eval_loss": 1.0}) == judging.Verdict()
    assert (progress.bests, progress.waited) == ([(4, 2.0)], 0)
    assert progress.metrics == {"eval_loss": 1.0}


def test_nothing_is_decided_where_nothing_depends_on_it() -> None:
    progress = Progress()
    assert judged(config(), 3.0, 9.0, progress=progress) == ["", ""]
    assert (progress.bests, progress.waited, progress.reached) == ([], 0, None)
    judging.check_metric(config(checkpoint={"metric": "bleu"}), {"eval_loss"})


@pytest.mark.parametrize(
    "changes", [{"checkpoint": {"keep_best": 1}}, {"train": {"early_stopping": 1}}]
)
def test_a_metric_that_there_is_not_is_refused(changes: dict[str, dict[str, object]]) -> None:
    checkpoint = {"metric": "bleu"} | changes.get("checkpoint", {})
    cfg = config(**(changes | {"checkpoint": checkpoint}))
    with pytest.raises(ConfigError, match="found 'bleu'; they have eval_loss"):
        judging.judge(cfg, Progress(step=1), {"eval_loss": 1.0})
    with pytest.raises(ConfigError, match="they have no metric at all"):
        judging.check_metric(cfg, ())


def test_another_metric_begins_anew() -> None:
    cfg, progress = config(checkpoint={"keep_best": 2}, train={"early_stopping": 9}), Progress()
    judged(cfg, 3.0, 4.0, progress=progress)
    other = config(checkpoint={"keep_best": 2, "metric_mode": "max"}, train={"early_stopping": 9})
    assert judged(other, 1.0, progress=progress) == ["best"]
    assert (progress.bests, progress.reached, progress.waited) == ([(3, 1.0)], 1.0, 0)


def test_what_was_counted_survives_a_checkpoint() -> None:
    import json
    from pathlib import Path

    cfg = config(checkpoint={"keep_best": 1}, train={"early_stopping": 3})
    progress = Progress()
    judged(cfg, 3.0, 4.0, progress=progress)
    again = Progress.from_state(json.loads(json.dumps(progress.state())), Path("/c/step-2"))
    assert again.bests == [(1, 3.0)]
    assert judged(cfg, 5.0, 6.0, progress=again) == judged(cfg, 5.0, 6.0, progress=progress)
