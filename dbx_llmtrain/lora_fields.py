"""``model.lora`` in the words of peft: which fields of its ``LoraConfig`` may be given, and what is
handed to it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dbx_llmtrain.errors import Problem

PATH = "model.lora"
ALL_LINEAR = "all-linear"

OURS: Mapping[str, str] = {"alpha": "lora_alpha", "dropout": "lora_dropout"}
"""Our names to peft's, where they differ."""

PASSED_ON: frozenset[str] = frozenset(
    "exclude_modules bias use_rslora modules_to_save init_lora_weights layers_to_transform "
    "layers_pattern rank_pattern alpha_pattern use_dora lora_bias target_parameters "
    "ensure_weight_tying".split()
)
"""Fields of peft's ``LoraConfig`` (0.21) that a run can have."""

_FOLLOWS = "is set by us, it follows from the model and the run: remove it"
_FOLLOWING = (
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision "
    "inference_mode fan_in_fan_out"
)
_LATER = "is not available in this version: remove it"
_LATER_FIELDS = (
    "megatron_config megatron_core loftq_config eva_config corda_config lora_ga_config "
    "velora_config monteclora_config kasa_config arrow_config alora_invocation_tokens "
    "layer_replication runtime_config use_bdlora use_qalora qalora_group_size "
    "trainable_token_indices"
)
REFUSED: Mapping[str, str] = dict.fromkeys(_FOLLOWING.split(), _FOLLOWS) | dict.fromkeys(
    _LATER_FIELDS.split(), _LATER
)
"""Fields of peft's that a run cannot have, and why."""

_STARTS = (True, False, "gaussian")
_BIASES = ("none", "all", "lora_only")


def _is_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def _is_whole(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_layers(value: Any) -> bool:
    items = value if isinstance(value, list | tuple) else [value]
    return all(_is_whole(item) for item in items)


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def _is_pattern(value: Any) -> bool:
    return isinstance(value, str) or _is_names(value)


def _is_ranks(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_whole(item, 1) for item in value.values())


def _is_alphas(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(item, int | float) and not isinstance(item, bool) and item > 0
        for item in value.values()
    )


_VALUES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "bias": (" or ".join(_BIASES), lambda value: value in _BIASES),
    "modules_to_save": ("a list of names of layers", _is_names),
    "target_parameters": ("a list of names of parameters", _is_names),
    "exclude_modules": ("names of layers, or a pattern for them", _is_pattern),
    "layers_pattern": ("the name of the list of blocks, such as layers", _is_pattern),
    "layers_to_transform": ("numbers of blocks, the first is 0", _is_layers),
    "rank_pattern": ("a mapping of names of layers to ranks", _is_ranks),
    "alpha_pattern": ("a mapping of names of layers to alphas", _is_alphas),
    "use_rslora": ("true or false", _is_switch),
    "use_dora": ("true or false", _is_switch),
    "lora_bias": ("true or false", _is_switch),
    "ensure_weight_tying": ("true or false", _is_switch),
}
"""What the values of extra fields have to be: peft takes any, and fails with some in the ranks."""


def arguments(lora: Any) -> dict[str, Any]:
    """The keywords of peft's ``LoraConfig`` for a ``model.lora``."""
    given = lora.model_dump()
    alpha = given["alpha"]
    given["alpha"] = int(alpha) if alpha == int(alpha) else alpha
    return {OURS.get(name, name): value for name, value in given.items()}


def problems(lora: Any) -> list[Problem]:
    """Faults of a ``model.lora`` that need no peft to be seen."""
    extra: Mapping[str, Any] = lora.model_extra or {}
    found = [
        Problem(f"{PATH}.{name}", REFUSED[name])
        for name, value in extra.items()
        if name in REFUSED and value is not None
    ]
    if not lora.target_modules:
        found.append(
            Problem(f"{PATH}.target_modules", f"is empty: name layers, or leave it at {ALL_LINEAR}")
        )
    elif _is_almost_all(lora.target_modules):
        found.append(
            Problem(
                f"{PATH}.target_modules",
                f"found {lora.target_modules!r}: did you mean {ALL_LINEAR}? (names of layers are "
                "given as a list)",
            )
        )
    for name, (expected, fits) in _VALUES.items():
        value = extra.get(name)
        if value is not None and not fits(value):
            found.append(Problem(f"{PATH}.{name}", f"expected {expected}, found {value!r}"))
    start = extra.get("init_lora_weights", True)
    if start not in _STARTS:
        found.append(
            Problem(
                f"{PATH}.init_lora_weights",
                f"expected true, false or gaussian, found {start!r}: what starts from the base "
                "weights or from data is not available in this version",
            )
        )
    return found


def misses(
    lora: Any, modules: Sequence[str], parameters: Sequence[str], blocks: int
) -> list[Problem]:
    """Names of layers that the model does not have, and numbers of blocks. ``modules`` and
    ``parameters`` are all of its names, as peft compares them: by their ends, a single text of
    ``target_modules`` as a pattern for the whole name."""
    extra: Mapping[str, Any] = lora.model_extra or {}
    targets = lora.target_modules
    found = []
    if isinstance(targets, str) and targets != ALL_LINEAR:
        found += _pattern(targets, modules)
    for field, names, known in (
        ("target_modules", () if isinstance(targets, str) else targets, modules),
        ("modules_to_save", extra.get("modules_to_save") or (), modules),
        ("target_parameters", extra.get("target_parameters") or (), parameters),
    ):
        for name in names:
            # (peft takes any end of a name for modules_to_save, whole parts for the others.)
            end = name if field == "modules_to_save" else f".{name}"
            if not any(f".{one}".endswith(end) for one in known):
                found.append(Problem(f"{PATH}.{field}", _no_layer(name, field, known)))
    layers = extra.get("layers_to_transform")
    if layers is not None and blocks and not extra.get("layers_pattern"):
        over = [one for one in (layers if isinstance(layers, list | tuple) else [layers])
                if one >= blocks]  # fmt: skip
        if over:
            message = f"the model has {blocks} blocks, 0 to {blocks - 1}: found {over[0]}"
            found.append(Problem(f"{PATH}.layers_to_transform", message))
    return found


def _pattern(text: str, modules: Sequence[str]) -> list[Problem]:
    path = f"{PATH}.target_modules"
    try:
        pattern = re.compile(text)
    except re.error as error:
        return [Problem(path, f"{text!r} is no pattern ({error}): give a list of names of layers")]
    if any(pattern.fullmatch(name) for name in modules):
        return []
    if text in _ends(modules):
        why = f"a single text is a pattern for the whole name: give a list, [{text}]"
    else:
        why = f"no layer of the model has a name like {text!r}{_near(text, modules)}"
    return [Problem(path, why)]


def _no_layer(name: str, field: str, known: Sequence[str]) -> str:
    what = "parameter" if field == "target_parameters" else "layer"
    return f"no {what} of the model has the name {name}{_near(name, known)}"


def _ends(names: Sequence[str]) -> list[str]:
    """Last parts of names, which are what layers are given by."""
    return sorted({name.rpartition(".")[2] for name in names} - {""})


def _near(name: str, known: Sequence[str]) -> str:
    ends = [end for end in _ends(known) if not end.isdigit()]
    close = difflib.get_close_matches(name, ends, n=1, cutoff=0.6)
    return f": did you mean {close[0]}?" if close else f": it has {', '.join(ends[:12])}"


def _is_almost_all(targets: Any) -> bool:
    """Whether ``all-linear`` is written in another way."""
    if not isinstance(targets, str) or targets == ALL_LINEAR:
        return False
    plain = re.sub(r"[\s_-]+", "-", targets.strip().lower())
    return plain in ("all", "linear") or bool(
        difflib.get_close_matches(plain, [ALL_LINEAR], n=1, cutoff=0.8)
    )


def unknown(lora: Any, fields: Iterable[str]) -> list[Problem]:
    """A fault for every extra field of a ``model.lora`` that is none of peft's ``fields``, with the
    name that it most likely stands for."""
    known = {*fields}
    names = ["r", *OURS, "target_modules", *sorted(known & PASSED_ON)]
    return [
        Problem(f"{PATH}.{name}", f"unknown key: {_hint(name, names)}")
        for name in lora.model_extra or {}
        if name not in known and name not in REFUSED
    ]


def _hint(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {PATH}.{close[0]}?"
    return f"expected a field of peft's LoraConfig ({', '.join(names)})"
