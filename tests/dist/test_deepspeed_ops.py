"""DeepSpeed's compiled operators: built by the first rank of a node, and what trains with them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain import storage, zero_config
from dbx_llmtrain.events import read_events
from dbx_llmtrain.model_sections import ParallelConfig
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import builds
from tests.dist import plans

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
TORCHS = {zero_config.CPU_ADAM: False}
LARGE = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 1}
"""Wide enough that parameters are worth a file on disk (above a megabyte)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, data and what was built."""
    return tmp_path_factory.mktemp("ops")


def train(
    folder: Path, name: str, *, resume: Path | None = None, **parallel: Any
) -> tuple[RunPlan, dict[str, float]]:
    """Three steps on one rank with a model of random weights: held-out losses, and how many files
    were seen where parameters and optimizer state are offloaded to."""
    chosen = ParallelConfig(kind="deepspeed", **parallel)
    plan = plans.plan(
        folder,
        name,
        every=2,
        strategy="deepspeed",
        parallel=chosen,
        world_size=1,
        train={"max_steps": 3},
        model=plans.model_folder(folder / "model", **LARGE),
        resume_from=str(resume) if resume else None,
    )
    model = plan.config.model.model_copy(update={"init": "random"})
    plan = plan.model_copy(update={"config": plan.config.model_copy(update={"model": model})})
    path = folder / f"{name}.json"
    path.write_text(plan.model_dump_json())
    disk, swapped = Path(str(plan.local_dir)) / "nvme", 0
    with (folder / f"{name}.log").open("w+") as log:
        rank = subprocess.Popen(
            [sys.executable, "-m", "dbx_llmtrain.worker.main", str(path)],
            cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
            env=os.environ | {"TORCH_EXTENSIONS_DIR": str(folder / "built")},
        )  # fmt: skip
        while rank.poll() is None:
            swapped = max(swapped, len(list(disk.rglob("*.swp"))))
            time.sleep(0.05)
    assert rank.returncode == 0, (folder / f"{name}.log").read_text()[-3000:]
    evaluated = [
        event.metrics["eval_loss"]
        for event in read_events(Path(plan.run_dir) / "events.jsonl")
        if event.kind == "eval"
    ]
    return plan, {"first": evaluated[0], "last": evaluated[-1], "swapped": swapped}


def phases(plan: RunPlan) -> list[str]:
    events = read_events(Path(plan.run_dir) / "events.jsonl")
    return [str(event.data["phase"]) for event in events if event.kind == "phase"]


def test_c109_deepspeeds_adam_takes_the_steps_of_torchs(folder: Path) -> None:
    if not {"g++", "ninja"} <= set(builds.find_tools()):
        pytest.skip("needs g++ and ninja")
    lock = folder / "built" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()  # as a rank leaves it that was killed while it built: others would wait for ever
    built, own = train(folder, "own", stage=2, offload_optimizer="cpu")
    assert list((folder / "built" / "cpu_adam").glob("*.so"))
    assert phases(built)[0].startswith("building DeepSpeed's cpu_adam")
    again, _ = train(folder, "again", stage=2, offload_optimizer="cpu")
    assert phases(again)[0] == "looking for model and data", "it is built already"
    _, torchs = train(folder, "torchs", stage=2, offload_optimizer="cpu", config=TORCHS)
    assert own["last"] == pytest.approx(torchs["last"], abs=1e-4)
    assert own["last"] < own["first"]


def test_what_is_offloaded_to_disk_trains_alike(folder: Path) -> None:
    if "libaio" not in builds.find_tools():
        pytest.skip("needs the header of libaio")
    plain, expected = train(folder, "plain", stage=3)
    start = storage.checkpoint_folder(Path(plain.run_dir), 2)
    for name, places in {
        "optimizer": {"offload_optimizer": "nvme"},
        "both": {"offload_optimizer": "nvme", "offload_params": "nvme"},
    }.items():
        plan, found = train(folder, name, stage=3, config=TORCHS, **places)
        assert found["last"] == pytest.approx(expected["last"], abs=1e-5), name
        assert found["swapped"] >= 3, name
        # A terabyte of it would stay there.
        assert not list((Path(str(plan.local_dir)) / "nvme").iterdir()), name
        _, rest = train(folder, f"{name}-rest", resume=start, stage=3, config=TORCHS, **places)
        assert rest["last"] == pytest.approx(expected["last"], abs=1e-5), name
