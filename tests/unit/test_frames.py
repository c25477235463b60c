"""Which frames a traceback begins with."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain.errors import DataError
from dbx_llmtrain.worker import handover
from dbx_llmtrain.worker.handover import describe


def files(text: str) -> list[str]:
    return [line.split('"')[1] for line in text.splitlines() if line.startswith('  File "')]


def through(*names: str) -> ValueError:
    """An exception whose frames are of files with these names."""
    code = "def call(rest):\n    if rest: rest[0](rest[1:])\n    else: raise ValueError('x')\n"
    calls = []
    for name in names:
        scope: dict[str, Any] = {}
        exec(compile(code, name, "exec"), scope)
        calls.append(scope["call"])
    with pytest.raises(ValueError, match="x") as caught:
        calls[0](calls[1:])
    assert caught.value.__traceback__ is not None
    return caught.value.with_traceback(caught.value.__traceback__.tb_next)


OURS = str(handover.__file__)
TORCH = "/x/lib/python3.11/site-packages/torch/nn/functional.py"
HUB = "/x/lib/python3.11/site-packages/transformers/modeling.py"
USER = "/Workspace/Users/me/train.py"


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        ((OURS, OURS, USER, TORCH), (USER, TORCH)),
        ((OURS, TORCH, HUB, OURS, TORCH), (HUB, OURS, TORCH)),
        ((OURS, json.__file__, "<frozen runpy>", HUB), (HUB,)),
        ((OURS, "/tmp/ipykernel_1/2.py", TORCH), ("/tmp/ipykernel_1/2.py", TORCH)),
        ((OURS, OURS, TORCH, TORCH), (OURS, TORCH, TORCH)),
        ((TORCH, TORCH), (TORCH, TORCH)),
    ],
    ids=["user", "library", "Python", "notebook", "ours", "torch"],
)
def test_what_is_on_top_is_dropped(names: tuple[str, ...], kept: tuple[str, ...]) -> None:
    text = describe(through(*names))["traceback"]
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("ValueError: x\n")
    assert tuple(files(text)) == kept


def test_secrets_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "opensesame")
    code = "def call(rest): raise ValueError('opensesame at https://me:word@host/x')"
    scope: dict[str, Any] = {}
    exec(compile(code, USER, "exec"), scope)
    with pytest.raises(ValueError, match="host") as caught:
        scope["call"]([])
    found = describe(caught.value)
    assert found["error"] == "ValueError: *** at https://***@host/x"
    assert found["traceback"].endswith("ValueError: *** at https://***@host/x\n")


def test_what_it_was_raised_from_is_shortened_too() -> None:
    error = DataError("a row is torn")
    error.__cause__ = through(OURS, OURS, USER)
    assert files(describe(error)["traceback"]) == [USER]


def test_a_package_that_is_half_installed_breaks_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    found = describe(ModuleNotFoundError("No module named 'half'", name="half"))["error"]
    assert found == "ModuleNotFoundError: No module named 'half'"


def test_the_version_of_a_package_that_lacks_a_name() -> None:
    with pytest.raises(ImportError) as caught:
        exec("from click import no_such_name")
    assert describe(caught.value)["error"].endswith(f"(this node has click {version('click')})")
    with pytest.raises(ImportError) as caught:
        exec("import no_such_package_anywhere")
    assert describe(caught.value)["error"].endswith("No module named 'no_such_package_anywhere'")
