"""Faults of a configuration that types cannot express, and the words for all of them."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from dbx_llmtrain import model_checks, option_names, option_values
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
MODEL_NAME = re.compile(
    r"[^\s@/:.]([^@/:.]*[^\s@/:.])?(\.[^\s@/:.]([^@/:.]*[^\s@/:.])?){0,2}"
    r"(@(?![vV]\d+$)(?!(?i:latest)$)[\w-]+)?"
)
_TAKEN_NAMES = ("mlflow.db", "mlartifacts")

# Fields and values of the contract that a later version builds. They are refused by name, so that
# nobody's setting is ignored. Key: dotted path, or path=value for one value of a live field.
_LATER: dict[str, str] = {
    "train.profile": "run a profiler on the rank by hand",
}
MAPPINGS = ("env", "tags", "columns", "config", "lora")
"""Fields whose keys are the user's own."""
_TYPE_NAMES = ("text", "source", "list", "share", "named", "str", "int", "float", "bool")
_PATTERNS = {
    "formatter": "module:function, such as my_rows:to_chat",
    "eval": "names of letters, digits, dots, dashes and underscores",
}
_WHOLE = {
    "parallel.config": "a mapping or the path of a JSON file",
    "train.betas": "two numbers in [0, 1)",
    "train.max_time": "days, hours, minutes and seconds in quotes ('00:10:30:00': ten and a half "
    "hours)",
    "train.early_stopping": "a number of evaluations, or a mapping of patience and min_delta",
    "train.sample_prompts": "a list of prompts, each a text or a list of messages (role, content)",
    "checkpoint.metric": "the name of a metric, such as eval_loss",
    "checkpoint.resume": "auto, never, or the path of a checkpoint",
}
_OWN_DEEPSPEED = ("parallel", "config")
"""Not checked by its keys here: those are DeepSpeed's."""
_DEEPSPEED_OPTIMIZER = frozenset(("type", "params"))
"""Keys of DeepSpeed's ``optimizer``, by which it is told from ours."""


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
    if path == "train.optimizer" and not _DEEPSPEED_OPTIMIZER & set(value):
        return []
    problems, known = [], False
    for key, item in value.items():
        below = f"{path}.{key}"
        inner = inner_keys(below, item)
        hint = _explain(option_names.find(below))
        known = known or bool(inner or hint)
        problems += inner or [Problem(below, f"unknown key{hint and f': {hint}'}")]
    return problems if known else []


def renamed_keys(path: str, value: Any) -> list[Problem]:
    """Keys of a mapping that is the user's own, but that have another name there: PEFT's names of
    our fields of ``model.lora``."""
    if path != "model.lora" or not isinstance(value, Mapping):
        return []
    found = []
    for key in value:
        options = [o for o in option_names.find(str(key)) if o.source == option_names.PEFT]
        if options and options[0].ours not in (path, f"{path}.{key}"):
            found.append(Problem(f"{path}.{key}", f"unknown key: {_explain(options)}"))
    return found


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
    return None


def from_pydantic(section: str, error: ValidationError) -> list[Problem]:
    """One problem per field: what was expected, what was found (never a value that may be secret).

    A field with a union type gives pydantic one error per member; they are told as one.
    """
    grouped: dict[str, list[Any]] = {}
    for item in error.errors(include_url=False):
        keys = [str(key) for key in item["loc"]]
        own_keys = keys and keys[0] in MAPPINGS and (section, *keys[:1]) != _OWN_DEEPSPEED
        depth = 2 if own_keys else 1
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
        items = [item for item in items if not _is_name_for_mapping(item)] or items
        expected = " or ".join(dict.fromkeys(_expected(item) for item in items))
        expected = _WHOLE.get(path, expected) if len(items[0]["loc"]) < 3 else expected
        found = f"{_found(path, items[0])}{_meant(path, items)}"
        problems.append(Problem(path, f"expected {expected}, found {found}"))
    return problems


def _meant(path: str, items: Iterable[Any]) -> str:
    """A question after one of the names that pydantic expected."""
    for item in items:
        if item["type"] == "literal_error":
            choices = re.findall("'([^']*)'", item["ctx"]["expected"])
            return option_values.hint(path, item["input"], choices)
    return ""


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
    elif item["type"] in ("model_type", "dict_type"):
        message = "a mapping of fields" if item["type"] == "model_type" else "a mapping"
    return (message[0].lower() + message[1:] if message else "another value") + where


def _is_name_for_mapping(item: Any) -> bool:
    """Whether pydantic expected a text, such as one of several names, where a mapping was given."""
    return item["type"] in ("literal_error", "string_type") and isinstance(item["input"], Mapping)


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
        "model": model_checks.model_problems,
        "train": model_checks.train_problems,
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
    ] + [*model_checks.parallel_problems(sections), *_between_sections(sections)]


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
    problems = _register_as(tracking)
    name = tracking.run_name
    if name is None:
        return problems
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
    if wrong:
        message = f"expected the name of a folder, {name[:60]!r} {wrong}"
        problems.append(Problem("tracking.run_name", message))
    return problems


def _register_as(tracking: Any) -> list[Problem]:
    """The name of a registered model."""
    told = tracking.register_as
    if told is None:
        return []
    path = "tracking.register_as"
    if tracking.log_model == "none":
        return [
            Problem(path, "a model that is not logged cannot be registered: set log_model=final")
        ]
    if MODEL_NAME.fullmatch(told):
        return []
    return [
        Problem(
            path,
            "expected catalog.schema.model or a name, followed by @alias if wanted (an alias of "
            f"letters, digits, _ and -, not a version such as v1, nor latest), found {told[:80]!r}",
        )
    ]


def _checkpoint(checkpoint: Any) -> list[Problem]:
    problems = []
    if checkpoint.dir and "://" in checkpoint.dir:
        problems.append(
            Problem(
                "checkpoint.dir",
                f"expected a path that every node can open, such as /Volumes/catalog/schema/"
                f"volume/runs, found {checkpoint.dir!r}",
            )
        )
    if not checkpoint.resume.strip():
        problems.append(
            Problem("checkpoint.resume", "is empty: expected auto, never or a path of a checkpoint")
        )
    return problems


def _between_sections(sections: Mapping[str, Any]) -> list[Problem]:
    """Faults of what is evaluated, kept and logged, which several sections say together."""
    train, checkpoint = sections.get("train"), sections.get("checkpoint")
    tracking, data = sections.get("tracking"), sections.get("data")
    problems = []
    if train is not None and train.eval_every is None:
        why = {
            "train.early_stopping": train.early_stopping is not None,
            "checkpoint.keep_best": checkpoint is not None and checkpoint.keep_best > 0,
        }
        if asking := [path for path, is_set in why.items() if is_set]:
            message = f"missing: {' and '.join(asking)} can only do something between the steps"
            problems.append(Problem("train.eval_every", message))
    if train is not None and train.sample_prompts and data is not None and data.objective == "mlm":
        message = "a model of data.objective: mlm writes no answers: remove it"
        problems.append(Problem("train.sample_prompts", message))
    if tracking is not None and checkpoint is not None:
        problems += _logged_model(tracking, checkpoint)
    return problems


def _logged_model(tracking: Any, checkpoint: Any) -> list[Problem]:
    path = "tracking.log_model"
    if tracking.log_model == "best" and not checkpoint.keep_best:
        return [Problem(path, "best needs checkpoint.keep_best, which says how many are kept")]
    logged = tracking.log_model in ("final", "best") or tracking.register_as is not None
    if logged and not checkpoint.export:
        given = path if tracking.log_model else "tracking.register_as"
        return [Problem(given, "what is logged is the export: set checkpoint.export=true")]
    return []
