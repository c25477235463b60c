"""The arithmetic of memory and time against numbers worked out by hand, and against what autograd
really keeps. What training really takes is in ``tests/dist/test_memory_measured.py``."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Phi3Config

from dbx_llmtrain import activations, compat, memory, zero_config
from dbx_llmtrain.driver.sources import resolve_model
from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.estimates import MemoryEstimate, ModelShape
from dbx_llmtrain.memory import Adapters, Setup, estimate, flops_per_token, usable
from dbx_llmtrain.model_sections import ModelConfig, ParallelConfig
from dbx_llmtrain.records import ModelInfo
from dbx_llmtrain.shapes import model_shape
from dbx_llmtrain.worker import loss as loss_of_worker
from dbx_llmtrain.worker.loss import LossModule
from tests import tiny

GB = 10**9


def shape(config: Any) -> ModelShape:
    return model_shape(config, transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


def llama(**changes: Any) -> ModelShape:
    """Llama 2's 7B unless changed."""
    return shape(LlamaConfig(**({"tie_word_embeddings": False} | changes)))


@pytest.fixture(scope="module")
def models() -> dict[str, ModelShape]:
    return {
        "7B": llama(),
        "13B": llama(
            hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40
        ),
        "70B": llama(
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
        ),
    }


# Blocks of a Llama: q and o (hidden x heads), k and v (hidden x key heads), gate, up and down
# (hidden x intermediate), two norms. Around them the embedding, a head of its own, a norm.
HAND = {
    "7B": 32 * (2 * 4096 * 4096 + 2 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096)
    + 2 * 32000 * 4096 + 4096,
    "13B": 40 * (2 * 5120 * 5120 + 2 * 5120 * 5120 + 3 * 5120 * 13824 + 2 * 5120)
    + 2 * 32000 * 5120 + 5120,
    "70B": 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192)
    + 2 * 32000 * 8192 + 8192,
}  # fmt: skip


def test_parameters_are_those_of_the_published_models(models: dict[str, ModelShape]) -> None:
    assert HAND == {"7B": 6_738_415_616, "13B": 13_015_864_320, "70B": 68_976_648_192}
    assert {name: model.parameters for name, model in models.items()} == HAND


# Gigabytes of a rank: weights, master weights, gradients, optimizer state.
STATES = [
    # Everything on every rank: 4 + 4 + 8 bytes a parameter.
    ("7B", Setup("ddp", ranks=8), (26.95, 0, 26.95, 53.91)),
    ("13B", Setup("ddp", ranks=8), (52.06, 0, 52.06, 104.13)),
    ("70B", Setup("ddp", ranks=8), (275.9, 0, 275.9, 551.8)),
    # An eighth of it, and a 64th.
    ("7B", Setup("fsdp", ranks=8), (3.369, 0, 3.369, 6.738)),
    ("13B", Setup("fsdp", ranks=8), (6.508, 0, 6.508, 13.02)),
    ("70B", Setup("fsdp", ranks=64, nodes=8), (4.311, 0, 4.311, 8.622)),
    ("70B", Setup("fsdp", shard="grad_op", ranks=64, nodes=8), (4.311, 0, 4.311, 8.622)),
    # Hybrid: an eighth, since each of the 8 nodes has all of it.
    ("70B", Setup("fsdp", shard="hybrid", ranks=64, nodes=8), (34.49, 0, 34.49, 68.98)),
    # ZeRO, bf16: 2 bytes of weights; 4 of fp32 weights, 4 of gradients and 8 of state are cut.
    ("7B", Setup("deepspeed", stage=1, ranks=8), (13.48, 3.369, 26.95, 6.738)),
    ("7B", Setup("deepspeed", stage=2, ranks=8), (13.48, 3.369, 3.369, 6.738)),
    ("7B", Setup("deepspeed", stage=3, ranks=8), (1.685, 3.369, 3.369, 6.738)),
    ("13B", Setup("deepspeed", stage=2, ranks=16, nodes=2), (26.03, 3.254, 3.254, 6.508)),
    ("13B", Setup("deepspeed", stage=3, ranks=16, nodes=2), (1.627, 3.254, 3.254, 6.508)),
    ("70B", Setup("deepspeed", stage=3, ranks=64, nodes=8), (2.156, 4.311, 4.311, 8.622)),
]


@pytest.mark.parametrize(("name", "setup", "expected"), STATES)
def test_states_of_7b_13b_and_70b_are_those_by_hand(
    models: dict[str, ModelShape], name: str, setup: Setup, expected: tuple[float, ...]
) -> None:
    found = memory.states(models[name], setup)
    ours = (found.weights, found.master, found.gradients, found.optimizer)
    assert [value / GB for value in ours] == pytest.approx(expected, rel=0.01)


def test_plain_mixed_precision_adam_is_sixteen_bytes(models: dict[str, ModelShape]) -> None:
    """The landmark of ZeRO (arXiv 1910.02054), 2 + 2 + 12: here 4 + 4 + 8."""
    for model in models.values():
        found = memory.states(model, Setup("ddp", ranks=8))
        whole = found.weights + found.gradients + found.optimizer
        assert whole / model.parameters == pytest.approx(16, rel=1e-6)


def test_activations_of_7b_by_hand(models: dict[str, ModelShape]) -> None:
    setup = Setup("fsdp", ranks=8, length=4096)
    # A token in a block, bf16: two norms with an fp32 input, normalised, result: 2 x 8 x 4096;
    # q, k, v and the result of attention: 4 x 2 x 4096; gate, its SiLU, up, product: 4 x 2 x 11008.
    token = 2 * 8 * 4096 + 4 * 2 * 4096 + 4 * 2 * 11008
    assert activations.block(models["7B"], setup) == 4096 * token == 763_363_328
    # Checkpointed: only what goes into a block, 2 x 4096 bytes a token; the mask 2 x 4096 x 4096;
    # the last norm (8 x 4096) and the rotary tables (2 x 2 x 128).
    checkpointed = activations.kept(models["7B"], replace(setup, gradient_checkpointing=1))
    ends = 4096 * (8 * 4096 + 2 * 2 * 128)
    assert checkpointed == 32 * 4096 * 2 * 4096 + 2 * 4096 * 4096 + ends
    every_second = activations.kept(models["7B"], replace(setup, gradient_checkpointing=2))
    assert every_second - checkpointed == 16 * (4096 * token - 4096 * 2 * 4096)


def test_logits_do_not_grow_with_vocabulary_times_length(models: dict[str, ModelShape]) -> None:
    short, long = (
        activations.loss_chunk(models["7B"], Setup("single", length=length))
        for length in (4096, 32768)
    )
    assert short == long
    # 1,572 positions of 32,000 logits, fp32 and bf16: one chunk.
    assert short == 1572 * 32000 * 6


def test_the_numbers_are_those_of_the_loss_and_of_deepspeed() -> None:
    assert activations.CHUNK_LOGITS == loss_of_worker._CHUNK_LOGITS
    zero = zero_config.build(
        ParallelConfig(kind="deepspeed", stage=3),
        micro_batch=1,
        precision="bf16",
        max_grad_norm=1.0,
        device="cuda:0",
    )["zero_optimization"]
    assert zero["reduce_bucket_size"] == memory._BUCKET_ZERO
    assert zero["stage3_max_live_parameters"] == memory._LIVE_ZERO3


# What autograd keeps -----------------------------------------------------------------------------

SMALL = {
    "llama": LlamaConfig(
        hidden_size=256, intermediate_size=640, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=97,
    ),
    "gpt2": GPT2Config(n_embd=256, n_head=8, n_layer=1, vocab_size=97),
    "phi3": Phi3Config(
        hidden_size=256, intermediate_size=640, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=97, pad_token_id=0,
    ),
    "mixtral": MixtralConfig(
        hidden_size=256, intermediate_size=640, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=97, num_local_experts=4,
    ),
}  # fmt: skip
FEW = Setup("single", device="cpu", length=128, precision="fp32")
KEPT = [
    ("llama", FEW),
    ("llama", replace(FEW, packed=False)),
    ("llama", replace(FEW, attention="eager")),
    ("llama", replace(FEW, precision="bf16")),
    ("llama", replace(FEW, precision="bf16", attention="eager")),
    ("llama", replace(FEW, kind="fsdp", precision="bf16")),
    ("gpt2", FEW),
    ("gpt2", replace(FEW, kind="fsdp", precision="bf16")),
    ("phi3", FEW),
    ("phi3", replace(FEW, kind="fsdp", precision="bf16")),
    ("mixtral", FEW),
    ("mixtral", replace(FEW, kind="fsdp", precision="bf16")),
]


@pytest.mark.skipif(
    not compat.at_least("transformers", "5"), reason="blocks of transformers 4 keep other tensors"
)
@pytest.mark.parametrize(("name", "setup"), KEPT)
def test_a_block_keeps_what_autograd_keeps(name: str, setup: Setup) -> None:
    config = SMALL[name]
    layers = "n_layer" if name == "gpt2" else "num_hidden_layers"
    one, two = (
        saved(type(config).from_dict(config.to_dict() | {layers: count}), setup) for count in (1, 2)
    )
    small = shape(config)
    expected = activations.block(small, setup) + memory.cast_weights(small, setup)
    # (Phi's rotary embedding lays queries out anew, so attention's result is copied once more.)
    assert expected == pytest.approx(two - one, rel=0.05 if name == "phi3" else 0.02)


def saved(config: Any, setup: Setup) -> int:
    """Bytes that a forward pass saves for the backward one, parameters not counted."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=setup.attention).train()
    model.config.use_cache = False
    autocast = setup.precision == "bf16" and setup.kind == "single"
    if setup.precision == "bf16" and not autocast:
        model = model.bfloat16()
    module = LossModule(model)
    module.autocast = torch.bfloat16 if autocast else None
    module.padded = not setup.packed
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    length = setup.length
    ids = torch.randint(0, 97, (1, length))
    place = torch.arange(length)[None]
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        module(
            input_ids=ids,
            position_ids=place % (length // 2),
            segment_ids=1 + place // (length // 2) if setup.packed else None,
            labels=ids,
        )
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


# Shapes ------------------------------------------------------------------------------------------


def test_shape_of_a_llama_and_its_parts() -> None:
    found = shape(SMALL["llama"])
    model = tiny.llama()
    assert (found.hidden, found.intermediate, found.heads, found.kv_heads) == (256, 640, 8, 2)
    assert (found.head_dim, found.vocab, found.blocks, found.gated) == (32, 97, 1, True)
    assert found.block_parameters == found.blocks_parameters
    linears = sum(one.inputs * one.outputs * one.count for one in found.linears)
    assert found.blocks_parameters == linears + 2 * 256
    assert found.root_parameters == 2 * 97 * 256 + 256
    own = model_shape(model.config, type(model))
    assert own.parameters == sum(p.numel() for p in model.parameters())


def test_shape_of_a_tied_and_of_a_mixture_of_experts() -> None:
    gpt2 = shape(GPT2Config())
    assert (gpt2.parameters, gpt2.tied, gpt2.head_parameters) == (124_439_808, True, 0)
    assert (gpt2.gated, gpt2.norm, gpt2.dropout, gpt2.activation) == (
        False, "layer", True, "gelu_new",
    )  # fmt: skip
    mixtral = shape(MixtralConfig(tie_word_embeddings=False))
    # Mixtral 8x7B: 46.7 billion parameters, of which a token meets 12.9.
    assert mixtral.parameters == 46_702_792_704
    assert mixtral.active_parameters == 12_879_925_248


def test_seventy_billion_take_no_time() -> None:
    started = time.process_time()
    big = llama(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    for ranks in range(1, 201):
        estimate(big, Setup("fsdp", ranks=ranks))
    assert big.parameters == 70_553_706_496
    assert time.process_time() - started < 3


def test_a_model_brings_its_shape(tmp_path: Path) -> None:
    found = described(tiny.model_folder(tmp_path / "model"), tmp_path).shape
    assert found is not None
    assert (found.hidden, found.blocks, found.model_type) == (32, 2, "llama")


def test_a_configuration_that_builds_no_model_is_refused(tmp_path: Path) -> None:
    folder = tiny.model_folder(tmp_path / "model")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"hidden_act": "no such function"}))
    with pytest.raises(ConfigError, match=r"no model can be built from its config\.json: KeyError"):
        described(folder, tmp_path)


def described(folder: Path, tmp_path: Path) -> ModelInfo:
    return resolve_model(ModelConfig(source=str(folder)), tmp_path / "cache", objective="sft")


# LoRA, other optimizers, offload ------------------------------------------------------------------


def test_adapters_train_little_over_a_frozen_base(models: dict[str, ModelShape]) -> None:
    model = models["7B"]
    # r x (inputs + outputs): q, k, v, o (4096 + 4096), gate, up, down (4096 + 11008), 32 blocks.
    trained = 32 * 16 * (4 * 8192 + 3 * 15104)
    lora = Setup("single", lora=Adapters(16), length=2048)
    assert memory.trained_parameters(model, lora) == trained == 39_976_960
    found = memory.states(model, lora)
    assert found.weights == 2 * model.parameters + 4 * trained
    assert (found.gradients, found.optimizer) == (4 * trained, 8 * trained)
    some = replace(lora, lora=Adapters(8, ("q_proj", "v_proj")))
    assert memory.trained_parameters(model, some) == 32 * 8 * 2 * 8192
    # 4 bits: half a byte and its scales for every matrix of the blocks, 2 bytes for the rest.
    small = memory.states(model, replace(lora, load_in_4bit=True)).weights
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    rest = 2 * (model.parameters - matrices) + 4 * trained
    assert small == pytest.approx(0.516 * matrices + rest, rel=0.01)
    assert estimate(model, replace(lora, load_in_4bit=True)).total < usable(24 * 2**30)


@pytest.mark.parametrize(
    ("optimizer", "momentum", "each"),
    [("adamw", False, 8), ("adamw_8bit", False, 2.03), ("sgd", False, 0), ("sgd", True, 4)],
)
def test_state_of_an_optimizer(
    models: dict[str, ModelShape], optimizer: Any, momentum: bool, each: float
) -> None:
    setup = Setup("single", optimizer=optimizer, momentum=momentum)
    found = memory.states(models["7B"], setup).optimizer / models["7B"].parameters
    assert found == pytest.approx(each, rel=0.01)


def test_adafactor_keeps_rows_and_columns(models: dict[str, ModelShape]) -> None:
    found = memory.states(models["7B"], Setup("single", optimizer="adafactor")).optimizer
    assert 0 < found < 0.001 * 8 * models["7B"].parameters


def test_offload_moves_the_states_to_the_host(models: dict[str, ModelShape]) -> None:
    model = models["7B"]
    kept = estimate(model, Setup("fsdp", ranks=8))
    moved = estimate(model, Setup("fsdp", ranks=8, cpu_offload=True))
    assert (moved.weights, moved.optimizer) == (0, 0)
    assert kept.host + 16 * model.parameters == pytest.approx(moved.host, rel=0.01)
    zero = estimate(model, Setup("deepspeed", stage=2, ranks=8, offload_optimizer="cpu"))
    assert zero.weights == 2 * model.parameters
    # fp32 weights, gradients and state: 16 bytes a parameter on the node.
    assert kept.host + 16 * model.parameters == pytest.approx(zero.host, rel=0.01)
    nvme = Setup("deepspeed", ranks=8, offload_optimizer="nvme", offload_params="nvme")
    found = estimate(model, nvme)
    assert found.weights == 0
    # 4 + 8 of the optimizer and 2 of the weights lie on disk.
    assert found.disk - kept.disk == pytest.approx(14 * model.parameters, rel=0.01)


def test_disk_and_checkpoint(models: dict[str, ModelShape]) -> None:
    model = models["7B"]
    setup = Setup("fsdp", ranks=16, nodes=2, model_bytes=13 * GB, data_bytes=GB)
    found = estimate(model, setup)
    # fp32 weights and AdamW's two numbers, half of it on its way through each node's disk.
    assert found.checkpoint == 12 * model.parameters
    assert found.disk == 13 * GB + GB + 6 * model.parameters


EVERY = [
    Setup("single"),
    Setup("ddp", ranks=8, accumulation=4),
    *(Setup("fsdp", shard=shard, ranks=8) for shard in ("full", "grad_op", "hybrid")),
    Setup("fsdp", ranks=8, cpu_offload=True),
    *(Setup("deepspeed", stage=stage, ranks=8) for stage in (1, 2, 3)),
    Setup("deepspeed", stage=2, ranks=8, offload_optimizer="cpu"),
    Setup("deepspeed", stage=3, ranks=8, offload_optimizer="nvme", offload_params="cpu"),
    Setup("fsdp", ranks=8, lora=Adapters(16)),
    Setup("ddp", ranks=8, masked=True),
]


@pytest.mark.parametrize("setup", EVERY)
def test_the_parts_add_up_and_more_work_takes_more(
    models: dict[str, ModelShape], setup: Setup
) -> None:
    found = estimate(models["7B"], setup)
    assert found.total == sum(parts(found))
    assert all(value >= 0 for value in parts(found))
    assert estimate(models["13B"], setup).total > found.total
    assert estimate(models["7B"], replace(setup, micro_batch=8, length=4096)).total > found.total
    again = estimate(models["7B"], replace(setup, micro_batch=8, length=4096,
                                           gradient_checkpointing=1))  # fmt: skip
    assert again.total < estimate(models["7B"], replace(setup, micro_batch=8, length=4096)).total
    assert MemoryEstimate.model_validate_json(found.model_dump_json()) == found


def parts(found: MemoryEstimate) -> list[int]:
    names = "weights master gradients optimizer activations logits communication".split()
    return [getattr(found, name) for name in names]


def test_grad_op_holds_the_gathered_weights(models: dict[str, ModelShape]) -> None:
    model = models["7B"]
    full, kept = (
        estimate(model, Setup("fsdp", shard=shard, ranks=64, nodes=8, length=4096))
        for shard in ("full", "grad_op")
    )
    difference = kept.communication - full.communication
    assert difference == pytest.approx(2 * model.blocks_parameters, rel=0.1)


# Time --------------------------------------------------------------------------------------------


def test_operations_of_a_token(models: dict[str, ModelShape]) -> None:
    model = models["7B"]
    # Every matrix three times (the embedding is only looked up), 2 operations a number; attention's
    # two products over 4,096 places, three times.
    matrices = 6 * (6_738_415_616 - 32000 * 4096)
    attention = 12 * 32 * 4096 * 4096
    assert flops_per_token(model, 4096) == matrices + attention
    again = flops_per_token(model, 4096, checkpointing=1)
    assert again == pytest.approx((matrices + attention) * 4 / 3)
    assert flops_per_token(model, 4096, lora=True) == pytest.approx(matrices * 2 / 3 + attention)


def test_what_of_a_gpu_can_be_used() -> None:
    assert usable(80 * 2**30) == pytest.approx(80.4 * GB, rel=0.01)
    assert usable(10**9) == 0
