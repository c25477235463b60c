"""The notebooks run as a reader runs them: every cell, in a fresh kernel with its own Spark."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests import tiny
from tests.spark import spark_env

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
QUICKSTART = ROOT / "notebooks" / "01_quickstart.ipynb"

STUB_DBUTILS = """
class Widgets:
    def __init__(self, given):
        self.values = given

    def text(self, name, default):
        self.values.setdefault(name, default)

    def get(self, name):
        return self.values[name]


class DbUtils:
    widgets = Widgets({"steps": "3", "folder": "/Volumes/a/b/c"})


dbutils = DbUtils()
"""


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def inject(notebook: NotebookNode, source: str, *, after: str | None) -> None:
    """Put a cell behind the one with this id, or in front of all."""
    ids = [cell.id for cell in notebook.cells]
    place = 0 if after is None else ids.index(after) + 1
    notebook.cells.insert(place, nbformat.v4.new_code_cell(source))


def execute(notebook: NotebookNode, folder: Path, timeout_s: int) -> None:
    """Run every cell in a fresh kernel whose working folder is ``folder``. Raises for an error."""
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(
        notebook, timeout=timeout_s, kernel_name="python3", resources=resources
    ).execute()


def shown(notebook: NotebookNode, cell_id: str) -> str:
    """Everything that a cell has printed or shown, as text."""
    (cell,) = [cell for cell in notebook.cells if cell.id == cell_id]
    parts = [
        item.text if item.output_type == "stream" else item.data.get("text/plain", "")
        for item in cell.outputs
    ]
    return "".join(parts)


def blocks_shown(notebook: NotebookNode) -> str:
    """What the notebook's live blocks say in the end, as text."""
    data = [
        item.data
        for cell in code_cells(notebook)
        for item in cell.outputs
        if item.output_type == "display_data" and "dbx-live" in item.data.get("text/html", "")
    ]
    return "\n".join(f"{one['text/plain']}\n{one['text/html']}" for one in data)


def last_output(notebook: NotebookNode) -> Any:
    return json.loads(notebook.cells[-1].outputs[0].text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_valid_and_stores_no_output(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert "parameters" in [
        tag for cell in code_cells(notebook) for tag in cell.metadata.get("tags", ())
    ]
    for cell in code_cells(notebook):
        assert cell.outputs == [], cell.id
        assert cell.execution_count is None, cell.id
    written = [cell["id"] for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    assert len(set(written)) == len(written)


def test_every_cell_passes_ruff() -> None:
    for arguments in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, "--no-cache", ROOT / "notebooks"],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    assert len(NOTEBOOKS) >= 1


def test_what_is_installed_never_touches_torch() -> None:
    """The wheel alone, without --upgrade or extras; its own requirements name no such package."""
    import tomllib

    lines = {
        line.strip()
        for path in NOTEBOOKS
        for cell in code_cells(read(path))
        for line in cell.source.splitlines()
        if "%pip" in line
    }
    assert lines == {"%pip install --quiet $WHEEL"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[<>=~\[ ]", line)[0] for line in project["dependencies"]}
    assert not names & {"torch", "pyspark", "transformers", "datasets", "mlflow"}


def settings_of(folder: Path, *, databricks: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The settings after the widgets cell; with ``databricks`` there are widgets."""
    notebook = read(QUICKSTART)
    end = [cell.id for cell in notebook.cells].index("widgets") + 1
    del notebook.cells[end:]
    if databricks:
        monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "16.4")
        inject(notebook, STUB_DBUTILS, after=None)
    inject(
        notebook,
        "import json\nprint(json.dumps([model, folder, steps, batch, length]))",
        after="widgets",
    )
    execute(notebook, folder, 60)
    return last_output(notebook)


def test_settings_on_databricks_are_those_of_the_widgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = settings_of(tmp_path, databricks=True, monkeypatch=monkeypatch)
    assert found == ["HuggingFaceTB/SmolLM2-135M-Instruct", "/Volumes/a/b/c", 3, 8, 750]


def test_settings_of_a_laptop_are_those_of_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dbx_llmtrain.config import TrainConfig

    found = settings_of(tmp_path, databricks=False, monkeypatch=monkeypatch)
    demo = TrainConfig.from_yaml(ROOT / "examples" / "quickstart.yaml")
    train = demo.train
    numbers = [train.max_steps, train.global_batch_size, demo.data.max_length]
    assert found == [demo.model.source, "quickstart", *numbers]


@pytest.mark.spark
@pytest.mark.timeout(400)
def test_the_quickstart_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model_folder(tmp_path / "model")
    for name in ("tmp", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("SPARK_HOME", str(spark_env.make_home(tmp_path)))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    notebook = read(QUICKSTART)
    inject(notebook, f"model = {str(model)!r}\nsteps, length = 3, 128", after="parameters")
    execute(notebook, tmp_path / "work", 300)
    for cell in code_cells(notebook):
        assert not [item for item in cell.outputs if item.output_type == "error"], cell.id

    assert re.search(r"\d+ rows in quickstart/docstrings.jsonl", shown(notebook, "data"))
    assert "2 tasks at once" in shown(notebook, "probe")
    assert "Plan of run-" in shown(notebook, "plan")
    assert re.search(r"loss\s+\d+\.\d+", shown(notebook, "train"))
    block = blocks_shown(notebook)
    assert re.search(r"training: step 3 of 3, loss \d+\.\d+", block)
    assert "polyline" in block, "its losses are drawn"
    line = shown(notebook, "result").splitlines()[0]
    assert re.fullmatch(r"held-out loss \d\.\d+ before, \d\.\d+ after", line)
    assert shown(notebook, "answer")
    (run,) = (tmp_path / "work" / "quickstart" / "runs").glob("run-*")
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    assert result["steps"] == 3
    assert (run / "export" / "model.safetensors").is_file()
    assert str(run / "result.json") in shown(notebook, "files")
    assert result["run_id"] in shown(notebook, "files")
