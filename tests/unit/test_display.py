from __future__ import annotations

import math
from typing import Any

import pytest

from dbx_llmtrain import display
from dbx_llmtrain.errors import Finding
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.reports import ClusterReport, PairSpeed
from tests import sample


def test_a_cluster_shows_every_gpu_and_node() -> None:
    text = repr(sample.cluster())
    assert text.startswith("Cluster spark://driver:7077\n---")
    assert "Spark 3.5.2, 2 nodes, 4 GPUs, 4 tasks at once, 1 GPU each" in text
    assert "driver (driver)" in text
    for part in ("GPU-worker-1-0", "GPU-worker-2-1", "1.0 GiB of 80.0 GiB", "550.54"):
        assert part in text
    assert "On every node: python 3.12.3, torch 2.7.0, transformers 4.51.3" in text
    assert "500 GiB" in text


def test_a_cluster_without_gpus_is_normal_and_problems_are_told() -> None:
    other = sample.node("b").model_copy(update={"packages": {"torch": "2.9.0"}})
    bad = sample.node("a", problem="nvidia-smi: <not found>")
    report = sample.cluster(bad, other, missing=("10.0.0.9",), task_gpus=None)
    text, page = str(report), report._repr_html_()
    assert "2 nodes, 0 GPUs, 4 tasks at once\n" in text
    assert "none" in text
    assert "a: nvidia-smi: <not found>" in text
    assert "Did not answer in time: 10.0.0.9" in text
    assert "Versions differ:" in text
    assert "2.9.0" in text
    assert "&lt;not found&gt;" in page
    assert "<not" not in page


def test_one_machine_is_listed_once() -> None:
    here = sample.node("driver")
    report = sample.cluster(local=True, master="local[2]", nodes=(here,), executors=())
    text = str(report)
    assert text.count("8 ") == 1
    assert "1 node, 0 GPUs, no executors: ranks run on the driver's machine" in text


def test_a_plan_shows_every_decision_with_its_reason() -> None:
    plan = sample.run_plan(resume_from="/shared/runs/first/checkpoints/step-00000002")
    text, page = repr(plan), plan._repr_html_()
    for decision in plan.decisions:
        assert decision.name in text
        assert decision.reason in text
    assert "/models/tiny (llama, 134,515,008 parameters)" in text
    assert "32 examples = 2 ranks x 2 micro-batches of 8; an epoch has only 12\n" in text
    assert "3, of them 1 warm-up; 1 an epoch" in text
    assert "resumes from" in text
    assert "10 no trained token" in text
    assert "&lt;share&gt;" in page
    assert "<share>" not in page


@pytest.mark.parametrize(
    ("total", "ranks", "micro", "told"),
    [
        (32, 2, 8, "32 examples = 2 ranks x 2 micro-batches of 8"),
        (1, 1, 1, "1 example = 1 rank x 1 micro-batch of 1"),
        (8, 1, 16, "8 examples: all on 1 rank"),
        (32, 64, 1, "32 examples: 1 on each of 32 ranks; 32 ranks without any"),
        (32, 64, 4, "32 examples: 1 on each of 32 ranks; 32 ranks without any"),
        (10, 4, 8, "10 examples: up to 3 on each of 4 ranks"),
        (10, 2, 2, "10 examples: 5 on each of 2 ranks, in 3 micro-batches of at most 2"),
        (10, 4, 2,
         "10 examples: up to 3 on each of 4 ranks, in up to 2 micro-batches of at most 2"),
    ],
)  # fmt: skip
def test_the_examples_of_a_step_add_up(total: int, ranks: int, micro: int, told: str) -> None:
    accumulation = math.ceil(math.ceil(total / ranks) / micro)
    plan = sample.run_plan(
        global_batch_size=total, world_size=ranks, micro_batch_size=micro, examples=1000,
        accumulation=accumulation,
    )  # fmt: skip
    (line,) = (line for line in str(plan).splitlines() if line.startswith("step "))
    assert line.removeprefix("step").strip() == told


def test_a_name_that_another_call_will_not_have_is_told() -> None:
    note = "(without tracking.run_name every call names it by its time)"
    assert note in " ".join(str(sample.run_plan(config=sample.config())).split())
    job = sample.run_plan("/shared/runs/job-7-run-8-train", config=sample.config())
    told = " ".join(str(job).split())
    assert note not in told
    assert "(named by the job: its retries and repairs go on in it)" in told
    named = sample.config(tracking={"run_name": "first"})
    assert note not in " ".join(str(sample.run_plan(config=named)).split())


def test_a_result_shows_losses_first_and_where_the_files_are() -> None:
    result = sample.result(restarts=("rank 1 lost",))
    text = str(result)
    assert text.index("initial_eval_loss") < text.index("eval_loss  ") < text.index("peak_memory")
    for part in ("4.24", "2.7", "1,234.5", "2.0 GiB", "/export", "step-00000003", "rank 1 lost"):
        assert part in text
    assert "3 steps done" in text
    assert "<table>" in result._repr_html_()
    assert "MLflow run" not in str(sample.result(run_id=None))


def test_a_result_says_why_it_ended_early_and_which_model_was_best() -> None:
    result = sample.result(
        stop_reason="no better eval_loss in 3 evaluations",
        best_checkpoint="/shared/runs/first/checkpoints/step-00000002",
        best_model_path="/shared/runs/first/export-best",
        model_uri="models:/m-1",
        registered="models:/main.ml.answers/3",
        metrics={"train_loss": 2.0, "best_eval_loss": 2.1, "eval_loss": 2.2},
    )
    text = str(result)
    assert "3 steps done, ended before the last one: no better eval_loss in 3 evaluations" in text
    assert "best checkpoint  /shared/runs/first/checkpoints/step-00000002\n" in text
    assert "best model       /shared/runs/first/export-best\n" in text
    assert text.index("eval_loss  ") < text.index("best_eval_loss") < text.index("train_loss")
    assert "model in MLflow  models:/m-1\n" in text
    assert "registered       models:/main.ml.answers/3\n" in text
    assert "best" not in str(sample.result())
    assert "registered" not in str(sample.result())


@pytest.mark.parametrize(
    ("train", "told"),
    [
        ({}, "10 rows before the first step and after the last"),
        ({"eval_every": 50}, "10 rows before the first step, every 50 steps and after the last"),
        ({"eval_every": "epoch", "eval_max_rows": 100},
         "10 rows after the last step; of each set at most 100 examples before the first, every "
         "epoch"),
    ],
)  # fmt: skip
def test_a_plan_says_when_it_evaluates(train: dict[str, Any], told: str) -> None:
    config = sample.config(data={"train": "/t.jsonl", "eval": 0.1}, train=train)
    assert facts(sample.run_plan(config=config))["evaluation"] == told


def test_a_plan_without_held_out_rows_says_so() -> None:
    splits = {"train": sample.data().splits["train"]}
    plan = sample.run_plan(data=sample.data().model_copy(update={"splits": splits}))
    assert facts(plan)["evaluation"] == "none: no rows are held out (data.eval)"


def facts(plan: RunPlan) -> dict[str, str]:
    """The first table of a plan as it is shown, each fact on one line."""
    lines = str(plan).split("\n\n")[1].splitlines()
    left = len(lines[0]) - len(lines[0].removeprefix("model").lstrip())
    found: dict[str, str] = {}
    for line in lines:
        name = line[:left].strip() or next(reversed(found))
        found[name] = f"{found.get(name, '')} {line[left:]}".strip()
    return found


@pytest.mark.parametrize(
    ("metrics", "remark"),
    [
        ({"initial_eval_loss": 2.0, "eval_loss": 1.5, "train_loss": 9.0}, ""),
        ({"train_loss": 2.0}, ""),
        ({"initial_eval_loss": 2.0, "eval_loss": 2.5, "train_loss": 1.0},
         "ended above where it began (2 to 2.5): the model became worse"),
        ({"initial_eval_loss": 2.0, "eval_loss": math.nan, "train_loss": 1.0},
         "eval_loss is not finite: do not use the model"),
        ({"train_loss": math.inf}, "train_loss is not finite: do not use the model"),
    ],
)  # fmt: skip
def test_a_run_that_made_the_model_worse_says_so(metrics: dict[str, float], remark: str) -> None:
    text = " ".join(str(sample.result(metrics=metrics)).split())
    assert remark in text
    assert bool(remark) == ("worse" in text or "do not use" in text)


def test_text_is_ascii_and_wrapped() -> None:
    decision = sample.run_plan().decisions[0].model_copy(update={"reason": "because " * 40})
    for text in (
        repr(sample.cluster()),
        repr(sample.run_plan(decisions=(decision,))),
        repr(sample.result()),
    ):
        assert text.isascii()
        assert max(map(len, text.splitlines())) <= 130


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (200 * 2**30, "200 GiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_size(value: int, text: str) -> None:
    assert display.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "True"), (12345, "12,345"), (2.0, "2"), (1e-5, "1e-05"), (12345.67, "12,345.7")],
)
def test_number(value: object, text: str) -> None:
    assert display.number(value) == text


def test_findings_of_a_full_probe_are_listed_errors_first() -> None:
    report = sample.cluster().model_copy(
        update={
            "findings": (
                Finding("ok", "memory", "at least 10 GiB free (a)"),
                Finding("warning", "GPU memory", "GPU 0 of a is not free"),
                Finding("error", "NCCL", "2.1 on a, 2.2 on <b>"),
            ),
            "speeds": (PairSpeed(first="a", second="b", bytes_per_second=1e9),),
        }
    )
    text = str(report)
    assert "1 error, 1 warning:" in text
    places = [text.index(word) for word in ("2.1 on a", "is not free", "10 GiB free", "954 MiB/s")]
    assert places == sorted(places)
    assert "2.2 on &lt;b&gt;" in report._repr_html_()
    again = ClusterReport.model_validate_json(report.model_dump_json())
    assert again.findings == report.findings
    assert "errors" not in str(sample.cluster())
