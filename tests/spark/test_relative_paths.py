"""Paths that are relative to the driver's folder: executors run in folders of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dbx_llmtrain as llm
from dbx_llmtrain import storage
from dbx_llmtrain.driver import staging
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.resuming import identity
from tests import tiny
from tests.unit.test_sources import write_gguf

ROWS = [
    {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": f"b {i}"}]}
    for i in range(20)
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The driver's folder, with a model, rows, and a template."""
    monkeypatch.chdir(tmp_path)
    tiny.model_folder(tmp_path / "model")
    for name in ("rows.jsonl", "held_out.jsonl", "many/0.jsonl", "many/1.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    (tmp_path / "template.jinja").write_text(tiny.CHATML, encoding="utf-8")
    return tmp_path


def config(folder: Path, source: str, *overrides: str, **data: Any) -> llm.TrainConfig:
    return llm.TrainConfig(
        model={"source": source},
        data={"train": "rows.jsonl", "max_length": 96} | data,
        train={"max_steps": 1, "global_batch_size": 2},
        cluster={"local_dir": str(folder / "local")},
    ).override(*overrides)


def staged(spark: Any, cfg: llm.TrainConfig) -> RunPlan:
    """Plan, and let the executors' machine copy model and data from where the plan says."""
    plan = llm.plan(cfg, spark=spark)
    assert not plan.local_mode
    for places in staging.stage_everywhere(spark, plan).values():
        for artifact in (plan.model.artifact, plan.data.artifact):
            there = Path(places[artifact.fingerprint])
            assert all((there / entry.path).is_file() for entry in artifact.files)
    return plan


@pytest.mark.timeout(300)
def test_a_folder_rows_a_template_and_a_cache(spark: Any, folder: Path) -> None:
    cfg = config(
        folder, "model", "checkpoint.dir=runs/here", eval="./held_out.jsonl", cache_dir="cache",
        chat_template="template.jinja",
    )  # fmt: skip
    plan = staged(spark, cfg)
    assert plan.model.artifact.source == str(folder / "model")
    assert Path(plan.data.artifact.source).is_relative_to(folder / "cache")
    assert Path(plan.run_dir).parent == folder / "runs" / "here"
    assert plan.data.audit.train_rows == plan.data.audit.eval_rows == len(ROWS)


@pytest.mark.timeout(300)
def test_a_gguf_file_a_folder_of_rows_a_pattern_and_a_delta_table(spark: Any, folder: Path) -> None:
    tokenizer = tiny.tokenizer(add_bos=False)
    write_gguf(folder / "tiny.gguf", tiny.llama(vocab_size=len(tokenizer)), tokenizer)
    deltalake = pytest.importorskip("deltalake")
    deltalake.write_deltalake("table", pa.Table.from_pylist(ROWS))
    cfg = config(folder, "./tiny.gguf", train="many", eval="many/*.jsonl", test="table")
    plan = staged(spark, cfg)
    assert Path(plan.model.artifact.source).is_relative_to(folder / "runs" / ".cache")
    assert plan.data.audit.train_rows == plan.data.audit.eval_rows == 2 * len(ROWS)
    assert plan.data.audit.test_rows == len(ROWS)


@pytest.mark.timeout(300)
def test_a_checkpoint_to_go_on_from(spark: Any, folder: Path) -> None:
    plan = llm.plan(config(folder, "model"), spark=spark)
    step = storage.checkpoint_folder(Path("old"), 1)
    step.mkdir(parents=True)
    manifest = {"files": [], "identity": identity(plan), "state": {"step": 1}}
    storage.write_manifest(step, manifest)
    resumed = llm.plan(config(folder, "model", f"checkpoint.resume={step}"), spark=spark)
    assert resumed.resume_from == str(folder / step)
