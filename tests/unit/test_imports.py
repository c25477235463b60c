from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "pyspark", "transformers", "datasets", "mlflow", "deepspeed", "pandas", "numpy")


def loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after ``code``."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{code}\nimport sys; print(*{{m.split('.')[0] for m in sys.modules}})",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(done.stdout.split())


def test_importing_the_package_is_light() -> None:
    assert not loaded_by("import dbx_llmtrain") & {*HEAVY, "pydantic", "yaml"}


@pytest.mark.parametrize(
    "names", ["TrainConfig, ConfigError, RunPlan", "plan, probe, train", "TrainConfig, __version__"]
)
def test_using_a_name_loads_no_heavy_library(names: str) -> None:
    assert not loaded_by(f"from dbx_llmtrain import {names}") & set(HEAVY)


@pytest.mark.parametrize(
    "module", ["cli", "display", "tracking", "storage", "events", "worker.node", "worker.main"]
)
def test_modules_of_the_driver_load_no_heavy_library(module: str) -> None:
    assert not loaded_by(f"import dbx_llmtrain.{module}") & set(HEAVY)


def test_importing_changes_nothing() -> None:
    code = """
import logging, os, warnings
before = (dict(os.environ), list(logging.root.handlers), logging.root.level, list(warnings.filters))
import dbx_llmtrain.cli
after = (dict(os.environ), list(logging.root.handlers), logging.root.level, list(warnings.filters))
assert before == after, (before, after)
"""
    loaded_by(code)
