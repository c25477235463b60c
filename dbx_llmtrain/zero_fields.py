"""The fields of DeepSpeed's configuration, with their types: its own pydantic classes are the
source, but importing DeepSpeed takes seconds and the driver may not have it. (A test compares.)"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError


def _no_truth(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is needed")
    return value


_NUMBER = BeforeValidator(_no_truth)
_TYPES: Mapping[str, tuple[str, TypeAdapter[Any]]] = {
    "switch": ("true or false", TypeAdapter(bool)),
    "count": ("a whole number of 0 or more", TypeAdapter(Annotated[int, Field(ge=0), _NUMBER])),
    "positive": ("a whole number above 0", TypeAdapter(Annotated[int, Field(gt=0), _NUMBER])),
    "number": ("a whole number", TypeAdapter(Annotated[int, _NUMBER])),
    "share": (
        "a number from 0 to 1",
        TypeAdapter(Annotated[float, Field(ge=0, le=1), _NUMBER]),
    ),
    "names": ("a list of names", TypeAdapter(list[str] | str)),
    "section": ("a mapping of fields", TypeAdapter(dict[str, Any])),
    "any": ("", TypeAdapter(Any)),
}

_STAGE_3 = (
    ("prefetch_bucket_size", "count"),
    ("param_persistence_threshold", "count"),
    ("model_persistence_threshold", "count"),
    ("max_live_parameters", "count"),
    ("max_reuse_distance", "count"),
    ("gather_16bit_weights_on_model_save", "switch"),
    ("module_granularity_threshold", "number"),
    ("use_all_reduce_for_fetch_params", "switch"),
    ("allgather_sequential", "switch"),
)
"""Fields that may be written with ``stage3_`` before them, and are so as a rule."""

ZERO: Mapping[str, str] = (
    dict.fromkeys(
        "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions "
        "overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint "
        "cpu_offload_param cpu_offload_use_pin_memory cpu_offload "
        "stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 "
        "round_robin_gradients parameter_alignment zero_quantized_weights "
        "zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear "
        "pipeline_loading_checkpoint override_module_apply "
        "log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory".split(),
        "switch",
    )
    | {
        "stage": "count",
        "reduce_bucket_size": "positive",
        "allgather_bucket_size": "count",
        "sub_group_size": "count",
        "zero_hpz_partition_size": "count",
        "offload_param": "section",
        "offload_optimizer": "section",
        "zenflow": "section",
        "leaf_module": "section",
    }
    | dict(_STAGE_3)
    | {f"stage3_{name}": kind for name, kind in _STAGE_3}
)
"""``zero_optimization``: field -> type."""

_OFFLOAD: Mapping[str, str] = {
    "device": "any", "nvme_path": "any", "buffer_count": "count", "pin_memory": "switch",
}  # fmt: skip
SECTIONS: Mapping[str, Mapping[str, str]] = {
    "zero_optimization": ZERO,
    "zero_optimization.offload_param": {
        **_OFFLOAD, "buffer_size": "count", "max_in_cpu": "count",
    },
    "zero_optimization.offload_optimizer": {
        **_OFFLOAD, "pipeline_read": "switch", "pipeline_write": "switch", "fast_init": "switch",
        "ratio": "share", "super_offload": "switch", "cpuadam_cores_perc": "share",
    },
    "zero_optimization.leaf_module": dict.fromkeys(("classes", "names", "name_suffixes"), "names"),
    "aio": {
        "block_size": "positive", "queue_depth": "positive", "intra_op_parallelism": "positive",
        "single_submit": "switch", "overlap_events": "switch", "use_gds": "switch",
    },
}  # fmt: skip
"""Sections of which every field is known here, by their dotted path."""

TOP: Mapping[str, str] = {
    "zero_optimization": "section",
    "aio": "section",
    "steps_per_print": "positive",
    "wall_clock_breakdown": "switch",
    "memory_breakdown": "switch",
    "dump_state": "switch",
    "disable_allgather": "switch",
    "disable_python_gc": "switch",
    "dataloader_drop_last": "switch",
    "zero_allow_untested_optimizer": "switch",
    "zero_force_ds_cpu_optimizer": "switch",
    "use_data_before_expert_parallelism": "switch",
    "log_level": "any",
    "seq_parallel_communication_data_type": "any",
    "vocabulary_size": "any",
    "weight_quantization": "section",
    "flops_profiler": "section",
    "comms_logger": "section",
    "csv_monitor": "section",
    "comet": "section",
    "checkpoint": "section",
    "datastates_ckpt": "section",
    "timers": "section",
}
"""What may stand at the top, beside what this package refuses or sets: key -> type."""

REMOVED = frozenset(
    "nebula quantize_training eigenvalue sparse_attention graph_harvesting "
    "zero_optimization.mics_shard_size zero_optimization.mics_hierarchical_params_gather "
    "zero_optimization.zeropp_loco_param".split()
)
"""What DeepSpeed had once (up to 0.19), and refuses by name now."""


def faults(own: Mapping[str, Any], others: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Dotted path and message of every key that DeepSpeed does not have, and of every value that it
    would refuse. ``others`` are the paths of keys that are judged elsewhere."""
    yield from _within("", own, TOP, others)


def _within(
    prefix: str, content: Mapping[str, Any], known: Mapping[str, str], others: frozenset[str]
) -> Iterator[tuple[str, str]]:
    names = {path.removeprefix(prefix) for path in others if path.startswith(prefix)}
    names = {name for name in names if "." not in name}
    for key, value in content.items():
        path = f"{prefix}{key}"
        if key in names or value == "auto":
            continue
        if path in REMOVED:
            yield path, "is not in DeepSpeed any more: remove it"
            continue
        if key not in known:
            yield path, _unknown(str(key), {*known, *names}, prefix)
            continue
        expected, kind = _TYPES[known[key]]
        try:
            kind.validate_python(value)
        except ValidationError:
            yield path, f"DeepSpeed expects {expected}, found {value!r}"
            continue
        if path in SECTIONS:
            yield from _within(f"{path}.", value, SECTIONS[path], others)


def _unknown(key: str, known: set[str], prefix: str) -> str:
    close = difflib.get_close_matches(key, sorted(known), n=1)
    where = f"{prefix.rstrip('.')} of DeepSpeed's" if prefix else "DeepSpeed's configuration"
    if close:
        return f"unknown key: did you mean {prefix}{close[0]}?"
    if not prefix and key in ZERO:
        return f"unknown key: it belongs into zero_optimization: {{{key}: ...}}"
    return f"unknown key: {where} has no such field: remove it"
