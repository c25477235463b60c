"""Answers of the model that is being trained to ``train.sample_prompts``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dbx_llmtrain.errors import ConfigError, Problem
from dbx_llmtrain.outcomes import Sample
from dbx_llmtrain.text.prompts import Prompt
from dbx_llmtrain.worker import lending
from dbx_llmtrain.worker.generation import as_list
from dbx_llmtrain.worker.world import World

NEW_TOKENS = 128
"""An answer to a sample prompt has at most so many tokens."""


@dataclass(frozen=True)
class Asked:
    """What is to be answered, in at most ``new_tokens`` each. ``generation`` has the ids of the
    model's tokens, ``positions`` is how many tokens it can see at once."""

    prompts: tuple[Prompt, ...]
    tokenizer: Any
    generation: dict[str, Any]
    positions: int | None = None
    new_tokens: int = NEW_TOKENS


def answer(root: nn.Module, model: Any, world: World, asked: Asked) -> list[Sample]:
    """The answers to all prompts, in their order, the same on every rank; all ranks call it.

    Decoded greedily. The ranks share the prompts out and answer one at a time, so that nothing is
    padded; what is sent between them is the answers. Raises ``ConfigError`` for a model that cannot
    generate.
    """
    if not lending.can_generate(model):
        name = type(model).__name__
        message = f"transformers cannot generate with {name}: leave them out"
        raise ConfigError([Problem("train.sample_prompts", message)])
    own: list[Sample] = []

    def use(lent: Any) -> None:
        for number in _turns(len(asked.prompts), world):
            own.append(_answer(lent, asked, asked.prompts[number], world.device))

    ids = {key: value for key, value in asked.generation.items() if key.endswith("_token_id")}
    lending.lend(root, model, world, use, ids | {"do_sample": False})
    everyone: list[Any] = [own]
    if world.size > 1:
        everyone = [None] * world.size
        dist.all_gather_object(everyone, own)
    by_round = [sample for turn in zip(*everyone, strict=True) for sample in turn]
    return by_round[: len(asked.prompts)]


def _turns(count: int, world: World) -> Sequence[int]:
    """Numbers of the prompts that this rank answers: every rank as many, for where weights are
    sharded each forward pass is one of all. What is left over is answered twice."""
    rounds = -(-count // world.size)
    return [min(turn * world.size + world.rank, count - 1) for turn in range(rounds)]


def _answer(model: Any, asked: Asked, prompt: Prompt, device: str) -> Sample:
    ids = torch.tensor([prompt.ids], device=device)
    room = asked.new_tokens
    if asked.positions is not None:
        room = min(room, asked.positions - len(prompt.ids))
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=room)
    new = found[0, ids.shape[1] :].tolist()
    ends = as_list(asked.generation.get("eos_token_id"))
    # (A rank that goes on for the others' sake adds pads.)
    stop = next((at + 1 for at, token in enumerate(new) if token in ends), len(new))
    new = new[:stop]
    text = asked.tokenizer.decode(new, skip_special_tokens=True)
    stopped = bool(new) and new[-1] in ends
    return Sample(prompt=prompt.shown, text=text, tokens=len(new), stopped=stopped)
