"""Adapters under every strategy: gradients, what is frozen, checkpoints, export, whole runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dbx_llmtrain import storage
from dbx_llmtrain.events import read_events
from dbx_llmtrain.records import RunPlan
from tests.dist import plans
from tests.dist.launch import Launched, some_slow, two_ranks
from tests.dist.lora_cases import LORAS

pytestmark = pytest.mark.dist

LAUNCHES = [("single", 1), ("ddp,fsdp", 2), ("zero1,zero2,zero3", 2)]
STRATEGIES = [name for names, _ in LAUNCHES for name in names.split(",")]
QUICK = ("single", "ddp", "fsdp")
RUNS = ("ddp", "fsdp")
LORA = {"r": 4, "dropout": 0.1, "modules_to_save": ["lm_head"]}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What the cases found, by strategy."""
    return Launched(LAUNCHES, "tests.dist.lora_cases", tmp_path_factory)


@pytest.mark.parametrize("strategy", some_slow(STRATEGIES, QUICK))
def test_c74_only_adapters_have_gradients_and_they_are_those_of_one_process(
    found: Mapping[str, Any], strategy: str
) -> None:
    gradients = found[strategy]["gradients"]
    assert {name: case["trained"] for name, case in gradients.items()} == {
        "all-linear": 28, "dora": 12, "embeddings": 10, "head": 6,
    }  # fmt: skip
    for name, case in gradients.items():
        assert case["names"], name
        assert case["difference"] < 1e-5, name
        assert case["loss"] < 1e-5, name


@pytest.mark.parametrize("strategy", some_slow(STRATEGIES, QUICK))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_c65_and_c74_the_base_stays_bitwise_as_it_was_and_all_adapters_move(
    found: Mapping[str, Any], strategy: str, precision: str
) -> None:
    case = found[strategy]["training"][precision]
    assert case["frozen"] == 21
    assert case["unchanged"]
    assert case["moved"]
    assert case["ranks"] == 1
    assert case["base"] == [{"fp32": "torch.float32", "bf16": "torch.bfloat16"}[precision]]
    assert case["adapters"] == ["torch.float32"]
    assert case["losses"][-1] < case["losses"][0] - 0.05


@pytest.mark.slow
def test_adapters_start_and_train_alike_whatever_the_strategy(found: Mapping[str, Any]) -> None:
    for precision, off in (("fp32", 1e-5), ("bf16", 0.02)):
        cases = [found[strategy]["training"][precision] for strategy in STRATEGIES]
        assert len({case["start"] for case in cases}) == 1
        for case in cases:
            assert case["losses"] == pytest.approx(cases[0]["losses"], abs=off)
    starts = {found[strategy]["training"][kind]["start"] for strategy in STRATEGIES
              for kind in ("fp32", "bf16")}  # fmt: skip
    assert len(starts) == 1


@pytest.mark.parametrize("strategy", QUICK)
def test_the_optimizer_holds_the_adapters_alone(found: Mapping[str, Any], strategy: str) -> None:
    assert found[strategy]["training"]["fp32"]["held"] == 28


@pytest.mark.parametrize("strategy", some_slow(STRATEGIES, QUICK))
def test_a_checkpoint_holds_what_is_trained_and_goes_on_exactly(
    found: Mapping[str, Any], strategy: str
) -> None:
    case = found[strategy]["saving"]
    assert case["model"] == case["trained"]
    assert len(case["model"]) == case["states"] == 10
    assert case["loaded"]
    assert case["goes_on"]


@pytest.mark.parametrize("strategy", some_slow(STRATEGIES, QUICK))
@pytest.mark.parametrize("name", LORAS)
def test_c102_merged_logits_are_those_of_the_adapter(
    found: Mapping[str, Any], strategy: str, name: str
) -> None:
    case = found[strategy]["exporting"][name]
    assert case["difference"] < 1e-5
    assert case["effect"] > 1e-2
    assert case["unexpected"] == []
    assert case["missing"] == (["lm_head.weight"] if name == "embeddings" else [])  # tied
    assert case["unchanged"]
    assert case["adapter"] == found["single"]["exporting"][name]["adapter"]


# Whole runs


def with_lora(plan: RunPlan, **changes: Any) -> RunPlan:
    """The plan with adapters."""
    content = json.loads(plan.model_dump_json())
    content["config"]["model"]["lora"] = LORA
    return RunPlan.model_validate(content | changes)


def write(folder: Path, plan: RunPlan) -> str:
    """Lay out a plan for ``tests.dist.main_rank``."""
    folder.mkdir(parents=True)
    for rank in (0, 1):
        (folder / f"plan-{rank}.json").write_text(plan.model_dump_json())
    return str(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[RunPlan, RunPlan]]:
    """For each strategy a run of 4 steps and one that goes on from its step 2, both over."""
    folder = tmp_path_factory.mktemp("runs")
    done, folders = {}, []
    for strategy in RUNS:
        settings: dict[str, Any] = {"strategy": strategy, "world_size": 2}
        settings |= {"train": {"max_steps": 4}, "model": plans.model_folder(folder / "model")}
        whole = with_lora(plans.plan(folder, f"{strategy}-whole", every=2, **settings))
        start = storage.checkpoint_folder(Path(whole.run_dir), 2)
        rest = with_lora(plans.plan(folder, f"{strategy}-rest", **settings), resume_from=str(start))
        done[strategy] = (whole, rest)
        folders += [
            write(folder / f"{strategy}-{part}-plan", plan)
            for part, plan in zip(("whole", "rest"), done[strategy], strict=True)
        ]
    two_ranks(folder, folders, dict(os.environ))
    for name in folders:
        for rank in (0, 1):
            outcome = json.loads((Path(name) / f"outcome-{rank}.json").read_text())
            assert outcome.get("steps") == 4, outcome
    return done


@pytest.mark.parametrize("strategy", RUNS)
def test_c83_a_resumed_run_with_adapters_is_the_same_run(
    runs: dict[str, tuple[RunPlan, RunPlan]], strategy: str
) -> None:
    for file in ("export/model.safetensors", "adapter/adapter_model.safetensors"):
        first, second = ((Path(plan.run_dir) / file).read_bytes() for plan in runs[strategy])
        assert first == second


def test_strategies_export_the_same_adapter(runs: dict[str, tuple[RunPlan, RunPlan]]) -> None:
    ddp, fsdp = (
        load_file(Path(runs[strategy][0].run_dir) / "adapter" / "adapter_model.safetensors")
        for strategy in RUNS
    )
    assert len(ddp) == 29
    assert ddp.keys() == fsdp.keys()
    # Dropout draws from each rank's own random numbers, the same ones under both.
    assert max(float((ddp[name] - fsdp[name]).abs().max()) for name in ddp) < 1e-4


@pytest.mark.parametrize("strategy", RUNS)
def test_c75_the_adapter_of_a_run_on_a_fresh_base_gives_the_logits_of_the_merged_model(
    runs: dict[str, tuple[RunPlan, RunPlan]], strategy: str
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plan = runs[strategy][0]
    folder = Path(plan.run_dir)
    ids = torch.arange(3, 19)[None]
    base = AutoModelForCausalLM.from_pretrained(plan.model.artifact.source)
    plain = base(ids).logits.detach()
    opened = PeftModel.from_pretrained(base, folder / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(folder / "export").eval()
    with torch.no_grad():
        logits, other = opened(ids).logits, merged(ids).logits
    assert float((logits - other).abs().max()) < 1e-5
    assert float((logits - plain).abs().max()) > 1e-3


@pytest.mark.parametrize("strategy", RUNS)
def test_a_run_says_what_is_trained_and_where_the_adapter_is(
    runs: dict[str, tuple[RunPlan, RunPlan]], strategy: str
) -> None:
    plan = runs[strategy][0]
    events = list(read_events(Path(plan.run_dir) / "events.jsonl", attempt=plan.attempt))
    notes = next(event for event in events if event.kind == "started").data["notes"]
    assert "trained as a whole and saved with the adapter: lm_head" in notes
    assert any(note.startswith("adapters on down_proj, gate_proj, k_proj") for note in notes)
    kinds = [event.kind for event in events if event.kind != "phase"]
    assert kinds[-3:] == ["export", "adapter", "finished"]
    adapter = json.loads((Path(plan.run_dir) / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == plan.model.source
    assert not list((Path(plan.run_dir) / "export").rglob("adapter*"))
