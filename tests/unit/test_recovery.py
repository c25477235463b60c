"""What follows a loss: whether the run goes on, from where, and with which ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain import storage
from dbx_llmtrain.driver import lease, recovery, supervise
from dbx_llmtrain.driver.recovery import Verdict
from dbx_llmtrain.errors import ClusterError, ConfigError, TrainingFailed
from dbx_llmtrain.events import Event
from dbx_llmtrain.layout import Layout
from dbx_llmtrain.outcomes import RankResult
from dbx_llmtrain.records import RunPlan
from tests import sample

DONE = RankResult(steps=9, metrics={}, checkpoint=None, model_path=None)


def lost(message: str = "no record of how rank 1 ended", **changes: Any) -> TrainingFailed:
    fields: dict[str, Any] = {"rank": 1, "host": "h1", "step": 7, "cause": "lost"}
    return TrainingFailed(message, **(fields | changes))


def plan(folder: Path = Path("/shared/runs/first"), **changes: Any) -> RunPlan:
    most = changes.pop("most", 3)
    config = sample.config(
        cluster={"max_restarts": most} | changes.pop("cluster", {}),
        data={"train": "/data/train.jsonl", "max_length": 128},
        train=changes.pop("train", {}),
    )
    return sample.run_plan(folder, **({"config": config, "total_steps": 9} | changes))


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (lost(), True),
        (lost(cause="network"), True),
        (lost(cause="host_memory"), True),
        (lost(cause="", exit_code=-9), True),
        (lost(cause="crash", exit_code=-15), True),
        (lost("the run ended after step 7 as it was asked to (CANCEL)", cause="stopped"), False),
        (lost("the Spark job of this run was cancelled", cause="stopped"), False),
        (lost(cause="crash", exit_code=-11), False),
        (lost(cause="", exit_code=1), False),
        *[
            (lost(cause=cause, exit_code=1), False)
            for cause in (
                "out_of_memory",
                "configuration",
                "stalled",
                "disk_full",
                "import",
                "data",
            )
        ],
    ],
)
def test_what_may_be_tried_again(error: TrainingFailed, transient: bool) -> None:
    assert recovery.is_transient(error) is transient
    assert recovery.decide(error, [], 1) == Verdict(transient)
    assert recovery.decide(error, [], 0) == Verdict(False), "nobody has asked for it"


SAME = "not tried again: the same failure at the same step as before"


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        (lost(), lost(), SAME),
        (lost(), lost(step=8), ""),
        (lost(), lost("no record of how rank 0 ended"), ""),
        (lost(step=None), lost(step=None), SAME),
        (
            lost("reset by 10.0.0.3:41234; Spark says: task 3"),
            lost("reset by 10.0.0.3:55001; Spark says: task 9"),
            SAME,
        ),
        (lost("by 10.0.0.3 after 3.2 s"), lost("by 10.0.0.4 after 3.2 s"), ""),
        (
            lost(cause="host_memory"),
            lost(cause="host_memory", step=9),
            "not tried again: a machine's memory was full for the second time",
        ),
        (lost(), lost(cause="host_memory", step=9), ""),
    ],
)
def test_the_same_again_is_not_tried_again(
    before: TrainingFailed, now: TrainingFailed, why: str
) -> None:
    assert recovery.decide(now, [before], 5) == Verdict(not why, why)


def test_no_more_restarts_than_were_allowed() -> None:
    earlier = [lost(step=step) for step in (1, 2)]
    assert recovery.decide(lost(), earlier, 3).go_on
    verdict = recovery.decide(lost(), earlier, 2)
    assert verdict == Verdict(False, "not tried again: cluster.max_restarts is 2")


class Attempts:
    """Raises one of ``errors`` after the other, then succeeds."""

    def __init__(self, *errors: TrainingFailed) -> None:
        self.errors = list(errors)
        self.plans: list[RunPlan] = []

    def __call__(self, plan: RunPlan) -> RankResult:
        self.plans.append(plan)
        if self.errors:
            raise self.errors.pop(0)
        return DONE


def checkpoint(folder: Path, step: int) -> Path:
    path = storage.checkpoint_folder(folder, step)
    path.mkdir(parents=True)
    (path / storage.MANIFEST).write_text(json.dumps({"files": [], "state": {"step": step}}))
    return path


def test_a_run_that_has_lost_something_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    """Also where the attempt did not come to say that it had written it."""
    saved = checkpoint(tmp_path, 6)
    told: list[str] = []
    attempts = Attempts(lost(), lost(step=8))
    outcome = supervise.run(plan(tmp_path), attempts, tell=told.append)
    assert [one.resume_from for one in attempts.plans] == [None, str(saved), str(saved)]
    assert len({one.attempt for one in attempts.plans}) == 3, "records are told apart"
    assert outcome.result == DONE
    assert outcome.restarts == tuple(told)
    assert told == [
        f"lost: rank 1 on h1 after step {step}: no record of how rank 1 ended; started again from "
        "step 6 with 2 ranks"
        for step in (7, 8)
    ]


def test_all_ranks_may_be_taken_at_once_more_than_once(tmp_path: Path) -> None:
    """None of them leaves a record: how far an attempt was is in its events."""

    def taken_after(step: int) -> Any:
        def attempt(plan: RunPlan) -> RankResult:
            event = Event(attempt=plan.attempt, rank=0, kind="step", time=1.0, step=step)
            (tmp_path / "events.jsonl").write_text(event.model_dump_json() + "\n")
            raise lost(step=None, rank=None, host=None)

        return attempt

    attempts = [taken_after(3), taken_after(5), lambda plan: DONE]
    told: list[str] = []
    supervise.run(plan(tmp_path), lambda plan: attempts.pop(0)(plan), tell=told.append)
    assert [text.split(": ")[1] for text in told] == ["a rank after step 3", "a rank after step 5"]
    attempts = [taken_after(3), taken_after(3)]
    with pytest.raises(TrainingFailed, match="the same failure at the same step as before"):
        supervise.run(plan(tmp_path), lambda plan: attempts.pop(0)(plan))


def test_of_sparks_words_the_lost_executor_is_told() -> None:
    spark = "Py4JJavaError: " + "An error occurred while calling " * 20
    lost_one = "ExecutorLostFailure (executor 1 exited) Reason: Command exited with code 137"
    message = f"no rank failed by itself; Spark says: {spark}{lost_one} Driver stacktrace: at x"
    told = recovery.restart_text(lost(message), plan(), plan(), 6)
    assert told == (
        f"lost: rank 1 on h1 after step 7: no rank failed by itself; {lost_one}; started again "
        "from step 6 with 2 ranks"
    )
    assert (
        len(recovery.restart_text(lost("x" * 5000 + "; Spark says: " + spark), plan(), plan(), 6))
        < 600
    )


def test_without_a_checkpoint_it_begins_again(tmp_path: Path) -> None:
    told: list[str] = []
    attempts = Attempts(lost(step=None, rank=None, host=None, cause="", exit_code=-9))
    supervise.run(plan(tmp_path), attempts, tell=told.append)
    assert attempts.plans[1].resume_from is None
    assert told[0].startswith("killed: a rank before its first step: ")
    assert told[0].endswith("; started again from the beginning with 2 ranks")


def test_what_another_run_has_left_behind_is_not_gone_on_from(tmp_path: Path) -> None:
    """An attempt that began at step 8 of another run: nothing before that is its own."""
    checkpoint(tmp_path, 4)
    start = checkpoint(tmp_path.with_name("other"), 8)
    attempts = Attempts(lost(step=9))
    supervise.run(
        plan(tmp_path, resume_from=str(start), total_steps=20), attempts, tell=lambda text: None
    )
    assert attempts.plans[1].resume_from == str(start)


def test_an_evaluation_begins_again(tmp_path: Path) -> None:
    checkpoint(tmp_path, 6)
    attempts = Attempts(lost(step=None))
    supervise.run(plan(tmp_path, purpose="evaluate"), attempts, tell=lambda text: None)
    assert attempts.plans[1].resume_from is None


def failure(attempts: Attempts, first: RunPlan, **options: Any) -> TrainingFailed:
    with pytest.raises(TrainingFailed) as caught:
        supervise.run(first, attempts, tell=lambda text: None, **options)
    return caught.value


def test_why_it_was_not_tried_again_is_in_the_advice(tmp_path: Path) -> None:
    attempts = Attempts(lost(), lost(advice="look at Spark's log"))
    error = failure(attempts, plan(tmp_path))
    assert len(attempts.plans) == 2
    assert error.advice == f"look at Spark's log. {SAME}"
    assert f"What to do: {error.advice}" in str(error)


def test_a_failure_is_passed_on_as_it_is_where_no_restart_is_wanted(tmp_path: Path) -> None:
    error = lost()
    assert failure(Attempts(error), plan(tmp_path, most=0)) is error


def test_smaller_pieces_and_restarts_are_counted_apart(tmp_path: Path) -> None:
    full = lost("CUDA out of memory", cause="out_of_memory", step=0)
    attempts = Attempts(full, lost(), full, lost(step=8))
    outcome = supervise.run(plan(tmp_path, most=2), attempts, tell=lambda text: None)
    assert [one.micro_batch_size for one in attempts.plans] == [8, 4, 4, 2, 2]
    assert [text.split(":")[0] for text in outcome.restarts if text.startswith("lost")] == [
        "lost", "lost",
    ]  # fmt: skip
    assert len(outcome.restarts) == 4


def test_nodes_that_do_not_come_back_are_in_the_advice(tmp_path: Path) -> None:
    def regroup(again: RunPlan) -> RunPlan:
        recovery.ranks_left(again, 1)
        raise AssertionError

    error = failure(Attempts(lost()), plan(tmp_path), regroup=regroup)
    assert "it could not be started again: ClusterError: the cluster cannot run this:" in str(error)
    assert "1 rank(s) have room after the loss; 2 are needed as cluster.min_processes" in str(error)
    assert isinstance(error.__cause__, ClusterError)


def test_a_folder_that_is_another_calls_by_now_is_left_alone(tmp_path: Path) -> None:
    def regroup(again: RunPlan) -> RunPlan:
        raise lease.Lost("another call has it")

    with pytest.raises(lease.Lost):
        supervise.run(plan(tmp_path), Attempts(lost()), regroup=regroup, tell=lambda text: None)


@pytest.mark.parametrize(
    ("least", "there", "ranks"), [(None, 5, 4), (None, 4, 4), (2, 3, 3), (2, 2, 2), (9, 4, 4)]
)
def test_ranks_that_are_left(least: int | None, there: int, ranks: int) -> None:
    first = plan(world_size=4, cluster={"min_processes": least})
    assert recovery.ranks_left(first, there) == ranks


@pytest.mark.parametrize(
    ("least", "there", "said"),
    [
        (None, 3, "3 rank(s) have room after the loss; 4 are needed as cluster.min_processes"),
        (2, 1, "1 rank(s) have room after the loss; cluster.min_processes is 2"),
    ],
)
def test_too_few_ranks_are_left(least: int | None, there: int, said: str) -> None:
    first = plan(world_size=4, cluster={"min_processes": least})
    with pytest.raises(ClusterError) as caught:
        recovery.ranks_left(first, there)
    assert said in str(caught.value)


def fewer(before: RunPlan, ranks: int) -> RunPlan:
    report = sample.cluster(*[sample.node(f"w{i}") for i in range(ranks)], slots=ranks)
    return recovery.replan(before, report, Layout(ranks, False, False, ()))


@pytest.mark.parametrize(
    "train", [{}, {"global_batch_size": 32}, {"gradient_accumulation_steps": 1}],
    ids=["default", "given", "made of accumulation"],
)  # fmt: skip
def test_fewer_ranks_take_the_same_steps(train: dict[str, Any]) -> None:
    before = plan(world_size=4, micro_batch_size=8, accumulation=1, train=train)
    now = fewer(before, 3)
    assert (now.world_size, now.global_batch_size) == (3, 32)
    assert (now.micro_batch_size, now.accumulation) == (8, 2), "11, 11 and 10 examples on a rank"
    kept = ("total_steps", "steps_per_epoch", "warmup_steps", "examples", "config", "run_dir")
    assert [getattr(now, name) for name in kept] == [getattr(before, name) for name in kept]
    told = recovery.restart_text(lost(), before, now, 6)
    assert told.endswith(
        "started again from step 6 with 3 ranks instead of 4 (micro-batch x accumulation 8 x 2, "
        "the global batch stays 32)"
    )


def test_pieces_that_were_made_smaller_stay_small() -> None:
    now = fewer(plan(world_size=4, micro_batch_size=2, accumulation=4), 2)
    assert (now.micro_batch_size, now.accumulation) == (2, 8)
    why = {each.name: (each.value, each.reason) for each in now.decisions}
    assert why["train.micro_batch_size"] == (2, "as before")


def test_an_evaluation_on_fewer_ranks() -> None:
    before = plan(world_size=4, purpose="evaluate", micro_batch_size=8, global_batch_size=32)
    now = fewer(before, 3)
    assert (now.world_size, now.micro_batch_size, now.global_batch_size) == (3, 8, 24)


def test_a_strategy_that_cannot_run_on_them_is_refused() -> None:
    config = sample.config(
        data={"train": "/d", "max_length": 128}, parallel={"kind": "fsdp", "shard": "hybrid"}
    )
    before = plan(world_size=4).model_copy(update={"config": config})
    nodes = [sample.node(name).model_copy(update={"host": name}) for name in ("a", "b")]
    report = sample.cluster(*nodes, executors=("a", "a", "b"), slots=3)
    with pytest.raises(ConfigError, match="hybrid"):
        recovery.replan(before, report, Layout(3, False, False, ()))


def test_locally_nobody_is_asked() -> None:
    again = plan(local_mode=True)
    options: dict[str, Any] = {"slots": 0, "check": lambda: None, "say": print}
    assert recovery.regroup(None, again, again, **options) is again


def test_the_steps_of_an_attempt_are_counted_from_where_it_began(tmp_path: Path) -> None:
    """It began at step 5, as it says: the checkpoint of step 4 is not its own."""
    checkpoint(tmp_path, 4)
    first = plan(tmp_path)
    began = Event(attempt=first.attempt, rank=0, kind="started", time=1.0, step=5)
    (tmp_path / "events.jsonl").write_text(began.model_dump_json() + "\n")
    attempts = Attempts(lost())
    supervise.run(first, attempts, tell=lambda text: None)
    assert attempts.plans[1].resume_from is None
