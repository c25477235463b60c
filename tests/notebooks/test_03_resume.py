"""The notebook about stopping and going on, as a reader runs it: every cell, in a kernel with its
own Spark."""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
from nbformat import NotebookNode

from tests import tiny
from tests.notebooks.test_notebooks import code_cells, execute, inject, last_output, read, shown
from tests.spark import spark_env

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "03_resume_and_register.ipynb"
STEPS = 900
"""Enough of a tiny model's for the run to be stopped between the first third and the last step."""

WIDGETS = """
class Widgets:
    given = {"folder": "/Volumes/a/b/c", "registered_name": "a.b.answers", "steps": "9"}

    def text(self, name, default):
        self.given.setdefault(name, default)

    def get(self, name):
        return self.given[name]


class DbUtils:
    widgets = Widgets()


dbutils = DbUtils()
"""


def test_settings_of_the_notebook_about_resuming_are_those_of_its_widgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "16.4")
    notebook = read(NOTEBOOK)
    del notebook.cells[[cell.id for cell in notebook.cells].index("widgets") + 1 :]
    inject(notebook, WIDGETS, after=None)
    inject(
        notebook,
        "import json\nprint(json.dumps([model, folder, steps, batch, length, registered_name]))",
        after="widgets",
    )
    execute(notebook, tmp_path, 60)
    expected = ["HuggingFaceTB/SmolLM2-135M-Instruct", "/Volumes/a/b/c", 9, 8, 512, "a.b.answers"]
    assert last_output(notebook) == expected


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(900)
def test_the_notebook_about_resuming_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model_folder(tmp_path / "model")
    for name in ("tmp", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("SPARK_HOME", str(spark_env.make_home(tmp_path)))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    notebook = read(NOTEBOOK)
    inject(notebook, f"model = {str(model)!r}\nsteps, length = {STEPS}, 128", after="parameters")
    execute(notebook, tmp_path / "work", 500)
    for cell in code_cells(notebook):
        assert not [item for item in cell.outputs if item.output_type == "error"], cell.id
    check_resumed(notebook, tmp_path / "work" / "resume" / "runs")
    check_outcomes(notebook, tmp_path / "work" / "resume")


def check_resumed(notebook: NotebookNode, runs: Path) -> None:
    assert shown(notebook, "stop-run").rstrip().endswith("stopped")
    (step,) = re.findall(r"resumes from +\S+step-(\d+)", shown(notebook, "resume"))
    assert STEPS // 3 <= int(step) < STEPS
    assert f"{STEPS} steps done" in shown(notebook, "result")
    result = json.loads((runs / "answers" / "result.json").read_text(encoding="utf-8"))
    assert result["steps"] == STEPS
    assert "eval_loss" in shown(notebook, "plot")
    with closing(sqlite3.connect(runs / "mlflow.db")) as store:
        found = store.execute("select run_uuid, status from runs where name = 'answers'").fetchall()
    assert found == [(result["run_id"], "FINISHED")], "one run, stopped and resumed"


def check_outcomes(notebook: NotebookNode, folder: Path) -> None:
    ((before, after),) = re.findall(
        r"^(\S+) before, (\S+) after$", shown(notebook, "evaluate"), re.M
    )
    assert float(after) < float(before)
    assert "textwrap.dedent" in shown(notebook, "samples")
    assert "> What does `textwrap.dedent` in Python do?\n" in shown(notebook, "generate")
    assert "the whole model, bf16" in shown(notebook, "export")
    assert (folder / "exported" / "model.safetensors").is_file()
    assert re.search(r"name +python_answers\n", shown(notebook, "register"))
    assert re.search(r"alias +champion\n", shown(notebook, "register"))
    assert shown(notebook, "serve")
