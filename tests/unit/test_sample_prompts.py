"""``train.sample_prompts`` before the start, and a model that cannot answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain.driver import sample_prompts
from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.text.prompts import Prompt
from dbx_llmtrain.worker import samples
from dbx_llmtrain.worker.loss import LossModule
from tests import sample, tiny
from tests.unit.test_loop import ALONE


def check(folder: Path, prompts: list[Any], *, positions: int = 128, **data: Any) -> None:
    if not folder.exists():
        tiny.tokenizer(chat_template=None).save_pretrained(folder)
    model = sample.run_plan().model
    artifact = model.artifact.model_copy(update={"source": str(folder)})
    update = {"artifact": artifact, "vocab_size": 320, "max_positions": positions}
    cfg = sample.config(train={"sample_prompts": prompts})
    sample_prompts.check(
        cfg, model.model_copy(update=update), sample.data().model_copy(update=data)
    )


def test_prompts_that_the_ranks_would_refuse_are_refused_on_the_driver(tmp_path: Path) -> None:
    folder = tmp_path / "words"
    turns = [{"role": "user", "content": "x"}]
    check(tmp_path / "nowhere", [])  # nothing is loaded
    check(folder, ["what"])
    check(folder, ["what", turns], chat_template=tiny.CHATML)
    with pytest.raises(ConfigError, match=r"sample_prompts\[1\]: is a list of messages, and the"):
        check(folder, ["what", turns])
    with pytest.raises(ConfigError, match=r"sample_prompts\[0\]: has 2 tokens, the model has 2"):
        check(folder, ["x"], positions=2)


def test_a_model_that_transformers_cannot_generate_with_is_told() -> None:
    model = tiny.bert()
    asked = samples.Asked((Prompt("x", (5, 6)),), None, {})
    with pytest.raises(ConfigError, match="cannot generate with BertForMaskedLM: leave them out"):
        samples.answer(LossModule(model, masked=True), model, ALONE, asked)
