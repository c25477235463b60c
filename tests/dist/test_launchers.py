"""Ranks without Spark: one call per node under TF_CONFIG, and what their environment has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dbx_llmtrain.events import read_events
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker.main import run
from tests.dist import plans
from tests.dist.launch import TIMEOUT, free_port

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]

NOTE_IMPORTS = '''
import json, os, sys
from pathlib import Path

NAMES = ("HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
HEAVY = ("torch", "transformers", "huggingface_hub")


class Note:
    """Writes down what the environment is when a heavy package is looked for first."""

    def find_spec(self, name, path=None, target=None):
        rank = os.environ.get("RANK")
        if name in HEAVY and rank is not None and "LOCAL_RANK" in os.environ:
            file = Path(os.environ["NOTES"], f"{rank}-{name}.json")
            if not file.exists() and "torch.distributed.run" not in sys.argv[0]:
                file.write_text(json.dumps({name: os.environ.get(name) for name in NAMES}))
        return None


sys.meta_path.insert(0, Note())
'''


def two_nodes(plan: RunPlan, folder: Path, **more: str) -> list[tuple[int, str]]:
    """Exit code and output of one call per node, each on a node of its own."""
    (folder / "plan.json").write_text(plan.model_dump_json())
    cluster = {"chief": [f"127.0.0.1:{free_port()}"], "worker": ["127.0.0.1:1"]}
    calls = []
    for index, kind in enumerate(("chief", "worker")):
        environment = os.environ | more | {
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}}),
            "DBX_LLMTRAIN_NODE": f"node-{index}",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        calls.append(
            subprocess.Popen(
                [sys.executable, "-m", "dbx_llmtrain.worker.main", str(folder / "plan.json")],
                cwd=ROOT,
                env=environment,
                stdout=(folder / f"output-{index}").open("wb"),
                stderr=subprocess.STDOUT,
            )
        )
    deadline = time.monotonic() + TIMEOUT
    try:
        codes = [call.wait(deadline - time.monotonic()) for call in calls]
    finally:
        for call in calls:
            call.terminate()
    return [(code, (folder / f"output-{index}").read_text()) for index, code in enumerate(codes)]


def test_one_call_per_node_starts_the_ranks_of_the_node(tmp_path: Path) -> None:
    """2 nodes x 2 ranks train as one rank does; every rank has its caches on its node's disk before
    anything heavy is imported, but for what cluster.env says."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(NOTE_IMPORTS)
    (tmp_path / "notes").mkdir()
    settings = {"max_steps": 2, "global_batch_size": 4}
    cluster = {"env": {"TRITON_CACHE_DIR": "/by/cluster.env"}}
    alone = plans.plan(tmp_path, "alone", train=settings, export=False)
    plan = plans.plan(tmp_path, "nodes", train=settings, export=False)
    config = plan.config.override(f"cluster.env={json.dumps(cluster['env'])}")
    plan = plan.model_copy(
        update={"config": config, "strategy": "ddp", "world_size": 4, "attempt": "nodes"}
    )
    paths = [str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = two_nodes(
        plan, tmp_path, NOTES=str(tmp_path / "notes"), PYTHONPATH=os.pathsep.join(paths),
        HF_HOME="",
    )  # fmt: skip
    assert [code for code, _ in found] == [0, 0], found
    finished = [event for event in events(plan) if event.kind == "finished"]
    assert [event.step for event in finished] == [2]
    assert finished[0].metrics["train_loss"] == pytest.approx(
        run(alone).metrics["train_loss"], abs=1e-6
    )
    caches = Path(str(plan.local_dir)) / "caches"
    for rank in range(4):
        for name in ("torch", "transformers", "huggingface_hub"):
            noted = json.loads((tmp_path / "notes" / f"{rank}-{name}.json").read_text())
            assert noted == {
                "HF_HOME": str(caches / "huggingface"),
                "TORCHINDUCTOR_CACHE_DIR": str(caches / "torchinductor"),
                "TRITON_CACHE_DIR": "/by/cluster.env",
                "TORCH_EXTENSIONS_DIR": str(caches / "torch_extensions"),
            }, (rank, name)


def events(plan: RunPlan) -> list:  # type: ignore[type-arg]
    return list(read_events(Path(plan.run_dir) / "events.jsonl", attempt=plan.attempt))


def test_tasks_that_cannot_share_the_ranks_are_told(tmp_path: Path) -> None:
    plan = plans.plan(tmp_path, world_size=3, strategy="ddp")
    for code, output in two_nodes(plan, tmp_path):
        assert code == 1
        assert "for 3 ranks, which the 2 tasks of TF_CONFIG cannot share evenly" in output


def test_c64_a_skipped_step_uses_up_none_of_the_schedule_also_after_a_resume(
    tmp_path: Path,
) -> None:
    """The third of 4 steps has no trained token; the run is left after it, and goes on."""
    from dbx_llmtrain import storage
    from dbx_llmtrain.text.prepared import Example

    rows = [Example([5, 6, 7, 8 + n], [n // 2 != 2] * 4) for n in range(10)]
    settings = {
        "max_steps": 5, "global_batch_size": 2, "schedule": "linear", "min_learning_rate": 0.002,
    }  # fmt: skip
    data = {"shuffle": False}
    fields = {"train": settings, "rows": rows, "data": data, "export": False, "warmup_steps": 1}
    whole = plans.plan(tmp_path, "whole", every=3, **fields)
    result = run(whole)
    rates = [one.metrics["learning_rate"] for one in events(whole) if one.kind == "step"]
    assert rates == pytest.approx([0.01, 0.008, 0.006, 0.006, 0.004])
    assert result.metrics["skipped_steps"] == 1
    start = storage.checkpoint_folder(Path(whole.run_dir), 3)
    rest = whole.model_copy(update={"resume_from": str(start), "attempt": "rest"})
    assert run(rest).metrics["skipped_steps"] == 1
    again = [one.metrics["learning_rate"] for one in events(rest) if one.kind == "step"]
    assert again == rates[3:]
