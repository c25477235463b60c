"""Preparing needs no GPU: where tasks of the cluster take one each, it still uses every core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny

PROGRAM = Path(__file__).parent / "programs" / "gpu_slots.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tasks_of_preparing_take_a_core_and_no_gpu(tmp_path: Path) -> None:
    tiny.model_folder(tmp_path / "model")
    rows = [{"text": f"the cat sat on mat {i}"} for i in range(50)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(text)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path), str(tmp_path / "model")],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["with_gpu"] == 1
    assert found["rows"] == [50, 50]
    assert found["profile"] == found["expected"]
    if found["profile"]:
        assert (found["count"], found["threads"]) == (2, 1)
    else:
        assert (found["count"], found["threads"]) == (1, 2), "the task's own threads use the cores"
