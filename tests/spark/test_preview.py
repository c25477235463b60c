"""``dbx-llmtrain preview`` as a shell runs it, with a Spark of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dbx_llmtrain.previewing import Preview
from tests import tiny
from tests.spark.test_cli import FOREIGN

ROW = {"prompt": "<script>x</script> \u732b", "completion": "the \x1b[31mcat sat"}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_command_shows_the_rows_and_finds_them_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FOREIGN:
        monkeypatch.delenv(name, raising=False)
    model = tiny.model_folder(tmp_path / "model")
    (model / "model.safetensors").unlink()
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n", encoding="utf-8")
    config = "model: {source: model}\ndata: {train: rows.jsonl, max_length: 96, cache_dir: cache}\n"
    (tmp_path / "config.yaml").write_text(config, encoding="utf-8")

    def run(*options: str) -> str:
        command = Path(sys.executable).with_name("dbx-llmtrain")
        done = subprocess.run(
            [command, "preview", "config.yaml", "-n", "1", "--master", "local[1]", *options],
            cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", timeout=180,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    text = run()
    assert "\x1b" not in text, "it is not a terminal"
    assert "<script>x</script> \u732b\u27e8<|im_end|>\u27e9" in text
    assert "\u27e6the \u27e8U+001B\u27e9[31mcat sat\u27e8<|im_end|>\u27e9\u27e7" in text
    found = Preview.model_validate_json(run("--json"))
    assert found.audit.train_rows == found.count == 1
    (page,) = (tmp_path / "cache").glob("data/*/preview.html")
    assert found.page == str(page)
    assert "<script" not in page.read_text(encoding="utf-8")
    assert not (tmp_path / "mlflow.db").exists()
    assert not (tmp_path / "mlruns").exists()
