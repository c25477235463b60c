"""A model folder to the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dbx_llmtrain import credentials, storage
from dbx_llmtrain.errors import CheckpointError, ConfigError, Problem

_FIELD = "push_to_hub"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_STALE = ["*.safetensors", "*.safetensors.index.json"]
"""Of an earlier upload: its shards beside the new ones would make two models of one."""


def problems(name: object) -> list[Problem]:
    """What shows of the name of a repository without the network."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        found = credentials.redact(repr(name), os.environ)
        return [Problem(_FIELD, f"expected ORG/NAME, found {found}")]
    return []


def check_access(name: str) -> None:
    """Raise ``ConfigError`` unless the hub takes the token; asked before there is anything to
    upload."""
    import huggingface_hub

    if not huggingface_hub.get_token():
        raise ConfigError([Problem(_FIELD, "needs a token: set HF_TOKEN in the environment")])
    try:
        _ask(name, lambda: huggingface_hub.HfApi().whoami())
    except CheckpointError as error:
        raise ConfigError([Problem(_FIELD, str(error))]) from error.__cause__


def upload(folder: Path, name: str, message: str) -> str:
    """Put the files of a folder into the hub's repository ``name``, and return its address.

    A repository that is not there yet is made, and is private; one that is stays as visible as it
    is. Raises ``CheckpointError``; the folder stays in any case.
    """
    import huggingface_hub

    def send() -> Any:
        hub = huggingface_hub.HfApi()
        address = hub.create_repo(name, private=True, exist_ok=True)
        hub.upload_folder(
            repo_id=name,
            folder_path=folder,
            ignore_patterns=[storage.MANIFEST],
            delete_patterns=_STALE,
            commit_message=message,
        )
        return address

    try:
        return str(_ask(name, send))
    except CheckpointError as error:
        raise CheckpointError(
            f"{_FIELD}: {error}. The export itself is complete: {folder}"
        ) from error.__cause__


def _ask(name: str, question: Callable[[], Any]) -> Any:
    """``question()``, with every failure as a ``CheckpointError``."""
    try:
        return question()
    except Exception as error:
        # The hub's client raises its own errors, those of the HTTP library that it happens to use,
        # and those of the file system; they have no common base.
        raise CheckpointError(_explain(name, error)) from error


def _explain(name: str, error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    owner = name.partition("/")[0]
    if status == 401:
        return "the hub does not know the token in HF_TOKEN: make a new one in its settings"
    if status == 403:
        return (
            f"the token in HF_TOKEN may not write to {name}: it needs the right to write to "
            f"{owner}'s repositories"
        )
    if status == 404:
        return f"the hub has no {owner} that this token may write to: check the name {name}"
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    told = credentials.redact(first_line, os.environ)
    return f"the hub cannot be reached or refuses {name} ({type(error).__name__}: {told})"
