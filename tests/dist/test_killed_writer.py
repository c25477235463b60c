"""kill -9 of a process that writes checkpoints, at random moments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import volumes
from tests.dist.killed_writer import SAVES

pytestmark = pytest.mark.dist

KILLS = 30


def kill(folder: Path, seed: int, environment: dict[str, str]) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.dist.killed_writer", str(folder), str(seed), str(KILLS)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return seen


def check(seen: list[dict[str, Any]]) -> None:
    """At every moment there was a whole checkpoint, never an older one than before."""
    assert len(seen) == KILLS + 1
    steps = [moment["step"] for moment in seen]
    assert steps[0] == SAVES
    assert None not in steps
    assert steps == sorted(steps)
    for moment in seen:
        assert moment["faults"] == []
        assert moment["values"] == [moment["step"]]
        assert moment["state"] == {"step": moment["step"]}
        # What is being written or deleted, also by a writer before; it does not pile up.
        assert moment["complete"] + moment["torn"] <= 4
    # The kills came before, between and in the middle of saves.
    assert len(set(steps)) > KILLS // 3
    assert any(moment["torn"] for moment in seen)


def test_c87_c89_a_complete_checkpoint_is_found_after_every_kill(tmp_path: Path) -> None:
    check(kill(tmp_path / "run", 1, {}))


@pytest.mark.slow
def test_c87_the_same_on_a_volume_where_renaming_copies(tmp_path: Path) -> None:
    volume = volumes.make(tmp_path)
    if volume is None:
        pytest.skip(volumes.NO_COMPILER)
    check(kill(volume.folder, 2, volume.environment))
    assert volume.refused() == []
