"""The test that users copy runs as they would run it: as it is, and with a file of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
HINT = "# Your own instead: "


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    "as_it_is",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["as it is", "another configuration"],
)
def test_a_copy_passes(tmp_path: Path, as_it_is: bool) -> None:
    text = (EXAMPLES / "test_my_training.py").read_text(encoding="utf-8")
    (hint,) = (line for line in text.splitlines() if line.startswith(HINT))
    begin = text.index("CONFIG: Path")
    end = text.index('\n"""\n', begin) + len('\n"""\n')
    changed = f"{text[:begin]}{hint.removeprefix(HINT)}\n{text[end:]}"
    (tmp_path / "test_mine.py").write_text(text if as_it_is else changed, encoding="utf-8")
    shutil.copy(EXAMPLES / "quickstart.yaml", tmp_path / "config.yaml")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py",
         f"--basetemp={tmp_path / 'temporary'}"],
        capture_output=True, text=True, timeout=400, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 passed" in ended.stdout
