"""Checkpoints and exports of two ranks, and what one rank makes of them and they of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dbx_llmtrain import storage
from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.worker.world import World, open_world
from tests import tiny
from tests.dist import checkpoint_cases as cases
from tests.dist.launch import launch
from tests.dist.runs import Context

pytestmark = pytest.mark.dist

BOTH = [True, True]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A process group of one rank in this process."""
    threads = torch.get_num_threads()
    with open_world(use_gpu=False) as alone:
        yield alone
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def ranks(folder: Path, world: World) -> dict[str, Any]:
    """What two ranks found; before, one process writes a checkpoint for them to read."""
    run = cases.make(Context("single", world, folder / "alone"), "single")
    cases.advance(run, 0, 4)
    cases.save(run, folder / "single")
    torch.save(cases.everything(run), folder / "single.pt")
    for tied in (False, True):
        tiny.model_folder(folder / f"source-{tied}", tied=tied, chat_template=None)
    return launch("fsdp", 2, folder, "tests.dist.checkpoint_cases")


@pytest.mark.parametrize("strategy", cases.STRATEGIES)
def test_c83_a_resumed_run_is_bitwise_the_one_that_was_not_interrupted(
    ranks: dict[str, Any], strategy: str
) -> None:
    found = ranks["resumed"][strategy]
    assert found["state"] == {"step": 4, "nll": 1.5}
    assert found["steps"] == cases.STEPS
    assert found["rates"] == sorted(found["rates"], reverse=True)
    for check in ("at_load", "rest_equal", "end_equal"):
        assert found[check] == BOTH, check


@pytest.mark.parametrize("strategy", cases.STRATEGIES)
def test_c85_every_generator_of_every_rank_goes_on_where_it_was(
    ranks: dict[str, Any], strategy: str
) -> None:
    assert ranks["resumed"][strategy]["draws_equal"] == BOTH
    assert ranks["resumed"][strategy]["draws_differ_on_ranks"] == 2


@pytest.mark.parametrize("strategy", cases.STRATEGIES)
def test_a_checkpoint_holds_every_tensor_once_and_leaves_nothing_behind(
    ranks: dict[str, Any], strategy: str
) -> None:
    # 21 parameters, each with exp_avg, exp_avg_sq and step.
    assert ranks["resumed"][strategy]["tensors"] == 84
    assert ranks["resumed"][strategy]["left"] == []


@pytest.mark.parametrize("reader", cases.STRATEGIES)
@pytest.mark.parametrize("writer", ["single", *cases.STRATEGIES])
def test_c84_two_ranks_read_what_any_strategy_wrote(
    ranks: dict[str, Any], writer: str, reader: str
) -> None:
    assert ranks["crossed"][f"{writer}-{reader}"] == BOTH


@pytest.mark.parametrize("writer", ["single", *cases.STRATEGIES])
def test_c84_one_rank_reads_what_any_strategy_wrote(
    ranks: dict[str, Any], folder: Path, world: World, writer: str, tmp_path: Path
) -> None:
    run = cases.make(Context("single", world, tmp_path), "single", seed=3)
    state = cases.load(run, folder / writer)
    assert state["step"] == 4
    assert cases.equal(cases.everything(run), torch.load(folder / f"{writer}.pt"))


def test_loaded_state_is_of_the_kind_that_the_optimizer_makes_itself(
    folder: Path, ranks: dict[str, Any], world: World, tmp_path: Path
) -> None:
    context = Context("single", world, tmp_path)
    own, loaded = (cases.make(context, "single") for _ in range(2))
    cases.advance(own, 0, 1)
    cases.load(loaded, folder / "fsdp")
    for first, second in zip(own.model.parameters(), loaded.model.parameters(), strict=True):
        mine, theirs = own.optimizer.state[first], loaded.optimizer.state[second]
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert theirs[key].dtype == value.dtype
            assert theirs[key].shape == value.shape
            assert theirs[key].requires_grad == value.requires_grad


def test_a_checkpoint_before_the_first_step_has_no_optimizer_state(
    world: World, tmp_path: Path
) -> None:
    context = Context("single", world, tmp_path / "runs")
    run, again = cases.make(context, "single"), cases.make(context, "single", seed=1)
    cases.save(run, tmp_path / "step-0")
    cases.load(again, tmp_path / "step-0")
    assert cases.equal(cases.everything(again), cases.everything(run))
    assert not again.optimizer.state


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("hash", r"distcp is damaged: its hash is not the manifest's"),
        ("nothing", r"incomplete: no valid manifest\.json"),
        ("incomplete", r"incomplete: no valid manifest\.json"),
        ("identity", r"train\.seed: 1 then, 2 now.* another tracking\.run_name"),
        ("tied", r"of another model: model\.lm_head\.weight is only in one of them"),
        ("wider", r"model\.model\.embed_tokens\.weight is \(97, 32\) there and \(101, 32\) here"),
        ("frozen", r"it trained model\.norm\.weight, which is not trained here"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_on_every_rank(
    ranks: dict[str, Any], case: str, message: str
) -> None:
    import re

    for found in ranks["damaged"]["messages"]:
        assert re.search(message, found[case]), found[case]
    assert ranks["damaged"]["unchanged"] == BOTH


def test_a_rank_that_cannot_write_fails_all_and_is_named(ranks: dict[str, Any]) -> None:
    found = ranks["unwritable"]
    for message in found["one"]:
        assert "rank 1: NotADirectoryError" in message
        assert "rank 0" not in message
    for message in found["all"]:
        assert "cannot be written" in message
        assert "rank 0: NotADirectoryError" in message
        assert "rank 1: NotADirectoryError" in message
    assert not found["exists"]
    assert found["left"] == []


def test_a_killed_attempts_files_are_gone_and_the_manifest_names_all_others(
    ranks: dict[str, Any],
) -> None:
    found = ranks["leftovers"]
    names = [".metadata", "__0_0.distcp", "__1_0.distcp", "rng-00000.json", "rng-00001.json"]
    assert found["named"] == names
    assert found["files"] == sorted([*names, "manifest.json"])
    assert found["world_size"] == 2
    assert found["versions"]["torch"] == torch.__version__


def test_c69_ranks_with_different_weights_are_refused(ranks: dict[str, Any]) -> None:
    for message in ranks["same_weights"]["weights"]:
        # Norms are all ones in both models, and buffers are equal.
        assert "ranks [1] hold other weights than rank 0 in 16 of" in message
    for message in ranks["same_weights"]["buffer"]:
        assert "in 1 of" in message
        assert "(model.rotary_emb.inv_freq)" in message


@pytest.mark.parametrize("strategy", cases.STRATEGIES)
def test_c88_only_rank_0_gets_the_whole_model(ranks: dict[str, Any], strategy: str) -> None:
    for tied, keys in ((False, 21), (True, 20)):
        found = ranks["gathered"][f"{strategy}-{tied}"]
        assert found == {"keys": [keys, 0], "equal": True, "plain": True}


@pytest.mark.slow
def test_c88_a_rank_that_skips_the_gather_ends_in_a_time_out(tmp_path: Path) -> None:
    script = tmp_path / "skip.py"
    script.write_text(
        "import sys, time, torch\n"
        "from tests import tiny\n"
        "from dbx_llmtrain.worker.export import gather\n"
        "from dbx_llmtrain.worker.loss import LossModule\n"
        "from dbx_llmtrain.worker.parallel import make_strategy\n"
        "from dbx_llmtrain.worker.world import open_world\n"
        "with open_world(use_gpu=False, timeout_s=4) as world:\n"
        "    model = tiny.llama()\n"
        "    make_strategy('fsdp', world, 'fp32').wrap(LossModule(model))\n"
        "    if world.rank == 1:\n"
        "        time.sleep(60)\n"
        "    started = time.monotonic()\n"
        "    try:\n"
        "        gather(model, torch.float32, world)\n"
        "    except RuntimeError as error:\n"
        "        print('raised after', int(time.monotonic() - started), flush=True)\n"
        "        raise SystemExit(7) from error\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    started = time.monotonic()
    done = subprocess.run(
        [*torchrun, str(script)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "raised after" in done.stdout, done.stderr
    assert int(done.stdout.split("raised after")[1].split()[0]) < 30
    assert time.monotonic() - started < 50


def _reload(target: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[kind]
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("strategy", cases.STRATEGIES)
def test_c94_c96_the_export_of_a_wrapped_model_loads_with_equal_logits(
    ranks: dict[str, Any], folder: Path, strategy: str, tied: bool
) -> None:
    name = f"{strategy}-{tied}"
    assert ranks["exported"][name] == {"ranks": [True, False], "training": True}
    target = folder / "exports" / name
    model = _reload(target)
    input_ids, logits = torch.load(f"{target}.logits")
    with torch.no_grad():
        ours = model(input_ids=input_ids).logits
    assert float((ours - logits).abs().max()) <= 1e-5
    untouched, weights = torch.load(target.with_suffix(".pt"))
    stored = dict(model.named_parameters())
    assert stored.keys() == weights.keys()
    assert all(torch.equal(stored[key], weights[key]) for key in weights)
    assert not torch.equal(untouched["model.norm.weight"], weights["model.norm.weight"])


@pytest.mark.parametrize("strategy", cases.STRATEGIES)
def test_c95_a_tied_export_has_no_second_copy(
    ranks: dict[str, Any], folder: Path, strategy: str
) -> None:
    file = folder / "exports" / f"{strategy}-True" / "model.safetensors"
    weights = load_file(file)
    assert "lm_head.weight" not in weights
    assert len(weights) == 20
    source = folder / "source-True" / "model.safetensors"
    assert file.stat().st_size == pytest.approx(source.stat().st_size, rel=0.01)


def test_c96_wrapping_and_gathering_changes_no_bit(ranks: dict[str, Any], folder: Path) -> None:
    for tied in (False, True):
        source = load_file(folder / f"source-{tied}" / "model.safetensors")
        for strategy in cases.STRATEGIES:
            path = folder / "exports" / f"{strategy}-{tied}.pt"
            untouched, _ = torch.load(path)
            assert untouched.keys() == source.keys()
            assert all(torch.equal(untouched[key], source[key]) for key in source)


def test_c114_objects_checkpoints_and_clipping_share_a_gloo_group(ranks: dict[str, Any]) -> None:
    assert ranks["objects"] == {"object": [{"from": 0}, {"from": 0}], "norms": 1}
    assert ranks["resumed"]["fsdp"]["at_load"] == BOTH


def test_only_complete_checkpoints_are_found(tmp_path: Path) -> None:
    assert storage.latest_checkpoint(tmp_path) is None
    for step in (2, 10, 300):
        path = storage.checkpoint_folder(tmp_path, step)
        path.mkdir(parents=True)
        (path / "data").write_text(str(step))
        entries = [entry.model_dump() for entry in storage.entries(path)]
        storage.write_manifest(path, {"files": entries})
    (tmp_path / "checkpoints" / "notes").mkdir()
    (tmp_path / "checkpoints" / "step-x").mkdir()
    assert storage.latest_checkpoint(tmp_path) == storage.checkpoint_folder(tmp_path, 300)
    (storage.checkpoint_folder(tmp_path, 300) / "data").unlink()
    assert storage.latest_checkpoint(tmp_path) == storage.checkpoint_folder(tmp_path, 10)
    (storage.checkpoint_folder(tmp_path, 10) / "manifest.json").write_text("{")
    assert storage.latest_checkpoint(tmp_path) == storage.checkpoint_folder(tmp_path, 2)


def test_a_manifest_of_something_else_is_no_checkpoint(tmp_path: Path, world: World) -> None:
    storage.write_manifest(tmp_path / "step-1", {"files": []})
    run = cases.make(Context("single", world, tmp_path / "run"), "single")
    with pytest.raises(CheckpointError, match="manifest lacks identity, state, world_size"):
        cases.load(run, tmp_path / "step-1")
