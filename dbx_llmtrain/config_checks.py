"""Faults of a configuration that types cannot express, and the words for all of them."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from dbx_llmtrain import option_names
from dbx_llmtrain.errors import Problem

_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE
)

# Set by the launcher for every rank; another value would send a rank to the wrong place.
_LAUNCHER_NAMES = frozenset(
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK MASTER_ADDR MASTER_PORT "
    "CUDA_VISIBLE_DEVICES TF_CONFIG".split()
)
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "DBX_LLMTRAIN_")
_RUN_NAME_BYTES = 200
_TAKEN_NAMES = ("mlflow.db", "mlartifacts")

# Fields and values of the contract that a later version builds. They are refused by name, so that
# nobody's setting is ignored. Key: dotted path, or path=value for one value of a live field.
_LATER: dict[str, str] = {
    "model.init": "models are loaded with their weights",
    "model.config": "the model's own configuration is used",
    "model.tokenizer": "the model's own tokenizer is used",
    "model.new_tokens": "the vocabulary stays as it is",
    "model.gradient_checkpointing": "activations are kept; lower train.micro_batch_size",
    "model.compile": "the model runs uncompiled",
    "model.lora": "all weights are trained",
    "model.load_in_4bit": "weights are kept in full precision",
    "data.test": "use data.eval",
    "data.formatter": "rename columns with data.columns",
    "data.mlm_probability": "data.objective is sft",
    "data.shuffle": "rows are shuffled every epoch by train.seed",
    "data.chat_template": "the tokenizer's own template is used",
    "data.format=sharegpt": "convert the rows to messages",
    "data.format=tokens": "give text, prompts with completions, or messages",
    "data.objective=pretrain": "data.format: text trains on every token of a row",
    "data.objective=mlm": "causal language models only",
    "data.overflow=split": "use truncate, drop or error",
    "parallel.cpu_offload": "parameters stay on the device",
    "parallel.stage": "use parallel.kind: fsdp, which shards like stage 3",
    "parallel.offload_optimizer": "optimizer state stays on the device",
    "parallel.offload_params": "parameters stay on the device",
    "parallel.nvme_dir": "nothing is offloaded",
    "parallel.config": "use parallel.kind: fsdp",
    "parallel.kind=deepspeed": "use fsdp, which shards like ZeRO-3",
    "parallel.shard=grad_op": "use full",
    "parallel.shard=hybrid": "use full",
    "train.max_time": "use train.max_steps",
    "train.decay_steps": "the rate falls until the last step",
    "train.schedule=wsd": "use cosine, linear or constant",
    "train.precision=fp16": "use bf16, or fp32 on a GPU without it",
    "train.eval_max_rows": "the whole held-out set is evaluated",
    "train.eval_micro_batch_size": "evaluation uses train.micro_batch_size",
    "train.early_stopping": "use train.max_steps",
    "train.sample_prompts": "generate from the exported folder",
    "train.profile": "run a profiler on the rank by hand",
    "checkpoint.every_minutes": "use checkpoint.every",
    "checkpoint.every=epoch": "use a number of steps",
    "checkpoint.keep_last": "every checkpoint is kept",
    "checkpoint.keep_best": "every checkpoint is kept",
    "checkpoint.metric": "every checkpoint is kept",
    "checkpoint.metric_mode": "every checkpoint is kept",
    "tracking.log_model": "log the exported folder by hand",
    "tracking.register_as": "register the exported folder by hand",
    "tracking.system_metrics": "use the cluster's own metrics",
    "cluster.debug": "look into the run folder's logs",
    "cluster.max_restarts": "run again with the same tracking.run_name to go on",
    "cluster.stall_timeout": "collectives time out after 10 minutes",
}
_MAPPINGS = ("env", "tags", "columns")
_LATER_LISTS = ("data.train", "data.eval")
_LATER_SCHEMES = ("table:", "delta:", "models:/")


def is_secret_name(name: str) -> bool:
    """Whether an environment variable of this name holds a secret by common usage."""
    return _SECRET_NAME.search(name) is not None


def unknown_key(path: str, valid: Iterable[str]) -> Problem:
    """The fault of a key that we do not have, with the name it most likely stands for."""
    later = not_yet(path, None)
    if later:
        return later
    foreign = option_names.find(path)
    if foreign:
        return Problem(path, f"unknown key: {foreign.hint()}")
    close = option_names.nearest(path, valid)
    hint = f"did you mean {close}?" if close else "dbx_llmtrain.TrainConfig lists the fields"
    return Problem(path, f"unknown key: {hint}")


def not_yet(path: str, value: Any) -> Problem | None:
    """The refusal of a field or value that a later version builds, or ``None``."""
    for key in (path, f"{path}={value}"):
        if key in _LATER:
            what = key if "=" not in key else f"{value!r}"
            return Problem(path, f"{what} is not available in this version: {_LATER[key]}")
    if path in _LATER_LISTS and isinstance(value, list):
        return Problem(path, "several sources are not available in this version: give one")
    if path in ("model.source", *_LATER_LISTS) and isinstance(value, str):
        for scheme in _LATER_SCHEMES:
            if value.startswith(scheme):
                return Problem(path, f"{scheme} sources are not available in this version")
    return None


def from_pydantic(section: str, error: ValidationError) -> list[Problem]:
    """One problem per field: what was expected, what was found (never a value that may be secret).

    A field with a union type gives pydantic one error per member; they are told as one.
    """
    grouped: dict[str, list[Any]] = {}
    for item in error.errors(include_url=False):
        keys = [str(key) for key in item["loc"]]
        depth = 2 if keys and keys[0] in _MAPPINGS else 1
        grouped.setdefault(".".join([section, *keys[:depth]]), []).append(item)
    problems = []
    for path, items in grouped.items():
        if any(item["type"] == "missing" and len(item["loc"]) == 1 for item in items):
            problems.append(Problem(path, "missing: it has no default"))
            continue
        expected = " or ".join(dict.fromkeys(_expected(item) for item in items))
        problems.append(Problem(path, f"expected {expected}, found {_found(path, items[0])}"))
    return problems


def _expected(item: Any) -> str:
    message: str = item["msg"]
    if item["type"] == "missing":
        key = item["loc"][-1]
        return f"a value for {f'item {key + 1}' if isinstance(key, int) else key}"
    inner = [str(key) for key in item["loc"][1:] if str(key).islower() and "[" not in str(key)]
    where = f" ({inner[-1]})" if inner and item["type"] == "extra_forbidden" else ""
    message = message.removeprefix("Input should be ").removeprefix("Input should ")
    if item["type"] == "string_type":
        scalar = isinstance(item["input"], int | float | datetime.date)
        message = "text (in quotes)" if scalar else "text"
    elif item["type"] == "model_type":
        message = "a mapping of fields"
    return (message[0].lower() + message[1:] if message else "another value") + where


def _found(path: str, item: Any) -> str:
    value = item["input"]
    if path.startswith("cluster.env"):
        return f"a value of type {type(value).__name__}"
    return f"{str(value)[:80]!r}" if isinstance(value, str) else str(value)[:80]


def combinations(sections: Mapping[str, Any]) -> list[Problem]:
    """Faults between fields, of the sections that are valid by themselves."""
    checks = {
        "train": _train,
        "data": _data,
        "cluster": _cluster,
        "checkpoint": _checkpoint,
        "tracking": _tracking,
    }
    return [
        problem
        for name, check in checks.items()
        if name in sections
        for problem in check(sections[name])
    ] + _parallel(sections)


def _train(train: Any) -> list[Problem]:
    problems = []
    if train.epochs is not None and train.max_steps is not None:
        problems.append(
            Problem(
                "train.max_steps",
                f"{train.max_steps} steps and train.epochs={train.epochs} contradict each other: "
                "give one of them",
            )
        )
    if train.warmup >= 1 and train.warmup != int(train.warmup):
        problems.append(
            Problem(
                "train.warmup",
                f"expected whole steps, or a share below 1, found {train.warmup}",
            )
        )
    if train.min_learning_rate > train.learning_rate:
        problems.append(
            Problem(
                "train.min_learning_rate",
                f"expected at most train.learning_rate ({train.learning_rate}), found "
                f"{train.min_learning_rate}",
            )
        )
    if not all(0 <= beta < 1 for beta in train.betas):
        problems.append(
            Problem("train.betas", f"expected two numbers in [0, 1), found {list(train.betas)}")
        )
    return problems


def _data(data: Any) -> list[Problem]:
    known = {
        "messages", "prompt", "completion", "instruction", "input", "output", "context", "response",
        "text",
    }  # fmt: skip
    return [
        Problem(
            f"data.columns.{name}",
            f"unknown name: expected one of {', '.join(sorted(known))} (our name: your column)",
        )
        for name in data.columns
        if name not in known
    ]


def _cluster(cluster: Any) -> list[Problem]:
    secret = (
        "looks like a secret, which a configuration must not hold: set it in the driver's "
        "environment, from where the ranks get it"
    )
    launcher = "is set by the launcher for every rank and cannot be given: remove it"
    problems = []
    for name in cluster.env:
        if name in _LAUNCHER_NAMES or name.startswith(_LAUNCHER_PREFIXES):
            problems.append(Problem(f"cluster.env.{name}", launcher))
        elif is_secret_name(name):
            problems.append(Problem(f"cluster.env.{name}", secret))
    return problems


def _tracking(tracking: Any) -> list[Problem]:
    """The run's name is also the name of its folder."""
    name = tracking.run_name
    if name is None:
        return []
    wrong = (
        "is empty" if not name.strip()
        else "starts or ends with a space" if name != name.strip()
        else "starts with a dot" if name.startswith(".")
        else "has a character that cannot be in a folder's name"
        if any(char in "/\\" or not char.isprintable() for char in name)
        else f"is longer than {_RUN_NAME_BYTES} bytes" if len(name.encode()) > _RUN_NAME_BYTES
        else "is the name of the tracking store" if name in _TAKEN_NAMES
        else ""
    )  # fmt: skip
    return (
        [Problem("tracking.run_name", f"expected the name of a folder, {name[:60]!r} {wrong}")]
        if wrong
        else []
    )


def _checkpoint(checkpoint: Any) -> list[Problem]:
    path = checkpoint.dir
    if path and "://" in path:
        return [
            Problem(
                "checkpoint.dir",
                f"expected a path that every node can open, such as /Volumes/catalog/schema/"
                f"volume/runs, found {path!r}",
            )
        ]
    return []


def _parallel(sections: Mapping[str, Any]) -> list[Problem]:
    parallel, cluster = sections.get("parallel"), sections.get("cluster")
    if parallel is None or cluster is None:
        return []
    if parallel.kind == "single" and cluster.processes not in ("auto", 1):
        return [
            Problem(
                "parallel.kind",
                f"single runs one process, but cluster.processes is {cluster.processes}: use ddp "
                "or fsdp, or cluster.processes=1",
            )
        ]
    return []
