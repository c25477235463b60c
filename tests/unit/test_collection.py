"""No test file is left out by pytest's own list of folders to skip."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_file_is_collected() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider"],
        capture_output=True, text=True, timeout=120, cwd=ROOT, check=True,
    ).stdout  # fmt: skip
    missing = [
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        if (name := path.relative_to(ROOT).as_posix()) not in shown
    ]
    assert not missing
