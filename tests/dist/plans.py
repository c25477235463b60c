"""Plans for the tiny model and data, with the files that they need."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dbx_llmtrain import storage
from dbx_llmtrain.records import Artifact, ModelInfo, RunPlan
from dbx_llmtrain.text.prepared import Example
from tests import sample, tiny

END = 4
"""Id of the token that ends an answer in the tiny tokenizer's chat template."""


def model_folder(folder: Path, **config: Any) -> Path:
    """A tiny model with these changes of its configuration."""
    if not folder.exists():
        tiny.model_folder(folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def plan(
    folder: Path,
    name: str = "run",
    *,
    train: dict[str, Any] | None = None,
    every: int | str = "never",
    export: bool = True,
    rows: Sequence[Example] | None = None,
    held_out: Sequence[Example] | None = None,
    more: Mapping[str, Sequence[Example]] | None = None,
    data: dict[str, Any] | None = None,
    model: Path | None = None,
    packing: bool = False,
    **changes: Any,
) -> RunPlan:
    """A plan for one rank: 8 rows, 3 a step, one at a time, 8 steps, so 2 epochs and 2 steps.

    ``more``: further splits by name; ``data``: fields of the data section. Model and data lie in
    ``folder`` and are made when they are not there.
    """
    model = model or model_folder(folder / "model")
    prepared = tiny.prepared(
        folder / f"data-{name}", train=rows, held_out=held_out, more=more, packing=packing
    ).model_copy(update={"end_tokens": (END,)})
    same_rows = prepared.artifact.model_copy(
        update={"fingerprint": "rows" if not (rows or more) else name}
    )
    prepared = prepared.model_copy(update={"artifact": same_rows})
    settings = {"max_steps": 8, "global_batch_size": 3, "learning_rate": 1e-2} | (train or {})
    values: dict[str, Any] = {
        "config": sample.config(
            train=settings,
            checkpoint={"every": every, "export": export},
            data={"train": "/data/train.jsonl"} | (data or {}),
        ),
        "attempt": f"attempt-{name}",
        "strategy": "single",
        "world_size": 1,
        "global_batch_size": settings["global_batch_size"],
        "micro_batch_size": 1,
        "examples": prepared.train_examples,
        "steps_per_epoch": -(-prepared.train_examples // settings["global_batch_size"]),
        "total_steps": settings["max_steps"],
        "warmup_steps": 2,
        "local_dir": str(folder / "local"),
        "data": prepared,
        "model": ModelInfo(
            artifact=Artifact(
                kind="models",
                source=str(model),
                fingerprint=model.name,
                files=storage.entries(model),
            ),
            source=str(model),
            model_type="llama",
            vocab_size=320,
        ),
    }
    return sample.run_plan(folder / name, **(values | changes))
