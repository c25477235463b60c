"""What the tests with executors share: a small plan, and a look at the processes that are left."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

from dbx_llmtrain import storage
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.records import Artifact, Audit, ModelInfo, PreparedData, RunPlan, SplitInfo

PROGRAMS = Path(__file__).parent / "programs"
MARK = "RANK_PROGRAM_MARK"


def artifact(folder: Path, kind: str = "models") -> Artifact:
    files = storage.entries(folder)
    return Artifact(kind=kind, source=str(folder), fingerprint=uuid.uuid4().hex, files=files)


def make_plan(
    run_dir: Path,
    *,
    action: str = "finish",
    ranks: int = 2,
    local_mode: bool = False,
    use_gpu: bool = False,
    env: dict[str, str] | None = None,
) -> RunPlan:
    """A plan whose trainer is ``programs/rank_program.py`` with the given action."""
    variables = {"PYTHONPATH": str(PROGRAMS), "ACTION": action, "GLOO_SOCKET_IFNAME": "lo"}
    variables |= {MARK: uuid.uuid4().hex} | (env or {})
    config = TrainConfig.from_dict(
        {
            "model": {"source": "m"},
            "data": {"train": "d.jsonl"},
            "cluster": {"env": variables, "local_dir": str(run_dir / "local")},
        }
    )
    empty = Artifact(kind="data", source=str(run_dir), fingerprint="0", files=())
    audit = Audit(
        read_rows=1, train_rows=1, eval_rows=0, tokens=1, trained_tokens=1, packs=1,
        packing_efficiency=1.0,
    )  # fmt: skip
    data = PreparedData(
        artifact=empty, audit=audit, format="text",
        splits={"train": SplitInfo(examples=1, rows=1, tokens=1, trained=1)},
        sources={"train": "d.jsonl"},
    )  # fmt: skip
    model = ModelInfo(artifact=empty, source="m", model_type="llama", vocab_size=97)
    values: dict[str, Any] = {
        "attempt": uuid.uuid4().hex, "run_name": run_dir.name, "run_dir": str(run_dir),
        "config": config, "world_size": ranks, "local_mode": local_mode, "use_gpu": use_gpu,
        "strategy": "ddp", "precision": "fp32", "attention": "sdpa", "global_batch_size": 2,
        "micro_batch_size": 1, "accumulation": 1, "examples": 1, "steps_per_epoch": 1,
        "total_steps": 1, "warmup_steps": 0, "local_dir": config.cluster.local_dir,
        "model": model, "data": data,
    }  # fmt: skip
    return RunPlan(**values)


def trainers(plan: RunPlan) -> list[int]:
    """Processes of this plan's ranks, by a mark that only their environment holds."""
    return processes_with(f"{MARK}={plan.config.cluster.env[MARK]}")


def processes_with(text: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def wait_until(condition: Any, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)
