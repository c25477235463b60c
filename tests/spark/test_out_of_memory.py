"""``train(cfg)`` of a model whose rank 1 runs out of memory: its own code raises torch's error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dbx_llmtrain as llm
from dbx_llmtrain.events import read_events
from tests import tiny

RAISES = """
        import os
        TinyModel.passes = getattr(TinyModel, "passes", 0) + self.training
        late = TinyModel.passes > 1 and os.environ.get("RANK") == "1"
        if self.training and late and input_ids.shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
"""


def model(folder: Path, *, limited: bool) -> Path:
    """A model with code of its own. ``limited``: after its first step rank 1 takes two rows at
    once."""
    tiny.custom_folder(folder)
    file = folder / "modeling_tiny.py"
    if limited:
        before, head, after = file.read_text().partition("    def forward(self")
        line, rest = after.split("\n", 1)
        file.write_text(f"{before}{head}{line}\n{RAISES}{rest}")
    return folder


def config(folder: Path, name: str, *, limited: bool, **train: Any) -> llm.TrainConfig:
    rows = folder / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"text": "the cat " + "sat " * (n % 5 + 1)}) + "\n" for n in range(16))
    )
    settings = {"max_steps": 3, "global_batch_size": 8, "learning_rate": 1e-2, "warmup": 1}
    return llm.TrainConfig(
        model={"source": str(model(folder / name, limited=limited)), "trust_remote_code": True},
        data={"train": str(rows), "max_length": 64, "packing": False},
        parallel={"kind": "ddp"},
        train=settings | train,
        checkpoint={"dir": str(folder / "runs"), "every": 1, "export": False},
        tracking={"run_name": name},
        cluster={
            "use_gpu": False,
            "local_mode": True,
            "processes": 2,
            "local_dir": str(folder / "local"),
            "env": {"GLOO_SOCKET_IFNAME": "lo"},
        },
    )


@pytest.mark.slow
def test_a_run_that_has_too_little_memory_goes_on_in_smaller_pieces(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = llm.train(config(tmp_path, "small", limited=False, micro_batch_size=2), spark=spark)
    capsys.readouterr()
    result = llm.train(config(tmp_path, "large", limited=True, micro_batch_size=4), spark=spark)
    (text,) = result.restarts
    assert "ran out of memory after step 1 with a micro-batch x accumulation of 4 x 1: started" in (
        text
    )
    assert "again with 2 x 2, although train.micro_batch_size is 4" in text
    assert text in capsys.readouterr().out
    # The same rows, and numbers that differ by rounding alone.
    assert result.steps == small.steps == 3
    assert result.metrics["train_loss"] == pytest.approx(small.metrics["train_loss"], abs=1e-5)
    folder = Path(result.run_dir)
    plan = llm.RunPlan.model_validate_json((folder / "plan.json").read_text())
    assert (plan.micro_batch_size, plan.accumulation) == (2, 2)
    assert json.loads((folder / "result.json").read_text())["restarts"] == [text]
    assert plan.resume_from == str(folder / "checkpoints" / "step-00000001")
    events = list(read_events(folder / "events.jsonl"))
    attempts = list(dict.fromkeys(event.attempt for event in events))
    assert attempts[1:] == [plan.attempt], "two attempts, of one run"
    steps = [(attempts.index(one.attempt), one.step) for one in events if one.kind == "step"]
    assert steps == [(0, 1), (1, 2), (1, 3)]
    assert plan.tracking is not None
    assert plan.tracking.run_id == result.run_id
