"""What other trainers call the values of our options; keys and values that were probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

_OURS: Mapping[str, Mapping[str, str]] = {
    "train.optimizer": {
        "adam": "adamw", "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw",
        "adamw_apex_fused": "adamw", "adamw_anyprecision": "adamw", "fused_adam": "adamw",
        "adamw_bnb_8bit": "adamw_8bit", "adamw_torch_8bit": "adamw_8bit",
        "paged_adamw_8bit": "adamw_8bit", "adam8bit": "adamw_8bit", "adamw8bit": "adamw_8bit",
        "paged_adamw_32bit": "adamw", "paged_adamw": "adamw",
    },
    "train.schedule": {
        "warmup_stable_decay": "wsd", "cosine_with_min_lr": "cosine with train.min_learning_rate",
        "cosine_warmup_with_min_lr": "cosine with train.min_learning_rate",
        "constant_with_warmup": "constant with train.warmup", "none": "constant",
        "cosine_annealing": "cosine", "cosineannealing": "cosine", "warmuplr": "constant",
        "warmupdecaylr": "linear", "warmupcosinelr": "cosine",
    },
    "train.precision": {
        "bfloat16": "bf16", "torch.bfloat16": "bf16", "bf16-mixed": "bf16", "float16": "fp16",
        "torch.float16": "fp16", "half": "fp16", "16-mixed": "fp16", "float32": "fp32",
        "torch.float32": "fp32", "float": "fp32", "no": "fp32", "32": "fp32", "tf32": "fp32",
        "32-true": "fp32",
    },
    "parallel.kind": {
        "zero": "deepspeed", "zero1": "deepspeed with parallel.stage=1",
        "zero2": "deepspeed with parallel.stage=2", "zero3": "deepspeed with parallel.stage=3",
        "fsdp1": "fsdp", "fsdp2": "fsdp", "full_shard": "fsdp", "fully_shard": "fsdp",
        "shard_grad_op": "fsdp with parallel.shard=grad_op",
        "hybrid_shard": "fsdp with parallel.shard=hybrid", "multi_gpu": "ddp", "no": "single",
        "none": "single", "distributed": "ddp", "dp": "ddp",
    },
    "parallel.shard": {
        "full_shard": "full", "shard_grad_op": "grad_op", "hybrid_shard": "hybrid",
        "_hybrid_shard_zero2": "hybrid", "true": "full", "false": "grad_op",
        "no_shard": "parallel.kind=ddp", "zero2": "grad_op", "zero3": "full",
    },
    "model.gradient_checkpointing": {"true": "full", "false": "none"},
}  # fmt: skip
"""Field -> another trainer's value, in small letters -> what to write."""


def hint(path: str, value: Any, choices: Iterable[str]) -> str:
    """A question after the value that was probably meant, of another trainer's or misspelled; empty
    where none is near."""
    given = str(value).strip().lower()
    table = _OURS.get(path, {})
    found = table.get(given) or table.get(given.replace("-", "_").replace(" ", "_"))
    if path == "parallel.kind" and not found:
        found = table.get(given.replace("-", "").replace("_", "").replace(" ", ""))
    if not found and isinstance(value, str):
        found = next(iter(difflib.get_close_matches(given, list(choices), n=1, cutoff=0.7)), None)
    return f" (did you mean {found}?)" if found else ""


def unknown_keys(value: Mapping[Any, Any], known: Iterable[str]) -> str:
    """What is said of the keys of a mapping that are none of ``known``; empty where all are."""
    names = list(known)
    told = []
    for key in map(str, value):
        if key not in names:
            close = difflib.get_close_matches(key, names, n=1, cutoff=0.7)
            instead = f"did you mean {close[0]}?" if close else f"expected {', '.join(names)}"
            told.append(f"unknown key {key}: {instead}")
    return "; ".join(told)
