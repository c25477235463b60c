"""Names of prepared data sets: of everything that their tokens and packs depend on, all splits.

What a run must have in common with its checkpoints is less: the examples of its training split,
which have a digest of their own (``SplitInfo.digest``)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from dbx_llmtrain import storage
from dbx_llmtrain.driver import formatters
from dbx_llmtrain.driver.inputs import Input
from dbx_llmtrain.driver.model_files import digest, fingerprint
from dbx_llmtrain.records import Artifact, ModelInfo
from dbx_llmtrain.sections import DataConfig

RECIPE = 4
"""Raise it when the same rows give other tokens, packs or counts."""

_SOURCES = {"train", "eval", "test"}
_ELSEWHERE = {"cache_dir", "formatter", "chat_template"}
_OF_THE_RUN = {"mlm_probability", "group_by_length", "longest_first"}


def tokenizer(model: ModelInfo) -> Artifact:
    """The files of a model that are not its weights: what turns text into tokens."""
    files = tuple(entry for entry in model.artifact.files if ".safetensors" not in entry.path)
    name = fingerprint(files, "tokenizer")
    source = model.artifact.source
    return Artifact(kind="tokenizers", source=source, fingerprint=name, files=files)


def of_data(
    data: DataConfig,
    model: ModelInfo,
    inputs: Sequence[Input],
    function: formatters.Formatter | None,
) -> str:
    """24 hex digits that name the data set: another one after a change of any row, the tokenizer,
    the template, a setting, the formatter or the code. Raises ``ConfigError`` for a formatter that
    cannot be named."""
    packages = ("dbx_llmtrain", "transformers", "tokenizers")
    parts = {
        "recipe": [RECIPE, *map(version, packages)],
        "tokenizer": tokenizer(model).fingerprint,
        "vocabulary": model.vocab_size,
        "sources": [[item.role, item.told, item.weight, item.key] for item in inputs],
        "shares": [value for value in (data.eval, data.test) if isinstance(value, float)],
        "template": _template(data.chat_template),
        "formatter": formatters.key(function) if function is not None else None,
        "settings": data.model_dump(mode="json", exclude=_SOURCES | _ELSEWHERE | _OF_THE_RUN),
    }
    return digest(json.dumps(parts, sort_keys=True))


def _template(given: str | None) -> Any:
    """What a chat template is: its text, or the content of its file."""
    if given is None or "{{" in given or "{%" in given:
        return given
    path = storage.local_path(given)
    return [given, storage.hash_file(path)] if path.is_file() else given
