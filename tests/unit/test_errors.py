from __future__ import annotations

import pickle

import pytest

from dbx_llmtrain import errors
from dbx_llmtrain.errors import (
    ClusterError,
    ConfigError,
    Finding,
    LlmTrainError,
    Problem,
    StagingError,
    TrainingFailed,
)


def test_a_config_error_lists_every_problem() -> None:
    error = ConfigError([Problem("train.epochs", "bad"), Problem("", "worse")])
    assert isinstance(error, ValueError)
    assert isinstance(error, LlmTrainError)
    assert [problem.path for problem in error.problems] == ["train.epochs", ""]
    expected = "2 problems in the configuration:\n  - train.epochs: bad\n  - worse"
    assert str(error) == expected
    assert str(ConfigError([Problem("a", "b")])).startswith("1 problem in")


def test_a_cluster_error_lists_every_finding() -> None:
    error = ClusterError([Finding("error", "slots", "too few"), Finding("warning", "disk", "low")])
    assert str(error) == (
        "the cluster cannot run this:\n  - [error] slots: too few\n  - [warning] disk: low"
    )
    assert len(error.findings) == 2


def test_a_staging_error_names_each_node() -> None:
    error = StagingError("the model", {"b": "disk full", "a": "no such file"})
    assert error.nodes == {"a": "no such file", "b": "disk full"}
    expected = "the model could not be staged on 2 node(s):\n  - a: no such file\n  - b: disk full"
    assert str(error) == expected


def test_a_failed_training_says_who_where_and_what_to_do() -> None:
    error = TrainingFailed(
        "ValueError: boom",
        rank=1,
        host="worker-2",
        gpu="GPU-1",
        step=7,
        exit_code=1,
        traceback="Traceback ...\nValueError: boom\n",
        log_tail="not shown with a traceback",
        advice="mend it",
    )
    text = str(error)
    first = "training failed: rank 1, on worker-2, GPU GPU-1, at step 7, exit code 1: ValueError"
    assert text.startswith(first)
    assert "Traceback of the rank:\nTraceback ...\nValueError: boom\n\n" in text
    assert text.endswith("What to do: mend it")
    assert "not shown" not in text
    assert str(TrainingFailed("boom")) == "boom"
    assert "Last lines of the rank:\nbye" in str(TrainingFailed("x", rank=0, log_tail="bye\n"))
    logged = str(TrainingFailed("x", rank=0, log="/r/logs/rank-00000.log", advice="mend it"))
    assert "\n\nThe whole log of the rank: /r/logs/rank-00000.log\n\nWhat to do" in logged


def test_a_notebook_shows_what_is_told_and_no_frames_of_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    code = "raise TrainingFailed('ValueError: boom', rank=1, advice='mend it') from KeyError('x')"
    shell.run_cell(f"from dbx_llmtrain import TrainingFailed\n{code}")
    printed = capsys.readouterr().out
    assert printed.splitlines() == [
        "TrainingFailed: training failed: rank 1: ValueError: boom", "", "What to do: mend it",
    ]  # fmt: skip


def test_the_tree_in_the_docstring_has_every_class() -> None:
    classes = [item for item in vars(errors).values() if isinstance(item, type)]
    raised = [item for item in classes if issubclass(item, Exception)]
    assert len(raised) == 9
    for item in raised:
        assert item.__name__ in (errors.__doc__ or "")
        assert issubclass(item, LlmTrainError)


@pytest.mark.parametrize("error", [errors.DataError("x"), errors.CheckpointError("y")])
def test_plain_errors_survive_pickle(error: LlmTrainError) -> None:
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
