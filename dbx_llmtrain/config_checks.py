"""Faults of a configuration that types cannot express, and the words for all of them."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from dbx_llmtrain import option_names
from dbx_llmtrain.data_checks import data_problems
from dbx_llmtrain.errors import Problem
from dbx_llmtrain.secret_text import hidden, is_secret_name, secrets_in

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
MAPPINGS = ("env", "tags", "columns")
"""Fields whose keys are the user's own."""
_TYPE_NAMES = ("text", "source", "list", "share", "named", "str", "int", "float", "bool")
_PATTERNS = {
    "formatter": "module:function, such as my_rows:to_chat",
    "eval": "names of letters, digits, dots, dashes and underscores",
}
_LATER_SCHEMES = ("models:/",)


def without_secrets(sections: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The sections with every secret hidden, and the refusal of each, by the path of its field."""
    plain = {
        name: value.model_dump(mode="json", exclude_unset=True)
        if isinstance(value, BaseModel)
        else value
        for name, value in sections.items()
    }
    found = list(dict.fromkeys(secrets_in(plain)))
    if not found:
        return dict(sections), []
    problems = [
        Problem(
            path,
            f"has {kind} in it, which a configuration must not hold: set it in the driver's "
            "environment, from where the ranks get it",
        )
        for path, kind in found
    ]
    clean: dict[str, Any] = hidden(plain)
    return clean, problems


def not_told(problems: Iterable[Problem], told: Iterable[Problem]) -> list[Problem]:
    """Those problems that are about other fields than the ``told`` ones."""
    paths = [problem.path for problem in told]
    return [
        problem
        for problem in problems
        if not any(path == problem.path or path.startswith(f"{problem.path}.") for path in paths)
    ]


def unknown_key(path: str, valid: Iterable[str], value: Any = None) -> list[Problem]:
    """The faults of a key that we do not have, with the name it most likely stands for. Another
    trainer's mapping of options (``fsdp_config``) is explained option by option."""
    later = not_yet(path, None)
    if later:
        return [later]
    if inner := inner_keys(path, value):
        return inner
    hint = _explain(option_names.find(path))
    if not hint:
        close = option_names.nearest(path, valid)
        hint = f"did you mean {close}?" if close else "dbx_llmtrain.TrainConfig lists the fields"
    return [Problem(path, f"unknown key: {hint}")]


def inner_keys(path: str, value: Any) -> list[Problem]:
    """The faults of the keys within another trainer's mapping; none where no key of it is known."""
    if not isinstance(value, Mapping) or not option_names.has_inner(path):
        return []
    problems, known = [], False
    for key, item in value.items():
        below = f"{path}.{key}"
        inner = inner_keys(below, item)
        hint = _explain(option_names.find(below))
        known = known or bool(inner or hint)
        problems += inner or [Problem(below, f"unknown key{hint and f': {hint}'}")]
    return problems if known else []


def _explain(options: Sequence[option_names.ForeignOption]) -> str:
    """What to write instead of another trainer's option; where several have it, all are named."""
    told: dict[str | None, list[option_names.ForeignOption]] = {}
    for option in options:
        told.setdefault(option.ours, []).append(option)
    return "; ".join(_hint(ours, some) for ours, some in told.items())


def _hint(ours: str | None, options: Sequence[option_names.ForeignOption]) -> str:
    whose = " and ".join(dict.fromkeys(f"{option.source}'s" for option in options))
    note = next((option.note for option in options if option.note), "")
    if ours is None:
        return f"{whose} {options[0].name} has no counterpart here: {note}"
    later = not_yet(".".join(ours.split(".")[:2]), None)
    if later:
        return f"{whose} name for {ours}, which {later.message.removeprefix(later.path).strip()}"
    return f"{whose} name for {ours}" + (f" ({note})" if note else "")


def not_yet(path: str, value: Any) -> Problem | None:
    """The refusal of a field or value that a later version builds, or ``None``."""
    for key in (path, f"{path}={value}"):
        if key in _LATER:
            what = key if "=" not in key else f"{value!r}"
            return Problem(path, f"{what} is not available in this version: {_LATER[key]}")
    if path == "model.source" and isinstance(value, str):
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
        depth = 2 if keys and keys[0] in MAPPINGS else 1
        grouped.setdefault(".".join([section, *keys[:depth]]), []).append(item)
    problems = []
    for path, items in grouped.items():
        if any(item["type"] == "missing" and len(item["loc"]) == 1 for item in items):
            problems.append(Problem(path, "missing: it has no default"))
            continue
        unknown = next((item["msg"] for item in items if item["type"] == "unknown_key"), None)
        if unknown:
            problems.append(Problem(path, unknown))
            continue
        expected = " or ".join(dict.fromkeys(_expected(item) for item in items))
        problems.append(Problem(path, f"expected {expected}, found {_found(path, items[0])}"))
    return problems


def _expected(item: Any) -> str:
    message: str = item["msg"]
    if item["loc"][1:2] == ("share",):
        shares = "a share of the rows above 0 and less than 1, or a source"
        return f"{shares} (leave it out to hold no rows out)" if item["input"] == 0 else shares
    if item["type"] == "string_pattern_mismatch" and item["loc"][0] in _PATTERNS:
        return _PATTERNS[item["loc"][0]]
    if item["type"] == "bool_parsing" and item["loc"][:1] == ("packing",):
        return "true, false"
    if item["type"] == "missing":
        key = item["loc"][-1]
        return f"a value for {f'item {key + 1}' if isinstance(key, int) else key}"
    inner = [key for key in map(str, item["loc"][1:]) if _is_field(key)]
    nested = item["type"] == "extra_forbidden" or len(item["loc"]) > 2
    where = f" ({inner[-1]})" if inner and nested else ""
    message = message.removeprefix("Input should be ").removeprefix("Input should ")
    if item["type"] == "string_type":
        scalar = isinstance(item["input"], int | float | datetime.date)
        message = "text (in quotes)" if scalar else "text"
    elif item["type"] == "model_type":
        message = "a mapping of fields"
    return (message[0].lower() + message[1:] if message else "another value") + where


def _is_field(key: str) -> bool:
    """Whether part of a pydantic location is a name of a field, not of a type or a position."""
    return key.islower() and key not in _TYPE_NAMES and not set("[-") & set(key)


def _found(path: str, item: Any) -> str:
    value = item["input"]
    if path.startswith("cluster.env"):
        return f"a value of type {type(value).__name__}"
    return f"{str(value)[:80]!r}" if isinstance(value, str) else str(value)[:80]


def combinations(sections: Mapping[str, Any]) -> list[Problem]:
    """Faults between fields, of the sections that are valid by themselves."""
    checks = {
        "model": _model,
        "train": _train,
        "data": data_problems,
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


def _model(model: Any) -> list[Problem]:
    if model.source.strip():
        return []
    return [Problem("model.source", "is empty: expected a hub id, a folder or a .gguf file")]


def _train(train: Any) -> list[Problem]:
    problems = []
    if train.epochs is not None and train.max_steps is not None:
        problems.append(
            Problem(
                "train.max_steps",
                f"{train.max_steps} steps and train.epochs={train.epochs:g} contradict each other: "
                "give one of them (train.epochs=null takes the epochs back)",
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
    if cluster.local_dir and not cluster.local_dir.startswith(("/", "~", "dbfs:/")):
        problems.append(
            Problem(
                "cluster.local_dir",
                "expected an absolute path, since every node has another current folder, found "
                f"{cluster.local_dir!r}",
            )
        )
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
