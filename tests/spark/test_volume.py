"""A whole run, and one that goes on from it, in a folder with the rules of a volume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dbx_llmtrain
from dbx_llmtrain import storage
from tests import tiny, volumes

# The session of the other tests must not lend its settings to these processes.
FOREIGN = ("SPARK_HOME", "SPARK_CONF_DIR", "SPARK_LOCAL_IP", "PYSPARK_PYTHON", "PYTHONPATH")
PACKAGE = {"PYTHONPATH": str(Path(dbx_llmtrain.__file__).parents[1])}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_driver_and_ranks_keep_to_the_rules(tmp_path: Path) -> None:
    volume = volumes.make(tmp_path / "rules")
    if volume is None:
        pytest.skip(volumes.NO_COMPILER)
    tiny.model_folder(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": f"the cat sat {number}"}) + "\n" for number in range(40))
    )
    (tmp_path / "config.yaml").write_text(
        "model: {source: model}\n"
        "data: {train: rows.jsonl, eval: 0.1, max_length: 64}\n"
        "train: {global_batch_size: 4, eval_every: 1}\n"
        f"checkpoint: {{every: 1, dir: {volume.folder}/runs}}\n"
        "tracking: {run_name: mine, tensorboard: true}\n"
        f"cluster: {{local_dir: {tmp_path}/local, processes: 2}}\n"
    )
    env = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    env |= PACKAGE | volume.environment
    env["MLFLOW_TRACKING_URI"] = f"sqlite:///{tmp_path}/mlflow.db"
    for steps in (2, 4):
        done = subprocess.run(
            [sys.executable, "-m", "dbx_llmtrain", "train", "config.yaml",
             f"train.max_steps={steps}", "--master", "local[2]"],
            cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    run_dir = volume.folder / "runs" / "mine"
    result: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    assert result["steps"] == 4
    assert [storage.step_of(path) for path in storage.checkpoints(run_dir)] == [4, 3]
    assert storage.torn(run_dir) == []
    assert {"config.yaml", "plan.json", "events.jsonl", "export", "logs", "tensorboard"} <= {
        path.name for path in run_dir.iterdir()
    }
    assert volume.refused() == []
