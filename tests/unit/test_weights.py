"""Which tensor of the files is which, what a rank holds of it, and what is said of broken files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dbx_llmtrain import compat
from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.worker import initial, weight_names
from dbx_llmtrain.worker.model import build, load_model
from dbx_llmtrain.worker.parts import Box, Run, part_of
from dbx_llmtrain.worker.weight_files import WeightFiles
from dbx_llmtrain.worker.weights import Fill
from dbx_llmtrain.worker.world import World
from tests import sample, tiny

ALONE = World(0, 1, 0, "n", "h", "cpu", 1, ("n",))


def fill(folder: Path, **model: Any) -> tuple[Fill, nn.Module]:
    """A model of a folder, filled on the CPU of one rank."""
    config = sample.config(model={"source": "/x"} | model)
    filling = Fill(sample.run_plan(config=config, attention="sdpa"), folder, ALONE)
    network = filling.build().to_empty(device="cpu")
    filling(network)
    return filling, network


def equal(first: Any, second: Any) -> bool:
    ours, theirs = first.state_dict(), second.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_a_structure_has_no_weights_but_all_buffers(tmp_path: Path) -> None:
    tiny.llama(tied=True).save_pretrained(tmp_path)
    model, whole = (make(tmp_path, attention="sdpa") for make in (build, load_model))
    assert all(weight.is_meta and weight.requires_grad for weight in model.parameters())
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.training
    assert model.config.use_cache is False
    buffers = dict(model.named_buffers())
    assert buffers
    assert all(torch.equal(buffers[name], own) for name, own in whole.named_buffers())
    assert next(nn.Linear(2, 2).parameters()).device.type == "cpu"  # nothing is left behind


def test_files_in_several_shards_are_read(tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    filling, model = fill(tmp_path)
    assert equal(model, load_model(tmp_path, attention="sdpa"))
    sizes = sum(math.prod(tensor.shape) * 4 for tensor in model.state_dict().values())
    assert filling.requested == sizes


@pytest.mark.parametrize("prefix", ["", "model."])
def test_files_of_the_body_alone_fit_with_or_without_its_prefix(
    tmp_path: Path, prefix: str
) -> None:
    model = tiny.llama(tied=True)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {prefix + name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert equal(fill(tmp_path)[1], model)


@pytest.mark.parametrize("build", [tiny.llama, tiny.mixtral, tiny.bert])
def test_before_transformers_5_names_are_the_same_or_it_loads_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Any
) -> None:
    monkeypatch.setattr(weight_names, "at_least", lambda package, minimum: False)
    model = build()
    model.save_pretrained(tmp_path)
    config = sample.config(
        data={"train": "/x", "objective": "mlm" if build is tiny.bert else "sft"}
    )
    filling = Fill(sample.run_plan(config=config, attention="sdpa"), tmp_path, ALONE)
    network = filling.build().to_empty(device="cpu")
    filling(network)
    assert equal(network, load_model(tmp_path, attention="sdpa", objective=config.data.objective))
    # transformers 4 has the experts one by one, as the files do.
    merged = build is tiny.mixtral and compat.at_least("transformers", "5")
    assert (filling.requested == 0) is merged


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 63}))
    with pytest.raises(CheckpointError, match=r"mismatched: model\.layers\.0\.mlp\.down_proj"):
        fill(tmp_path)


def test_c68_rows_that_are_lacking_are_an_error_where_nobody_asked_for_new_ones(
    tmp_path: Path,
) -> None:
    tiny.llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 112}))
    with pytest.raises(CheckpointError, match=r"mismatched: lm_head\.weight, model\.embed_tokens"):
        fill(tmp_path)


def test_an_extra_tensor_in_the_files_is_left_alone(tmp_path: Path) -> None:
    model = tiny.llama()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.old"] = torch.zeros(3)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert equal(fill(tmp_path)[1], model)


def test_c69_digests_tell_other_weights(tmp_path: Path) -> None:
    for name, model in (("a", tiny.llama()), ("b", tiny.llama()), ("c", tiny.llama(seed=1))):
        model.save_pretrained(tmp_path / name)
    first, same, other = (WeightFiles(tmp_path / name).digests() for name in "abc")
    assert first == same
    equal_ones = {name for name in first if first[name] == other[name]}
    assert equal_ones == {name for name in first if "norm" in name}  # all ones


def test_c69_a_large_tensor_is_sampled(tmp_path: Path) -> None:
    weights = {"large": torch.arange(300 * 100.0).reshape(300, 100), "long": torch.zeros(20000)}
    save_file(weights, tmp_path / "model.safetensors")
    before = WeightFiles(tmp_path).digests()
    weights["large"][150, 99] += 1
    weights["long"][10_200] += 1
    save_file(weights, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    assert all(before[name] != found for name, found in files.digests().items())
    assert files.requested == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("shape", [(5, 3), (6,), (1,), (4, 2, 3)])
def test_runs_of_a_flattened_tensor_take_their_numbers(shape: tuple[int, ...], ranks: int) -> None:
    tensor = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    size = -(-tensor.numel() // ranks)
    held = [Run(torch.zeros(size), shape, rank * size) for rank in range(ranks)]
    for part in held:
        assert part.everywhere is False
        for row in range(part.start, part.stop):
            part.put(row, tensor[row : row + 1])
    found = torch.cat([part.target for part in held])
    assert torch.equal(found[: tensor.numel()], tensor.flatten())
    assert not found[tensor.numel() :].any()


def test_boxes_take_what_overlaps() -> None:
    tensor = torch.arange(24.0).reshape(6, 4)
    box = Box(torch.zeros(3, 2), (6, 4), (2, 1), everywhere=False)
    for first in (0, 4):
        box.put(first, tensor[first : first + 4])
    assert torch.equal(box.target, tensor[2:5, 1:3])
    assert (box.start, box.stop) == (2, 5)
    scalar = part_of(nn.Parameter(torch.tensor(1.0)))
    scalar.put(0, torch.tensor([3.0]))
    assert (scalar.shape, scalar.everywhere) == ((1,), True)


def test_random_weights_do_not_touch_the_random_state(tmp_path: Path) -> None:
    tiny.llama().config.save_pretrained(tmp_path)
    model = build(tmp_path, attention="sdpa")
    before = torch.get_rng_state()
    names = [name for name, _ in initial.tensors(model, 0)]
    assert torch.equal(torch.get_rng_state(), before)
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert all(parameter.is_meta for parameter in model.parameters())


def test_blocks_start_with_different_weights(tmp_path: Path) -> None:
    tiny.llama().config.save_pretrained(tmp_path)
    found = dict(initial.tensors(build(tmp_path, attention="sdpa"), 0))
    first, second = (found[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1))
    assert not torch.equal(first, second)
    other = dict(initial.tensors(build(tmp_path, attention="sdpa"), 1))
    assert not torch.equal(other["model.layers.0.mlp.up_proj.weight"], first)


def test_a_parameter_that_no_initialiser_knows_is_an_error(tmp_path: Path) -> None:
    tiny.llama().config.save_pretrained(tmp_path)
    model = build(tmp_path, attention="sdpa")
    model.model.extra = nn.Parameter(torch.empty(2, 2, device="meta"))
    with pytest.raises(CheckpointError, match=r"initialiser gives no value to model\.extra"):
        dict(initial.tensors(model, 0))
