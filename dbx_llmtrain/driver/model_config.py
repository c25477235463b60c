"""What a model's files say of it, and whether it can be trained at all."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from dbx_llmtrain import storage
from dbx_llmtrain.custom_code import load_from, private_modules
from dbx_llmtrain.driver.model_code import auto_class, find_code
from dbx_llmtrain.driver.model_files import read_header, refuse
from dbx_llmtrain.estimates import ModelShape
from dbx_llmtrain.records import Artifact, ModelInfo
from dbx_llmtrain.shapes import model_shape, without_storage

# Families that number the positions of a text from behind their padding token's id.
_LATE_POSITIONS = frozenset(
    "camembert data2vec-text longformer mpnet roberta roberta-prelayernorm xlm-roberta "
    "xlm-roberta-xl xmod".split()
)

_COUNTS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
_HEAD_SIZES = ("head_dim", "qk_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_channels")
"""Under these names a model tells how large a head is, whatever the hidden size."""

_DECODER = "is_decoder: true"


def describe(
    artifact: Artifact,
    name: str,
    revision: str | None,
    *,
    trusted: bool = False,
    attention: str = "auto",
    objective: str = "sft",
) -> ModelInfo:
    """What the plan needs to know of a model that the user calls ``name``.

    Raises ``ConfigError`` for one that cannot be trained, or not for this ``data.objective``, or
    not with this ``attention``.
    """
    config = load_config(
        Path(artifact.source), name, trusted=trusted, attention=attention, objective=objective
    )
    text = config.get_text_config()
    shape = shape_of(config, Path(artifact.source), name, trusted=trusted, objective=objective)
    window = getattr(text, "sliding_window", None)
    return ModelInfo(
        artifact=artifact,
        source=name,
        revision=revision,
        model_type=config.model_type,
        parameters=_parameters(artifact, name) or shape.parameters,
        vocab_size=text.vocab_size,
        max_positions=positions_of(config),
        sliding_window=window if getattr(text, "use_sliding_window", True) else None,
        shape=shape,
    )


def positions_of(config: Any) -> int | None:
    """How many tokens a text may have at most; ``None`` where the model sets no limit."""
    positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and config.model_type in _LATE_POSITIONS:
        positions -= config.pad_token_id + 1
    return positions


def load_config(
    folder: Path, name: str, *, trusted: bool, attention: str = "auto", objective: str = "sft"
) -> Any:
    """The model's configuration; where ``trusted``, its own code is imported too.

    Raises ``ConfigError`` for a model that cannot be trained for this ``objective``, or not with
    this ``attention``, and for code that cannot be imported.
    """
    from transformers import AutoConfig

    trusted = trusted and bool(find_code(folder, name).files)
    with private_modules(None, wanted=trusted):
        arguments = load_from(folder, trusted=trusted)
        try:
            config = AutoConfig.from_pretrained(**arguments)
            model = _own_class(config, arguments, objective)
        except Exception as error:
            # A model's own code may raise anything.
            if trusted:
                kind = type(error).__name__
                raise refuse(f"{name}: its code cannot be imported: {kind}: {error}") from error
            raise refuse(f"{name}: transformers cannot read its config.json: {error}") from error
    model = model or _known_class(config, name, objective)
    if getattr(config, "quantization_config", None):
        raise refuse(f"{name} has quantised weights: expected bf16, fp16 or fp32 weights")
    if not isinstance(getattr(config.get_text_config(), "vocab_size", None), int):
        raise refuse(f"{name}: its configuration has no vocab_size, the rows of its embedding")
    if attention == "sdpa" and not getattr(model, "_supports_sdpa", False):
        raise refuse(
            f"{name} ({config.model_type}) has no sdpa attention: use auto or eager",
            "model.attention",
        )
    return config


def shape_of(
    config: Any, folder: Path, name: str, *, trusted: bool, objective: str = "sft"
) -> ModelShape:
    """What the arithmetic of memory needs to know of the model that ``config`` describes; no weight
    is read. ``folder`` has its own code, where it has some and is ``trusted``.

    Raises ``ConfigError`` where no model can be built from the configuration, or it cannot
    compute.
    """
    if wrong := impossible(config.get_text_config()):
        raise refuse(f"{name}: no model can be built from its config.json: {wrong}")
    trusted = trusted and bool(find_code(folder, name).files)
    with private_modules(None, wanted=trusted):
        model = _own_class(config, load_from(folder, trusted=trusted), objective)
        model = model or _known_class(config, name, objective)
        try:
            return model_shape(config, model)
        except Exception as error:
            # Inconsistent numbers raise whatever the model's code makes of them.
            kind = type(error).__name__
            raise refuse(
                f"{name}: no model can be built from its config.json: {kind}: {error}"
            ) from error


def impossible(text: Any) -> str:
    """Why a language model of this configuration cannot compute, though it can be built; empty
    where nothing is wrong. (Numbers that are not there, or one for every layer, are left alone.)"""

    def number(name: str) -> int | None:
        value = getattr(text, name, None)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    for name in _COUNTS:
        value = number(name)
        if value is not None and value < 1:
            return f"{name} is {value}: expected 1 or more"
    hidden, heads = number("hidden_size"), number("num_attention_heads")
    groups = number("num_key_value_heads")
    if heads and groups and heads % groups:
        return (
            f"num_attention_heads is {heads}, which is no multiple of num_key_value_heads, {groups}"
        )
    sized = any(getattr(text, name, None) is not None for name in _HEAD_SIZES)
    if hidden and heads and not sized and hidden % heads:
        return (
            f"hidden_size is {hidden}, which is no multiple of num_attention_heads, {heads}, and "
            "there is no head_dim"
        )
    return ""


def empty_model(
    config: Any, folder: Path, name: str, *, trusted: bool, objective: str = "sft"
) -> Any:
    """The model that ``config`` describes, without storage: for the names of its layers."""
    trusted = trusted and bool(find_code(folder, name).files)
    with private_modules(None, wanted=trusted):
        model = _own_class(config, load_from(folder, trusted=trusted), objective)
        return without_storage(config, model or _known_class(config, name, objective))


def _own_class(config: Any, arguments: dict[str, Any], objective: str) -> Any:
    """The class of the model's own code that will be used, ``None`` where there is none. It is
    imported: a package that it lacks shows here."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    own = (getattr(config, "auto_map", None) or {}).get(auto_class(objective))
    if own is None or not arguments["trust_remote_code"]:
        return None
    return get_class_from_dynamic_module(
        own, arguments["pretrained_model_name_or_path"], local_files_only=True
    )


def _known_class(config: Any, name: str, objective: str) -> Any:
    """The class of transformers for a model of its own. Raises ``ConfigError`` for a model of
    another kind than the objective trains.

    Some types (BERT) are both: then the configuration says by ``is_decoder`` what it is, since an
    encoder sees the tokens that it would be trained to predict.
    """
    import transformers

    causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    masked = transformers.MODEL_FOR_MASKED_LM_MAPPING.get(type(config), None)
    if getattr(config, "is_encoder_decoder", False):
        raise refuse(
            f"{name} is of type {config.model_type}: expected a causal language model or one for "
            "masked tokens, found an encoder with a decoder"
        )
    both = bool(causal and masked)
    if both and (getattr(config, "is_decoder", False) or getattr(config, "causal", False)):
        masked = None
    elif both:
        causal = None
    if objective == "mlm" and not masked:
        raise refuse(
            f"{name} is of type {config.model_type}{' as a decoder' if both else ''}: "
            "data.objective mlm needs a model for masked tokens (BERT, RoBERTa, ModernBERT and the "
            "like)"
        )
    if objective != "mlm" and not causal:
        why = f" and its config.json does not say {_DECODER}" if both else ""
        hint = ", or data.objective: mlm" if masked else ""
        raise refuse(
            f"{name} is of type {config.model_type}{why}: expected a causal language model{hint}"
        )
    return masked if objective == "mlm" else causal


def _parameters(artifact: Artifact, source: str) -> int:
    """Numbers in the weight files, read from their headers; 0 where there are none."""
    total = 0
    for entry in artifact.files:
        if not entry.path.endswith(".safetensors"):
            continue
        try:
            tensors, _ = read_header(storage.place(Path(artifact.source), entry))
            total += sum(math.prod(item["shape"]) for item in tensors.values())
        except (ValueError, KeyError, TypeError) as error:
            raise refuse(f"{source}: {entry.path} is not a safetensors file") from error
    return total
