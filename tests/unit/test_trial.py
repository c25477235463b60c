"""A rehearsal's plan, and what is made of its times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain import storage
from dbx_llmtrain.display import page_text
from dbx_llmtrain.driver import trial
from dbx_llmtrain.driver.supervise import Outcome
from dbx_llmtrain.events import Event
from dbx_llmtrain.outcomes import RankResult
from dbx_llmtrain.records import RunPlan
from tests import sample

TIMES = trial.Times(
    start=10.0, first_evaluation=1.0, steps=(3.0, 2.0), stall=0.5, checkpoint=4.0,
    checkpoint_bytes=100, resume=9.0, last_evaluation=6.0, export=7.0,
)  # fmt: skip


def plan(**sections: Any) -> RunPlan:
    """100 steps, 10 an epoch; 2 held-out examples."""
    cfg = sample.config(**sections)
    return sample.run_plan(
        "/r/first-trial", config=cfg, total_steps=100, steps_per_epoch=10, trial=True
    )


def test_it_keeps_to_everything_but_what_would_cost_time() -> None:
    whole = plan(
        train={"epochs": 10, "learning_rate": 0.5, "micro_batch_size": 3, "eval_every": 5,
               "early_stopping": 2, "max_time": "00:00:10:00", "sample_prompts": ["hi"],
               "log_every": 10},
        checkpoint={"every": 5, "every_minutes": 1, "keep_best": 2, "dir": "/r"},
        tracking={"run_name": "first", "log_model": "best", "register_as": "a.b.c",
                  "tags": {"x": "y"}},
        data={"shuffle": False, "train": "d.jsonl", "eval": 0.1},
    )  # fmt: skip
    short = trial.shorten(whole)
    assert short.total_steps == 2
    kept = {"config", "total_steps", "resume_from"}
    assert short.model_dump(exclude=kept) == whole.model_dump(exclude=kept)
    assert RunPlan.model_validate_json(short.model_dump_json()) == short, "the ranks read it"
    train, checkpoint, tracking = (
        short.config.train, short.config.checkpoint, short.config.tracking
    )  # fmt: skip
    assert (train.learning_rate, train.micro_batch_size, train.epochs) == (0.5, 3, 10)
    assert train.sample_prompts == ("hi",)
    assert (train.eval_every, train.early_stopping, train.max_time) == (None, None, None)
    assert (checkpoint.every, checkpoint.every_minutes, checkpoint.keep_best) == ("never", None, 0)
    assert (tracking.run_name, tracking.log_model, tracking.register_as, tracking.tags) == (
        "first-trial", "none", None, {"x": "y"},
    )  # fmt: skip
    assert (short.config.data.longest_first, short.config.data.shuffle) == (True, True)


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({}, 16),
        ({"eval_micro_batch_size": 2}, 4),
        ({"eval_max_rows": 3}, 3),
        ({"eval_max_rows": 100}, 16),
    ],
)
def test_the_first_evaluation_is_one_forward_of_each_rank(
    train: dict[str, Any], expected: int
) -> None:
    assert trial.shorten(plan(train=train)).config.train.eval_max_rows == expected
    none = sample.data().model_copy(update={"splits": {"train": sample.data().splits["train"]}})
    without = plan().model_copy(update={"data": none})
    assert trial.shorten(without).config.train.eval_max_rows is None


@pytest.mark.parametrize(
    ("sections", "evaluations", "checkpoints"),
    [
        # The first and the last evaluation, and one checkpoint until it is complete.
        ({}, 12.0, 4.0),
        ({"train": {"eval_every": 10}}, 12.0 + 9 * 6.0, 4.0),
        ({"train": {"eval_every": "epoch", "eval_max_rows": 1}}, 6.0 + 10 * 3.0, 4.0),
        ({"checkpoint": {"every": 25}}, 12.0, 3 * 0.5 + 4.0),
        ({"checkpoint": {"every": "epoch"}}, 12.0, 9 * 0.5 + 4.0),
    ],
)
def test_what_the_whole_run_takes(
    sections: dict[str, Any], evaluations: float, checkpoints: float
) -> None:
    parts = trial.expect(plan(**sections), TIMES, 2.0)
    assert [took for _, took in parts] == [10.0, 200.0, evaluations, checkpoints, 7.0]
    text = page_text(trial.summary(plan(**sections), TIMES))
    assert text.startswith("Rehearsal of first: all of it works\n")
    assert "step 1                      3 s   longest rows" in text
    assert "start from the checkpoint   9 s   what a retry costs" in text
    assert "The whole run of 100 steps takes about " in text
    assert "200 x" not in text
    assert "3.33 min of steps (100 x 2 s)" in text


def event(kind: Any, time: float, attempt: str, **fields: Any) -> Event:
    values: dict[str, Any] = {"attempt": attempt, "rank": 0, "step": 1, "n": 1}
    return Event(kind=kind, time=time, **(values | fields))


def events(began: float, attempt: str, *, last: bool) -> list[Event]:
    def phase(name: str, seconds: float) -> Event:
        return event("phase", began + seconds, attempt, data={"phase": name})

    saved = {"path": "/c", "seconds": 4.0, "seconds_stalled": 0.5, "bytes": 100}
    first = [phase("loading the model", 5)] + ([] if last else [phase("evaluating", 9)])
    return [
        *first,
        phase("training", 10),
        event("step", began + 12, attempt, metrics={"seconds_per_step": 2.0}),
        *([phase("evaluating", 12), phase("testing", 14)] if last else []),
        phase("writing a checkpoint", 15),
        event("checkpoint", began + 19, attempt, data=saved),
        *([phase("exporting", 20)] if last else []),
        event("finished", began + 27, attempt),
    ]


def test_it_launches_twice_and_tells_the_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launched: list[RunPlan] = []
    now = [1000.0, 2000.0]
    whole = plan().model_copy(update={"run_dir": str(tmp_path)})

    def go(asked: RunPlan) -> Outcome:
        began, last = now[len(launched)], asked.stop_after is None
        launched.append(asked)
        with (tmp_path / "events.jsonl").open("a") as file:
            for one in events(began, asked.attempt, last=last):
                file.write(one.model_dump_json() + "\n")
        result = RankResult(steps=2 if last else 1, metrics={}, checkpoint="/c", model_path=None)
        smaller = asked.model_copy(update={"micro_batch_size": 4})
        return Outcome(smaller, result, () if last else ("with less at once",))

    outcome = trial.rehearse(whole, go, clock=lambda: now[len(launched)])
    first, second = launched
    assert (first.stop_after, first.resume_from, first.total_steps) == (1, None, 2)
    assert (second.stop_after, second.resume_from) == (None, "/c")
    assert second.micro_batch_size == 4, "what was found to fit"
    assert len({whole.attempt, first.attempt, second.attempt}) == 2
    assert (outcome.result.steps, outcome.restarts) == (2, ("with less at once",))
    said = capsys.readouterr().out
    for line in (
        "start until the first step  9 s  ",
        "first evaluation            1 s  ",
        "step 2                      2 s  ",
        "checkpoint                  4 s   training waits 0.5 s",
        "start from the checkpoint   10 s ",
        "last evaluation             3 s  ",
        "export                      7 s",
    ):
        assert f"\n{line}" in said
    assert storage.local_path(outcome.plan.run_dir) == tmp_path


def test_what_is_not_known_is_nothing() -> None:
    assert trial.measure([], [], 0.0, 0.0) == trial.Times(0, 0, (), 0, 0, 0, 0, 0, 0)
