"""Adapters over a base in 4 bits, on one GPU with bitsandbytes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dbx_llmtrain.events import EVENTS_FILE, read_events
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker.gpus import read_gpus
from tests import tiny
from tests.dist import plans

GPUS = read_gpus()[0]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="nvidia-smi shows no GPU on this machine"),
    pytest.mark.skipif(
        importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
    ),
]


@pytest.mark.parametrize("strategy", ["single", "ddp"])
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_learn_over_four_bits_and_are_merged_into_the_original_weights(
    tmp_path: Path, strategy: str, dora: bool
) -> None:
    model = plans.model_folder(tmp_path / "model")
    tiny.llama(hidden_size=64, intermediate_size=128, vocab_size=320).save_pretrained(model)
    plan = plans.plan(
        tmp_path, model=model, strategy=strategy, precision="bf16", use_gpu=True, every=4
    )
    content = json.loads(plan.model_dump_json())
    content["config"]["model"] |= {"lora": {"use_dora": dora}, "load_in_4bit": True}
    plan = RunPlan.model_validate(content)
    (tmp_path / "plan.json").write_text(plan.model_dump_json(), encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "dbx_llmtrain.worker.main", str(tmp_path / "plan.json")],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"}, check=True, timeout=240,
    )  # fmt: skip
    run_dir = Path(plan.run_dir)
    events = list(read_events(run_dir / EVENTS_FILE))
    notes = next(event for event in events if event.kind == "started").data["notes"]
    assert "14 layers of the frozen base are kept in 4 bits (NF4)" in notes
    losses = [event.metrics["eval_loss"] for event in events if event.kind == "eval"]
    assert losses[-1] < losses[0]
    before, after = (load_file(path / "model.safetensors") for path in (model, run_dir / "export"))
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    name = "model.layers.0.mlp.up_proj.weight"
    moved = after[name] - before[name]
    assert float(moved.abs().max()) > 0
    if not dora:  # an adapter's difference has its rank, the error of 4 bits has not
        sizes = torch.linalg.svdvals(moved)
        assert float(sizes[16:].max()) < 1e-4 * float(sizes[0])
    assert (run_dir / "adapter" / "adapter_model.safetensors").is_file()
