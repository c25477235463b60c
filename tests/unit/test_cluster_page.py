"""``docs/cluster.md`` has every check that the code can name."""

from __future__ import annotations

import ast
from pathlib import Path

import dbx_llmtrain
from tests.pages import ROOT

PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
_FIRST = ("_error", "_cannot")
"""Functions of ours whose first argument of two is the name of a check."""


def named(function: ast.AST) -> set[str]:
    """The names of checks in a function: written down, or by a variable ``check``."""
    known = {
        target.id: value.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        for left in node.targets
        for target, value in zip(
            left.elts if isinstance(left, ast.Tuple) else [left],
            node.value.elts if isinstance(node.value, ast.Tuple) else [node.value],
            strict=False,
        )
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant)
    }
    found = set()
    for node in ast.walk(function):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        arguments = node.args
        if node.func.id == "Finding" and len(arguments) > 1:
            argument = arguments[1]
        elif node.func.id in _FIRST and len(arguments) == 2:
            argument = arguments[0]
        else:
            continue
        if isinstance(argument, ast.Constant):
            found.add(argument.value)
        elif isinstance(argument, ast.Name) and argument.id in known:
            found.add(known[argument.id])
    return {name for name in found if isinstance(name, str)}


def checks() -> set[str]:
    found: set[str] = set()
    for path in Path(str(dbx_llmtrain.__file__)).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                found |= named(node)
    return found


def listed() -> set[str]:
    """The first cells of the page's tables, those with commas taken apart."""
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| ")]
    return {name.strip() for row in rows for name in row.split(",")} - {"check"}


def test_every_check_is_on_the_page() -> None:
    found = checks()
    assert {"task slots", "GPU memory", "run folder", "bandwidth", "network", "java"} <= found
    assert found <= listed(), found - listed()


def test_the_page_has_no_check_that_is_gone() -> None:
    by_variable = {"deepspeed", "peft", "bitsandbytes", "liger-kernel"}
    assert listed() - checks() <= by_variable
