"""A model folder of parts: a configuration that is changed or new, a tokenizer of its own, tokens
that are added. The weight files stay where they are."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dbx_llmtrain import storage
from dbx_llmtrain.custom_code import load_from, private_modules
from dbx_llmtrain.driver.model_changes import PATH, blamed, changed, check_taken, culprits
from dbx_llmtrain.driver.model_config import load_config, shape_of
from dbx_llmtrain.driver.model_files import (
    digest,
    fingerprint,
    is_of_tokenizer,
    publish,
    refuse,
    tokenizer_files,
)
from dbx_llmtrain.errors import ConfigError, Problem
from dbx_llmtrain.model_sections import ModelConfig, TokenizerConfig
from dbx_llmtrain.records import Artifact

CONFIG = "config.json"
_RECIPE = "composed 1"  # part of the fingerprint: change it when the same parts give another folder
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_FREE = {"dropout", "experts_per_token"}
"""What a model's shape tells beside the shapes of its weights."""


def is_wanted(config: ModelConfig) -> bool:
    """Whether the model is not simply the one of its source."""
    return bool(config.config or config.tokenizer or config.new_tokens or not config.source)


def own_tokenizer(config: ModelConfig) -> TokenizerConfig | None:
    """The settings of ``model.tokenizer``, ``None`` where there are none."""
    given = config.tokenizer
    return TokenizerConfig(source=given) if isinstance(given, str) else given


@dataclass(frozen=True)
class Parts:
    """What a folder is made of: the model as it is found (none where ``model.config`` defines it)
    and the folder of another tokenizer; ``name`` is what the user calls the model."""

    config: ModelConfig
    name: str
    objective: str
    base: Artifact | None = None
    tokenizer: Path | None = None

    @property
    def trusted(self) -> bool:
        """Whether the model's own code may run."""
        return self.config.trust_remote_code


def compose(parts: Parts, cache_dir: Path, work_dir: Path | None) -> Artifact:
    """The folder, in the cache; files of weights are told to be where they are.

    Raises ``ConfigError`` for fields that the architecture does not have, another shape than the
    weights', and a tokenizer that does not fit.
    """
    base, config, words = parts.base, parts.config, parts.tokenizer
    weights = (
        [
            entry.model_copy(update={"origin": str(storage.place(Path(base.source), entry))})
            for entry in (base.files if config.init == "pretrained" else ())
            if ".safetensors" in entry.path
        ]
        if base
        else []
    )
    own = storage.entries(words, tokenizer_files(words, trusted=True)) if words else ()
    name = digest(
        _RECIPE,
        version("transformers"),
        base.fingerprint if base else "",
        fingerprint(own),
        json.dumps(config.model_dump(mode="json", include=_KEYED), sort_keys=True),
        parts.objective,
    )
    with blamed(config.config, config.source):
        small = publish(cache_dir, name, work_dir, lambda target: _make(parts, target))
    files = sorted([*small.files, *weights], key=lambda entry: entry.path)
    return small.model_copy(update={"files": tuple(files)})


_KEYED = {"init", "config", "tokenizer", "new_tokens", "trust_remote_code"}


def _make(parts: Parts, target: Path) -> None:
    """Write everything but the weights to ``target``."""
    _copy(parts, target)
    content = _base_config(parts)
    fields = {key: value for key, value in parts.config.config.items() if key != "vocab_size"}
    given = parts.config.config.get("vocab_size")
    if given is not None and not (isinstance(given, int) and not isinstance(given, bool)):
        raise refuse(f"expected a whole number, found {given!r}", f"{PATH}.vocab_size")
    found = changed(content, fields, parts.name)
    if parts.base is None:
        found = dict.fromkeys(_IDS[:2]) | found  # no defaults of another tokenizer
    if given is not None:
        _set_rows(found, given)
    _write(target / CONFIG, found)
    with private_modules(None, wanted=parts.trusted):
        words = _tokenizer(target, parts)
        _add_tokens(words, target, parts)
        found = _sized(found, words, target, parts)
    loaded = _load(target, parts)
    check_taken(loaded, fields)
    if parts.base is None:
        _write(target / CONFIG, _complete(loaded, parts.objective))


def _copy(parts: Parts, target: Path) -> None:
    """The files beside weights and configuration: the model's, and the tokenizer's, which takes the
    place of the model's own."""
    base, words = parts.base, parts.tokenizer
    for entry in base.files if base else ():
        replaced = words is not None and is_of_tokenizer(entry.path)
        if entry.path != CONFIG and ".safetensors" not in entry.path and not replaced:
            _copy_file(storage.place(Path(base.source if base else ""), entry), target / entry.path)
    for path in tokenizer_files(words, trusted=parts.trusted) if words else ():
        if not (target / path.relative_to(words or path)).exists():
            _copy_file(path, target / path.relative_to(words or path))


def _copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _base_config(parts: Parts) -> dict[str, Any]:
    if parts.base is None:
        return {}
    content: dict[str, Any] = _read(Path(parts.base.source) / CONFIG)
    return content


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _write(path: Path, content: Mapping[str, Any]) -> None:
    storage.write_text(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


def _load(target: Path, parts: Parts) -> Any:
    config = parts.config
    return load_config(
        target,
        parts.name,
        trusted=parts.trusted,
        attention=config.attention,
        objective=parts.objective,
    )


def _tokenizer(target: Path, parts: Parts) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(**load_from(target, trusted=parts.trusted))
    except Exception as error:
        # The tokenizers library raises bare Exceptions for files that it cannot read.
        _load(target, parts)  # (the configuration is read as well: its faults are told as such)
        where = "model.source" if parts.tokenizer is None else "model.tokenizer"
        raise refuse(f"the tokenizer cannot be loaded: {error}", where) from error


def _add_tokens(words: Any, target: Path, parts: Parts) -> None:
    """Add ``model.new_tokens``. Raises ``ConfigError`` for one that is there already."""
    tokens = parts.config.new_tokens
    known = words.get_vocab()
    problems = [
        Problem("model.new_tokens", f"{token!r} is in the tokenizer already (id {known[token]})")
        for token in tokens
        if token in known
    ]
    if problems:
        raise ConfigError(problems)
    if tokens:
        words.add_tokens(tokens)
        words.save_pretrained(target)


def _sized(found: dict[str, Any], words: Any, target: Path, parts: Parts) -> dict[str, Any]:
    """The configuration with as many rows as the vocabulary needs and the tokenizer's own ids,
    written to ``target``. Raises ``ConfigError`` where it would have less, or where the weights
    have another shape."""
    config = parts.config
    if config.init == "pretrained":
        _check_shape(found, target, parts)
    needed = max(words.get_vocab().values()) + 1
    given = config.config.get("vocab_size")
    if given is not None and given < needed:
        raise refuse(
            f"is {given}, but the tokenizer has ids up to {needed - 1}: expected {needed} or more",
            f"{PATH}.vocab_size",
        )
    settings = own_tokenizer(config) or TokenizerConfig()
    fresh = config.init == "random" and (parts.base is None or settings.source is not None)
    rows = given or (needed if fresh else max(needed, _rows(_load(target, parts))))
    multiple = settings.pad_vocab_to_multiple_of or 1
    _set_rows(found, math.ceil(rows / multiple) * multiple)
    if parts.base is None or settings.source is not None:
        _set_ids(found, words, config.config)
        _set_generation_ids(target, words)
    _write(target / CONFIG, found)
    return found


def _rows(loaded: Any) -> int:
    rows: int = loaded.get_text_config().vocab_size
    return rows


def _set_rows(found: dict[str, Any], rows: int) -> None:
    """(Models with several parts have their language model's settings in ``text_config``.)"""
    inner = found.get("text_config")
    if isinstance(inner, dict) and "vocab_size" not in found:
        found["text_config"] = {**inner, "vocab_size": rows}
    else:
        found["vocab_size"] = rows


def _set_ids(found: dict[str, Any], words: Any, given: Mapping[str, Any]) -> None:
    """The tokenizer's special tokens, where the user has not given others. A pad token only where
    there is one: some families count positions from it."""
    for name in _IDS:
        own = getattr(words, name, None)
        if name not in given and (own is not None or name != "pad_token_id"):
            several = found.get(name)
            if not (isinstance(several, list) and own in several):
                found[name] = own


def _set_generation_ids(target: Path, words: Any) -> None:
    path = target / "generation_config.json"
    if path.is_file():
        content = _read(path)
        _set_ids(content, words, {})
        _write(path, content)


def _check_shape(found: dict[str, Any], target: Path, parts: Parts) -> None:
    """Raise ``ConfigError`` where the fields ask for another shape than the weights have."""
    fields = parts.config.config
    if not fields or parts.base is None:
        return
    content = _base_config(parts)

    def shape(settings: Mapping[str, Any]) -> dict[str, Any]:
        _write(target / CONFIG, settings)
        known = shape_of(
            _load(target, parts),
            target,
            parts.name,
            trusted=parts.trusted,
            objective=parts.objective,
        )
        return known.model_dump(exclude=_FREE)

    before = shape(content)
    if shape(found) != before:
        names = culprits(
            fields, lambda field: shape(changed(content, {field: fields[field]}, "")) != before
        )
        raise refuse(
            f"{', '.join(names)} would give the model another shape than its weights have: set "
            "model.init=random to train it from the start, or leave it out",
            f"{PATH}.{names[0]}",
        )
    _write(target / CONFIG, found)


def _complete(loaded: Any, objective: str) -> dict[str, Any]:
    """Every field of a model that is defined by some: another release may have other defaults."""
    from transformers.models.auto import modeling_auto

    names: Any = (
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        if objective == "mlm"
        else modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    content: dict[str, Any] = json.loads(loaded.to_json_string(use_diff=False))
    for name in ("transformers_version", "_name_or_path"):
        content.pop(name, None)
    own = names[loaded.model_type]
    content["architectures"] = [own if isinstance(own, str) else own[0]]
    return content
