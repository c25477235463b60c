"""A rank's whole story with several held-out sets, other orders, and masked tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dbx_llmtrain import storage
from dbx_llmtrain.custom_code import load_from, private_modules
from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.text.prepared import Split
from dbx_llmtrain.worker.main import run
from tests import reference, tiny
from tests.dist import plans
from tests.dist.test_main import events, resume, same_threads, tensors

__all__ = ["same_threads"]
pytestmark = pytest.mark.dist

SETS = {
    "eval-easy": tiny.examples((5, 9, 7), seed=2),
    "eval-hard": tiny.examples((30, 12), seed=3),
    "test": tiny.examples((20, 11, 6, 9), seed=4),
}


def trained(rows: list[Any]) -> int:
    return sum(sum(row.trained[1:]) for row in rows)


def test_every_held_out_set_has_a_loss_and_all_together_one(tmp_path: Path) -> None:
    plan = plans.plan(tmp_path, held_out=[], more=SETS, train={"max_steps": 3, "eval_every": 2})
    metrics = run(plan).metrics
    easy, hard = SETS["eval-easy"], SETS["eval-hard"]
    found = [event.metrics for event in events(plan, "eval")]
    # Before the first step, after the second and the last; then, once, the test rows.
    assert [sorted(name for name in each if name.endswith("loss")) for each in found] == [
        ["eval_easy_loss", "eval_hard_loss", "eval_loss"]
    ] * 3 + [["test_loss"]]
    for each in found[:3]:
        weights = trained(easy), trained(hard)
        mean = (each["eval_easy_loss"] * weights[0] + each["eval_hard_loss"] * weights[1]) / sum(
            weights
        )
        assert each["eval_loss"] == pytest.approx(mean, abs=1e-9)
    assert found[2].items() - {("eval_perplexity", 0)} >= {
        (name, metrics[name]) for name in ("eval_loss", "eval_easy_loss", "eval_hard_loss")
    }
    assert metrics["initial_eval_loss"] == found[0]["eval_loss"]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(Path(plan.run_dir) / "export")
    for name, rows in SETS.items():
        expected = float(reference.mean_loss(model, rows).detach())
        assert metrics[f"{name.replace('-', '_')}_loss"] == pytest.approx(expected, abs=1e-5)


def test_test_rows_alone_are_evaluated_at_the_end(tmp_path: Path) -> None:
    plan = plans.plan(
        tmp_path, held_out=[], more={"test": SETS["test"]}, export=False, train={"max_steps": 1}
    )
    metrics = run(plan).metrics
    assert [event.step for event in events(plan, "eval")] == [1]
    assert "test_loss" in metrics
    assert "eval_loss" not in metrics


def test_a_resumed_run_keeps_the_losses_of_the_named_sets(tmp_path: Path) -> None:
    plan = plans.plan(tmp_path, held_out=[], more=SETS, train={"max_steps": 2})
    first = run(plan)
    second = run(resume(plan, 2))
    names = [name for name in first.metrics if name.endswith("_loss") and name != "train_loss"]
    assert sorted(names) == [
        "eval_easy_loss", "eval_hard_loss", "eval_loss", "initial_eval_loss", "test_loss",
    ]  # fmt: skip
    assert {name: second.metrics[name] for name in names} == {
        name: first.metrics[name] for name in names
    }


@pytest.mark.parametrize(
    "data",
    [
        {"shuffle": False},
        {"packing": False, "group_by_length": True},
        {"longest_first": True},
    ],
    ids=str,
)
def test_a_run_obeys_the_order_that_is_asked_for(tmp_path: Path, data: dict[str, Any]) -> None:
    plan = plans.plan(tmp_path, export=False, data=data, train={"max_steps": 3})
    run(plan)
    tokens = [event.metrics["tokens_seen"] for event in events(plan, "step")]
    lengths = [int(n) for n in Split(Path(plan.data.artifact.source)).tokens]
    assert tokens[-1] == sum(lengths)
    if "shuffle" in data:
        assert tokens[0] == sum(lengths[:3])
    if "longest_first" in data:
        assert tokens[0] == sum(sorted(lengths)[-3:])


def test_a_run_does_not_go_on_in_another_order(tmp_path: Path) -> None:
    plan = plans.plan(tmp_path, every=2, export=False, train={"max_steps": 2})
    run(plan)
    data = plan.config.data.model_copy(update={"shuffle": False})
    config = plan.config.model_copy(update={"data": data})
    with pytest.raises(CheckpointError, match=r"data\.shuffle: true then, false now"):
        run(resume(plan, 2, config=config))


# Masked tokens -------------------------------------------------------------------------------


def masked_folder(folder: Path) -> Path:
    """A tiny BERT with a tokenizer that has a mask token."""
    words = tiny.tokenizer(chat_template=None)
    words.add_special_tokens({"mask_token": "<mask>", "pad_token": "<pad>"})
    tiny.bert(vocab_size=len(words)).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def masked_plan(folder: Path, name: str = "run", **changes: Any) -> RunPlan:
    model = masked_folder(folder / "bert") if not (folder / "bert").exists() else folder / "bert"
    data = {"objective": "mlm", "mlm_probability": 0.3} | changes.pop("data", {})
    plan = plans.plan(
        folder,
        name,
        model=model,
        rows=tiny.examples((12, 40, 9, 30, 11, 25, 8, 10)),
        data=data,
        **changes,
    )
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    info = plan.model.model_copy(update={"model_type": "bert", "vocab_size": size})
    return plan.model_copy(
        update={"model": info, "data": plan.data.model_copy(update={"end_tokens": ()})}
    )


def test_c94_a_model_for_masked_tokens_is_trained_and_exported(tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    plan = masked_plan(tmp_path, train={"max_steps": 12, "eval_every": 12})
    result = run(plan)
    assert result.metrics["eval_loss"] < result.metrics["initial_eval_loss"]
    steps = events(plan, "step")
    # Only hidden tokens have a label: about 0.3 of them, and other ones in every epoch.
    seen = [event.metrics["trained_tokens_seen"] for event in steps]
    epochs = {seen[2], seen[5] - seen[2], seen[8] - seen[5], seen[11] - seen[8]}
    assert len(epochs) > 1
    assert all(15 < count < 75 for count in epochs)
    export = Path(plan.run_dir) / "export"
    model, report = AutoModelForMaskedLM.from_pretrained(export, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(export).mask_token == "<mask>"
    assert not (export / "generation_config.json").exists()
    stored = tensors(Path(result.checkpoint or ""), tmp_path / "whole.pt")
    for name, weight in model.named_parameters():
        assert torch.equal(stored[f"model.{name}"], weight), name


def test_a_resumed_run_hides_the_same_tokens(tmp_path: Path) -> None:
    whole = masked_plan(tmp_path, "whole", every=3, train={"max_steps": 5})
    result = run(whole)
    start = storage.checkpoint_folder(Path(whole.run_dir), 3)
    rest = masked_plan(tmp_path, "rest", train={"max_steps": 5}, resume_from=str(start))
    artifact = whole.data.artifact
    rest = rest.model_copy(update={"data": rest.data.model_copy(update={"artifact": artifact})})
    again = run(rest)
    first, second = (
        tensors(Path(found.checkpoint or ""), tmp_path / f"{number}.pt")
        for number, found in enumerate((result, again))
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name in ("eval_loss", "train_loss"):
        assert again.metrics[name] == result.metrics[name]


def test_a_model_for_masked_tokens_with_its_own_code(tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM

    tiny.custom_folder(tmp_path / "bert", masked=True)
    plan = masked_plan(tmp_path, train={"max_steps": 6})
    settings = plan.config.model.model_copy(update={"trust_remote_code": True})
    config = plan.config.model_copy(update={"model": settings})
    result = run(plan.model_copy(update={"config": config}))
    assert result.metrics["eval_loss"] < result.metrics["initial_eval_loss"]
    export = Path(plan.run_dir) / "export"
    assert (export / "modeling_tiny.py").is_file()
    stored = tensors(Path(result.checkpoint or ""), tmp_path / "whole.pt")
    with private_modules(tmp_path, wanted=True):
        model = AutoModelForMaskedLM.from_pretrained(**load_from(export, trusted=True))
        assert type(model).__name__ == "TinyForMaskedLM"
        for name, weight in model.named_parameters():
            assert torch.equal(stored[f"model.{name}"], weight), name
