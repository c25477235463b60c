"""What decides the tokens of a source's rows: its format, the template, the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dbx_llmtrain.custom_code import load_from
from dbx_llmtrain.driver.formatters import Formatter
from dbx_llmtrain.driver.inputs import Input
from dbx_llmtrain.driver.model_files import refuse
from dbx_llmtrain.errors import DataError
from dbx_llmtrain.records import ModelInfo
from dbx_llmtrain.sections import DataConfig
from dbx_llmtrain.text.encode import Encoder, Rules, apply_formatter
from dbx_llmtrain.text.formats import detect_format
from dbx_llmtrain.text.templates import resolve_template


def load_tokenizer(model: ModelInfo, *, trusted: bool = False) -> Any:
    """The tokenizer of a model; ``trusted``: its own code runs (inside
    ``custom_code.private_modules``).

    Raises ``ConfigError`` for one that cannot be loaded, or that knows a token for which the model
    has no embedding.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            **load_from(Path(model.artifact.source), trusted=trusted)
        )
    except Exception as error:
        # The tokenizers library raises bare Exceptions for files that it cannot read.
        raise refuse(f"the tokenizer of {model.source} cannot be loaded: {error}") from error
    token, highest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if highest >= model.vocab_size:
        raise refuse(
            f"the tokenizer of {model.source} gives token {token!r} the id {highest}, but the "
            f"model has embeddings for ids below {model.vocab_size} only: use the tokenizer that "
            "the model was trained with, or resize the model's embeddings and save it first"
        )
    return tokenizer


def choose(
    data: DataConfig,
    model: ModelInfo,
    inputs: Sequence[Input],
    formatter: Formatter | None,
    tokenizer: Any,
) -> list[Rules]:
    """The rules of every source, checked against the tokenizer.

    Raises ``DataError`` for a source without rows and for columns that are of no known format,
    ``ConfigError`` for a tokenizer or template that cannot be used for it.
    """
    template = resolve_template(data.chat_template, tokenizer) if data.chat_template else None
    # Packing lays whole documents end to end and cuts them itself.
    whole = data.objective == "pretrain" and data.packing == "concat"
    chosen = []
    for item in inputs:
        found = Rules(
            format=_format(data, item, formatter),
            columns=data.columns,
            objective=data.objective,
            train_on=data.train_on,
            max_length=data.max_length,
            overflow="split" if whole else data.overflow,
            chat_template=template,
            vocab_size=model.vocab_size,
        )
        if found not in chosen:
            Encoder(tokenizer, found, formatter=formatter)
        chosen.append(found)
    return chosen


def _format(data: DataConfig, item: Input, formatter: Formatter | None) -> str:
    """The format of a source, by its first row that is not left out."""
    for row, where in item.first_rows():
        if data.format != "auto":
            return data.format
        formatted = row if formatter is None else apply_formatter(formatter, row, where)
        if formatted is not None:
            return detect_format(formatted, data.columns, where)
    raise DataError(
        f"{item.told}: data.formatter leaves out each of the first rows, so that their format is "
        "not known: set data.format"
    )
