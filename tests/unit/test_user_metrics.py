"""The user's own metrics: what is refused before the start, and its way to the ranks."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dbx_llmtrain.driver import user_metrics
from dbx_llmtrain.errors import CheckpointError, ConfigError
from dbx_llmtrain.worker import own_metrics, tools
from dbx_llmtrain.worker.loss import LossModule
from dbx_llmtrain.worker.tools import Tools
from tests import sample, tiny
from tests.unit.test_loop import ALONE

SCALE = 3.0
LOCK = threading.Lock()


def helper(value: float) -> float:
    return value * SCALE


def mine(model: Any, tokenizer: Any) -> dict[str, float]:
    return {"scaled": helper(2.0)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("accuracy", "expected a function of the model and its tokenizer, found str"),
        (lambda model: {}, "expected a function of two arguments, the model and its tokenizer"),
        (lambda a, b, c: {}, r"two arguments.*missing a required argument: 'c'"),
        (lambda a, b, lock=LOCK: {}, r"cannot be sent to the ranks \(TypeError: "),
    ],
)
def test_what_cannot_be_called_or_sent_is_refused_before_anything_starts(
    given: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        user_metrics.check(given)
    assert [problem.path for problem in caught.value.problems] == ["metrics"]


def test_no_function_and_builtins_are_taken() -> None:
    assert user_metrics.check(None) is None
    assert user_metrics.check(mine) is mine
    assert user_metrics.check(dict) is dict  # has no signature


def test_the_function_goes_by_value_with_everything_of_the_users_modules(tmp_path: Path) -> None:
    plan = user_metrics.ship(sample.run_plan(tmp_path), mine)
    assert plan.metrics is not None
    assert plan.metrics.path == "metrics.pkl"
    assert user_metrics.ship(sample.run_plan(tmp_path), None).metrics is None
    # Another interpreter, which cannot import this module.
    code = (
        "import pickle, sys\n"
        "with open(sys.argv[1], 'rb') as file: function = pickle.load(file)\n"
        "assert 'tests.unit.test_user_metrics' not in sys.modules\n"
        "print(function(None, None))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "metrics.pkl")],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "{'scaled': 6.0}", done.stderr
    import cloudpickle

    assert not cloudpickle.list_registry_pickle_by_value(), "nothing is left registered"


def test_a_file_with_another_hash_is_never_unpickled(tmp_path: Path) -> None:
    plan = user_metrics.ship(sample.run_plan(tmp_path), mine)
    assert plan.metrics is not None
    loaded = tools.load_metrics(plan.run_dir, plan.metrics)
    assert loaded(None, None) == {"scaled": 6.0}
    trap = pickle.dumps(_Trap(tmp_path / "sprung"))
    (tmp_path / "metrics.pkl").write_bytes(trap)
    with pytest.raises(CheckpointError, match="is not the one that was sent: its hash is another"):
        tools.load_metrics(plan.run_dir, plan.metrics)
    assert not (tmp_path / "sprung").exists()
    (tmp_path / "metrics.pkl").unlink()
    with pytest.raises(CheckpointError, match=r"metrics\.pkl cannot be read"):
        tools.load_metrics(plan.run_dir, plan.metrics)


class _Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self._path,))


def test_a_function_that_a_rank_cannot_load_is_told_with_the_reason(tmp_path: Path) -> None:
    from dbx_llmtrain import storage
    from dbx_llmtrain.records import FileEntry

    content = b"cno_such_module\nfunction\n."
    (tmp_path / "metrics.pkl").write_bytes(content)
    digest = storage.hash_file(tmp_path / "metrics.pkl")
    entry = FileEntry(path="metrics.pkl", size=len(content), sha256=digest)
    with pytest.raises(ConfigError, match=r"cannot be loaded on a rank \(ModuleNotFoundError"):
        tools.load_metrics(str(tmp_path), entry)


def measured(function: Any) -> dict[str, float]:
    model = tiny.llama()
    wanted = Tools(tokenizer="words", generation={}, metrics=function)
    return own_metrics.measure(LossModule(model), model, ALONE, wanted, taken=["eval_code_loss"])


def test_numbers_of_any_kind_are_taken() -> None:
    import numpy as np

    given = {"a": 1, "b.c/d-e": np.float32(2.5), "_f": torch.tensor([3.0]), "g": float("nan")}
    found = measured(lambda model, tokenizer: given)
    assert {name: found[name] for name in ("a", "b.c/d-e", "_f")} == {
        "a": 1.0, "b.c/d-e": 2.5, "_f": 3.0
    }  # fmt: skip
    assert found["g"] != found["g"]
    assert all(type(value) is float for value in found.values())
    assert measured(lambda model, tokenizer: {}) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1.0], "expected a mapping of names to numbers as the function's result, found list"),
        (None, "found NoneType"),
        ({"two words": 1}, "expected names of letters, digits .*, found 'two words'"),
        ({1: 1}, "found 1"),
        ({"eval_loss": 1}, "eval_loss is the name of a metric of ours: give yours another one"),
        ({"eval_code_loss": 1}, "eval_code_loss is the name of a metric of ours"),
        ({"loss": 1}, "loss is the name of a metric of ours"),
        ({"train_loss": 1}, "train_loss is the name of a metric of ours"),
        ({"best_eval_loss": 1}, "best_eval_loss is the name of a metric of ours"),
        ({"a": "0.5"}, r"expected a number for a, found '0\.5' \(str\)"),
        ({"a": [1]}, r"expected a number for a, found \[1\] \(list\)"),
        ({"a": torch.ones(2)}, r"expected a number for a, .*Tensor"),
    ],
)
def test_what_is_no_number_by_a_free_name_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measured(lambda model, tokenizer: given)


def test_what_the_function_raises_says_whose_it_is() -> None:
    def failing(model: Any, tokenizer: Any) -> dict[str, float]:
        raise KeyError("answer")

    with pytest.raises(KeyError, match="answer") as caught:
        measured(failing)
    assert "passed as metrics=" in "".join(caught.value.__notes__)
