"""How strategies differ in what they hold and send, and that nothing else differs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dbx_llmtrain.storage import checkpoint_folder, read_manifest
from dbx_llmtrain.worker.loop import NOT_FINITE, SCALE_LOWERED
from dbx_llmtrain.worker.main import run
from dbx_llmtrain.worker.parallel.scaling import LossScale
from tests.dist import plans

pytestmark = pytest.mark.dist
World = tuple[str, int]
Results = dict[str, Any]


def test_hybrid_shards_within_a_node_and_replicates_over_nodes(
    variant: World, variant_results: Results
) -> None:
    """Ranks 0 and 2 are on one node, 1 and 3 on the other: the first half of a matrix is on 0 and
    1, the second on 2 and 3."""
    found = variant_results["placement"]
    assert found["rows"] == [32] * variant[1]
    first = found["first"]
    if variant[0] == "hybrid":
        assert found["nodes"] == ["node-0", "node-1"] * 2
        assert found["mesh"] == [[0, 2], [1, 3]]
        assert (first[0], first[2]) == (first[1], first[3])
    assert first[0] != first[-1]


def test_c39_what_travels_in_a_step(variant: World, variant_results: Results) -> None:
    """Two blocks and the root. ``full`` gathers blocks again for the backward pass; between nodes
    gradients travel once per step, however many micro-batches there are."""
    one, four = (variant_results["travels"][batches] for batches in ("1", "4"))
    gathers = 3 if variant[0] == "grad_op" else 5
    between_nodes = 3 if variant[0] == "hybrid" else 0
    of_the_loss = 1
    assert one == {
        "_reduce_scatter": 3,
        "_allgather_base": gathers,
        "allreduce": between_nodes + of_the_loss,
    }
    assert four == {
        "_reduce_scatter": 12,
        "_allgather_base": 4 * gathers,
        "allreduce": between_nodes + of_the_loss,
    }


def test_c40_gradients_that_were_not_reduced_end_the_run(variant_results: Results) -> None:
    message = variant_results["never_reduced"]["message"]
    assert message.startswith("21 of 21 trainable parameters got no gradient: model.")


def test_c42_upstream_factor_on_gloo_needs_forced_sums(
    variant: World, variant_results: Results
) -> None:
    """Why the loss is scaled instead. (This pins PyTorch: a release that changes it is seen.)"""
    found = variant_results["upstream"]
    assert "PREMUL_SUM" in found["False"]
    assert found["True"] < 1e-6


def test_c73_calls_that_skip_the_hooks_fail(variant_results: Results) -> None:
    for call in ("forward", "inner"):
        assert "mixed torch.Tensor and DTensor" in variant_results["wrong_calls"][call], call


def test_c57_offload_without_a_gpu_clips_and_steps(
    variant: World, variant_results: Results
) -> None:
    """Nothing is pinned there, and the norm is reduced on the host. (Gradients: the table.)"""
    assert variant_results["placement"]["device"] == "cpu"
    assert variant_results["clipping"]["before"] > 0.5
    assert variant_results["clipping"]["after"] == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("tied", ["False", "True"])
def test_c70_a_model_without_storage_is_filled_after_wrapping(
    any_results: Results, tied: str
) -> None:
    """The gradient proves buffers and weights, ``meta`` that none was left out."""
    found = any_results["filled"][tied]
    assert found["gradient"] < 1e-6
    assert found["calls"] == [True]
    assert found["devices"] == ["cpu"]
    assert found["loss_fell"]


def test_c67_a_model_that_is_filled_stays_tied(any_results: Results) -> None:
    for tied, parameters in (("False", 21), ("True", 20)):
        found = any_results["filled"][tied]
        assert (str(found["tied"]), found["parameters"]) == (tied, parameters)


def test_c65_frozen_weights_get_nothing_and_do_not_move(any_results: Results) -> None:
    found = any_results["frozen"]["fp32"]
    assert found["error"] < 1e-5
    assert found["gradient"] < 1e-6
    assert found["unchanged"]
    assert found["held"]
    assert found["trained"] == 2


def test_c74_fp32_adapters_lie_beside_a_bf16_base(any_results: Results) -> None:
    found = any_results["frozen"]["bf16"]
    assert found["types"] == ["torch.bfloat16"]
    assert found["kinds"] == ["torch.float32"]
    assert found["unchanged"]
    assert found["error"] < 0.02


@pytest.mark.parametrize(("rows", "idle"), [("1", 0), ("0", 6), ("8", 6)])
def test_experts_without_a_token_have_a_gradient_of_zero(
    any_results: Results, rows: str, idle: int
) -> None:
    """An expert of a list that the tokens of some ranks, or of all, do not reach."""
    found = any_results["unused"][rows]
    assert found["idle"] == idle
    assert found["gradient"] < 1e-6
    assert found["skipped"] == [""]


def test_c43_gradients_are_accumulated_and_reduced_in_fp32(any_results: Results) -> None:
    """32 micro-batches in bf16: what is lost in adding them up is fp32's rounding, and the whole
    is off by less than 0.6%."""
    found = any_results["accumulated"]
    assert found["lost"] < 1e-6
    assert found["error"] < 0.006


def test_fp16_computes_in_fp16_and_stores_fp32(any_results: Results) -> None:
    found = any_results["scaled"]
    assert found["blocks"] == ["torch.float16"]
    assert found["stored"] == ["torch.float32"]
    assert found["error"] < 0.005


def test_c58_the_norm_is_that_of_the_gradient_without_the_loss_scale(any_results: Results) -> None:
    assert any_results["scaled"]["norm"] < 0.001


def test_c63_an_overflow_on_one_rank_skips_the_step_on_all(
    any_world: World, any_results: Results
) -> None:
    found = any_results["scaled"]
    size = any_world[1]
    assert found["skipped"] == [[SCALE_LOWERED, ""]] * size
    assert found["loss_was_finite"] == [True] * size
    assert found["unchanged"] == [True] * size
    assert found["scales"] == [[2.0**16, 2.0**15]] * size
    assert found["norms"] == [True]
    assert found["moved"]
    assert not found["alive"]


def test_c63_a_loss_that_is_no_number_skips_the_step_on_all(variant_results: Results) -> None:
    found = variant_results["poisoned"]
    assert all(rank == [NOT_FINITE, ""] for rank in found["skipped"])
    assert all(found["unchanged"])
    assert found["moved"]


def test_c66_no_gradient_is_left_by_a_skipped_step(variant_results: Results) -> None:
    assert not variant_results["poisoned"]["alive"]


def test_c53_the_optimizer_moves_the_model(variant_results: Results) -> None:
    found = variant_results["training"]
    assert found["same"]
    assert found["after"] < found["before"] - 0.3
    assert found["equal_on_ranks"] == 1
    assert found["bitwise"]


def test_c54_bf16_computes_and_fp32_stores_and_reduces(variant_results: Results) -> None:
    found = variant_results["precision"]
    assert found["blocks"] == ["torch.bfloat16"]
    for what in ("stored", "gradients", "buffers"):
        assert found[what] == ["torch.float32"], what
    assert found["loss"] == "torch.float32"


def test_c83_a_checkpoint_of_shards_resumes_bitwise(
    variant: World, variant_results: Results
) -> None:
    found = variant_results["kept"]
    assert found["at_load"] == [True] * variant[1]
    assert found["rest"]
    assert found["end"]
    assert (found["tensors"], found["shape"]) == (84, [97, 32])


def test_c79_ranks_drop_out_differently(any_world: World, any_results: Results) -> None:
    """The same row on every rank, and the same weights at the start."""
    found = any_results["repeated"]
    assert found["starts"] == 1
    assert len(set(found["losses"][0])) == any_world[1]


def test_c115_c79_two_runs_of_one_seed_are_bitwise_the_same(any_results: Results) -> None:
    found = any_results["repeated"]
    assert found["bitwise"]
    assert found["losses"][0] == found["losses"][1]


def test_the_loss_scale_goes_on_in_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was doubled after three steps and two more count; then it is doubled again, which is too
    much: without what the checkpoint keeps the resumed run would not skip the same step."""
    monkeypatch.setattr(LossScale.__init__, "__kwdefaults__", {"growth_interval": 3})
    threads = torch.get_num_threads()
    plan = plans.plan(tmp_path, precision="fp16", every=5, export=False)
    run(plan)
    folder = checkpoint_folder(Path(plan.run_dir), 5)
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest["state"]["strategy"] == {"loss_scale": 2.0**17, "good_steps": 2}
    shutil.move(plan.run_dir, tmp_path / "whole")
    kept = checkpoint_folder(tmp_path / "whole", 5)
    run(plan.model_copy(update={"resume_from": str(kept), "attempt": "second"}))
    torch.set_num_threads(threads)
    ends = [checkpoint_folder(where, 8) for where in (Path(plan.run_dir), tmp_path / "whole")]
    resumed, whole = (read_manifest(end) for end in ends)
    assert resumed is not None
    assert whole is not None
    assert resumed["state"]["strategy"] == whole["state"]["strategy"]
    for what in ("_nll", "skipped"):
        assert resumed["state"]["seen"][what] == whole["state"]["seen"][what]
    assert whole["state"]["seen"]["skipped"] == 1
