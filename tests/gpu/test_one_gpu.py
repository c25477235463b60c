"""The rank's whole story on one GPU, against the same on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain.events import EVENTS_FILE, read_events
from dbx_llmtrain.worker.gpus import read_gpus
from tests.dist import plans

GPUS = read_gpus()[0]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="nvidia-smi shows no GPU on this machine"),
]


def losses(folder: Path, name: str, **changes: Any) -> list[float]:
    """Held-out losses, before the first step and after the last, of a run in its own process."""
    plan = plans.plan(folder, name, **changes)
    (folder / f"{name}.json").write_text(plan.model_dump_json(), encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "dbx_llmtrain.worker.main", str(folder / f"{name}.json")],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"}, check=True, timeout=240,
    )  # fmt: skip
    events = read_events(Path(plan.run_dir) / EVENTS_FILE)
    return [event.metrics["eval_loss"] for event in events if event.kind == "eval"]


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 3e-2)])
def test_a_gpu_learns_what_the_cpu_learns(
    tmp_path: Path, strategy: str, precision: str, tolerance: float
) -> None:
    cpu = losses(tmp_path, "cpu")
    gpu = losses(tmp_path, "gpu", strategy=strategy, precision=precision, use_gpu=True)
    assert len(cpu) == len(gpu) == 2
    assert cpu[1] < cpu[0]
    assert gpu == pytest.approx(cpu, rel=tolerance)
