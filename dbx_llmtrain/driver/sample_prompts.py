"""``train.sample_prompts`` before anything is started: whether each can be answered."""

from __future__ import annotations

from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.custom_code import private_modules
from dbx_llmtrain.driver import rules
from dbx_llmtrain.records import ModelInfo, PreparedData
from dbx_llmtrain.text import prompts


def check(cfg: TrainConfig, model: ModelInfo, data: PreparedData) -> None:
    """Raise ``ConfigError`` with every prompt that the ranks would refuse."""
    given = cfg.train.sample_prompts
    if not given:
        return
    trusted = cfg.model.trust_remote_code
    with private_modules(None, wanted=trusted):
        tokenizer = rules.load_tokenizer(model, trusted=trusted)
        if data.chat_template is not None:
            tokenizer.chat_template = data.chat_template
        chats = prompts.from_chats(data.format, tokenizer)
        prompts.encode(tokenizer, given, chats=chats, positions=model.max_positions)
