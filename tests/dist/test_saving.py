"""Checkpoints that are written while training goes on, by two ranks under every strategy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dbx_llmtrain import storage
from dbx_llmtrain.worker import checkpoint
from dbx_llmtrain.worker.world import World, open_world
from tests import volumes
from tests.dist import checkpoint_cases, saving_cases
from tests.dist.launch import TIMEOUT, run_ranks, some_slow
from tests.dist.runs import Context

pytestmark = pytest.mark.dist

BOTH = [True, True]
STRATEGIES = saving_cases.STRATEGIES
Ranks = Callable[[str], dict[str, Any]]
QUICK = (saving_cases.ONE, "zero3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saving")


@pytest.fixture(scope="module")
def volume(folder: Path) -> volumes.Volume | None:
    return volumes.make(folder / "rules")


@pytest.fixture(scope="module")
def needs_volume(volume: volumes.Volume | None) -> volumes.Volume:
    if volume is None:
        pytest.skip(volumes.NO_COMPILER)
    return volume


@pytest.fixture(scope="module")
def ranks(folder: Path, volume: volumes.Volume | None) -> Ranks:
    """What two ranks found with a strategy, by case. The quick ones are launched together, and so
    are the others."""
    known: dict[str, Any] = {}

    def of(strategy: str) -> dict[str, Any]:
        if strategy not in known:
            quick = strategy in QUICK
            names = [name for name in STRATEGIES if (name in QUICK) == quick]
            out = folder / f"results-{quick}.json"
            program = ["tests.dist.rank", "tests.dist.saving_cases", ",".join(names), "1"]
            environment = volume.environment if volume else {}
            run_ranks([*program, str(folder), str(out)], 2, environment, TIMEOUT)
            known.update(json.loads(out.read_text()))
        found: dict[str, Any] = known[strategy]
        return found

    return of


@pytest.fixture(params=some_slow(STRATEGIES, QUICK))
def found(ranks: Ranks, request: pytest.FixtureRequest) -> dict[str, Any]:
    return ranks(request.param)


def test_a_checkpoint_is_of_its_moment_whatever_is_trained_meanwhile(found: dict[str, Any]) -> None:
    case = found["moment"]
    assert case["at_load"] == case["rest"] == case["end"] == BOTH
    assert case["state"] == {"step": 3}
    assert case["told"] == [[True], [True]]
    assert case["newest"]
    assert case["left"] == [[], []]
    first, second = case["saved"]
    assert first == second
    assert first["error"] == ""
    assert first["step"] == 3
    assert 0 < first["seconds_stalled"] <= first["seconds"]


def test_training_goes_on_while_storage_takes_its_time(
    found: dict[str, Any], needs_volume: volumes.Volume
) -> None:
    assert found["moment"]["busy"] == BOTH


def test_c85_every_generator_is_as_it_was_at_the_moment(found: dict[str, Any]) -> None:
    assert found["moment"]["draws"] == BOTH


def test_c89_one_at_a_time_and_the_last_and_the_best_stay(found: dict[str, Any]) -> None:
    case = found["in_turn"]
    assert case["told"] == [[[step, ""] for step in (1, 2, 3, 4)]] * 2
    assert case["last"]
    assert case["kept"] == ["step-00000004", "step-00000002"]
    assert case["torn"] == []
    assert case["faults"] == [[], []]
    assert case["equal"] == BOTH
    assert min(case["sizes"]) > 4 * 20_000


def test_a_rank_that_cannot_write_fails_one_checkpoint_and_nothing_else(
    found: dict[str, Any],
) -> None:
    case = found["failing"]
    for error in case["errors"]["scratch"]:
        assert "rank 1: FileExistsError" in error
        assert "rank 0" not in error
    for error in case["errors"]["size"]:
        assert "cannot be written: rank 1: OSError: [Errno 27] File too large" in error
        assert "rank 0" not in error
    assert case["errors"]["then"] == ["", ""]
    assert case["newest"] == 4
    assert case["losses"] == BOTH
    assert case["left"] == [[], []]
    assert case["told"][0] == [case["errors"][name][0] for name in case["errors"]]
    assert case["folders"][-1] == "step-00000004"
    assert not {"step-00000001", "step-00000002"} & set(case["folders"])


def test_a_full_disk_fails_one_checkpoint_and_nothing_else(
    found: dict[str, Any], needs_volume: volumes.Volume
) -> None:
    case = found["failing"]
    for error in case["errors"]["full"]:
        for rank in (0, 1):
            assert f"rank {rank}: OSError: [Errno 28] No space left on device" in error
    assert case["folders"] == ["step-00000004"]


def test_ranks_that_lost_each_other_save_the_next_one(
    ranks: Ranks,
) -> None:
    case = ranks(saving_cases.ONE)["broken"]
    for first, second in case["errors"]:
        assert "the ranks cannot agree" in first
        assert second == ""
    assert case["cut"]
    assert case["seconds"] < 30
    assert case["folders"] == []
    assert case["complete"] == ["step-00000002"]


def test_a_run_that_fails_does_not_wait_for_storage_without_end(
    ranks: Ranks, needs_volume: volumes.Volume
) -> None:
    case = ranks(saving_cases.ONE)["given_up"]
    for slow, quick in case["seconds"]:
        assert 5 <= slow < 8
        assert quick < 5
    during, after, _, quick_after = case["folders"]
    assert during == after == []
    assert quick_after == ["step-00000001"]
    assert case["told"][0] == [[1, ""]]


def test_the_weights_of_any_strategy_load_into_any_other(found: dict[str, Any]) -> None:
    assert found["weights"]
    assert set(map(str, found["weights"].values())) == {str(BOTH)}


def test_nothing_broke_the_rules_of_a_volume(ranks: Ranks, needs_volume: volumes.Volume) -> None:
    ranks(saving_cases.ONE)
    assert needs_volume.refused() == []


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A process group of one rank in this process."""
    threads = torch.get_num_threads()
    with open_world(use_gpu=False) as alone:
        yield alone
    torch.set_num_threads(threads)


@pytest.mark.parametrize("strategy", some_slow(STRATEGIES, QUICK))
def test_c84_c111_one_rank_goes_on_from_every_strategy(
    ranks: Ranks,
    folder: Path,
    volume: volumes.Volume | None,
    world: World,
    strategy: str,
    tmp_path: Path,
) -> None:
    ranks(strategy)
    parent = volume.folder if volume else folder / "volume"
    place = storage.checkpoint_folder(parent / strategy / "moment", 3)
    stored = torch.load(folder / f"{strategy}.pt")
    run = checkpoint_cases.make(Context("single", world, tmp_path), "single", seed=3)
    assert checkpoint_cases.load(run, place) == {"step": 3}
    assert checkpoint_cases.equal(checkpoint_cases.everything(run), stored)
    weights = checkpoint.read_weights(place)
    named = {f"model.{name}": tensor for name, tensor in weights.items()}
    expected = {name: value for name, value in stored.items() if name.startswith("model.")}
    assert checkpoint_cases.equal(named, expected)


def test_the_manifest_says_what_the_checkpoint_is(
    ranks: Ranks, folder: Path, volume: volumes.Volume | None
) -> None:
    ranks("fsdp")
    parent = volume.folder if volume else folder / "volume"
    manifest = checkpoint.read_state(storage.checkpoint_folder(parent / "fsdp" / "moment", 3))
    assert manifest["step"] == 3
    assert manifest["metrics"] == {"eval_loss": 2.5}
    assert manifest["world_size"] == 2
    assert manifest["strategy"] == "fsdp"
    assert manifest["identity"] == checkpoint_cases.IDENTITY
    assert manifest["fingerprints"] == {"model": "f00d" * 8, "data": "f00d" * 8}
    assert manifest["config"]["data"] == {"train": "/data/train.jsonl", "eval": 0.1}
    assert {group["weight_decay"] for group in manifest["groups"]} >= {0.0}
    assert manifest["versions"]["torch"] == torch.__version__
    assert {entry["path"] for entry in manifest["files"]} == {
        ".metadata", "__0_0.distcp", "__1_0.distcp", "rng-00000.json", "rng-00001.json",
    }  # fmt: skip
