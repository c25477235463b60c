"""DeepSpeed on two ranks and on one: the rows of CORRECTNESS section I, each with its number."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.launch import launch

pytestmark = pytest.mark.dist

CASES = "tests.dist.deepspeed_cases"
STAGES = ("zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By stage and case; under ``folder`` lie the checkpoints."""
    folder = tmp_path_factory.mktemp("deepspeed")
    return launch(",".join(STAGES), 2, folder, CASES) | {"folder": folder}


@pytest.fixture(scope="module")
def on_one(on_two: dict[str, Any]) -> dict[str, Any]:
    """Some of it on one rank, which finds the two ranks' checkpoints."""
    return launch(",".join(STAGES), 1, on_two["folder"], "tests.dist.deepspeed_one_cases")


@pytest.fixture(params=STAGES)
def two(request: pytest.FixtureRequest, on_two: dict[str, Any]) -> dict[str, Any]:
    """What the cases of a stage found on two ranks."""
    results: dict[str, Any] = on_two[request.param]
    return results | {"stage": request.param, "ranks": 2}


_BOTH = [
    *((stage, 2) for stage in STAGES),
    *(pytest.param((stage, 1), marks=pytest.mark.slow) for stage in STAGES),
]


@pytest.fixture(params=_BOTH, ids=str)
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the cases of a stage found on two ranks, or on one."""
    stage, ranks = request.param
    results: dict[str, Any] = request.getfixturevalue("on_two" if ranks == 2 else "on_one")
    return results[stage] | {"stage": stage, "ranks": ranks}


def test_gradients_are_those_of_one_process(found: dict[str, Any]) -> None:
    assert len(found["parity"]) == 4
    for name, case in found["parity"].items():
        assert case["gradient"] < 1e-6, name
        assert case["loss"] < 1e-6
        assert case["norm"] < 1e-6
        assert case["ranks"] == 1
        assert case["missing"] == []
        assert case["heads"] == name.startswith("tied")
        assert case["parameters"] == (20 if name.startswith("tied") else 21)


def test_c103_the_engine_never_divides_by_the_accumulation(two: dict[str, Any]) -> None:
    case = two["unscaled"]
    assert case["micro_batches"] == 8 // two["ranks"]
    assert case["told"] == 1
    assert case["norm"] == pytest.approx(1.0, abs=1e-6)
    # What it does with the same losses when it is told of 4 and left to scale.
    assert case["engine_norm"] == pytest.approx(0.25, abs=1e-6)


def test_c104_a_shorter_last_window_steps(two: dict[str, Any]) -> None:
    case = two["tail"]
    assert case["micro_batches"] == [6 // two["ranks"], 2 // two["ranks"]]
    assert case["steps"] == 2
    assert set(case["engine_steps"]) == {2}
    assert case["rows"] == [6, 2]
    assert max(case["norms"]) < 1e-6


def test_c105_the_first_update_in_bf16_is_the_learning_rate(found: dict[str, Any]) -> None:
    case = found["first_update"]
    assert case["share"] == pytest.approx(1.0, abs=0.01)
    assert case["kept"] == ["torch.float32"]
    assert case["held"] == ["torch.bfloat16"]
    assert case["buffers"] == ["torch.float32"]
    assert case["start"] == 0  # fp32 weights are not rounded on the way in


def test_c106_gradients_are_summed_and_reduced_in_fp32(two: dict[str, Any]) -> None:
    case = two["summed"]
    assert case["micro_batches"] == 32
    assert 0 < case["error"] < 0.006
    assert case["types"] == ["torch.bfloat16", "torch.float32"]
    assert case["reduced"] == "torch.float32"


def test_c107_the_norm_is_known_and_clipping_exact(two: dict[str, Any]) -> None:
    for limit, case in two["clipping"].items():
        assert case["reported"] < 1e-6
        assert case["engine"] == pytest.approx(case["expected"], abs=1e-6)
        clipped = min(case["expected"], float(limit) or case["expected"])
        assert case["after"] == pytest.approx(clipped, abs=1e-6)


def test_c108_no_sync_is_never_asked_for(two: dict[str, Any]) -> None:
    case = two["never_quiet"]
    assert ("incompatible" in case["refused"]) == (two["stage"] != "zero1")
    assert case["loss"] == pytest.approx(4.6, abs=0.1)


def test_c109_an_offloaded_optimizer_may_be_torchs(found: dict[str, Any]) -> None:
    case = found["offloaded"]
    expected = {"none", "optimizer"} | ({"params", "both"} if found["stage"] == "zero3" else set())
    assert case["runs"].keys() == expected
    plain = case["runs"]["none"]
    for run in case["runs"].values():
        assert run["losses"] == pytest.approx(plain["losses"], abs=1e-6)
        assert run["norms"] == pytest.approx(plain["norms"], abs=1e-6)
    assert case["apart"] < 5e-5


def test_c110_a_step_that_is_not_finite_is_skipped_by_all(found: dict[str, Any]) -> None:
    for case in found["poisoned"].values():
        assert case["skipped"] == [[False, True, False]] * found["ranks"]
        assert all(case["unchanged"])
        assert case["norms"] < 1e-2
        assert case["after"] < 5e-3
    assert found["poisoned"]["fp32"]["after"] < 5e-5


def test_c110_all_ranks_run_the_same_number_of_forward_passes(two: dict[str, Any]) -> None:
    for count, case in two["uneven"].items():
        assert len({tuple(forwards) for forwards in case["forwards"]}) == 1
        assert case["forwards"][0][0] == -(-int(count) // two["ranks"])
        assert case["gradient"] < 1e-6
        assert case["evaluated"] < 1e-6


def test_resuming_is_exact_on_as_many_ranks(found: dict[str, Any]) -> None:
    for precision, case in found["resumed"].items():
        assert case["states"] == ["exp_avg", "exp_avg_sq", "step"], precision
        for what in ("at_load", "rest", "end"):
            assert all(case[what]), (precision, what)


def test_c111_checkpoints_go_to_other_strategies_stages_and_numbers(found: dict[str, Any]) -> None:
    moved = dict(found["moved"])
    for kind in ("fsdp", "ddp"):
        case = moved.pop(kind)
        assert all(case["read"])
        assert all(case["given"])
        assert case["apart"] < 5e-5
    earlier = STAGES[: STAGES.index(found["stage"]) + 1]
    expected = {f"{stage}-{found['ranks']}-fp32" for stage in earlier}
    expected |= {f"{stage}-2-fp32" for stage in STAGES if found["ranks"] == 1}
    assert moved.keys() == expected
    for case in moved.values():
        assert all(case["read"])


def test_c101_the_export_is_whole(found: dict[str, Any]) -> None:
    case = found["exported"]
    assert case["complete"]
    assert case["keys"]
    assert case["bytes"] > 4 * 20_000
    assert case["logits"] < 1e-5
    assert case["moved"] > 1e-3


def test_a_model_without_storage_is_filled_where_it_is_cut(two: dict[str, Any]) -> None:
    case = two["without_storage"]
    assert case["gradient"] < 1e-6
    assert case["loss"] < 1e-6
    assert case["tied"]
    assert case["shapes"]
    assert case["held"]
    share = 1 / two["ranks"] if two["stage"] == "zero3" else 1
    assert case["share"] == pytest.approx(share, abs=0.01)


def test_the_loops_rates_and_groups_reach_the_engine(two: dict[str, Any]) -> None:
    case = two["rates"]
    assert case["seen"] == sorted(set(case["told"]))
    assert len(case["told"]) == 6
    assert case["decays"] == [0.1, 0.0]


def test_misuse_is_refused(two: dict[str, Any]) -> None:
    assert "other settings of train" in two["misuse"]["train"]
    assert "fp16" in two["misuse"]["fp16"]
