"""What an evaluation needs beside the model and its rows: made once, kept for the whole run."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dbx_llmtrain import storage
from dbx_llmtrain.errors import CheckpointError, ConfigError, Problem
from dbx_llmtrain.records import FileEntry, RunPlan
from dbx_llmtrain.text import prompts
from dbx_llmtrain.worker import lending
from dbx_llmtrain.worker.folders import Folders
from dbx_llmtrain.worker.model import load_tokenizer
from dbx_llmtrain.worker.samples import Asked

METRICS_PATH = "metrics"
"""How messages call the function that was passed as ``metrics=``."""


@dataclass(frozen=True)
class Tools:
    """The tokenizer (with the template that was trained with), the model's ``generation``
    configuration, the user's ``metrics`` function, and the prompts to answer. Where neither
    prompts nor metrics are wanted nothing is loaded."""

    tokenizer: Any = None
    generation: dict[str, Any] | None = None
    metrics: Callable[[Any, Any], Mapping[str, float]] | None = None
    asked: Asked | None = None


_made: dict[tuple[str, str], Tools] = {}


def tools_of(plan: RunPlan, folders: Folders) -> Tools:
    """Those of a run, the same each time: a user's function may keep something between its calls.

    Raises ``ConfigError`` for prompts that cannot be answered, ``CheckpointError`` for a function
    whose file is not the one that was sent.
    """
    key = (plan.run_dir, plan.attempt)
    if key not in _made:
        _made.clear()
        _made[key] = _make(plan, folders)
    return _made[key]


def _make(plan: RunPlan, folders: Folders) -> Tools:
    given = plan.config.train.sample_prompts
    if not given and plan.metrics is None:
        return Tools()
    metrics = None
    if plan.metrics is not None:
        metrics = load_metrics(plan.run_dir, plan.metrics)
    tokenizer = load_tokenizer(folders.model, trusted=plan.config.model.trust_remote_code)
    if plan.data.chat_template is not None:
        tokenizer.chat_template = plan.data.chat_template
    generation = lending.settings(folders.model, plan.data.end_tokens, tokenizer)
    asked = None
    if given:
        chats = prompts.from_chats(plan.data.format, tokenizer)
        positions = plan.model.max_positions
        found = prompts.encode(tokenizer, given, chats=chats, positions=positions)
        asked = Asked(found, tokenizer, generation, positions)
    return Tools(tokenizer, generation, metrics, asked)


def load_metrics(run_dir: str, entry: FileEntry) -> Callable[[Any, Any], Mapping[str, float]]:
    """The user's function out of its file. Nothing of a file with another hash is unpickled.

    Raises ``CheckpointError`` for such a file, ``ConfigError`` where the function needs what this
    machine does not have.
    """
    path = storage.local_path(run_dir) / entry.path
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"the metrics function {path} cannot be read: {error}") from error
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise CheckpointError(
            f"the metrics function {path} is not the one that was sent: its hash is another"
        )
    try:
        loaded: Callable[[Any, Any], Mapping[str, float]] = pickle.loads(content)
    except Exception as error:
        message = f"cannot be loaded on a rank ({type(error).__name__}: {error})"
        raise ConfigError([Problem(METRICS_PATH, message)]) from error
    return loaded
