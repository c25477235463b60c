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

PROGRAM = """
import json, sys
from dbx_llmtrain import cli

for arguments in json.loads(sys.argv[1]):
    print("ran", *arguments, "code", cli.run(arguments), flush=True)
for code in json.loads(sys.argv[2]):
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    print("ran Python", names["result"].steps, "steps in", names["result"].run_dir, flush=True)
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


@pytest.mark.timeout(400)
def test_what_the_readme_shows_runs(tmp_path: Path) -> None:
    model, rows = model_folder(tmp_path / "model"), write_rows(tmp_path / "train.jsonl")
    (minimal,) = (text for text in blocks("yaml", README) if "train.jsonl\n" in text[-13:])
    code = [block for block in blocks("python", README) if "import dbx_llmtrain" in block]
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
    (tmp_path / "tmp").mkdir()
    environ = {**os.environ, "PYSPARK_PYTHON": sys.executable, "TMPDIR": str(tmp_path / "tmp")}
    environ |= {"SPARK_HOME": str(spark_env.make_home(tmp_path)), "SPARK_LOCAL_IP": "127.0.0.1"}
    lines = commands("dbx-llmtrain")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(lines), json.dumps(code)],
        capture_output=True, text=True, timeout=360, cwd=tmp_path, env=environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ran = [line for line in done.stdout.splitlines() if line.startswith("ran ")]
    assert ran[: len(lines)] == [f"ran {' '.join(line)} code 0" for line in lines], done.stderr
    on_laptop, on_cluster = ran[len(lines) :]
    assert on_laptop.startswith(f"ran Python 2 steps in {tmp_path / 'runs'}")
    assert on_cluster.startswith("ran Python ")
    assert str(tmp_path / "volume") in on_cluster
    assert (tmp_path / "runs" / "first" / "result.json").is_file()
