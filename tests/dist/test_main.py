"""A rank's whole story: two ranks side by side, one in this process, some by the command line."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from dbx_llmtrain import storage
from dbx_llmtrain.errors import CheckpointError, ClusterError
from dbx_llmtrain.events import Event, read_events
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.text.prepared import Example
from dbx_llmtrain.tracking import METRICS
from dbx_llmtrain.worker import copies
from dbx_llmtrain.worker.main import main, run
from tests import tiny
from tests.dist import plans
from tests.dist.launch import TIMEOUT, two_ranks

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
TIMED = {
    *("tokens_per_second", "seconds_per_step", "memory_bytes", "data_wait_seconds"),
    *("slowest_rank", "slowest_rank_seconds", "median_rank_seconds"),
}
"""Metrics of a step that are of the clock."""
STRATEGIES = ("ddp", "fsdp")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": {"name": "sgd", "momentum": 0.5}, "learning_rate": 1.0},
    "adafactor": {"optimizer": "adafactor"},
}


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Runs in this process set its number of threads; one is best for models this small."""
    threads, cpus = torch.get_num_threads(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cpus)})
    yield
    os.sched_setaffinity(0, cpus)
    torch.set_num_threads(threads)


def events(plan: RunPlan, kind: str | None = None) -> list[Event]:
    """The events of a plan's attempt, of one kind or all but phases."""
    found = read_events(Path(plan.run_dir) / "events.jsonl", attempt=plan.attempt)
    return [event for event in found if (event.kind == kind if kind else event.kind != "phase")]


def tensors(folder: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint, whole."""
    dcp_to_torch_save(folder, scratch)
    content: dict[str, torch.Tensor] = torch.load(scratch)
    return content


def resume(plan: RunPlan, step: int, **changes: Any) -> RunPlan:
    """The plan with a start from its own checkpoint of ``step``, as another attempt."""
    folder = storage.checkpoint_folder(Path(plan.run_dir), step)
    update = {"resume_from": str(folder), "attempt": "second"} | changes
    return plan.model_copy(update=update)


# Two ranks


def write(folder: Path, first: RunPlan, second: RunPlan | None = None) -> str:
    """Lay out a plan for ``tests.dist.main_rank``; the second rank's may differ."""
    folder.mkdir(parents=True)
    for rank, plan in enumerate((first, second or first)):
        (folder / f"plan-{rank}.json").write_text(plan.model_dump_json())
    return str(folder)


def pairs(folder: Path) -> dict[str, tuple[RunPlan, RunPlan]]:
    """For each strategy a run of 8 steps, and one that goes on from its step 4 in another folder,
    with another accumulation, where an attempt has left events before."""
    model = plans.model_folder(folder / "model", attention_dropout=0.1)
    found = {}
    for strategy in STRATEGIES:
        settings: dict[str, Any] = {"strategy": strategy, "world_size": 2, "model": model}
        settings |= {"train": {"eval_every": 3}}
        whole = plans.plan(folder, f"{strategy}-whole", every=4, **settings)
        start = storage.checkpoint_folder(Path(whole.run_dir), 4)
        rest = plans.plan(folder, f"{strategy}-rest", resume_from=str(start), **settings)
        Path(rest.run_dir).mkdir()
        old = Event(attempt="old", rank=0, kind="step", time=1.0, step=1).model_dump_json()
        (Path(rest.run_dir) / "events.jsonl").write_text(f"{old}\n{old[:20]}")
        found[strategy] = (whole, rest)
    return found


def unlike(folder: Path) -> tuple[RunPlan, RunPlan]:
    """A plan for two ranks on two nodes; on the second one the staged model is another."""
    first = plans.plan(folder, "unlike", strategy="fsdp", world_size=2)
    second = first.model_copy(update={"local_dir": str(folder / "other-node")})
    staged = folder / "other-node" / "models" / first.model.artifact.fingerprint
    shutil.copytree(first.model.artifact.source, staged)
    weights = load_file(staged / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, staged / "model.safetensors", metadata={"format": "pt"})
    copies.mark(staged)
    return first, second


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Plans by name, and what came of them on each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    runs = pairs(folder)
    folders = [
        write(folder / f"{strategy}-{part}", plan)
        for strategy, pair in runs.items()
        for part, plan in zip(("whole-plan", "rest-plan"), pair, strict=True)
    ]
    for name, train in OPTIMIZERS.items():
        settings = train | {"max_steps": 4}
        plan = plans.plan(folder, name, strategy="ddp", world_size=2, train=settings)
        folders.append(write(folder / f"{name}-plan", plan))
    folders.append(write(folder / "unlike-plan", *unlike(folder)))
    two_ranks(folder, folders, dict(os.environ))
    outcomes = {
        Path(name).name: [
            json.loads((Path(name) / f"outcome-{rank}.json").read_text()) for rank in (0, 1)
        ]
        for name in folders
    }
    return {"plans": runs, "outcomes": outcomes}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_without_betas_train(ranks: dict[str, Any], name: str) -> None:
    for outcome in ranks["outcomes"][f"{name}-plan"]:
        assert outcome.get("error") is None
        assert outcome["steps"] == 4
    metrics = ranks["outcomes"][f"{name}-plan"][0]["metrics"]
    assert metrics["eval_loss"] < metrics["initial_eval_loss"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c83_a_run_that_was_resumed_in_the_middle_of_an_epoch_is_the_same_run(
    ranks: dict[str, Any], strategy: str, tmp_path: Path
) -> None:
    whole, rest = ranks["plans"][strategy]
    ends = [storage.checkpoint_folder(Path(plan.run_dir), 8) for plan in (whole, rest)]
    first, second = (tensors(end, tmp_path / str(i)) for i, end in enumerate(ends))
    assert len(first) == 84
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for rank in (0, 1):
        one, other = ((end / f"rng-{rank:05d}.json").read_bytes() for end in ends)
        assert one == other
    weights = [(Path(plan.run_dir) / "export" / "model.safetensors") for plan in (whole, rest)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c83_a_resumed_run_reports_the_same_numbers(ranks: dict[str, Any], strategy: str) -> None:
    whole, rest = ranks["plans"][strategy]
    first, second = (
        {
            (event.step, event.kind): {k: v for k, v in event.metrics.items() if k not in TIMED}
            for event in events(plan)
            if event.kind in ("step", "eval")
        }
        for plan in (whole, rest)
    )
    for event in events(whole, "step"):
        assert event.metrics["slowest_rank"] in (0.0, 1.0)
        assert 0 < event.metrics["median_rank_seconds"] <= event.metrics["slowest_rank_seconds"]
        assert [len(event.data[name]) for name in ("rank_seconds", "rank_data_seconds")] == [2, 2]
    assert sorted(first) == [
        (0, "eval"), *((step, "step") for step in (1, 2)), (3, "eval"), (3, "step"), (4, "step"),
        (5, "step"), (6, "eval"), (6, "step"), (7, "step"), (8, "eval"), (8, "step"),
    ]  # fmt: skip
    # A run that goes on from another one's checkpoint has its own evaluation before its first step.
    assert second.pop((4, "eval")).keys() == first[3, "eval"].keys()
    assert second == {key: value for key, value in first.items() if key[0] > 4}
    outcomes = [ranks["outcomes"][f"{strategy}-{part}-plan"][0] for part in ("whole", "rest")]
    for name in ("eval_loss", "train_loss", "skipped_steps"):
        assert outcomes[0]["metrics"][name] == outcomes[1]["metrics"][name]
    assert (
        outcomes[1]["metrics"]["initial_eval_loss"] < (outcomes[0]["metrics"]["initial_eval_loss"])
    ), "before its own first step"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_run_keeps_the_events_of_earlier_attempts(
    ranks: dict[str, Any], strategy: str
) -> None:
    _, rest = ranks["plans"][strategy]
    everything = list(read_events(Path(rest.run_dir) / "events.jsonl"))
    assert everything[0].attempt == "old"
    assert {event.attempt for event in everything[1:]} == {rest.attempt}
    (started,) = events(rest, "started")
    assert started.data["resumed_from"] == rest.resume_from
    assert everything[-1].kind == "finished"


def test_every_rank_finishes_and_rank_0_alone_has_the_model(ranks: dict[str, Any]) -> None:
    for strategy in STRATEGIES:
        first, second = ranks["outcomes"][f"{strategy}-whole-plan"]
        whole, _ = ranks["plans"][strategy]
        assert first["steps"] == second["steps"] == 8
        for name, value in first["metrics"].items():
            timed = name in ("tokens_per_second", "seconds_to_first_step")
            assert timed or second["metrics"][name] == value
        assert first["checkpoint"] == second["checkpoint"]
        assert Path(first["model_path"]) == Path(whole.run_dir) / "export"
        assert second["model_path"] is None


def test_ddp_and_fsdp_train_alike(ranks: dict[str, Any]) -> None:
    ddp, fsdp = (ranks["outcomes"][f"{strategy}-whole-plan"][0] for strategy in STRATEGIES)
    for name in ("initial_eval_loss", "eval_loss", "train_loss"):
        assert ddp["metrics"][name] == pytest.approx(fsdp["metrics"][name], abs=1e-5)


def test_c69_a_node_with_another_model_stops_every_rank(ranks: dict[str, Any]) -> None:
    for outcome in ranks["outcomes"]["unlike-plan"]:
        assert outcome["error"].startswith("CheckpointError: ranks [1] hold other weights")
        assert "model.norm.weight" in outcome["error"]


def test_ranks_leave_no_temporary_files(ranks: dict[str, Any]) -> None:
    for pair in ranks["plans"].values():
        for plan in pair:
            scratch = Path(plan.local_dir) / "scratch"
            assert list(scratch.iterdir()) == []


# One rank in this process


def test_events_lines_and_metrics_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plans.plan(tmp_path, every=3, train={"eval_every": 4})
    result = run(plan)
    run_dir = Path(plan.run_dir)
    # A checkpoint is told of when it is complete, while training goes on.
    others = [(event.kind, event.step) for event in events(plan) if event.kind != "step"]
    assert [event for event in others if event[0] != "checkpoint" or event[1] == 8] == [
        ("started", 0), ("eval", 0), ("eval", 4), ("eval", 8),
        ("checkpoint", 8), ("export", 8), ("finished", 8),
    ]  # fmt: skip
    assert [step for kind, step in others if kind == "checkpoint"] == [3, 6, 8]
    assert [(event.data["phase"], event.step) for event in events(plan, "phase")] == [
        ("looking for model and data", 0), ("waiting for all ranks", 0), ("loading the model", 0),
        ("training", 0), ("evaluating", 0), ("training", 0), ("writing a checkpoint", 3),
        ("training", 3), ("evaluating", 4), ("training", 4), ("writing a checkpoint", 6),
        ("training", 6), ("evaluating", 8), ("writing a checkpoint", 8), ("exporting", 8),
    ]  # fmt: skip
    steps = events(plan, "step")
    assert [event.step for event in steps] == list(range(1, 9))
    assert all(event.metrics.keys() <= METRICS.keys() for event in events(plan)[:-1])
    # Two epochs of 8 rows and the first two steps of the third.
    assert [event.metrics["rows_seen"] for event in steps] == [3, 6, 8, 11, 14, 16, 19, 22]
    assert result.steps == 8
    assert result.checkpoint == str(run_dir / "checkpoints" / "step-00000008")
    assert result.model_path == str(run_dir / "export")
    assert events(plan, "finished")[0].metrics == result.metrics
    assert set(result.metrics) == {
        "initial_eval_loss", "eval_loss", "eval_perplexity", "train_loss", "tokens_per_second",
        "peak_memory_bytes", "seconds_to_first_step", "skipped_steps",
    }  # fmt: skip
    evals = [event.metrics["eval_loss"] for event in events(plan, "eval")]
    assert [result.metrics["initial_eval_loss"], result.metrics["eval_loss"]] == [
        evals[0],
        evals[-1],
    ]
    assert result.metrics["eval_loss"] < result.metrics["initial_eval_loss"]
    assert 50e6 < result.metrics["peak_memory_bytes"] < 20e9
    assert result.metrics["skipped_steps"] == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("step ") and " loss " in line for line in lines) == 8 + 3
    assert f"step 8: export in {run_dir / 'export'}" in lines


def test_c44_the_reported_loss_is_the_token_mean_of_the_steps_since_the_last_report(
    tmp_path: Path,
) -> None:
    each = plans.plan(tmp_path, "each", export=False)
    some = plans.plan(tmp_path, "some", export=False, train={"log_every": 3})
    metrics = [run(plan).metrics for plan in (each, some)]
    steps = [event.metrics for event in events(each, "step")]
    trained = [0.0] + [step["trained_tokens_seen"] for step in steps]
    weights = [after - before for before, after in itertools.pairwise(trained)]

    def mean(part: slice) -> float:
        values = zip(steps[part], weights[part], strict=True)
        return sum(step["loss"] * weight for step, weight in values) / sum(weights[part])

    reports = events(some, "step")
    assert [report.step for report in reports] == [3, 6, 8]
    expected = [mean(part) for part in (slice(0, 3), slice(3, 6), slice(6, 8))]
    assert [report.metrics["loss"] for report in reports] == pytest.approx(expected, abs=1e-9)
    for found in metrics:
        assert found["train_loss"] == pytest.approx(mean(slice(0, 8)), abs=1e-9)


def test_a_run_without_held_out_rows_and_export(tmp_path: Path) -> None:
    plan = plans.plan(tmp_path, held_out=[], export=False, train={"max_steps": 2})
    result = run(plan)
    assert result.model_path is None
    assert not (Path(plan.run_dir) / "export").exists()
    assert "eval_loss" not in result.metrics
    assert "initial_eval_loss" not in result.metrics
    assert [event.kind for event in events(plan)] == [
        "started", "step", "step", "checkpoint", "finished",
    ]  # fmt: skip


def test_what_the_export_needed_is_reported_before_the_first_step(tmp_path: Path) -> None:
    model = plans.model_folder(tmp_path / "chat")
    content = {"eos_token_id": 2, "temperature": 0.6, "do_sample": False}
    (model / "generation_config.json").write_text(json.dumps(content))
    plan = plans.plan(tmp_path, model=model, train={"max_steps": 1})
    run(plan)
    notes = events(plan, "started")[0].data["notes"]
    assert notes == [
        "do_sample: set to true, because temperature=0.6 needs it",
        "eos_token_id: added 4, with which the answers in the data end",
    ]
    exported = json.loads((Path(plan.run_dir) / "export" / "generation_config.json").read_text())
    assert exported == content | {"do_sample": True, "eos_token_id": [2, 4], "bos_token_id": 1}


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    plan = plans.plan(tmp_path, train={"max_steps": 2})
    first = run(plan)
    checkpoint = Path(str(first.checkpoint))
    written = (checkpoint / "manifest.json").stat().st_mtime_ns
    weights = (Path(plan.run_dir) / "export" / "model.safetensors").read_bytes()
    again = resume(plan, 2)
    second = run(again)
    assert second.steps == 2
    assert events(again, "step") == []
    assert (checkpoint / "manifest.json").stat().st_mtime_ns == written
    assert second.checkpoint == first.checkpoint
    assert second.metrics["train_loss"] == first.metrics["train_loss"]
    assert second.metrics["eval_loss"] == first.metrics["eval_loss"]
    assert (Path(plan.run_dir) / "export" / "model.safetensors").read_bytes() == weights


def test_c86_a_checkpoint_of_other_rows_or_after_the_end_is_refused(tmp_path: Path) -> None:
    plan = plans.plan(tmp_path, export=False, train={"max_steps": 2})
    run(plan)
    with pytest.raises(CheckpointError, match=r"after step 2, but the run ends with step 1"):
        run(resume(plan, 2, total_steps=1))
    with pytest.raises(CheckpointError, match=r"train\.global_batch_size: 3 then, 4 now"):
        run(resume(plan, 2, global_batch_size=4))
    train = plan.data.splits["train"].model_copy(update={"digest": "other-rows"})
    data = plan.data.model_copy(update={"splits": plan.data.splits | {"train": train}})
    with pytest.raises(CheckpointError, match=r"data\.train: \d+ rows as then, but others"):
        run(resume(plan, 2, data=data))
    with pytest.raises(CheckpointError, match=r"incomplete: no valid manifest"):
        run(resume(plan, 1))
    assert events(plan.model_copy(update={"attempt": "second"}), "failed")


def test_another_number_of_ranks_than_planned_is_refused(tmp_path: Path) -> None:
    plan = plans.plan(tmp_path, world_size=4, strategy="fsdp")
    with pytest.raises(ClusterError, match="the plan is for 4 ranks, the launcher started 1"):
        run(plan)


def test_c17_a_step_without_trained_tokens_is_skipped_and_counted(tmp_path: Path) -> None:
    rows = [*tiny.examples((6, 7)), Example([5, 6, 7], [False] * 3)]
    train = {"max_steps": 3, "global_batch_size": 1}
    plan = plans.plan(tmp_path, rows=rows, export=False, train=train)
    result = run(plan)
    assert result.metrics["skipped_steps"] == 1
    losses = [event.metrics["loss"] for event in events(plan, "step")]
    assert sum(math.isnan(loss) for loss in losses) == 1
    assert math.isfinite(result.metrics["train_loss"])


def test_files_of_a_killed_attempt_are_removed(tmp_path: Path) -> None:
    plan = plans.plan(tmp_path, export=False, train={"max_steps": 1})
    run(plan)
    from dbx_llmtrain.worker.folders import scratch_folder

    with scratch_folder(plan, 0) as folder:
        killed = folder.parents[1] / "killed" / "0" / "checkpoint-0-x"
        killed.mkdir(parents=True)
        neighbour = folder.parent / "1"
        neighbour.mkdir()
    assert neighbour.exists()
    neighbour.rmdir()
    run(plan)
    assert not killed.exists()
    assert list((tmp_path / "local" / "scratch").iterdir()) == []


def test_wrong_arguments() -> None:
    assert main([]) == 2
    with pytest.raises(FileNotFoundError):
        main(["/nowhere/plan.json"])


# By the command line


def by_hand(plan: RunPlan, folder: Path, *launcher: str) -> tuple[int, str]:
    """Exit code and output of ``python -m dbx_llmtrain.worker.main``, with a rank folder."""
    folder.mkdir()
    (folder / "plan.json").write_text(plan.model_dump_json())
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "dbx_llmtrain.worker.main", str(folder / "plan.json")],
        cwd=ROOT,
        env=os.environ | {"DBX_LLMTRAIN_RANK_DIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    return done.returncode, done.stdout


def test_ranks_of_torchrun_hand_over_their_result(tmp_path: Path) -> None:
    plan = plans.plan(tmp_path, train={"max_steps": 2}, strategy="fsdp", world_size=2)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    code, output = by_hand(plan, tmp_path / "rank", *torchrun)
    assert code == 0, output
    result = json.loads((tmp_path / "rank" / "result.json").read_text())
    assert result["steps"] == 2
    assert (tmp_path / "rank" / "step").read_text() == "2"
    assert not (tmp_path / "rank" / "failure.json").exists()
    assert "Writing model shards" not in output


def test_a_rank_hands_over_why_and_where_it_failed(tmp_path: Path) -> None:
    plan = plans.plan(tmp_path, export=False, train={"max_steps": 2})
    Path(plan.run_dir).mkdir()
    (Path(plan.run_dir) / "checkpoints").write_text("a file where the folder should be")
    code, output = by_hand(plan, tmp_path / "rank")
    assert code == 1
    failure = json.loads((tmp_path / "rank" / "failure.json").read_text())
    assert failure["step"] == 2
    assert failure["stopped"] is False
    assert failure["error"].startswith("CheckpointError: the checkpoint ")
    assert "NotADirectoryError" in failure["error"]
    frames = [line for line in failure["traceback"].splitlines() if line.startswith("  File")]
    assert frames
    last = failure["traceback"].rindex("Traceback")
    assert "worker/main.py" not in failure["traceback"][last:]
    assert "worker/session.py" in failure["traceback"][last:]
    assert failure["traceback"].rstrip().splitlines()[-1] in output
    assert not (tmp_path / "rank" / "result.json").exists()
    assert events(plan)[-1].kind == "failed"
    assert events(plan)[-1].step == 2
    assert list((tmp_path / "local" / "scratch").iterdir()) == []


def test_weights_that_are_not_finite_stop_the_run_before_the_first_step(tmp_path: Path) -> None:
    model = plans.model_folder(tmp_path / "broken")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    plan = plans.plan(tmp_path, model=model)
    with pytest.raises(RuntimeError, match="not finite before the first step"):
        run(plan)
    assert events(plan)[-1].kind == "failed"
    assert "RuntimeError: the model's logits" in events(plan)[-1].data["error"]
