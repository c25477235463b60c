"""Two ranks of one node train a model that comes with its own code, at the same time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dbx_llmtrain import storage
from dbx_llmtrain.custom_code import private_modules
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker.model import load_model
from tests import sample, tiny
from tests.dist import plans
from tests.dist.launch import two_ranks

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
STRATEGIES = ("ddp", "fsdp")


def trusting(folder: Path, model: Path, strategy: str, **changes: Any) -> RunPlan:
    """A plan for the folder's model that lets its code run."""
    plan = plans.plan(folder, strategy, model=model, strategy=strategy, every=2, **changes)
    data = plan.config.model_dump(mode="json")
    data["model"] |= {"trust_remote_code": True}
    return plan.model_copy(update={"config": sample.config(**data)})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of a run of two ranks with each strategy; their user's home."""
    folder = tmp_path_factory.mktemp("custom")
    model = tiny.custom_folder(folder / "model")
    made = {
        strategy: trusting(folder, model, strategy, world_size=2, train={"max_steps": 3})
        for strategy in STRATEGIES
    }
    names = []
    for strategy, plan in made.items():
        names.append(folder / f"{strategy}-plan")
        names[-1].mkdir()
        for rank in (0, 1):
            (names[-1] / f"plan-{rank}.json").write_text(plan.model_dump_json())
    environment = os.environ | {"HF_HOME": str(folder / "home")}
    environment.pop("HF_MODULES_CACHE", None)
    two_ranks(folder, names, environment)
    outcomes = {
        name.name.removesuffix("-plan"): json.loads((name / "outcome-0.json").read_text())
        for name in names
    }
    return {"plans": made, "outcomes": outcomes, "folder": folder, "model": model}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_train_and_export_a_model_with_its_code(
    runs: dict[str, Any], strategy: str, tmp_path: Path
) -> None:
    outcome, plan = runs["outcomes"][strategy], runs["plans"][strategy]
    assert outcome.get("steps") == 3, outcome
    assert outcome["metrics"]["eval_loss"] < outcome["metrics"]["initial_eval_loss"]
    target = Path(outcome["model_path"])
    assert storage.read_manifest(target) is not None
    for path in runs["model"].glob("*.py"):
        assert (target / path.name).read_bytes() == path.read_bytes()
    with private_modules(tmp_path, wanted=True):
        models = [
            load_model(folder, attention=plan.attention, trusted=True)
            for folder in (target, runs["model"])
        ]
        ids = torch.arange(3, 20)[None]
        after, before = (model.eval()(input_ids=ids).logits for model in models)
    assert not torch.equal(after, before)


def test_strategies_agree_on_such_a_model(runs: dict[str, Any]) -> None:
    losses = [runs["outcomes"][strategy]["metrics"]["eval_loss"] for strategy in STRATEGIES]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_code_was_imported_in_private_and_is_gone(runs: dict[str, Any]) -> None:
    assert not (runs["folder"] / "home" / "modules").exists()
    assert not list((runs["folder"] / "local" / "scratch").iterdir())
