"""A ``.gguf`` file to a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dbx_llmtrain.compat import dtype_argument
from dbx_llmtrain.errors import ConfigError, Problem

_SPECIAL_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}


def convert(file: Path, target: Path) -> None:
    """Write config, bf16 weights, tokenizer and chat template of ``file`` to ``target``.

    The weights are dequantised to fp32 and rounded to bf16 once. ``from_pretrained(gguf_file=...)``
    is not used for them: its models refuse ``save_pretrained``. Raises ``ConfigError`` for a file
    that transformers cannot read, and where the package gguf is missing.
    """
    try:
        model, tokenizer = _load(file)
    except ImportError as error:
        raise _refuse(file, f"needs a package: {error}. pip install gguf") from error
    except (ValueError, KeyError, OSError, RuntimeError, NotImplementedError) as error:
        raise _refuse(file, f"cannot be read: {error}") from error
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _load(file: Path) -> tuple[Any, Any]:
    """The model in bf16 on the CPU, and the tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    tokenizer = _load_tokenizer(file)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=shape)["tensors"]
    model = AutoModelForCausalLM.from_config(config, **dtype_argument(torch.bfloat16))
    found = model.load_state_dict(tensors, strict=False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    missing = set(found.missing_keys) - (tied if config.tie_word_embeddings else set())
    if missing or found.unexpected_keys:
        raise ValueError(
            f"tensors missing: {sorted(missing)[:5]}, unknown: {found.unexpected_keys[:5]}"
        )
    return model, tokenizer


def _load_tokenizer(file: Path) -> Any:
    """The tokenizer with the special tokens that the file names.

    transformers < 5 ignores the file's flag for BOS (it always adds it with a tokenizer of the
    Llama family), and 4.50 takes the token of BOS for EOS: training would teach the wrong end.
    """
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    fields = GGUFReader(file).fields

    def number(name: str) -> int | None:
        field = fields.get(f"tokenizer.ggml.{name}")
        return None if field is None else int(field.parts[field.data[0]][0])

    add_bos = number("add_bos_token")
    settings = {} if add_bos is None else {"add_bos_token": bool(add_bos)}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, **settings)
    for ours, theirs in _SPECIAL_TOKENS.items():
        id_ = number(f"{theirs}_token_id")
        if id_ is not None:
            setattr(tokenizer, ours, tokenizer.convert_ids_to_tokens(id_))
    _remove_added(tokenizer, len(fields["tokenizer.ggml.tokens"].data))
    return tokenizer


def _remove_added(tokenizer: Any, size: int) -> None:
    """Take away the tokens that the file does not have: transformers 5 adds GPT-2's end token to
    every byte-level vocabulary, for which the model has no embedding."""
    from tokenizers import Tokenizer

    if max(tokenizer.added_tokens_decoder, default=0) < size:
        return
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < size]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))


def _refuse(file: Path, why: str) -> ConfigError:
    return ConfigError([Problem("model.source", f"{file} {why}")])
