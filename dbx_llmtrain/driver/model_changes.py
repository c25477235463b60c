"""``model.config``: fields of a Hugging Face configuration, changed or all of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dbx_llmtrain.driver.model_files import refuse
from dbx_llmtrain.errors import ConfigError, Problem
from dbx_llmtrain.text.values import meant

PATH = "model.config"
_ROPE = ("rope_parameters", "rope_theta", "rope_scaling")
_TYPES = ("dtype", "torch_dtype")


@contextmanager
def blamed(fields: Mapping[str, Any], source: str) -> Iterator[None]:
    """Faults of a configuration that ``fields`` changed, or (without ``source``) defined, are told
    as theirs: there is no ``config.json`` of a user's that has them."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([_blamed(p, fields, source) for p in error.problems]) from error


def _blamed(problem: Problem, fields: Mapping[str, Any], source: str) -> Problem:
    text = problem.message
    if problem.path != "model.source":
        return problem
    if not source:
        text = text.removeprefix(PATH).removeprefix(":").strip()
        return Problem(PATH, text.replace("its config.json", "it"))
    if not fields or "its config.json" not in text:
        return problem
    return Problem(PATH, text.replace("its config.json", "its config.json with these fields"))


def changed(content: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What ``config.json`` says with these fields; ``content`` is what it says now, nothing where
    the fields define the model. ``name`` is what the user calls it.

    Mappings (``rope_parameters``, an inner ``text_config``) are changed key by key. Raises
    ``ConfigError`` for a field that the architecture does not have.
    """
    architecture = _architecture(content, fields, name)
    found = dict(content) or {"model_type": architecture}
    given = _own_names(fields, architecture)
    known = _names(architecture, content)
    problems = [
        Problem(f"{PATH}.{field}", f"{architecture} has no such field{meant(field, known)}")
        for field in given
        if known and field not in known
    ]
    if problems:
        raise ConfigError(problems)
    _change_rope(found, given)
    for field, value in given.items():
        if field in _ROPE:
            continue
        inner = found.get(field)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            value = {**inner, **value}
        found[field] = value
    return found


def check_taken(loaded: Any, fields: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for a field that the ``loaded`` configuration does not have as it was
    given: transformers would go on with another value."""
    problems = []
    for field, value in _own_names(fields, loaded.model_type).items():
        if field in _ROPE:
            continue
        found = getattr(loaded, field, None)
        if not _same(found, value, field):
            message = f"is {value!r}, but transformers reads it as {found!r}"
            problems.append(Problem(f"{PATH}.{field}", message))
    if problems:
        raise ConfigError(problems)


def _same(found: Any, value: Any, field: str) -> bool:
    if field in _TYPES:
        return str(found).removeprefix("torch.") == str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return all(
            _same(found.get(key) if isinstance(found, Mapping) else getattr(found, key, None), part,
                  key)
            for key, part in value.items()
        )  # fmt: skip
    if isinstance(value, list | tuple):
        return isinstance(found, list | tuple) and list(found) == list(value)
    return bool(found == value)


def _architecture(content: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> str:
    """The model type. Raises ``ConfigError`` where none is known, or the fields have another."""
    from transformers import CONFIG_MAPPING

    given, own = fields.get("model_type"), content.get("model_type")
    if content:
        if given not in (None, own):
            raise refuse(
                f"{name} is of type {own}: leave model.source out to define a {given}",
                f"{PATH}.model_type",
            )
        return str(own)
    if given is None:
        raise refuse("missing: expected llama, qwen3, gpt2, ...", f"{PATH}.model_type")
    if given not in CONFIG_MAPPING:
        raise refuse(
            f"transformers has no model type {given!r}{meant(str(given), CONFIG_MAPPING)}",
            f"{PATH}.model_type",
        )
    return str(given)


def _class(architecture: str) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[architecture] if architecture in CONFIG_MAPPING else None


def _own_names(fields: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The fields under the names that the architecture itself uses (``n_embd`` for GPT-2's
    ``hidden_size``)."""
    names = getattr(_class(architecture), "attribute_map", None) or {}
    return {names.get(field, field): value for field, value in fields.items()}


def _names(architecture: str, content: Mapping[str, Any]) -> set[str]:
    """Every field that the architecture knows; nothing where that cannot be told."""
    kind = _class(architecture)
    if kind is None:
        return set()
    try:
        known = set(kind().to_dict())
    except Exception:  # noqa: BLE001  # some cannot be built without their inner configurations
        return set()
    known |= set(inspect.signature(kind.__init__).parameters) | set(content)
    known |= {name for part in kind.__mro__ for name in getattr(part, "__annotations__", ())}
    return known | (set(_ROPE) if known & set(_ROPE) else set())


def _change_rope(found: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Rotary settings in the form in which ``found`` has them: ``rope_parameters`` since
    transformers 5, before ``rope_theta`` and ``rope_scaling``."""
    if not any(name in given for name in _ROPE):
        return
    parameters = {**(given.get("rope_scaling") or {}), **(given.get("rope_parameters") or {})}
    if "rope_theta" in given:
        parameters["rope_theta"] = given["rope_theta"]
    if "rope_parameters" in found or not _has_rope_of_old(found):
        found["rope_parameters"] = {**(found.get("rope_parameters") or {}), **parameters}
        return
    if "rope_theta" in parameters:
        found["rope_theta"] = parameters.pop("rope_theta")
    if parameters:
        found["rope_scaling"] = {**(found.get("rope_scaling") or {}), **parameters}


def _has_rope_of_old(found: Mapping[str, Any]) -> bool:
    from dbx_llmtrain.compat import at_least

    return any(name in found for name in _ROPE[1:]) or not at_least("transformers", "5.0")


def culprits(fields: Iterable[str], differs: Any) -> list[str]:
    """The fields of which one alone makes ``differs(field)`` true, or else all."""
    fields = list(fields)
    return [field for field in fields if differs(field)] or fields
