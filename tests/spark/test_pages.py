"""The commands and the Python that the pages show, run one after another as a reader would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.pages import PAGES, blocks, commands
from tests.spark import spark_env

README = PAGES[0]

DOCS = [
    page
    for page in PAGES
    if page.name in ("checkpoints.md", "evaluation.md", "export.md", "launch.md", "tracking.md")
]

PROGRAM = """
import json, sys
from dbx_llmtrain import cli

for arguments in json.loads(sys.argv[1]):
    print("ran", *arguments, "code", cli.run(arguments), flush=True)
for code in json.loads(sys.argv[2]):
    names = {}
    exec(compile(code, "page.md", "exec"), names)
    result = names.get("result")
    done = f"{result.steps} steps in {result.run_dir}" if result else "and no result"
    print("ran Python", done, flush=True)
"""


def model_folder(folder: Path) -> Path:
    """A tiny model that takes rows as long as the pages' configurations allow."""
    words = tiny.tokenizer()
    tiny.llama(vocab_size=len(words), max_position_embeddings=4096).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def write_rows(path: Path) -> Path:
    rows = [
        {"prompt": f"what is {i}?", "completion": f"the answer is {i} and forty two"}
        for i in range(400)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def ours(*pages: Path) -> list[str]:
    """The blocks of Python that use the package."""
    return [block for block in blocks("python", *pages) if "import dbx_llmtrain" in block]


def run(folder: Path, lines: list[list[str]], code: list[str]) -> list[str]:
    """Run commands and then blocks of Python in one process whose working folder is ``folder``.
    Every command has to end with 0; returns what is said of each block."""
    (folder / "tmp").mkdir()
    environ = {**os.environ, "PYSPARK_PYTHON": sys.executable, "TMPDIR": str(folder / "tmp")}
    environ |= {"SPARK_HOME": str(spark_env.make_home(folder)), "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(lines), json.dumps(code)],
        capture_output=True, text=True, timeout=460, cwd=folder, env=environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ran = [line for line in done.stdout.splitlines() if line.startswith("ran ")]
    told = [f"ran {' '.join(line)} code 0" for line in lines]
    assert ran[: len(lines)] == told, done.stdout + done.stderr
    return ran[len(lines) :]


@pytest.mark.timeout(500)
def test_what_the_readme_shows_runs(tmp_path: Path) -> None:
    model, rows = model_folder(tmp_path / "model"), write_rows(tmp_path / "train.jsonl")
    (minimal,) = (text for text in blocks("yaml", README) if "train.jsonl\n" in text[-13:])
    code = ours(README)
    code.sort(key=lambda block: "SparkSession" not in block)  # the one that makes the session first
    places = {
        "HuggingFaceTB/SmolLM2-135M-Instruct": str(model),
        "HuggingFaceTB/SmolLM2-1.7B-Instruct": str(model),
        "/Volumes/main/ml/data/train.jsonl": str(rows),
        "/Volumes/main/ml/runs": str(tmp_path / "volume"),
    }
    for theirs, here in places.items():
        minimal = minimal.replace(theirs, here)
        code = [block.replace(theirs, here) for block in code]
    (tmp_path / "config.yaml").write_text(minimal, encoding="utf-8")
    lines = commands("dbx-llmtrain", *(page for page in PAGES if page not in DOCS))
    on_laptop, on_cluster = run(tmp_path, lines, code)
    assert on_laptop.startswith(f"ran Python 2 steps in {tmp_path / 'runs'}")
    assert on_cluster.startswith("ran Python ")
    assert str(tmp_path / "volume") in on_cluster
    assert (tmp_path / "runs" / "first" / "result.json").is_file()


CONFIG = """
model: {source: model}
data: {train: rows.jsonl, eval: 0.1, max_length: 64}
train: {max_steps: 2, micro_batch_size: 4}
checkpoint: {every: 1}
"""
SESSION = """
import dbx_llmtrain
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
"""


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_what_the_pages_about_results_show_runs(tmp_path: Path) -> None:
    """On the run ``first`` of a model that is tiny, with a configuration that holds rows out."""
    model_folder(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl")
    (tmp_path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    first = ["train", "config.yaml", "tracking.run_name=first", "--master", "local[2]"]
    lines = [first, *(line for line in commands("dbx-llmtrain", *DOCS) if line[0] != "train")]
    shown = {"train", "evaluate", "export", "generate", "log", "register"}
    assert {line[0] for line in lines} == shown
    places = {
        "/Volumes/main/ml/runs/second-try": str(tmp_path / "runs" / "first"),
        '"/Volumes/main/ml/runs"': repr(str(tmp_path / "runs")),
    }
    code = [SESSION, *ours(*DOCS)]
    for theirs, here in places.items():
        code = [block.replace(theirs, here) for block in code]
    said = run(tmp_path, lines, code)
    assert len(said) == len(code)
    assert said.count(f"ran Python 2 steps in {tmp_path / 'runs' / 'first'}") >= 2
    assert (tmp_path / "exported" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_rehearsal_that_is_shown_runs(tmp_path: Path) -> None:
    model_folder(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl")
    text = CONFIG + "tracking: {run_name: first}\ncluster: {local_mode: true}\n"
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    (line,) = [line for line in commands("dbx-llmtrain", *DOCS) if line[0] == "train"]
    assert run(tmp_path, [line], []) == []
    assert (tmp_path / "runs" / "first-trial" / "result.json").is_file()
