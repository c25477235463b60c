"""What a model's files say of it, and whether it can be trained at all."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from dbx_llmtrain.custom_code import load_from, private_modules
from dbx_llmtrain.driver.model_code import auto_class, find_code
from dbx_llmtrain.driver.model_files import read_header, refuse
from dbx_llmtrain.records import Artifact, ModelInfo

# Families that number the positions of a text from behind their padding token's id.
_LATE_POSITIONS = frozenset(
    "camembert data2vec-text longformer mpnet roberta roberta-prelayernorm xlm-roberta "
    "xlm-roberta-xl xmod".split()
)

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
    window = getattr(text, "sliding_window", None)
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and config.model_type in _LATE_POSITIONS:
        positions -= config.pad_token_id + 1
    return ModelInfo(
        artifact=artifact,
        source=name,
        revision=revision,
        model_type=config.model_type,
        parameters=_parameters(artifact, name),
        vocab_size=text.vocab_size,
        max_positions=positions,
        sliding_window=window if getattr(text, "use_sliding_window", True) else None,
    )


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
    """Numbers in the weight files, read from their headers."""
    total = 0
    for entry in artifact.files:
        if not entry.path.endswith(".safetensors"):
            continue
        try:
            tensors, _ = read_header(Path(artifact.source) / entry.path)
            total += sum(math.prod(item["shape"]) for item in tensors.values())
        except (ValueError, KeyError, TypeError) as error:
            raise refuse(f"{source}: {entry.path} is not a safetensors file") from error
    return total
