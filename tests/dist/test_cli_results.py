"""The shell commands that work on what a run has left, on a run of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from dbx_llmtrain import cli, storage
from dbx_llmtrain.driver import run_folder
from dbx_llmtrain.outcomes import Exported, Generations
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker.main import run
from tests.dist import plans

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> RunPlan:
    """A run with checkpoints after both steps and without an export."""
    folder = tmp_path_factory.mktemp("shell")
    plan = plans.plan(folder, "first", train={"max_steps": 2}, every=1, export=False)
    run_folder.write_start(plan)
    run(plan)
    return plan


def test_any_checkpoint_is_exported_from_a_shell(
    ended: RunPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = storage.checkpoint_folder(Path(ended.run_dir), 1)
    capsys.readouterr()
    options = ["--dtype", "bf16", "--json"]
    assert cli.run(["export", str(first), str(tmp_path / "there"), *options]) == 0
    found = Exported.model_validate_json(capsys.readouterr().out)
    assert (found.path, found.source, found.step) == (str(tmp_path / "there"), str(first), 1)
    assert (found.dtype, found.adapter, found.hub) == ("bf16", False, None)
    assert (tmp_path / "there" / "model.safetensors").is_file()
    assert cli.run(["export", str(first), "--no-merge"]) == 2
    assert "- --no-merge: the run trained no adapter" in capsys.readouterr().err
    assert cli.run(["register", str(first), "answers"]) == 2
    assert f"make that first with dbx-llmtrain export {first}" in capsys.readouterr().err


def test_a_run_answers_when_it_has_an_export(
    ended: RunPlan, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ["generate", ended.run_dir, "the cat", "--max-new-tokens", "2", "--device", "cpu"]
    assert cli.run(ask) == 2
    assert "has no complete export" in capsys.readouterr().err
    assert cli.run(["export", ended.run_dir]) == 0
    assert f"folder   {ended.run_dir}/export\n" in capsys.readouterr().out
    assert cli.run([*ask, "--json"]) == 0
    found = Generations.model_validate_json(capsys.readouterr().out)
    assert found.model == f"{ended.run_dir}/export"
    assert len(found) == 1


def test_a_run_that_is_not_finished_is_not_registered(
    ended: RunPlan, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["register", ended.run_dir, "answers"]) == 2
    assert f"{ended.run_dir} is not finished" in capsys.readouterr().err
    assert cli.run(["register", ended.run_dir, "a b", "--alias", "v1"]) == 2
    assert "expected a model's name" in capsys.readouterr().err
