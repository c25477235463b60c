"""Whole runs with DeepSpeed as a rank carries out a plan: two ranks, and one without a launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from dbx_llmtrain import storage
from dbx_llmtrain.events import read_events
from dbx_llmtrain.model_sections import ParallelConfig
from dbx_llmtrain.records import RunPlan
from tests.dist import plans
from tests.dist.launch import TIMEOUT, two_ranks

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
ALL_PARTITIONED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
ZERO3 = ParallelConfig(kind="deepspeed", stage=3, config=ALL_PARTITIONED)


def settings(parallel: ParallelConfig, **changes: Any) -> dict[str, Any]:
    return {"strategy": parallel.kind, "parallel": parallel, "world_size": 2} | changes


def write(folder: Path, plan: RunPlan) -> str:
    """A plan as ``tests.dist.main_rank`` takes it."""
    folder.mkdir()
    for rank in (0, 1):
        (folder / f"plan-{rank}.json").write_text(plan.model_dump_json())
    return str(folder)


def outcome(folder: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((Path(folder) / "outcome-0.json").read_text())
    return content


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of stage 3 with a checkpoint after step 4, from which the same and FSDP go on. (New
    processes: DeepSpeed keeps the process group that it has seen first.)"""
    folder = tmp_path_factory.mktemp("runs")
    model = plans.model_folder(folder / "model")
    train = {"train": {"eval_every": 3}, "model": model}
    whole = plans.plan(folder, "whole", every=4, **settings(ZERO3, **train))
    start = storage.checkpoint_folder(Path(whole.run_dir), 4)
    fsdp = ParallelConfig(kind="fsdp")
    rest, other = (
        plans.plan(folder, name, resume_from=str(start), **settings(parallel, **train))
        for name, parallel in (("rest", ZERO3), ("fsdp", fsdp))
    )
    folders = [write(folder / f"{plan.run_name}-{i}-plan", plan) for i, plan in
               enumerate((whole, rest, other))]  # fmt: skip
    two_ranks(folder, folders[:1], dict(os.environ))
    two_ranks(folder, folders[1:], dict(os.environ))
    return {"plans": (whole, rest, other), "outcomes": [outcome(name) for name in folders]}


def test_a_run_trains_evaluates_saves_and_exports(runs: dict[str, Any]) -> None:
    whole, found = runs["plans"][0], runs["outcomes"][0]
    assert "error" not in found
    assert found["steps"] == 8
    assert found["metrics"]["eval_loss"] < found["metrics"]["initial_eval_loss"]
    exported = load_file(Path(whole.run_dir) / "export" / "model.safetensors")
    assert exported.keys() == load_file(whole.model.source + "/model.safetensors").keys()
    assert all(tensor.numel() for tensor in exported.values())


def test_a_resumed_run_is_bitwise_the_same_run(runs: dict[str, Any], tmp_path: Path) -> None:
    whole, rest, _ = runs["plans"]
    first, second = (
        _tensors(storage.checkpoint_folder(Path(plan.run_dir), 8), tmp_path / str(i))
        for i, plan in enumerate((whole, rest))
    )
    assert len(first) == 84
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    metrics = [found["metrics"] for found in runs["outcomes"][:2]]
    for name in ("eval_loss", "train_loss"):
        assert metrics[0][name] == metrics[1][name]


def test_c111_fsdp_goes_on_from_it(runs: dict[str, Any]) -> None:
    metrics = [found["metrics"] for found in runs["outcomes"]]
    for name in ("eval_loss", "train_loss"):
        assert metrics[2][name] == pytest.approx(metrics[0][name], abs=1e-5)


def _tensors(folder: Path, scratch: Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(folder, scratch)
    content: dict[str, torch.Tensor] = torch.load(scratch)
    return content


# One process, by the command line


def run_alone(folder: Path, plan: RunPlan) -> subprocess.CompletedProcess[str]:
    path = folder / "plan.json"
    path.write_text(plan.model_dump_json())
    return subprocess.run(
        [sys.executable, "-m", "dbx_llmtrain.worker.main", str(path)],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=TIMEOUT, check=False,
    )  # fmt: skip


def test_one_process_needs_no_launcher_and_says_nothing(tmp_path: Path) -> None:
    parallel = ParallelConfig(kind="deepspeed", stage=2)
    plan = plans.plan(tmp_path, **settings(parallel, world_size=1), train={"max_steps": 2})
    done = run_alone(tmp_path, plan)
    assert done.returncode == 0, done.stderr
    assert "ds_accelerator" not in done.stdout + done.stderr
    assert "FutureWarning" not in done.stderr
    finished = list(read_events(Path(plan.run_dir) / "events.jsonl"))[-1]
    assert finished.kind == "finished"
    # No operator was compiled on the way.
    assert not list(Path(str(plan.local_dir)).rglob("*.so"))


@pytest.mark.slow
def test_cluster_env_reaches_deepspeed(tmp_path: Path) -> None:
    """It reads this variable when it is imported, and takes numbers only."""
    parallel = ParallelConfig(kind="deepspeed", stage=2)
    plan = plans.plan(tmp_path, **settings(parallel, world_size=1), train={"max_steps": 2})
    cluster = plan.config.cluster.model_copy(update={"env": {"DEEPSPEED_TIMEOUT": "seven"}})
    config = plan.config.model_copy(update={"cluster": cluster})
    done = run_alone(tmp_path, plan.model_copy(update={"config": config}))
    assert done.returncode != 0
    assert "'seven'" in done.stderr


@pytest.mark.slow
def test_c109_an_operator_that_cannot_be_built_is_refused(tmp_path: Path) -> None:
    parallel = ParallelConfig(kind="deepspeed", stage=2, offload_optimizer="cpu")
    plan = plans.plan(tmp_path, **settings(parallel, world_size=1), train={"max_steps": 2})
    tools = tmp_path / "bin"
    tools.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _BUILD.format(plan=plan.model_dump_json())],
        cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False,
        env=os.environ | {"PATH": str(tools), "CXX": "no-such-compiler"},
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("building DeepSpeed's cpu_adam (minutes, once a node)\n")
    assert "cpu_adam cannot be built" in done.stdout
    assert "apt-get install g++" in done.stdout
    assert "zero_force_ds_cpu_optimizer: false" in done.stdout


_BUILD = """
from dbx_llmtrain.errors import ClusterError
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker.parallel import zero_ops

try:
    zero_ops.build(RunPlan.model_validate_json({plan!r}), print)
except ClusterError as error:
    print(error)
    raise SystemExit(3)
"""
