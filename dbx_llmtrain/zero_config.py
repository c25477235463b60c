"""DeepSpeed's configuration: what ours sets, and what a user's own may add to it.

Pure: the driver checks a configuration with it, the ranks start the engine with it. Global batch,
accumulation, loss scaling and learning rate stay ours, so DeepSpeed is told of one micro-batch and
never scales a gradient itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dbx_llmtrain import zero_fields
from dbx_llmtrain.errors import ConfigError, Problem

PATH = "parallel.config"
CPU_ADAM = "zero_force_ds_cpu_optimizer"
"""DeepSpeed's switch: whether an offloaded optimizer has to be its own (a compiled op)."""

MINIMUM = "0.19.8"
"""The oldest version whose gradients are right: ZeRO-2 sums them in bf16 up to 0.19.7, 0.18 fails
on new versions of PyTorch, 0.17.6 loses micro-batches, 0.16.9 does where the optimizer is offloaded
(measured)."""

CPU_ADAM_OP, ASYNC_IO_OP = "cpu_adam", "async_io"
"""Operators of DeepSpeed's that have to be compiled."""

BUCKET = 50_000_000
"""Elements that travel at once: 200 MB in fp32, past which a network is no faster."""

NVME_FOLDER = "nvme"
"""Folder within the local directory for what is offloaded to disk."""

_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d{1,3}")
_OURS = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "managed_gradient_accumulation": "train.gradient_accumulation_steps",
    "gradient_clipping": "train.max_grad_norm",
    "optimizer": "train.optimizer and train.learning_rate",
    "scheduler": "train.schedule and train.warmup",
    "fp16": "train.precision (bf16 or fp32 with DeepSpeed)",
    "bf16": "train.precision",
    "bfloat16": "train.precision",
    "amp": "train.precision",
    "torch_autocast": "train.precision",
    "data_types": "train.precision (gradients are summed in fp32)",
    "communication_data_type": "train.precision (gradients are reduced in fp32)",
    "activation_checkpointing": "model.gradient_checkpointing",
    "compile": "model.compile",
    "zero_optimization.stage": "parallel.stage",
    "zero_optimization.cpu_offload": "parallel.offload_optimizer=cpu",
    "zero_optimization.cpu_offload_params": "parallel.offload_params=cpu",
    "zero_optimization.offload_optimizer.device": "parallel.offload_optimizer",
    "zero_optimization.offload_optimizer.nvme_path": "parallel.nvme_dir",
    "zero_optimization.offload_param.device": "parallel.offload_params",
    "zero_optimization.offload_param.nvme_path": "parallel.nvme_dir",
    "tensorboard": "tracking.tensorboard",
    "wandb": "tracking",
}
"""What has a field of its own, by DeepSpeed's name."""

_NEVER = {
    "prescale_gradients": "it changes the gradient",
    "gradient_predivide_factor": "it changes the gradient",
    "gradient_allreduce_op": "it changes the gradient",
    "sparse_gradients": "embeddings have dense gradients here",
    "elasticity": "a run keeps its number of ranks",
    "autotuning": "it starts runs of its own",
    "data_efficiency": "the order of rows is ours",
    "curriculum_learning": "the order of rows is ours",
    "progressive_layer_drop": "it changes the model",
    "compression_training": "it changes the model",
    "hybrid_engine": "it is for generating within training",
    "tensor_parallel": "only data is parallel",
    "autotp": "only data is parallel",
    "expert_parallel": "only data is parallel",
    "pipeline": "only data is parallel",
    "sequence_parallel_size": "only data is parallel",
    "data_parallel_size": "every rank takes part",
    "load_universal_checkpoint": "checkpoints are this package's own",
    "zero_optimization.load_from_fp32_weights": "checkpoints are this package's own",
    "zero_optimization.offload_optimizer.ratio": "learning rates do not reach the part on the GPU",
    "zero_optimization.zenflow": "it steps with gradients of earlier batches",
    "zero_optimization.zero_hpz_partition_size": "it is not tested with this package",
    "zero_optimization.zero_quantized_weights": "it rounds the weights",
    "zero_optimization.zero_quantized_nontrainable_weights": "it rounds the weights",
    "zero_optimization.zero_quantized_gradients": "it rounds the gradients",
    "zero_optimization.compute_grad_norm": "the gradient's norm is needed",
    "zero_optimization.ignore_unused_parameters": "a missing gradient is an error",
    "zero_allow_untested_optimizer": "the optimizer is torch's AdamW or SGD",
}
"""What is not offered, and why."""


_SWITCHED = (
    "fp16", "bf16", "bfloat16", "amp", "torch_autocast", "elasticity", "autotuning",
    "data_efficiency", "curriculum_learning", "progressive_layer_drop", "hybrid_engine",
    "tensorboard", "wandb",
)  # fmt: skip
"""Sections of those that are refused or ours, with a switch ``enabled``."""


def read(config: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """A user's own configuration, from a mapping or a JSON file.

    Raises ``ConfigError`` for a file that is missing or holds no JSON object.
    """
    if config is None:
        return {}
    if not isinstance(config, str):
        return {key: _with_numbers(value) for key, value in config.items()}
    try:
        content = json.loads(Path(config).read_text(encoding="utf-8"))
    except OSError as error:
        fault = f"the file cannot be read: {error}"
    except ValueError as error:
        fault = f"{config} is no JSON: {error}"
    else:
        if isinstance(content, dict):
            return content
        fault = f"{config}: expected a JSON object, found {type(content).__name__}"
    raise ConfigError([Problem(PATH, f"{fault}: give DeepSpeed's configuration or a path to it")])


def _with_numbers(value: Any) -> Any:
    """A copy in which ``5e8`` is a number: YAML reads it as text, JSON does not."""
    if isinstance(value, Mapping):
        return {key: _with_numbers(item) for key, item in value.items()}
    if isinstance(value, str) and _EXPONENT.fullmatch(value):
        number = float(value)
        return int(number) if number.is_integer() else number
    return value


def stage_of(parallel: Any) -> int:
    """The ZeRO stage: as set, else 3 where parameters or disks are used, else 2."""
    if parallel.stage is not None:
        return int(parallel.stage)
    return 3 if parallel.offload_params != "none" or uses_nvme(parallel) else 2


def uses_nvme(parallel: Any) -> bool:
    """Whether anything is kept on disk."""
    return "nvme" in (parallel.offload_optimizer, parallel.offload_params)


def needs_cpu_adam(parallel: Any, own: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed's compiled AdamW for the CPU takes the steps."""
    return parallel.offload_optimizer != "none" and own.get(CPU_ADAM) is not False


def operators(parallel: Any) -> tuple[str, ...]:
    """Operators that have to be compiled for the offloading that is asked for."""
    names = [CPU_ADAM_OP] if needs_cpu_adam(parallel, read(parallel.config)) else []
    return (*names, ASYNC_IO_OP) if uses_nvme(parallel) else tuple(names)


def with_content(parallel: Any) -> Any:
    """``parallel`` with the content of the file that it names: ranks may not see it.

    Raises ``ConfigError`` for a file that cannot be used.
    """
    if not isinstance(parallel.config, str):
        return parallel
    return parallel.model_copy(update={"config": read(parallel.config)})


def planned(
    parallel: Any, *, micro_batch: int, precision: str, max_grad_norm: float, use_gpu: bool
) -> Any:
    """What a plan holds of ``parallel``: with the content of the user's configuration, which agrees
    with the rest of the plan. Raises ``ConfigError`` as ``build`` does."""
    if parallel.kind != "deepspeed":
        return parallel
    parallel = with_content(parallel)
    device = "cuda" if use_gpu else "cpu"
    build(
        parallel,
        micro_batch=micro_batch,
        precision=precision,
        max_grad_norm=max_grad_norm,
        device=device,
        nvme_dir=parallel.nvme_dir,
    )
    return parallel


def build(
    parallel: Any,
    *,
    micro_batch: int,
    precision: str,
    max_grad_norm: float,
    device: str,
    nvme_dir: str | None = None,
) -> dict[str, Any]:
    """DeepSpeed's whole configuration, a user's own merged in.

    ``parallel`` is a ``ParallelConfig``, ``device`` the rank's, ``nvme_dir`` a folder on its disk.
    Raises ``ConfigError`` with every key that contradicts ours.
    """
    own = read(parallel.config)
    gpu = device != "cpu"
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        # Every micro-batch says itself whether it is the last one. A number here would be divided
        # by, and a last, shorter window of an epoch would never step.
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
        "bf16": {"enabled": precision == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        CPU_ADAM: needs_cpu_adam(parallel, own),
        "zero_optimization": _zero(parallel, gpu, nvme_dir),
    }
    devices = {
        "offload_optimizer": {"device": parallel.offload_optimizer},
        "offload_param": {"device": parallel.offload_params},
    }
    problems = refusals(own, merged(ours, {"zero_optimization": devices}))
    if problems:
        raise ConfigError(problems)
    return merged(ours, own)


def _zero(parallel: Any, gpu: bool, nvme_dir: str | None) -> dict[str, Any]:
    stage = stage_of(parallel)
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "overlap_comm": gpu and stage > 1,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
    }
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_param_persistence_threshold": 100_000,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
            "sub_group_size": 100_000_000,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    kept = {
        "offload_optimizer": parallel.offload_optimizer,
        "offload_param": parallel.offload_params,
    }
    for key, where in kept.items():
        if where != "none":
            zero[key] = {"device": where, "pin_memory": gpu}
            if where == "nvme":
                zero[key]["nvme_path"] = nvme_dir
    return zero


def refusals(own: Mapping[str, Any], ours: Mapping[str, Any] | None = None) -> list[Problem]:
    """What a user's configuration says against this package, by dotted path.

    ``ours``, where it is known, is what it is compared with: the same value is no contradiction,
    nor is ``"auto"``, Hugging Face's word for ours.
    """
    known = {"zero_allow_untested_optimizer": True, **dict(_leaves(ours or {}))}
    problems = []
    for path, value in _leaves(own):
        if _means_ours(path, value, own, known):
            continue
        owner = _owner(path, _OURS)
        reason = _owner(path, _NEVER)
        if owner is not None:
            found = f"; ours is {known[path]!r}" if path in known else ""
            problems.append(
                Problem(f"{PATH}.{path}", f"found {value!r}{found}: remove it and set {owner}")
            )
        elif reason is not None:
            problems.append(Problem(f"{PATH}.{path}", f"is not offered, as {reason}: remove it"))
    judged = frozenset((*_OURS, *_NEVER)) - {"zero_allow_untested_optimizer"}
    problems += [
        Problem(f"{PATH}.{path}", message) for path, message in zero_fields.faults(own, judged)
    ]
    return problems


def _means_ours(path: str, value: Any, own: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Whether a value is ours, or has no effect: in a section with a switch the switch counts."""
    if value == "auto" or (path in known and known[path] == value):
        return True
    section = path.split(".", 1)[0]
    content = own[section]
    if section not in _SWITCHED or not isinstance(content, Mapping) or "enabled" not in content:
        return False
    if path != f"{section}.enabled":
        return True
    return not value and section not in ("bf16", "bfloat16")


def merged(ours: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Ours with what the user's adds or changes; ``"auto"`` and precision stay ours."""
    result = dict(ours)
    for key, value in own.items():
        if value == "auto" or key in _SWITCHED:
            continue
        before = result.get(key)
        if isinstance(value, Mapping):
            result[key] = merged(before if isinstance(before, Mapping) else {}, value)
        else:
            result[key] = value
    return result


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted path; an empty mapping is one."""
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _owner(path: str, table: Mapping[str, str]) -> str | None:
    """The entry of ``path`` or of a section that it is in."""
    while path:
        if path in table:
            return table[path]
        path = path.rpartition(".")[0]
    return None
