"""The public surface. Growing it is a decision, and a visible change of this file."""

from __future__ import annotations

import inspect
import pkgutil

import pytest

import dbx_llmtrain
from dbx_llmtrain import cli, config
from dbx_llmtrain.errors import LlmTrainError
from dbx_llmtrain.records import Audit, RunPlan, TrainResult

EXPORTED = [
    "Audit",
    "CheckpointError",
    "ClusterError",
    "ClusterReport",
    "ConfigError",
    "DataError",
    "Evaluation",
    "Exported",
    "Forecast",
    "Generations",
    "LlmTrainError",
    "Logged",
    "PreparedData",
    "Preview",
    "RegisteredModel",
    "RegistryError",
    "RunPlan",
    "StagingError",
    "SubmitError",
    "TrainConfig",
    "TrainResult",
    "TrainingFailed",
    "__version__",
    "evaluate",
    "export",
    "generate",
    "launch",
    "load",
    "log",
    "plan",
    "prepare",
    "preview",
    "probe",
    "register",
    "train",
    "watch",
]

FIELDS = """
model.source model.revision model.init model.config model.tokenizer model.new_tokens
model.trust_remote_code model.attention model.gradient_checkpointing model.compile
model.use_liger_kernel model.lora model.load_in_4bit
data.train data.eval data.test data.format data.columns data.formatter data.objective
data.mlm_probability data.train_on data.max_length data.overflow data.packing data.shuffle
data.group_by_length data.longest_first data.chat_template data.cache_dir
parallel.kind parallel.shard parallel.cpu_offload parallel.stage parallel.offload_optimizer
parallel.offload_params parallel.nvme_dir parallel.config
train.epochs train.max_steps train.global_batch_size train.gradient_accumulation_steps
train.micro_batch_size train.learning_rate train.schedule train.warmup train.decay_steps
train.min_learning_rate train.optimizer train.weight_decay train.betas train.max_grad_norm
train.precision train.seed train.max_time train.eval_every train.eval_max_rows
train.eval_micro_batch_size train.early_stopping train.sample_prompts train.log_every
checkpoint.dir checkpoint.every checkpoint.every_minutes checkpoint.keep_last checkpoint.keep_best
checkpoint.metric checkpoint.metric_mode checkpoint.export checkpoint.resume
tracking.experiment tracking.run_name tracking.tags tracking.log_model tracking.register_as
tracking.log_checkpoints
tracking.tensorboard tracking.system_metrics tracking.progress tracking.log_level
cluster.processes cluster.use_gpu cluster.local_mode cluster.local_dir cluster.env
cluster.max_restarts cluster.min_processes cluster.stall_timeout cluster.debug
""".split()


def test_exported_names() -> None:
    assert sorted(EXPORTED) == EXPORTED
    assert dbx_llmtrain.__all__ == EXPORTED
    for name in EXPORTED:
        assert getattr(dbx_llmtrain, name) is not None
    assert dir(dbx_llmtrain) == EXPORTED, "what a notebook offers to complete"
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = dbx_llmtrain.trian


def test_config_fields() -> None:
    assert config.field_paths() == FIELDS
    for section in config.SECTIONS.values():
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name} has no docstring"


def test_fields_that_others_read() -> None:
    needed = "run_id run_dir checkpoint model_path steps restarts audit metrics".split()
    assert set(needed) <= set(TrainResult.model_fields)
    counts = "read_rows train_rows eval_rows dropped truncated_rows tokens trained_tokens"
    more = "trained_end_tokens packs packing_efficiency"
    assert set(f"{counts} {more}".split()) <= set(Audit.model_fields)
    assert {"attempt", "run_dir", "config", "world_size"} <= set(RunPlan.model_fields)


def test_every_error_is_one_of_ours_and_says_when_it_is_raised() -> None:
    for name in EXPORTED:
        found = getattr(dbx_llmtrain, name)
        if inspect.isclass(found) and issubclass(found, BaseException):
            assert issubclass(found, LlmTrainError)
            assert found.__doc__


def test_no_module_has_the_name_of_a_public_function() -> None:
    modules = {module.name for module in pkgutil.iter_modules(dbx_llmtrain.__path__)}
    assert not modules & set(EXPORTED)


def test_commands() -> None:
    later = ["evaluate", "export", "generate", "log", "register", "watch"]
    assert sorted(cli.cli.commands) == sorted(
        ["plan", "prepare", "preview", "probe", "train", *later]
    )
