"""What FSDP shards at a time: whole blocks of a model, whatever its family declares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from dbx_llmtrain.worker.parallel.fsdp import transformer_blocks
from tests import tiny


@pytest.mark.parametrize(
    "build", [tiny.llama, tiny.gpt2, tiny.mistral, tiny.bert, tiny.roberta, tiny.modernbert]
)
def test_every_block_is_one(build: Callable[[], Any]) -> None:
    model = build()
    blocks = transformer_blocks(model)
    assert len(blocks) == model.config.num_hidden_layers
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    held = [part for block in blocks for part in block.modules()]
    assert not [part for part in held if any(part is end for end in ends)]
    # A whole block, with its feed-forward part: nearly all that is no embedding.
    total = sum(weight.numel() for weight in model.parameters())
    at_ends = sum(weight.numel() for end in ends for weight in end.parameters())
    in_blocks = sum(weight.numel() for block in blocks for weight in block.parameters())
    assert in_blocks > 0.6 * (total - at_ends)


def test_experts_of_a_block_are_not_blocks() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(8))

    class Model(nn.Module):
        _no_split_modules = ("Block",)

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(2))

        def get_input_embeddings(self) -> None:
            return None

        get_output_embeddings = get_input_embeddings

    model = Model()
    assert transformer_blocks(model) == list(model.layers)
