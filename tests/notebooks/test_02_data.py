"""The notebook about data, as a reader runs it: every cell, in a kernel with its own Spark."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from nbformat import NotebookNode

from tests import tiny
from tests.notebooks.test_notebooks import code_cells, execute, inject, last_output, read, shown
from tests.spark import spark_env

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "02_data.ipynb"

WIDGETS = """
class Widgets:
    def text(self, name, default):
        assert isinstance(default, str)

    def get(self, name):
        return {"model": "some/model", "folder": "/Volumes/a/b/c", "length": "300"}[name]


class DbUtils:
    widgets = Widgets()


dbutils = DbUtils()
"""


def page(notebook: NotebookNode, cell_id: str) -> str:
    """What a cell shows in a notebook."""
    (cell,) = [cell for cell in notebook.cells if cell.id == cell_id]
    results = [item for item in cell.outputs if item.output_type == "execute_result"]
    (found,) = [item.data["text/html"] for item in results]  # a progress bar is no result
    return str(found)


def test_settings_of_the_data_notebook_are_those_of_its_widgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "16.4")
    notebook = read(NOTEBOOK)
    del notebook.cells[[cell.id for cell in notebook.cells].index("widgets") + 1 :]
    inject(notebook, WIDGETS, after=None)
    inject(notebook, "import json\nprint(json.dumps([model, folder, length]))", after="widgets")
    execute(notebook, tmp_path, 60)
    assert last_output(notebook) == ["some/model", "/Volumes/a/b/c", 300]


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(500)
def test_the_data_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model_folder(tmp_path / "model")
    (model / "model.safetensors").unlink()  # no weights are needed
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = 512  # the notebook's length
    (model / "config.json").write_text(json.dumps(config))
    for name in ("tmp", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("SPARK_HOME", str(spark_env.make_home(tmp_path)))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    notebook = read(NOTEBOOK)
    inject(notebook, f"model = {str(model)!r}", after="parameters")
    execute(notebook, tmp_path / "work", 400)
    for cell in code_cells(notebook):
        assert not [item for item in cell.outputs if item.output_type == "error"], cell.id
    check_first_half(notebook, tmp_path / "work")
    check_second_half(notebook)
    assert not list(tmp_path.rglob("mlruns")), "rows never go to MLflow"
    assert not list(tmp_path.rglob("mlflow.db"))


def check_first_half(notebook: NotebookNode, work: Path) -> None:
    (count,) = re.findall(r"(\d+) rows in data/chats.jsonl", shown(notebook, "rows"))
    first = page(notebook, "preview")
    assert "Examples of train: the first of" in first
    assert '<i><kbd class="token">&lt;|im_start|&gt;</kbd></i>' in first
    assert '<b><kbd class="token">&lt;|im_end|&gt;</kbd></b>' in first
    assert f"<th>rows read</th><td>{count}</td>" in first
    (kept,) = re.findall(r"<th>this page</th><td>(.*?)</td>", first)
    assert Path(kept).is_file()
    assert Path(kept).is_relative_to(work)
    assert "Prepared data" in shown(notebook, "prepare")

    lines = re.findall(r"(\w+) +([\d,]+) of [\d,]+ tokens", shown(notebook, "train-on"))
    trained = {name: int(count.replace(",", "")) for name, count in lines}
    assert 0 < trained["last_assistant"] < trained["assistant"] < trained["all"]
    assert page(notebook, "train-on-preview").count('<b><kbd class="token">') == 1

    assert re.search(r"bad\.jsonl.* line 21\b", shown(notebook, "bad"))


def check_second_half(notebook: NotebookNode) -> None:
    assert "<th>format</th><td>prompt_completion</td>" in page(notebook, "columns")
    assert re.search(r"\{'left out by data.formatter': \d+\}", shown(notebook, "formatter"))
    mixed = shown(notebook, "sources")
    assert "x 0.25" in mixed
    assert "eval-chats" in mixed
    assert "messages, instruction" in mixed
    assert "the DataFrame given as train" in page(notebook, "frame")
    kept = shown(notebook, "train").splitlines()
    assert {"manifest.json", "preview.html"} <= set(kept)
