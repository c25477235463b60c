"""Evaluations under every strategy: answers, a user's own metrics, subsets, and by themselves."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dbx_llmtrain import storage
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver import user_metrics
from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.events import Event, read_events
from dbx_llmtrain.model_sections import ParallelConfig
from dbx_llmtrain.outcomes import RankResult
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import evaluating, evaluations
from dbx_llmtrain.worker.jobs import Progress
from dbx_llmtrain.worker.main import run
from tests import reference, tiny
from tests.dist import plans
from tests.dist.launch import Launched, some_slow, two_ranks

pytestmark = pytest.mark.dist

GROUPS = (("single", 1), ("ddp,fsdp", 2), ("grad_op,offload", 2), ("zero2,zero3", 2))
STRATEGIES = [name for names, _ in GROUPS for name in names.split(",")]
QUICK = ("single", "ddp", "fsdp")
SIZES = {name: size for names, size in GROUPS for name in names.split(",")}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What the cases found, by strategy."""
    return Launched(GROUPS, "tests.dist.evaluation_cases", tmp_path_factory)


@pytest.mark.parametrize("strategy", some_slow(STRATEGIES, QUICK))
@pytest.mark.parametrize("case", ["free", "early", "one"])
def test_answers_are_those_of_plain_greedy_generation(
    found: Mapping[str, Any], strategy: str, case: str
) -> None:
    given = found[strategy]["answers"][case]
    assert given["texts"]
    assert given["prompts"]
    assert given["tokens"] == given["expected"]
    assert given["stopped"] == given["ended"]
    assert given["ranks"] == 1
    if case == "early":
        assert (given["stopped"][0], given["tokens"][0]) == (True, 4)
        assert len(set(given["tokens"])) > 1, "the ranks do not end together"


@pytest.mark.parametrize("strategy", some_slow(STRATEGIES, QUICK))
def test_c49_answers_and_own_metrics_leave_training_bitwise_as_it_was(
    found: Mapping[str, Any], strategy: str
) -> None:
    given = found[strategy]["unnoticed"]
    assert given["bitwise"]
    assert given["draws"] == [True] * SIZES[strategy]
    assert given["equal_on_ranks"] == 1, "rank 0's numbers count, on every rank"
    assert given["grad"], "without gradients"
    assert given["changed"], "of the weights as they are"


@pytest.mark.parametrize("strategy", some_slow(STRATEGIES, QUICK))
def test_the_model_that_is_lent_is_whole_and_in_evaluation_mode(
    found: Mapping[str, Any], strategy: str
) -> None:
    given = found[strategy]["lent"]
    assert given["fp32"] == {"difference": 0.0, "training": False, "back": True, "tokens": 3}
    assert 0 < given["bf16"]["difference"] < 0.02, "in the type that the run computes in"
    assert given["bf16"]["tokens"] == 3


# Whole runs


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Runs in this process set its number of threads; one is best for models this small."""
    threads, cpus = torch.get_num_threads(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cpus)})
    yield
    os.sched_setaffinity(0, cpus)
    torch.set_num_threads(threads)


def events(plan: RunPlan, kind: str) -> list[Event]:
    found = read_events(Path(plan.run_dir) / "events.jsonl", attempt=plan.attempt)
    return [event for event in found if event.kind == kind]


def mine(model: Any, tokenizer: Any) -> dict[str, float]:
    """The norm of the weights that a checkpoint has, and how the tokenizer writes a chat."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    ids = torch.tensor([tokenizer("what")["input_ids"]])
    answer = model.generate(ids, max_new_tokens=2, do_sample=False)
    mine.calls = getattr(mine, "calls", 0) + 1  # type: ignore[attr-defined]
    return {"calls": mine.calls, "letters": len(text), "ids": answer.shape[1]}  # type: ignore[attr-defined]


HELD_OUT = tiny.examples((3, 40, 5, 30, 4, 25, 6), seed=1)
CODE = tiny.examples((5, 9), seed=4)
TEST = tiny.examples((7, 9, 12), seed=5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunPlan, RankResult]:
    """A run of 4 steps on one rank, evaluated at steps 0, 2 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    plan = plans.plan(
        folder,
        "whole",
        train={
            "max_steps": 4,
            "eval_every": 2,
            "eval_max_rows": 3,
            "eval_micro_batch_size": 2,
            "sample_prompts": ["what is"],
        },
        every=4,
        more={"eval-code": CODE, "test": TEST},
    )
    model = plan.model.model_copy(update={"max_positions": 30})
    plan = user_metrics.ship(plan.model_copy(update={"model": model}), mine)
    return plan, run(plan)


def test_between_the_steps_some_examples_stand_for_the_set(
    trained: tuple[RunPlan, RankResult],
) -> None:
    plan, result = trained
    losses = [event for event in events(plan, "eval") if "eval_loss" in event.metrics]
    assert [event.step for event in losses] == [0, 2, 4]
    # 3 of the 7 rows, and both of the set that has no more.
    assert [event.data["rows"] for event in losses] == [5, 5, 9]
    assert len({losses[0].data["trained_tokens"], losses[1].data["trained_tokens"]}) == 1
    assert result.metrics["initial_eval_loss"] == losses[0].metrics["eval_loss"]
    assert result.metrics["eval_loss"] == losses[2].metrics["eval_loss"]


def test_c47_at_the_end_every_set_is_whole(trained: tuple[RunPlan, RankResult]) -> None:
    plan, result = trained
    model = _opened(result)
    for name, rows in {
        "eval_loss": HELD_OUT + CODE, "eval_code_loss": CODE, "test_loss": TEST
    }.items():  # fmt: skip
        expected = float(reference.mean_loss(model, rows).detach())
        assert abs(result.metrics[name] - expected) < 1e-6, name
    last = events(plan, "eval")[-1]
    assert last.metrics.keys() == {"test_loss", "test_perplexity"}
    assert last.data["rows"] == 3


def _opened(result: RankResult) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(result.model_path).eval()


def test_own_metrics_are_of_every_evaluation_and_keep_their_function(
    trained: tuple[RunPlan, RankResult],
) -> None:
    plan, result = trained
    found = [event.metrics for event in events(plan, "eval") if "calls" in event.metrics]
    assert [each["calls"] for each in found] == [1, 2, 3]
    assert {each["ids"] for each in found} == {found[0]["ids"]}
    assert result.metrics["calls"] == 3
    assert result.metrics["letters"] > 20


def test_answers_are_in_the_log_and_end_where_the_positions_do(
    trained: tuple[RunPlan, RankResult],
) -> None:
    plan, _ = trained
    found = events(plan, "samples")
    assert [event.step for event in found] == [0, 2, 4]
    for event in found:
        (sample,) = event.data["samples"]
        assert sample["prompt"] == "what is"
        assert sample["stopped"] or sample["tokens"] == 30 - 3


def evaluation(trained: RunPlan, name: str, **changes: Any) -> RunPlan:
    """A plan that evaluates what another one has trained."""
    run_dir = Path(trained.run_dir).parent / name
    update = {"purpose": "evaluate", "run_dir": str(run_dir), "attempt": name, "total_steps": 0}
    return trained.model_copy(update={**update, "run_name": name, "metrics": None, **changes})


def test_an_evaluation_by_itself_gives_what_the_run_gave(
    trained: tuple[RunPlan, RankResult],
) -> None:
    plan, result = trained
    assert result.checkpoint is not None
    first = evaluating.run(evaluation(plan, "base"))
    last = evaluating.run(evaluation(plan, "last", weights_from=result.checkpoint))
    for name in ("eval_loss", "eval_code_loss", "test_loss"):
        assert last.metrics[name] == pytest.approx(result.metrics[name], abs=1e-6)
    assert last.metrics["eval_perplexity"] == pytest.approx(
        torch.tensor(last.metrics["eval_loss"]).double().exp().item()
    )
    assert (last.metrics["evaluated_rows"], last.metrics["evaluated_tokens"]) == (9, 97)
    model = plans.model_folder(Path(plan.run_dir).parent / "model")
    from transformers import AutoModelForCausalLM

    untrained = AutoModelForCausalLM.from_pretrained(model).eval()
    expected = float(reference.mean_loss(untrained, HELD_OUT + CODE).detach())
    assert first.metrics["eval_loss"] == pytest.approx(expected, abs=1e-6)
    assert first.steps == 0
    assert not (Path(plan.run_dir).parent / "base" / "checkpoints").exists()
    (told,) = events(evaluation(plan, "last"), "samples")
    (trained_last,) = [event for event in events(plan, "samples") if event.step == 4]
    assert told.data == trained_last.data


def test_prompts_that_cannot_be_answered_end_a_rank_before_the_first_step(tmp_path: Path) -> None:
    plan = plans.plan(tmp_path, train={"sample_prompts": ["x"]})
    model = plan.model.model_copy(update={"max_positions": 1})
    with pytest.raises(ConfigError, match=r"sample_prompts\[0\]: has 2 tokens, the model has 1"):
        run(plan.model_copy(update={"model": model}))
    assert not events(plan, "step")


def test_the_best_model_is_tested_as_the_last_one_is(tmp_path: Path) -> None:
    settings = {"max_steps": 4, "eval_every": 1, "eval_max_rows": 3, "learning_rate": 3.0}
    plan = plans.plan(
        tmp_path, train=settings, more={"eval-code": CODE, "test": TEST}, export=False
    )
    given = plan.config.to_dict()
    best = {**given["checkpoint"], "keep_best": 1}
    plan = plan.model_copy(update={"config": TrainConfig.from_dict({**given, "checkpoint": best})})
    plan = user_metrics.ship(plan, mine)
    result = run(plan)
    assert result.best_checkpoint is not None
    assert result.best_checkpoint != result.checkpoint, "such a learning rate does harm"
    again = evaluating.run(evaluation(plan, "best", weights_from=result.best_checkpoint))
    names = ("eval_loss", "eval_code_loss", "test_loss")
    for name in (f"{best}{name}" for name in names for best in ("", "best_")):
        perplexity = result.metrics[name.replace("_loss", "_perplexity")]
        assert perplexity == pytest.approx(math.exp(result.metrics[name]))
    for name in names:
        assert result.metrics[f"best_{name}"] == pytest.approx(again.metrics[name], abs=1e-6)
        assert result.metrics[f"best_{name}"] < result.metrics[name]
    assert result.metrics["best_calls"] == result.metrics["calls"] + 1
    told = events(plan, "eval")[-1].metrics
    assert told["best_test_perplexity"] == pytest.approx(again.metrics["test_perplexity"])


def test_the_best_model_that_is_the_last_one_is_not_evaluated_twice(
    trained: tuple[RunPlan, RankResult],
) -> None:
    plan, result = trained
    assert result.checkpoint is not None
    progress = Progress(step=4, eval_loss=1.5, losses={"test_loss": 2.0, "accuracy": 0.5})
    job: Any = SimpleNamespace(plan=plan)
    evaluations.test_best(job, progress, Path(result.checkpoint))
    assert progress.losses == {
        "test_loss": 2.0, "accuracy": 0.5,
        "best_eval_loss": 1.5, "best_eval_perplexity": math.exp(1.5),
        "best_test_loss": 2.0, "best_accuracy": 0.5,
    }  # fmt: skip


def test_prompts_are_answered_at_every_evaluation_also_without_held_out_rows(
    tmp_path: Path,
) -> None:
    train = {"max_steps": 3, "eval_every": 2, "sample_prompts": ["what is"]}
    plan = plans.plan(tmp_path, train=train, held_out=(), export=False)
    assert not plan.data.eval_splits
    result = run(plan)
    assert [event.step for event in events(plan, "samples")] == [0, 2, 3]
    assert not events(plan, "eval")
    assert not [name for name in result.metrics if "eval" in name]


def test_a_metric_of_ones_own_ends_a_run_without_held_out_rows(tmp_path: Path) -> None:
    train = {"max_steps": 9, "eval_every": 1, "early_stopping": 1}
    plan = plans.plan(tmp_path, train=train, held_out=(), export=False)
    given = plan.config.to_dict()
    judged = {**given["checkpoint"], "metric": "letters"}
    config = TrainConfig.from_dict({**given, "checkpoint": judged})
    plan = user_metrics.ship(plan.model_copy(update={"config": config}), mine)
    result = run(plan)
    assert result.steps == 2, "the same number of letters each time"
    assert "letters has not become better" in result.stop_reason


# Two ranks


LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
WAYS: dict[str, dict[str, Any]] = {
    "fsdp": {"strategy": "fsdp"},
    "lora": {"strategy": "fsdp"},
    "zero2": {"strategy": "deepspeed"},
}


def pair(folder: Path, name: str) -> tuple[RunPlan, RunPlan]:
    """A run on two ranks, and an evaluation of its checkpoint on two of another strategy."""
    parallel = ParallelConfig(kind=WAYS[name]["strategy"], stage=2 if name == "zero2" else None)
    plan = plans.plan(
        folder,
        name,
        train={"max_steps": 2, "eval_max_rows": 2, "sample_prompts": ["what", "the", "fox"]},
        every=2,
        world_size=2,
        strategy=WAYS[name]["strategy"],
        parallel=parallel,
        more={"test": TEST},
    )
    if name == "lora":
        given = plan.config.to_dict()
        changed = {**given, "model": {**given["model"], "lora": LORA}}
        plan = plan.model_copy(update={"config": TrainConfig.from_dict(changed)})
    model = plan.model.model_copy(update={"max_positions": 16})
    plan = user_metrics.ship(plan.model_copy(update={"model": model}), mine)
    checkpoint = storage.checkpoint_folder(Path(plan.run_dir), 2)
    again = evaluation(
        plan,
        f"{name}-again",
        weights_from=str(checkpoint),
        strategy="fsdp" if name == "zero2" else "ddp",
        parallel=ParallelConfig(kind="fsdp" if name == "zero2" else "ddp"),
    )
    return plan, again


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Outcomes of both plans on both ranks, by way; and the adapter's folder, evaluated."""
    folder = tmp_path_factory.mktemp("pairs")
    plans_of: dict[str, RunPlan] = {}
    for name in WAYS:
        first, again = pair(folder, name)
        plans_of |= {name: first, f"{name}-again": again}
    adapter = Path(plans_of["lora"].run_dir) / "adapter"
    plans_of["adapter"] = evaluation(plans_of["lora"], "adapter", weights_from=str(adapter))
    folders = []
    for name, plan in plans_of.items():
        place = folder / f"{name}-plan"
        place.mkdir()
        for rank in (0, 1):
            (place / f"plan-{rank}.json").write_text(plan.model_dump_json())
        folders.append(place)
    two_ranks(folder, folders, dict(os.environ))
    return {
        name: [json.loads((place / f"outcome-{rank}.json").read_text()) for rank in (0, 1)]
        for name, place in zip(plans_of, folders, strict=True)
    } | {"plans": plans_of}


@pytest.mark.parametrize("name", WAYS)
def test_c50_a_checkpoint_of_any_strategy_is_evaluated_on_ranks_of_another(
    pairs: dict[str, Any], name: str
) -> None:
    (trained, _), (again, other) = pairs[name], pairs[f"{name}-again"]
    assert "error" not in trained
    assert "error" not in again
    for metric in ("eval_loss", "test_loss"):
        assert again["metrics"][metric] == pytest.approx(trained["metrics"][metric], abs=1e-6)
    assert again["metrics"] == other["metrics"], "the same on every rank"
    assert trained["metrics"]["calls"] == 2, "before the first step and after the last"
    told = [events(pairs["plans"][key], "samples")[-1].data for key in (name, f"{name}-again")]
    assert told[0] == told[1]
    assert [sample["prompt"] for sample in told[0]["samples"]] == ["what", "the", "fox"]


def test_an_adapters_folder_is_evaluated_on_its_base(pairs: dict[str, Any]) -> None:
    (trained, _), (found, _) = pairs["lora"], pairs["adapter"]
    assert found["metrics"]["eval_loss"] == pytest.approx(trained["metrics"]["eval_loss"], abs=1e-6)
    assert trained["metrics"]["eval_loss"] != trained["metrics"]["initial_eval_loss"]
