"""The shape of a model from its configuration alone: no weights, no tokenizer, no cluster."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbx_llmtrain.driver import adapters, gguf_header, hub, registered, sources
from dbx_llmtrain.driver.model_changes import blamed, changed
from dbx_llmtrain.driver.model_config import load_config, positions_of, shape_of
from dbx_llmtrain.driver.model_files import refuse
from dbx_llmtrain.estimates import ModelShape
from dbx_llmtrain.model_sections import ModelConfig

_CONFIG = "config.json"


@dataclass(frozen=True)
class Outline:
    """What the user calls a model, its shape, and how many positions it was built for."""

    name: str
    shape: ModelShape
    positions: int | None


def outline(config: ModelConfig, *, objective: str = "sft", runs: Path | None = None) -> Outline:
    """What the model's configuration tells. Of a hub model only ``config.json`` is
    downloaded (and its code, where that is trusted), of one in MLflow's registry (``runs``: see
    ``sources.resolve_model``) all but the weights, of a ``.gguf`` file the header is read.

    Raises ``ConfigError`` for a model that is not there or cannot be trained.
    """
    name = config.source or "model.config"
    with tempfile.TemporaryDirectory(prefix="dbx_llmtrain-") as temporary:
        found = _folder(config, Path(temporary), runs)
        folder = found
        if config.config or not config.source:
            folder = Path(temporary)
            _merge(found / _CONFIG, folder / _CONFIG, config.config, name)
        trusted = config.trust_remote_code and folder == found
        with blamed(config.config, config.source):
            loaded = load_config(
                folder, name, trusted=trusted, attention=config.attention, objective=objective
            )
            _resize(loaded, config)
            shape = shape_of(loaded, folder, name, trusted=trusted, objective=objective)
            adapters.check_model(config, folder, objective=objective)
        return Outline(name, shape, positions_of(loaded))


def _folder(config: ModelConfig, temporary: Path, runs: Path | None) -> Path:
    """A folder with the model's ``config.json``."""
    if not config.source:
        return temporary
    path = sources.find_model(config)
    if path is None and registered.is_registered(config.source):
        registered.fetch_config(config.source, temporary / "registered", runs)
        return temporary / "registered"
    if path is None:
        hub.fetch_config(
            config.source, config.revision, temporary, trusted=config.trust_remote_code
        )
        return temporary
    if path.is_dir():
        if not (path / _CONFIG).is_file():
            raise refuse(f"{config.source} has no {_CONFIG}")
        return path
    _read_gguf(path, temporary).save_pretrained(temporary)
    return temporary


def _read_gguf(file: Path, temporary: Path) -> Any:
    from transformers import AutoConfig

    try:
        tokens = gguf_header.write_slim(file, temporary / "header.gguf")
        config = AutoConfig.from_pretrained(temporary, gguf_file="header.gguf")
    except ImportError as error:
        raise refuse(f"{file} needs a package: {error}. pip install gguf") from error
    except (ValueError, KeyError, OSError, RuntimeError, NotImplementedError) as error:
        raise refuse(f"{file} cannot be read: {error}") from error
    if tokens:
        config.vocab_size = tokens
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _merge(source: Path, target: Path, fields: dict[str, Any], name: str) -> None:
    """Write the configuration with these fields changed; without a model's own, that of its
    type."""
    try:
        content = json.loads(source.read_text(encoding="utf-8")) if source.is_file() else {}
    except (OSError, ValueError) as error:
        raise refuse(f"{name}: {_CONFIG} is broken: {error}") from error
    content = changed(content, fields, name)
    target.write_text(json.dumps(content), encoding="utf-8")


def _resize(loaded: Any, config: ModelConfig) -> None:
    """Rows of the embedding for new tokens and for a vocabulary that is padded."""
    tokenizer = config.tokenizer
    multiple = 1
    if tokenizer is not None and not isinstance(tokenizer, str):
        multiple = tokenizer.pad_vocab_to_multiple_of or 1
    text = loaded.get_text_config()
    rows = text.vocab_size + len(config.new_tokens)
    text.vocab_size = math.ceil(rows / multiple) * multiple
