"""Runs on two ranks that are killed in the middle of a step, and go on; runs that are stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dbx_llmtrain import storage
from dbx_llmtrain.model_sections import ParallelConfig
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.text.prepared import Example, Split, write_split
from dbx_llmtrain.worker.data import Order
from dbx_llmtrain.worker.main import run
from tests import tiny
from tests.dist import plans
from tests.dist.launch import some_slow, two_ranks
from tests.dist.test_main import TIMED, events, same_threads, tensors

__all__ = ["same_threads"]
pytestmark = pytest.mark.dist

STEPS, KILLED, SAVED = 12, 7, 5
"""Steps of a run; the one in which it is killed; the one after which it was saved."""
FORWARDS = (3, 3, 3, 2)
"""Micro-batches of each rank in the steps of an epoch: 22 packs, 6 of them a step."""

PARTITIONED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
STRATEGIES = {
    "ddp": ParallelConfig(kind="ddp"),
    "fsdp": ParallelConfig(kind="fsdp"),
    "zero2": ParallelConfig(kind="deepspeed", stage=2),
    "zero3": ParallelConfig(kind="deepspeed", stage=3, config=PARTITIONED),
}
KILL_ONE, KILL_BOTH = (0, -signal.SIGKILL), (-signal.SIGKILL, -signal.SIGKILL)
DIES = {"ddp": KILL_BOTH, "fsdp": KILL_ONE, "zero2": KILL_BOTH, "zero3": KILL_ONE}
"""Exit codes: a rank that only loses the other one says so, and ends by itself."""


def make(folder: Path, name: str, *, ranks: int = 2, **changes: Any) -> RunPlan:
    """A run with dropout over packed rows, an example of a rank at a time; saved in the middle of
    an epoch."""
    strategy = name.split("-")[0]
    parallel = STRATEGIES.get(strategy, ParallelConfig(kind="single"))
    lengths = [3 + 17 * n % 41 for n in range(50)]
    values: dict[str, Any] = {
        "rows": tiny.examples(lengths),
        "packing": True,
        "model": plans.model_folder(folder / "model", attention_dropout=0.1),
        "strategy": parallel.kind,
        "parallel": parallel,
        "world_size": ranks,
        "every": SAVED,
        "export": False,
        "train": {"max_steps": STEPS, "global_batch_size": 6, "eval_every": 4},
    }
    plan = plans.plan(folder, name, **(values | changes))
    same = plan.data.artifact.model_copy(update={"fingerprint": "packed"})
    config = plan.config.override("checkpoint.keep_last=all")
    data = plan.data.model_copy(update={"artifact": same})
    # All runs find the same rows under the same name.
    return plan.model_copy(update={"data": data, "config": config})


def lay_out(folder: Path, plan: RunPlan, *actions: dict[int, Any]) -> Path:
    """Put a plan where ``main_rank`` finds it, with what happens on each rank."""
    place = folder / f"{plan.run_name}-plan"
    place.mkdir()
    for rank in (0, 1):
        (place / f"plan-{rank}.json").write_text(plan.model_dump_json())
    for rank, what in enumerate(actions):
        (place / f"actions-{rank}.json").write_text(json.dumps(what))
    return place


def forwards(steps: int) -> int:
    """Forward passes of a rank in so many steps."""
    return sum(FORWARDS[step % len(FORWARDS)] for step in range(steps))


def kill(codes: tuple[int, int]) -> tuple[dict[int, int], ...]:
    """In the second micro-batch of a step, when the last checkpoint is complete."""
    number = forwards(KILLED - 1) + 2
    return tuple({number: SAVED} if code else {} for code in codes)


def at(plan: RunPlan, step: int) -> Path:
    return storage.checkpoint_folder(Path(plan.run_dir), step)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


Three = tuple[RunPlan, RunPlan, RunPlan]
Runs = Callable[[str], Three]


@pytest.fixture(scope="module")
def runs(folder: Path) -> Runs:
    """By strategy: a run of 12 steps, one that is killed in its 7th, and what went on from that."""
    done: dict[str, Three] = {}

    def of(name: str) -> Three:
        if name not in done:
            done[name] = _three(folder, name)
        return done[name]

    return of


def _three(folder: Path, name: str) -> Three:
    whole, killed = make(folder, f"{name}-whole"), make(folder, f"{name}-killed")
    places = [lay_out(folder, whole), lay_out(folder, killed, *kill(DIES[name]))]
    # DeepSpeed keeps the process group that it has seen first.
    for launch in [places] if name in ("ddp", "fsdp") else [places[:1], places[1:]]:
        codes = DIES[name] if places[1] in launch else (0, 0)
        two_ranks(folder, launch, dict(os.environ), codes=codes)
    newest = str(storage.latest_checkpoint(Path(killed.run_dir)))
    rest = killed.model_copy(
        update={"resume_from": newest, "attempt": "again", "run_name": f"{name}-rest"}
    )
    two_ranks(folder, [lay_out(folder, rest)], dict(os.environ))
    return whole, killed, rest


def rows(folder: Path, plan: RunPlan, rank: int) -> list[str]:
    found: list[str] = json.loads(
        (folder / f"{plan.run_name}-plan" / f"rows-{rank}.json").read_text()
    )
    return found


by_strategy = pytest.mark.parametrize("name", some_slow(STRATEGIES, "fsdp"))


@by_strategy
def test_c83_a_run_that_was_killed_goes_on_as_if_nothing_had_been(
    runs: Runs, name: str, tmp_path: Path
) -> None:
    """Weights, optimizer and random states, bitwise."""
    whole, killed, rest = runs(name)
    assert rest.resume_from == str(at(killed, SAVED))
    ends = [at(plan, STEPS) for plan in (whole, rest)]
    first, second = (tensors(end, tmp_path / str(i)) for i, end in enumerate(ends))
    assert len(first) == 84
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for rank in (0, 1):
        states = [(end / f"rng-{rank:05d}.json").read_bytes() for end in ends]
        assert states[0] == states[1]


@by_strategy
def test_c83_every_row_comes_in_its_place(runs: Runs, name: str, folder: Path) -> None:
    """None is repeated or left out: by what each rank computes in each micro-batch."""
    whole, _, rest = runs(name)
    for rank in (0, 1):
        everything, again = rows(folder, whole, rank), rows(folder, rest, rank)
        assert len(everything) == forwards(STEPS)
        assert again == everything[forwards(SAVED) :]
        epoch = [everything[: forwards(4)], everything[forwards(4) : forwards(8)]]
        assert set(epoch[0]) != set(epoch[1]), "the other rank has the others, in another order"


@by_strategy
def test_c83_learning_rates_losses_and_evaluations_are_the_same(runs: Runs, name: str) -> None:
    whole, _, rest = runs(name)

    def told(plan: RunPlan) -> dict[tuple[int, str], dict[str, float]]:
        return {
            (event.step, event.kind): {k: v for k, v in event.metrics.items() if k not in TIMED}
            for event in events(plan)
            if event.kind in ("step", "eval")
        }

    first, second = told(whole), told(rest)
    assert [step for step, kind in second if kind == "step"] == [*range(SAVED + 1, STEPS + 1)]
    assert [step for step, kind in second if kind == "eval"] == [8, 12]
    assert second == {key: value for key, value in first.items() if key[0] > SAVED}
    (started,) = events(rest, "started")
    assert started.step == SAVED


@by_strategy
def test_c87_the_kill_left_a_complete_checkpoint_and_nothing_that_looks_like_one(
    runs: Runs, name: str
) -> None:
    _, killed, _ = runs(name)
    assert storage.verify(at(killed, SAVED)) == []
    assert storage.torn(Path(killed.run_dir)) == []


@pytest.mark.parametrize(
    "name", some_slow([name for name, codes in DIES.items() if codes == KILL_ONE], "fsdp")
)
def test_a_rank_that_loses_the_other_ends_by_itself_and_says_so(
    runs: Runs, name: str, folder: Path
) -> None:
    runs(name)
    outcome = json.loads((folder / f"{name}-killed-plan" / "outcome-0.json").read_text())
    assert "error" in outcome


# Other ranks, another strategy ----------------------------------------------------------------


@pytest.mark.parametrize("origin", some_slow(("ddp", "fsdp", "zero3"), "fsdp"))
def test_c84_one_rank_goes_on_from_two(
    runs: Runs, folder: Path, tmp_path: Path, origin: str
) -> None:
    """What is loaded is bitwise what was saved; every later step has the same rows."""
    whole = runs(origin)[0]
    loaded = make(folder, f"single-loaded-{origin}", ranks=1, resume_from=str(at(whole, SAVED)),
                  total_steps=SAVED)  # fmt: skip
    run(loaded)
    assert bitwise(at(whole, SAVED), at(loaded, SAVED), tmp_path)
    rest = make(folder, f"single-rest-{origin}", ranks=1, resume_from=str(at(whole, SAVED)))
    run(rest)
    same_rows(whole, rest)


def bitwise(one: Path, other: Path, scratch: Path) -> bool:
    first, second = (tensors(path, scratch / f"{i}.pt") for i, path in enumerate((one, other)))
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def same_rows(whole: RunPlan, rest: RunPlan) -> None:
    """Of the steps after the checkpoint; dropout is drawn otherwise on another number of ranks."""
    names = ("rows_seen", "tokens_seen", "trained_tokens_seen", "learning_rate")

    def told(plan: RunPlan) -> dict[int, list[float]]:
        found = events(plan, "step")
        return {e.step: [e.metrics[name] for name in names] for e in found if e.step > SAVED}

    assert told(rest) == told(whole)
    assert len(told(rest)) == STEPS - SAVED


@pytest.fixture(scope="module")
def from_one(folder: Path, runs: Runs) -> dict[str, Any]:
    """Runs of two ranks that go on from one rank, or from two of another strategy: up to the step
    of the checkpoint, to see what is loaded, and to the end."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cpus)})
    single = make(folder, "single-whole", ranks=1)
    run(single)
    os.sched_setaffinity(0, cpus)
    origins = {"single": single} | {name: runs(name)[0] for name in STRATEGIES}
    pairs = [
        ("single", "ddp"), ("single", "fsdp"), ("ddp", "fsdp"), ("fsdp", "ddp"),
        ("zero2", "fsdp"), ("zero3", "ddp"), ("ddp", "zero2"), ("single", "zero3"),
    ]  # fmt: skip
    found: dict[str, Any] = {"origins": origins, "loaded": {}, "rest": {}}
    places = []
    for origin, other in pairs:
        start = str(at(origins[origin], SAVED))
        for part, total in (("loaded", SAVED), ("rest", STEPS)):
            plan = make(folder, f"{other}-{part}-of-{origin}", resume_from=start, total_steps=total)
            found[part][origin, other] = plan
            places.append((other, lay_out(folder, plan)))
    together = [place for other, place in places if not other.startswith("zero")]
    two_ranks(folder, together, dict(os.environ))
    for other, place in places:
        # To the end only, as it takes a launch of its own: its first step needs what was loaded.
        if other.startswith("zero") and "-loaded-" not in place.name:
            two_ranks(folder, [place], dict(os.environ))
    return found


@pytest.mark.slow
def test_c84_two_ranks_and_other_strategies_go_on_from_any_checkpoint(
    from_one: dict[str, Any], tmp_path: Path
) -> None:
    for (origin, other), plan in from_one["loaded"].items():
        if not other.startswith("zero"):
            start = at(from_one["origins"][origin], SAVED)
            scratch = tmp_path / f"{origin}-{other}"
            scratch.mkdir()
            assert bitwise(start, at(plan, SAVED), scratch), (origin, other)


@pytest.mark.slow
def test_c84_every_later_step_has_the_same_rows(from_one: dict[str, Any]) -> None:
    for (origin, _), plan in from_one["rest"].items():
        same_rows(from_one["origins"][origin], plan)


# Stopped on both ranks ------------------------------------------------------------------------

IN_STEP_3 = 2 * FORWARDS[0] + 2
"""Number of a forward pass in the middle of the third step."""


@pytest.fixture(scope="module")
def stopped(folder: Path, runs: Runs) -> dict[str, tuple[RunPlan, list[dict[str, Any]]]]:
    """Runs that end early, and one that finds its newest checkpoint damaged: plan and outcomes."""
    late = {"began": time.time() - 100.0}
    settings = {
        "ddp-signal": (), "fsdp-request": (), "ddp-late": ("train.max_time=00:00:00:30",),
        "fsdp-enough": ("checkpoint.metric_mode=max", "train.early_stopping=1",
                        "checkpoint.keep_best=1", "checkpoint.keep_last=1"),
    }  # fmt: skip
    chosen = {name: make(folder, name, **(late if name == "ddp-late" else {})) for name in settings}
    for name, changes in settings.items():
        config = chosen[name].config.override("train.eval_every=1", *changes)
        chosen[name] = chosen[name].model_copy(update={"config": config})
    actions = {
        "ddp-signal": ({}, {IN_STEP_3: "SIGTERM"}),
        "fsdp-request": ({IN_STEP_3: "STOP"}, {}),
    }
    damaged = make(folder, "fsdp-damaged")
    for step in (SAVED, 2 * SAVED):
        shutil.copytree(at(runs("fsdp")[0], step), at(damaged, step))
    file = at(damaged, 2 * SAVED) / "rng-00001.json"
    file.write_text(file.read_text().replace("1", "2", 1))
    chosen["fsdp-damaged"] = damaged.model_copy(update={"resume_from": str(at(damaged, 2 * SAVED))})
    for plan in chosen.values():
        Path(plan.run_dir).mkdir(exist_ok=True)
    places = {name: lay_out(folder, plan, *actions.get(name, ())) for name, plan in chosen.items()}
    two_ranks(folder, list(places.values()), dict(os.environ))
    return {
        name: (
            chosen[name],
            [json.loads((place / f"outcome-{rank}.json").read_text()) for rank in (0, 1)],
        )
        for name, place in places.items()
    }


def test_a_signal_to_one_rank_stops_both_at_the_same_step(stopped: dict[str, Any]) -> None:
    plan, outcomes = stopped["ddp-signal"]
    for outcome in outcomes:
        assert outcome["error"].startswith("Stopped: ended after step 3 as it was asked to (SIGTE")
    assert [storage.step_of(path) for path in storage.checkpoints(Path(plan.run_dir))] == [3]
    assert storage.verify(at(plan, 3)) == []


def test_a_request_to_stop_ends_both_with_a_result(stopped: dict[str, Any]) -> None:
    plan, outcomes = stopped["fsdp-request"]
    for outcome in outcomes:
        assert (outcome["steps"], outcome["stop_reason"]) == (3, "STOP")
        assert outcome["checkpoint"] == str(at(plan, 3))


def test_the_clock_of_rank_0_ends_both(stopped: dict[str, Any]) -> None:
    for outcome in stopped["ddp-late"][1]:
        assert (outcome["steps"], outcome["stop_reason"]) == (1, "train.max_time")


def test_both_find_that_it_is_enough_and_which_was_the_best(stopped: dict[str, Any]) -> None:
    plan, outcomes = stopped["fsdp-enough"]
    for outcome in outcomes:
        assert outcome["steps"] == 2
        assert outcome["stop_reason"].startswith("train.early_stopping: eval_loss has not become")
        assert outcome["best_checkpoint"] == str(at(plan, 1))
        assert outcome["checkpoint"] == str(at(plan, 2))
    one, other = (outcome["metrics"] for outcome in outcomes)
    assert one["best_eval_loss"] == other["best_eval_loss"] > one["eval_loss"]


def test_both_go_on_from_the_checkpoint_before_a_damaged_one(
    stopped: dict[str, Any], runs: Runs, tmp_path: Path
) -> None:
    """Only one of them has read the file that is damaged."""
    plan, outcomes = stopped["fsdp-damaged"]
    assert [outcome["steps"] for outcome in outcomes] == [STEPS, STEPS]
    (started,) = events(plan, "started")
    assert (started.step, started.data["resumed_from"]) == (SAVED, str(at(plan, SAVED)))
    (warning,) = (note for note in started.data["notes"] if note.startswith("Warning:"))
    assert "rng-00001.json is damaged" in warning
    assert bitwise(at(runs("fsdp")[0], STEPS), at(plan, STEPS), tmp_path)


# How long it takes to get there ---------------------------------------------------------------


def test_the_first_rows_of_a_resumed_run_are_found_as_quickly_as_those_of_a_fresh_one(
    tmp_path: Path,
) -> None:
    """Wherever in an epoch: nothing is run through. 20,000 examples."""
    write_split(tmp_path, [Example([5, 6, 7], [False, True, True])] * 20_000, max_length=64,
                packing=False)  # fmt: skip

    def seconds(step: int) -> float:
        order = Order(Split(tmp_path), seed=step, global_batch=2, micro_batch=1)
        began = time.perf_counter()
        order.step(step)
        return time.perf_counter() - began

    first = min(seconds(0) for _ in range(5))
    last = min(seconds(9_998) for _ in range(5))
    assert last < 3 * first + 0.005
