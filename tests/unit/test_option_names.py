from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain import config_checks, option_names, option_tables, option_values
from dbx_llmtrain.config import TrainConfig, field_paths
from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.option_names import OPTIONS

ROOT = Path(__file__).parents[2]


def test_every_row_leads_to_a_field_or_says_why_not() -> None:
    """A field is one that lives, or one that is refused by name until it does."""
    for option in OPTIONS:
        assert option.name, option
        if option.ours is None:
            assert option.note, option
            continue
        path = ".".join(option.ours.split(".")[:2])
        assert path in field_paths() or config_checks.not_yet(path, None), option


def test_names_are_unique_within_a_source() -> None:
    twice = Counter((option.source, option.name) for option in OPTIONS)
    assert [key for key, count in twice.items() if count > 1] == []
    assert len(OPTIONS) > 400


def test_every_hugging_face_argument_is_known() -> None:
    transformers = pytest.importorskip("transformers")
    known = {option.name for option in OPTIONS if option.source == option_tables.HF}
    theirs = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert theirs - known == set()


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("num_train_epochs", "train.epochs"),
        ("train.num-train-epochs", "train.epochs"),
        ("per_device_train_batch_size", "train.micro_batch_size"),
        ("max_seq_length", "data.max_length"),
        ("distributed_type", "parallel.kind"),
        ("fsdp_config.fsdp_sharding_strategy", "parallel.shard"),
        ("train_micro_batch_size_per_gpu", "train.micro_batch_size"),
        ("zero_optimization.stage", "parallel.stage"),
        ("optimizer.params.lr", "train.learning_rate"),
        ("bf16.enabled", "train.precision"),
        ("lr", "train.learning_rate"),
        ("optim.sched.name", "train.schedule"),
        ("global_batch_size", "train.global_batch_size"),
        ("lora_alpha", "model.lora.alpha"),
        ("use_dora", "model.lora"),
        ("use_liger_kernel", "model.use_liger_kernel"),
        ("torch_compile", "model.compile"),
        ("activation_checkpointing", "model.gradient_checkpointing"),
        ("deepspeed", "parallel.config"),
        ("fsdp_config.fsdp_offload_params", "parallel.cpu_offload"),
        ("fsdp_config.offload_params", "parallel.cpu_offload"),
        ("zero_optimization.offload_param.device", "parallel.offload_params"),
        ("lr_scheduler_kwargs", "train.decay_steps"),
        ("adam_epsilon", "train.optimizer"),
        ("optim", "train.optimizer"),
        ("resize_token_embeddings", "model.new_tokens"),
        ("tokenizer_name", "model.tokenizer"),
        ("report_to", "tracking.tensorboard"),
        ("create_tensorboard_logger", "tracking.tensorboard"),
        ("disable_tqdm", "tracking.progress"),
        ("log_level", "tracking.log_level"),
        ("save_total_limit", "checkpoint.keep_last"),
        ("load_best_model_at_end", "checkpoint.keep_best"),
        ("metric_for_best_model", "checkpoint.metric"),
        ("greater_is_better", "checkpoint.metric_mode"),
        ("early_stopping_threshold", "train.early_stopping"),
        ("per_device_eval_batch_size", "train.eval_micro_batch_size"),
        ("max_eval_samples", "train.eval_max_rows"),
        ("check_val_every_n_epoch", "train.eval_every"),
        ("train_time_interval", "checkpoint.every_minutes"),
        ("checkpoint_callback_params.save_top_k", "checkpoint.keep_best"),
        ("early_stopping_callback_params.patience", "train.early_stopping"),
        ("val_set_size", "data.eval"),
        ("eval_table_size", "train.sample_prompts"),
    ],
)
def test_names_of_other_trainers_are_found(name: str, ours: str) -> None:
    found = option_names.find(name)
    assert {option.ours for option in found} == {ours}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("device_map", "parallel.kind"),
        ("_n_gpu", "DataParallel"),
        ("tensor_model_parallel_size", "tensor parallelism"),
        ("pipeline_model_parallel_size", "pipeline parallelism"),
        ("sequence_parallel", "sequence"),
        ("context_parallel_size", "context"),
        ("rampup_batch_size", "the same in every step"),
        ("fp8_config", "fp8 is not supported"),
        ("mpirun_config", "MPI"),
        ("tpu_num_cores", "TPUs are not supported"),
        ("wandb", "MLflow"),
        ("push_to_hub", 'export(..., push_to_hub="org/name")'),
        ("eval_causal_lm_metrics", "train(cfg, metrics=...)"),
        ("async_save", "while training goes on"),
    ],
)
def test_what_we_do_not_have_is_said_with_the_reason(name: str, reason: str) -> None:
    (found,) = option_names.find(name)
    assert found.ours is None
    assert reason in found.note
    (problem,) = config_checks.unknown_key(name, [])
    assert f"{found.source}'s {found.name} has no counterpart here: {found.note}" in str(problem)


@pytest.mark.parametrize(
    "name", ["enabled", "tracking.enabled", "data.type", "no_such_option", "x"]
)
def test_vague_and_unknown_names_are_not_found(name: str) -> None:
    assert option_names.find(name) == []


def test_nearest() -> None:
    valid = field_paths()
    assert option_names.nearest("train.learning_rat", valid) == "train.learning_rate"
    assert option_names.nearest("micro_batchsize", valid) == "train.micro_batch_size"
    assert option_names.nearest("zzzzzz", valid) is None


def test_the_error_for_an_unknown_key_says_the_name() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(
            model={"source": "m", "device_map": "auto"},
            data={"train": "t"},
            train={"num_train_epochs": 1, "warmup_ratio": 0.1},
        )
    text = str(caught.value)
    assert "train.num_train_epochs: unknown key: Hugging Face's name for train.epochs" in text
    assert "Hugging Face's name for train.warmup (a share of the run when below 1)" in text
    assert "device_map has no counterpart here: every rank has one device" in text


BASE = {"model": {"source": "m"}, "data": {"train": "t"}}


def told(values: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_dict(BASE | values)
    return {p.path: p.message.removeprefix("unknown key: ") for p in caught.value.problems}


def test_a_field_of_a_later_version_is_said_to_be_one() -> None:
    found = told({"wall_clock_breakdown": True})
    assert found["wall_clock_breakdown"] == (
        "DeepSpeed's name for train.profile, which is not available in this version: run a "
        "profiler on the rank by hand"
    )


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.ours], ids=lambda o: o.name)
def test_no_hint_leads_to_a_field_that_is_refused(option: option_names.ForeignOption) -> None:
    assert option.ours is not None
    live = ".".join(option.ours.split(".")[:2]) in field_paths()
    (problem,) = config_checks.unknown_key(f"x.{option.name}", [])
    assert f"name for {option.ours}" in problem.message
    assert (
        f"name for {option.ours}, which is not available in this version" in problem.message
    ) is not live


def test_all_who_have_a_name_are_named() -> None:
    found = told(
        {"gradient_clipping": 1.0, "lora_alpha": 8, "lr": 1e-5, "gradient_accumulation_steps": 2,
         "fsdp_min_num_params": 1}
    )  # fmt: skip
    assert found["gradient_clipping"].startswith("Accelerate's and DeepSpeed's name for train.max")
    assert found["lora_alpha"] == "TRL's and PEFT's name for model.lora.alpha"
    assert found["lr"] == "DeepSpeed's and NeMo's name for train.learning_rate"
    assert found["gradient_accumulation_steps"].startswith("Hugging Face's and DeepSpeed's name")
    assert found["fsdp_min_num_params"] == (
        "Hugging Face's name for parallel.kind (fsdp); Accelerate's fsdp_min_num_params has no "
        "counterpart here: every block is sharded"
    )


def test_mappings_of_other_trainers_are_explained_option_by_option() -> None:
    found = told(
        {
            "fsdp_config": {"fsdp_sharding_strategy": "x", "use_orig_params": True, "strange": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 1, "eps": 1e-8}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
            "bf16": {"enabled": True},
            "train": {"optimizer": {"params": {"betas": [0.9, 0.95]}}},
            "parallel": {"deepspeed": {"zero_optimization": {"stage": 2}}},
        }
    )
    assert {path: text.split(" (")[0].split(",")[0] for path, text in found.items()} == {
        "fsdp_config.fsdp_sharding_strategy": "Accelerate's name for parallel.shard",
        "fsdp_config.use_orig_params": "Accelerate's fsdp_use_orig_params has no counterpart "
        "here: it is always so",
        "fsdp_config.strange": "unknown key",
        "optimizer.type": "DeepSpeed's name for train.optimizer",
        "optimizer.params.lr": "DeepSpeed's name for train.learning_rate",
        "optimizer.params.eps": "DeepSpeed's name for train.optimizer",
        "zero_optimization.stage": "DeepSpeed's name for parallel.stage",
        "zero_optimization.offload_optimizer.device": "DeepSpeed's name for "
        "parallel.offload_optimizer",
        "bf16.enabled": "DeepSpeed's name for train.precision",
        "train.optimizer.params.betas": "DeepSpeed's name for train.betas",
        "parallel.deepspeed.zero_optimization.stage": "DeepSpeed's name for parallel.stage",
    }


def test_a_misspelled_section_is_no_mapping_of_another_trainer() -> None:
    assert told({"trian": {"max_steps": 5}}) == {"trian": "did you mean train?"}
    assert told({"tracking": {"tags": {"lr": 1}}}) == {
        "tracking.tags.lr": "expected text (in quotes), found 1"
    }


def test_the_page_of_options_is_the_table() -> None:
    """Rewrite it with: python tools/option_table.py > docs/options.md"""
    written = subprocess.run(
        [sys.executable, ROOT / "tools" / "option_table.py"], capture_output=True, check=True
    )
    assert (ROOT / "docs" / "options.md").read_bytes() == written.stdout


@pytest.mark.parametrize(
    ("path", "value", "meant"),
    [
        ("train.optimizer", "adamw_torch_fused", "adamw"),
        ("train.optimizer", "adamw_bnb_8bit", "adamw_8bit"),
        ("train.optimizer", "adamw_hf", "adamw"),
        ("train.optimizer", {"name": "adamw_torch"}, "adamw"),
        ("train.schedule", "warmup_stable_decay", "wsd"),
        ("train.schedule", "cosine_with_min_lr", "cosine with train.min_learning_rate"),
        ("train.schedule", "cosin", "cosine"),
        ("parallel.kind", "zero3", "deepspeed with parallel.stage=3"),
        ("parallel.kind", "ZeRO-2", "deepspeed with parallel.stage=2"),
        ("parallel.kind", "FSDP2", "fsdp"),
        ("parallel.kind", "SHARD_GRAD_OP", "fsdp with parallel.shard=grad_op"),
        ("parallel.shard", "FULL_SHARD", "full"),
        ("parallel.shard", "SHARD_GRAD_OP", "grad_op"),
        ("parallel.shard", "HYBRID_SHARD", "hybrid"),
        ("train.precision", "bfloat16", "bf16"),
        ("train.precision", "float16", "fp16"),
        ("model.gradient_checkpointing", True, "full"),
    ],
)
def test_values_of_other_trainers_are_told_in_our_words(path: str, value: Any, meant: str) -> None:
    section, _, field = path.partition(".")
    values: dict[str, Any] = {"model": {"source": "m"}, "data": {"train": "x.jsonl"}}
    values[section] = values.get(section, {}) | {field: value}
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_dict(values)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert problem.message.endswith(f"(did you mean {meant}?)")


def test_a_value_that_is_like_none_is_not_explained() -> None:
    assert option_values.hint("parallel.kind", "zzz", ["ddp", "fsdp"]) == ""
    assert option_values.unknown_keys({"zzz": 1}, ["source"]) == "unknown key zzz: expected source"


def test_what_is_suggested_can_be_set() -> None:
    for path, table in option_values._OURS.items():
        section, _, field = path.partition(".")
        for ours in set(table.values()):
            first = ours.split(" ")[0]
            name, _, value = first.rpartition("=")
            where = name.rpartition(".")[2] or field
            values: dict[str, Any] = {"model": {"source": "m"}, "data": {"train": "x.jsonl"}}
            values[section] = values.get(section, {}) | {where: value}
            assert TrainConfig.from_dict(values)
