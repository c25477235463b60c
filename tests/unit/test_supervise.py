"""What follows a lack of memory: smaller pieces, twice at most, or the reason with what helps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain import storage
from dbx_llmtrain.driver import supervise
from dbx_llmtrain.errors import TrainingFailed
from dbx_llmtrain.estimates import MemoryEstimate
from dbx_llmtrain.events import Event
from dbx_llmtrain.forecasts import Decision, StrategyRow
from dbx_llmtrain.model_sections import ParallelConfig
from dbx_llmtrain.outcomes import RankResult
from dbx_llmtrain.records import RunPlan
from tests import sample

DONE = RankResult(steps=9, metrics={}, checkpoint=None, model_path=None)
GIB = 2**30


def plan(folder: Path = Path("/shared/runs/first"), **changes: Any) -> RunPlan:
    """8 examples at once and 16 on each of two ranks, 9 steps."""
    values: dict[str, Any] = {
        "global_batch_size": 32,
        "micro_batch_size": 8,
        "accumulation": 2,
        "total_steps": 9,
        "decisions": (
            Decision(name="train.micro_batch_size", value=8, reason="as configured"),
            Decision(name="accumulation", value=2, reason="ceil(16 examples on a rank / 8)"),
            Decision(name="train.precision", value="fp32", reason="CPU"),
        ),
    }
    return sample.run_plan(folder, **(values | changes))


def full(step: int | None = 0, **changes: Any) -> TrainingFailed:
    fields: dict[str, Any] = {"rank": 1, "host": "h1", "cause": "out_of_memory", "step": step}
    return TrainingFailed("OutOfMemoryError: CUDA out of memory", **(fields | changes))


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

    def sizes(self) -> list[tuple[int, int]]:
        return [(plan.micro_batch_size, plan.accumulation) for plan in self.plans]


def failed(attempts: Attempts, first: RunPlan) -> TrainingFailed:
    with pytest.raises(TrainingFailed) as caught:
        supervise.run(first, attempts, tell=lambda text: None)
    return caught.value


def test_a_run_that_fits_is_attempted_once() -> None:
    attempts = Attempts()
    outcome = supervise.run(plan(), attempts)
    assert (outcome.result, outcome.restarts, outcome.plan) == (DONE, (), plan())
    assert len(attempts.plans) == 1


def test_half_the_micro_batch_and_twice_the_accumulation_twice_at_most() -> None:
    attempts, told = Attempts(full(0), full(2)), []
    first = plan()
    outcome = supervise.run(first, attempts, tell=told.append)
    assert attempts.sizes() == [(8, 2), (4, 4), (2, 8)]
    assert outcome.result == DONE
    assert outcome.plan == attempts.plans[-1]
    assert (
        list(outcome.restarts)
        == told
        == [
            "rank 1 on h1 ran out of memory after step 0 with a micro-batch x accumulation of "
            "8 x 2: started again with 4 x 4; rows and numbers of a step stay the same",
            "rank 1 on h1 ran out of memory after step 2 with a micro-batch x accumulation of "
            "4 x 4: started again with 2 x 8; rows and numbers of a step stay the same",
        ]
    )
    assert len({one.attempt for one in attempts.plans}) == 3, "records are told apart"
    changed = {"attempt", "micro_batch_size", "accumulation", "decisions"}
    last = outcome.plan.model_dump(exclude=changed)
    assert last == first.model_dump(exclude=changed)
    reasons = {one.name: (one.value, one.reason) for one in outcome.plan.decisions}
    assert reasons == {
        "train.micro_batch_size": (
            2, "rank 1 on h1 ran out of memory with 4; the numbers stay the same",
        ),
        "accumulation": (8, "ceil(16 examples on a rank / 2)"),
        "train.precision": ("fp32", "CPU"),
    }  # fmt: skip


def test_the_third_time_it_fails_with_what_was_tried() -> None:
    attempts = Attempts(full(), full(), full())
    error = failed(attempts, plan())
    assert attempts.sizes() == [(8, 2), (4, 4), (2, 8)]
    assert "2 restart(s) with less at once did not help" in error.advice
    assert "train.micro_batch_size=1 (the plan's is 2)" in error.advice
    assert (error.rank, error.host, error.step, error.cause) == (1, "h1", 0, "out_of_memory")


def test_a_size_that_was_given_is_halved_too_and_said() -> None:
    config = sample.config(train={"micro_batch_size": 8})
    outcome = supervise.run(plan(config=config), Attempts(full()), tell=lambda text: None)
    (text,) = outcome.restarts
    assert "started again with 4 x 4, although train.micro_batch_size is 8; rows and" in text


@pytest.mark.parametrize(
    ("micro", "total", "sizes"),
    [
        (5, 32, [(5, 4), (2, 8), (1, 16)]),
        (3, 32, [(3, 6), (1, 16)]),
        # A rank never ran more than its share of a step.
        (64, 8, [(64, 1), (2, 2), (1, 4)]),
    ],
)
def test_odd_sizes_and_those_above_the_share(
    micro: int, total: int, sizes: list[tuple[int, int]]
) -> None:
    start = plan(micro_batch_size=micro, global_batch_size=total, accumulation=sizes[0][1])
    attempts = Attempts(full(), full(), full())
    failed(attempts, start)
    assert attempts.sizes() == sizes


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (full(3), {}),
        (full(0), {"micro_batch_size": 1, "accumulation": 16}),
        (full(None), {}),
        (full(2), {"total_steps": 2}),
    ],
    ids=["after step 3", "one example", "no step was begun", "after the last step"],
)
def test_no_other_attempt_where_smaller_pieces_would_not_help(
    error: TrainingFailed, changes: dict[str, Any]
) -> None:
    attempts = Attempts(error)
    told = failed(attempts, plan(**changes))
    assert len(attempts.plans) == 1
    assert "what takes less: " in told.advice
    assert "restart" not in told.advice


def test_any_other_failure_is_passed_on_as_it_is() -> None:
    other = TrainingFailed("ValueError: row 17", rank=1, step=0, advice="look at it")
    assert failed(Attempts(other), plan()) is other
    attempts = Attempts(full(), other)
    assert failed(attempts, plan()) is other
    assert len(attempts.plans) == 2


def row(**changes: Any) -> StrategyRow:
    estimate = MemoryEstimate(
        weights=2 * GIB, master=0, gradients=GIB, optimizer=4 * GIB, activations=9 * GIB, logits=0,
        communication=GIB // 2, total=16 * GIB + GIB // 2, host=GIB, disk=GIB, checkpoint=GIB,
    )  # fmt: skip
    values: dict[str, Any] = {
        "name": "fsdp full", "parallel": ParallelConfig(kind="fsdp"), "micro_batch_size": 8,
        "gradient_checkpointing": 0, "estimate": estimate, "fits": True, "spare": GIB, "why": "",
        "chosen": True,
    }  # fmt: skip
    return StrategyRow(**(values | changes))


def test_the_failure_has_the_memory_that_the_plan_had_counted() -> None:
    start = plan(strategies=(row(chosen=False, name="ddp"), row()))
    error = failed(Attempts(full(5)), start)
    assert (
        "the plan counted 16.5 GiB a rank for fsdp full with a micro-batch of 8 (weights 2.0 GiB, "
        "gradients 1.0 GiB, optimizer 4.0 GiB, activations 9.0 GiB, communication 512 MiB)"
    ) in error.advice
    assert f"What to do: {error.advice}" in str(error)


@pytest.mark.parametrize(
    ("changes", "lines", "absent"),
    [
        (
            {"strategy": "ddp", "parallel": ParallelConfig(kind="ddp"), "use_gpu": True},
            ["model.gradient_checkpointing=full", "data.max_length below 2048",
             "parallel.kind=fsdp with parallel.shard=full", "model.lora={}"],
            ["parallel.cpu_offload", "fewer ranks"],
        ),
        (
            {"strategy": "single", "parallel": ParallelConfig(kind="single")},
            ["more ranks with parallel.kind=fsdp", "machines with more memory, or fewer ranks"],
            [],
        ),
        (
            {"parallel": ParallelConfig(kind="fsdp"), "gradient_checkpointing": 1,
             "micro_batch_size": 1},
            ["parallel.cpu_offload=true", "more ranks"],
            ["gradient_checkpointing", "micro_batch_size=1", "parallel.kind=fsdp"],
        ),
        (
            {"parallel": ParallelConfig(kind="fsdp", shard="hybrid", cpu_offload=True)},
            ["parallel.kind=fsdp with parallel.shard=full"],
            ["parallel.cpu_offload"],
        ),
        (
            {"strategy": "deepspeed", "parallel": ParallelConfig(kind="deepspeed", stage=2)},
            ["parallel.stage=3, parallel.offload_optimizer and parallel.offload_params"],
            ["parallel.kind=fsdp"],
        ),
        ({"config": sample.config(model={"source": "m", "lora": {}})}, [], ["model.lora"]),
    ],
)  # fmt: skip
def test_what_helps_is_what_this_run_does_not_have(
    changes: dict[str, Any], lines: list[str], absent: list[str]
) -> None:
    error = failed(Attempts(full(5)), plan(**changes))
    for line in lines:
        assert line in error.advice
    for line in absent:
        assert line not in error.advice


def checkpoint(folder: Path, step: int) -> Path:
    """A complete checkpoint without files."""
    path = storage.checkpoint_folder(folder, step)
    path.mkdir(parents=True)
    (path / storage.MANIFEST).write_text(json.dumps({"files": [], "state": {"step": step}}))
    return path


def events(folder: Path, attempt: str, *saved: Path) -> None:
    with (folder / "events.jsonl").open("a") as file:
        for path in saved:
            event = Event(
                attempt=attempt, rank=0, kind="checkpoint", time=1.0, step=1,
                data={"path": str(path)},
            )  # fmt: skip
            file.write(event.model_dump_json() + "\n")


@pytest.mark.parametrize("said", [6, None])
def test_steps_are_counted_from_the_checkpoint_that_the_attempt_began_with(
    tmp_path: Path, said: int | None
) -> None:
    """It says itself which one that was, as the planned one may have been damaged. Where it was
    ended before that was heard, the planned one counts."""
    start = checkpoint(tmp_path, 7 if said else 6)
    resumed = plan(tmp_path, resume_from=str(start), total_steps=20)
    if said is not None:
        began = Event(attempt=resumed.attempt, rank=0, kind="started", time=1.0, step=said)
        (tmp_path / "events.jsonl").write_text(began.model_dump_json() + "\n")
    attempts = Attempts(full(8))
    outcome = supervise.run(resumed, attempts, tell=lambda text: None)
    assert attempts.sizes() == [(8, 2), (4, 4)]
    assert outcome.plan.resume_from == str(start)
    attempts = Attempts(full(9))
    failed(attempts, resumed)
    assert len(attempts.plans) == 1


def test_the_plan_names_the_checkpoint_that_was_taken(tmp_path: Path) -> None:
    """The planned one was damaged."""
    older, newest = (str(checkpoint(tmp_path, step)) for step in (1, 2))
    note = Decision(name="held-out rows", value="changed", reason="held-out rows since step 2")
    first = plan(tmp_path, resume_from=newest, decisions=(*plan().decisions, note))
    event = Event(attempt=first.attempt, rank=0, kind="started", time=1.0, step=1,
                  data={"resumed_from": older})  # fmt: skip
    (tmp_path / "events.jsonl").write_text(event.model_dump_json() + "\n")
    wanted = first.model_copy(update={"resume_from": older, "decisions": plan().decisions})
    assert supervise.run(first, Attempts()).plan == wanted
    attempts = Attempts(full(2))
    supervise.run(first, attempts, tell=lambda text: None)
    assert attempts.plans[1].resume_from == older
    (tmp_path / "plan.json").unlink()
    told: list[RunPlan] = []
    handle = supervise.noticing(first, told.append)
    handle(event)
    assert told == [wanted]
    assert RunPlan.model_validate_json((tmp_path / "plan.json").read_text()) == wanted
    for other in (event.model_copy(update={"data": {"resumed_from": newest}}),
                  event.model_copy(update={"kind": "step"}),
                  event.model_copy(update={"data": {}})):  # fmt: skip
        handle(other)
    assert told == [wanted]


def test_the_next_attempt_goes_on_from_what_this_one_has_saved(tmp_path: Path) -> None:
    """Checkpoints of an earlier run in the same folder are not of this one, nor is a broken one."""
    of_another = checkpoint(tmp_path, 7)
    events(tmp_path, "old", of_another)
    attempts = Attempts(full(2))
    supervise.run(plan(tmp_path), attempts, tell=lambda text: None)
    assert attempts.plans[1].resume_from is None
    mine = [checkpoint(tmp_path, step) for step in (1, 2)]
    events(tmp_path, plan().attempt, *mine)
    attempts = Attempts(full(2))
    supervise.run(plan(tmp_path), attempts, tell=lambda text: None)
    assert attempts.plans[1].resume_from == str(mine[1])
    (mine[1] / storage.MANIFEST).unlink()
    attempts = Attempts(full(2))
    supervise.run(plan(tmp_path), attempts, tell=lambda text: None)
    assert attempts.plans[1].resume_from is None


def test_a_failure_of_no_rank_in_particular() -> None:
    outcome = supervise.run(plan(), Attempts(full(rank=None, host=None)), tell=lambda text: None)
    assert outcome.restarts[0].startswith("a rank ran out of memory after step 0")


def test_it_is_said_on_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    supervise.run(plan(), Attempts(full()))
    assert "started again with 4 x 4" in capsys.readouterr().out
