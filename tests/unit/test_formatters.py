"""The user's own function: found, named by what it does, sent to workers that lack its module."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import logging
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain.driver import formatters
from dbx_llmtrain.errors import ConfigError

logger = logging.getLogger(__name__)
PATTERN = re.compile("a+")
TABLE = {"a": [1, 2], "b": (None, 1.5)}


def helper(text: str) -> str:
    return PATTERN.sub("b", text).upper()


def formatter(row: dict[str, Any]) -> dict[str, Any]:
    logger.debug("%s", TABLE)
    return {"text": helper(json.dumps(row))}


def function(source: str, name: str = "f", **space: Any) -> Callable[..., Any]:
    """A function as a notebook cell defines it."""
    names: dict[str, Any] = {"__name__": "__main__", **space}
    exec(source, names)
    found: Callable[..., Any] = names[name]
    return found


def closure(value: Any) -> Callable[[Any], Any]:
    return lambda row: (row, value)


def test_c91_the_name_follows_everything_that_the_function_does() -> None:
    base = "def g(x):\n    return x + 1\ndef f(row, n=1):\n    return g(row['a']) * n + K"
    first = formatters.key(function(base, K=1))
    assert formatters.key(function(base, K=1)) == first
    changed = [
        function(base.replace("x + 1", "x + 2"), K=1),
        function(base.replace("n=1", "n=2"), K=1),
        function(base.replace("* n", "- n"), K=1),
        function(base, K=2),
        functools.partial(function(base, K=1), n=1),
    ]
    assert len({first, *map(formatters.key, changed)}) == 6
    assert formatters.key(closure(1)) == formatters.key(closure(1))
    values: list[Any] = [1, 2, "1", (1,), [1], {"a": 1}, {1}, b"1", helper, PATTERN, json, None]
    assert len({formatters.key(closure(value)) for value in values}) == len(values)


def test_c91_the_name_is_the_same_in_another_process() -> None:
    code = (
        "from tests.unit import test_formatters as t; from dbx_llmtrain.driver import formatters; "
        "print(formatters.key(t.formatter), formatters.key(t.closure({'a', 'b', ('c', 1)})))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-B", "-c", code], capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert found == {
        f"{formatters.key(formatter)} {formatters.key(closure({'a', 'b', ('c', 1)}))}\n"
    }


@dataclasses.dataclass
class Options:
    prefix: str
    parts: list[int] = dataclasses.field(default_factory=list)

    def __call__(self, row: Any) -> Any:
        return self.prefix, row


class Recursive:
    __slots__ = ("me",)

    def __call__(self, row: Any) -> Any:
        return self.me


def test_c91_objects_with_a_readable_state_have_a_name() -> None:
    assert formatters.key(Options("a")) == formatters.key(Options("a"))
    assert formatters.key(Options("a")) != formatters.key(Options("b"))
    assert formatters.key(Options("a").__call__) != formatters.key(Options("b").__call__)
    recursive = Recursive()
    recursive.me = recursive
    assert formatters.key(recursive) == formatters.key(recursive)
    day = datetime.date(2026, 1, 1)
    assert formatters.key(closure(day)) != formatters.key(closure(day.replace(day=2)))
    cached = functools.lru_cache(helper)
    assert formatters.key(closure(cached)) == formatters.key(closure(functools.lru_cache(helper)))


def test_c91_what_cannot_be_named_is_refused_not_named_at_random() -> None:
    with pytest.raises(
        ConfigError,
        match=r"data\.formatter: the function, variable 'value' of its "
        r"closure\['a'\] is of type builtins\.object, by which the prepared data",
    ):
        formatters.key(closure({"a": object()}))
    numbers = (number for number in range(3))
    with pytest.raises(ConfigError, match=r"global 'K' is of type builtins\.generator"):
        formatters.key(function("def f(row):\n    return K", K=numbers))
    nowhere = types.ModuleType("nowhere")
    with pytest.raises(ConfigError, match=r"global 'K' \(module nowhere\) is of type builtins"):
        formatters.key(function("def f(row):\n    return K", K=nowhere))


def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: int) -> None:
    """Two modules of the user, of which only the first is named in the configuration."""
    for name in ("my_formats", "my_helpers"):
        sys.modules.pop(name, None)
    (tmp_path / "my_helpers.py").write_text(f"K = {value}\ndef h(x):\n    return x + K\n")
    (tmp_path / "my_formats.py").write_text(
        "import my_helpers\ndef f(row):\n    return {'text': str(my_helpers.h(row['n']))}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def test_modules_of_the_user_travel_and_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = set()
    for value in (1, 2):
        own_modules(tmp_path, monkeypatch, value)
        found = formatters.load("my_formats:f")
        keys.add(formatters.key(found))
        data = formatters.pickled(found)
    assert len(keys) == 2
    (tmp_path / "function").write_bytes(data)
    code = (
        f"import pickle; print(pickle.load(open({str(tmp_path / 'function')!r}, 'rb'))({{'n': 1}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=True, env={}
    )
    assert done.stdout == "{'text': '3'}\n"
    for name in ("my_formats", "my_helpers"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "cannot be imported on the driver .ModuleNotFoundError"),
        ("json:no_such_function", "cannot be imported on the driver .AttributeError"),
        ("json:__doc__", "expected a function of one row, found str"),
        ("tests.unit.test_formatters:own_modules", "expected a function of one argument"),
    ],
)
def test_a_formatter_that_is_none(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        formatters.load(name)
    assert [problem.path for problem in caught.value.problems] == ["data.formatter"]


class Stuck:
    def __reduce__(self) -> Any:
        raise TypeError("not mine")


def test_a_formatter_that_cannot_travel() -> None:
    with pytest.raises(ConfigError, match=r"f cannot be sent .* .TypeError: not mine"):
        formatters.pickled(function("def f(row):\n    return K", K=Stuck()))
