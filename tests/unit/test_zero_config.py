"""DeepSpeed's configuration: what ours says, what a user's own adds, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain import zero_config, zero_fields
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.model_sections import ParallelConfig
from tests import sample


def build(config: Any = None, *, device: str = "cpu", **parallel: Any) -> dict[str, Any]:
    return zero_config.build(
        ParallelConfig(kind="deepspeed", config=config, **parallel),
        micro_batch=4,
        precision="bf16",
        max_grad_norm=0.5,
        device=device,
        nvme_dir="/disk/nvme/0",
    )


def refused(config: Any, **parallel: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        build(config, **parallel)
    return {problem.path: problem.message for problem in caught.value.problems}


def test_c103_the_engine_is_told_of_one_micro_batch() -> None:
    ours = build()
    assert ours["train_micro_batch_size_per_gpu"] == 4
    assert ours["gradient_accumulation_steps"] == 1
    assert "train_batch_size" not in ours
    assert ours["gradient_clipping"] == 0.5


def test_c106_gradients_are_summed_and_reduced_in_fp32() -> None:
    ours = build()
    assert ours["bf16"] == {"enabled": True}
    assert ours["data_types"] == {"grad_accum_dtype": "fp32"}
    assert ours["communication_data_type"] == "fp32"


@pytest.mark.parametrize(
    ("parallel", "stage"),
    [
        ({}, 2),
        ({"stage": 1}, 1),
        ({"offload_optimizer": "cpu"}, 2),
        ({"offload_params": "cpu"}, 3),
        ({"offload_optimizer": "nvme"}, 3),
        ({"stage": 3}, 3),
    ],
)
def test_stages(parallel: dict[str, Any], stage: int) -> None:
    zero = build(**parallel)["zero_optimization"]
    assert zero["stage"] == stage
    assert ("stage3_prefetch_bucket_size" in zero) == (stage == 3)


def test_places_of_what_is_offloaded() -> None:
    zero = build(device="cuda:1", offload_optimizer="cpu", offload_params="nvme")
    zero = zero["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert zero["offload_param"] == {
        "device": "nvme", "pin_memory": True, "nvme_path": "/disk/nvme/0",
    }  # fmt: skip
    assert build(offload_optimizer="cpu")["zero_optimization"]["offload_optimizer"] == {
        "device": "cpu", "pin_memory": False,
    }  # fmt: skip


def test_only_a_gpu_overlaps() -> None:
    overlaps = [
        build(device=device, stage=stage)["zero_optimization"]["overlap_comm"]
        for device, stage in (("cpu", 3), ("cuda:0", 1), ("cuda:0", 2), ("cuda:0", 3))
    ]
    assert overlaps == [False, False, True, True]


def test_a_users_values_are_merged() -> None:
    merged = build(
        {
            "zero_optimization": {
                "reduce_bucket_size": 1000,
                "allgather_bucket_size": "auto",
                "round_robin_gradients": True,
                "offload_optimizer": {"pin_memory": True, "device": "cpu"},
            },
            "comms_logger": {"enabled": True},
        },
        offload_optimizer="cpu",
    )
    zero = merged["zero_optimization"]
    assert zero["reduce_bucket_size"] == 1000
    assert zero["allgather_bucket_size"] == zero_config.BUCKET
    assert zero["round_robin_gradients"] is True
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert merged["comms_logger"] == {"enabled": True}


def test_the_configuration_that_hugging_face_writes_is_taken() -> None:
    config = {
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "none"},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }
    merged = build(config, stage=3)
    assert merged["bf16"] == {"enabled": True}
    assert "fp16" not in merged
    assert "train_batch_size" not in merged
    assert merged["zero_optimization"]["sub_group_size"] == 1e9
    assert merged["steps_per_print"] == 2000


@pytest.mark.parametrize(
    ("config", "path", "advice"),
    [
        ({"train_batch_size": 64}, "train_batch_size", "train.global_batch_size"),
        ({"train_micro_batch_size_per_gpu": 8}, "train_micro_batch_size_per_gpu", "micro_batch"),
        ({"gradient_accumulation_steps": 8}, "gradient_accumulation_steps", "found 8; ours is 1"),
        ({"gradient_clipping": 1.0}, "gradient_clipping", "train.max_grad_norm"),
        ({"zero_optimization": {"stage": 1}}, "zero_optimization.stage", "parallel.stage"),
        ({"fp16": {"enabled": True}}, "fp16.enabled", "train.precision"),
        ({"bf16": {"enabled": False}}, "bf16.enabled", "train.precision"),
        ({"optimizer": {"type": "Adam"}}, "optimizer.type", "train.optimizer"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler.type", "train.schedule"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype", "fp32"),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param.device",
            "parallel.offload_params",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"nvme_path": "/x"}}},
            "zero_optimization.offload_optimizer.nvme_path",
            "parallel.nvme_dir",
        ),
        (
            {"zero_optimization": {"zero_quantized_gradients": True}},
            "zero_optimization.zero_quantized_gradients",
            "it rounds the gradients",
        ),
        ({"elasticity": {"enabled": True}}, "elasticity.enabled", "keeps its number of ranks"),
        ({"zero_allow_untested_optimizer": False}, "zero_allow_untested_optimizer", "torch's"),
    ],
)
def test_what_contradicts_ours_is_refused(config: Any, path: str, advice: str) -> None:
    found = refused(config)
    assert found.keys() == {f"parallel.config.{path}"}
    assert advice in found[f"parallel.config.{path}"]


@pytest.mark.parametrize(
    ("config", "path", "message"),
    [
        (
            {"zero_optimization": {"reduce_bucket_sise": 5e8}},
            "zero_optimization.reduce_bucket_sise",
            "did you mean zero_optimization.reduce_bucket_size?",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": -5}},
            "zero_optimization.reduce_bucket_size",
            "expects a whole number above 0, found -5",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": "many"}},
            "zero_optimization.reduce_bucket_size",
            "found 'many'",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": True}},
            "zero_optimization.reduce_bucket_size",
            "found True",
        ),
        (
            {"zero_optimization": {"overlap_comm": 7}},
            "zero_optimization.overlap_comm",
            "expects true or false, found 7",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"pin_memry": True}}},
            "zero_optimization.offload_optimizer.pin_memry",
            "did you mean zero_optimization.offload_optimizer.pin_memory?",
        ),
        ({"zero_optimization": {"offload_param": 1}}, "zero_optimization.offload_param", "mapping"),
        ({"zero_optimisation": {}}, "zero_optimisation", "did you mean zero_optimization?"),
        ({"overlap_comm": True}, "overlap_comm", "belongs into zero_optimization"),
        ({"my_setting": 1}, "my_setting", "has no such field"),
        ({"nebula": {}}, "nebula", "is not in DeepSpeed any more"),
        (
            {"zero_optimization": {"mics_shard_size": 2}},
            "zero_optimization.mics_shard_size",
            "is not in DeepSpeed any more",
        ),
        ({"aio": {"queue_depth": 0}}, "aio.queue_depth", "above 0"),
        ({"zero_optimization": 2}, "zero_optimization", "expects a mapping of fields, found 2"),
    ],
)
def test_what_deepspeed_does_not_have_is_refused(config: Any, path: str, message: str) -> None:
    found = refused(config)
    assert found.keys() == {f"parallel.config.{path}"}
    assert message in found[f"parallel.config.{path}"]
    assert problems(parallel={"kind": "deepspeed", "config": config}) == found


@pytest.mark.parametrize("given", ["5e8", "5.0e8", "5E+8", 5e8, 500_000_000])
def test_numbers_as_yaml_reads_them(given: Any) -> None:
    config = {"zero_optimization": {"reduce_bucket_size": given}}
    assert build(config)["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    sample.config(parallel={"kind": "deepspeed", "config": config})


def test_our_table_has_the_fields_that_deepspeed_has() -> None:
    """Names, and for numbers the smallest that is taken, as DeepSpeed's own classes have them."""
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    offload = pytest.importorskip("deepspeed.runtime.zero.offload_config")
    leaf = pytest.importorskip("deepspeed.runtime.zero.leaf_module_config")
    theirs = {
        "zero_optimization": config.DeepSpeedZeroConfig,
        "zero_optimization.offload_param": offload.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": offload.DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.leaf_module": leaf.DeepSpeedZeroLeafModuleConfig,
    }
    kinds = {bool: {"switch"}, int: {"count", "positive", "number"}, float: {"share"}}
    for path, kind in theirs.items():
        table, fields = zero_fields.SECTIONS[path], kind.model_fields
        names = set(fields) | {field.alias for field in fields.values() if field.alias}
        assert set(table) == names, path
        for name, field in fields.items():
            if field.annotation in kinds:
                assert table[name] in kinds[field.annotation], name
            if table[name] in ("positive", "count", "number"):
                least = {"positive": "Gt(gt=0)", "count": "Ge(ge=0)", "number": None}[table[name]]
                found = [str(item) for item in field.metadata]
                assert name == "stage" or found == ([least] if least else []), name


def test_c105_stage_0_is_refused() -> None:
    found = refused({"zero_optimization": {"stage": 0}})
    (message,) = found.values()
    assert "found 0; ours is 2" in message
    with pytest.raises(ConfigError, match=r"parallel\.stage"):
        sample.config(parallel={"kind": "deepspeed", "stage": 0})


def test_every_contradiction_is_told_at_once() -> None:
    assert len(refused({"train_batch_size": 1, "optimizer": {"type": "Adam"}})) == 2


def test_a_value_that_is_ours_is_no_contradiction() -> None:
    config = {
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True, "immediate_grad_update": True},
        "zero_allow_untested_optimizer": True,
        "elasticity": {"enabled": False, "version": 1},
    }
    assert build(config)["gradient_clipping"] == 0.5


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"sub_group_size": 5}}))
    parallel = ParallelConfig(kind="deepspeed", config=str(path))
    assert zero_config.with_content(parallel).config == {"zero_optimization": {"sub_group_size": 5}}
    assert build(str(path))["zero_optimization"]["sub_group_size"] == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("{", "is no JSON"), ("[1]", "expected a JSON object, found list")],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    assert message in refused(str(path))["parallel.config"]


def test_c109_operators_that_are_needed() -> None:
    def needed(**parallel: Any) -> tuple[str, ...]:
        return zero_config.operators(ParallelConfig(kind="deepspeed", **parallel))

    assert needed() == ()
    assert needed(offload_optimizer="cpu") == ("cpu_adam",)
    assert needed(offload_params="cpu") == ()
    assert needed(offload_params="nvme") == ("async_io",)
    torchs = {"zero_force_ds_cpu_optimizer": False}
    assert needed(offload_optimizer="cpu", config=torchs) == ()
    assert build(torchs, offload_optimizer="cpu")["zero_force_ds_cpu_optimizer"] is False


# Combinations that the configuration itself refuses


def problems(**sections: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        sample.config(**sections)
    return {problem.path: problem.message for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stage", 2),
        ("offload_optimizer", "cpu"),
        ("offload_params", "cpu"),
        ("nvme_dir", "/local/nvme"),
        ("config", {"a": 1}),
    ],
)
@pytest.mark.parametrize("kind", ["auto", "fsdp"])
def test_fields_of_deepspeed_beside_another_strategy(field: str, value: Any, kind: str) -> None:
    found = problems(parallel={"kind": kind, field: value})
    assert "set parallel.kind=deepspeed" in found[f"parallel.{field}"]


@pytest.mark.parametrize(
    ("sections", "path", "message"),
    [
        ({"parallel": {"stage": 2, "offload_params": "cpu"}}, "parallel.offload_params", "stage=3"),
        (
            {"parallel": {"stage": 1, "offload_optimizer": "nvme"}},
            "parallel.offload_optimizer",
            "stage=3",
        ),
        ({"train": {"precision": "fp16"}}, "train.precision", "bf16, fp32 or auto"),
        (
            {"parallel": {"config": {"train_batch_size": 8}}},
            "parallel.config.train_batch_size",
            "train.global_batch_size",
        ),
        (
            {"parallel": {"offload_optimizer": "cpu"}, "train": {"optimizer": "sgd"}},
            "train.optimizer",
            "expected adamw with an offloaded optimizer, found sgd",
        ),
        (
            {
                "parallel": {"offload_optimizer": "cpu"},
                "train": {"optimizer": {"name": "adamw", "amsgrad": True}},
            },
            "train.optimizer",
            "has no amsgrad",
        ),
        ({"parallel": {"nvme_dir": "/l/n"}}, "parallel.nvme_dir", "nothing is offloaded to nvme"),
        (
            {"parallel": {"offload_optimizer": "nvme", "nvme_dir": "nvme"}},
            "parallel.nvme_dir",
            "expected an absolute path",
        ),
        (
            {"parallel": {"offload_optimizer": "nvme", "nvme_dir": "/other/n"}},
            "parallel.nvme_dir",
            "cluster.local_dir is not set",
        ),
        (
            {
                "parallel": {"offload_optimizer": "nvme", "nvme_dir": "/other/n"},
                "cluster": {"local_dir": "/local"},
            },
            "parallel.nvme_dir",
            "cluster.local_dir is /local",
        ),
    ],
)
def test_combinations_that_no_cluster_can_run(
    sections: dict[str, Any], path: str, message: str
) -> None:
    parallel = {"kind": "deepspeed"} | sections.get("parallel", {})
    assert message in problems(**(sections | {"parallel": parallel}))[path]


def test_combinations_that_are_right() -> None:
    torchs = {"zero_force_ds_cpu_optimizer": False}
    good: list[TrainConfig] = [
        sample.config(parallel={"kind": "deepspeed", "offload_optimizer": "cpu"}),
        sample.config(
            parallel={"kind": "deepspeed", "offload_optimizer": "cpu", "config": torchs},
            train={"optimizer": "sgd"},
        ),
        sample.config(
            parallel={"kind": "deepspeed", "offload_params": "nvme", "nvme_dir": "/l/n"},
            cluster={"local_dir": "/l"},
        ),
    ]
    assert {cfg.parallel.kind for cfg in good} == {"deepspeed"}
