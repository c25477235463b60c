"""What the README and CONTRIBUTING show is true: it parses, it exists, it can be called so."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from pathlib import Path

import click
import pytest

import dbx_llmtrain
from dbx_llmtrain import cli, tracking
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.records import TrainResult

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, in both pages."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES, re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[list[str]]:
    """Arguments of every call of ``program`` in the shell blocks."""
    lines = [
        shlex.split(line, comments=True) for block in blocks("bash") for line in block.split("\n")
    ]
    return [line[1:] for line in lines if line and line[0] == program]


@pytest.mark.parametrize("text", blocks("yaml"))
def test_configurations_are_valid(text: str) -> None:
    assert TrainConfig.from_yaml(text).model.source


def test_python_uses_names_that_exist() -> None:
    (code,) = blocks("python")
    tree = ast.parse(code)
    used = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "llm"
    ]
    assert {"TrainConfig", "probe", "plan", "train"} <= set(used) <= set(dbx_llmtrain.__all__)
    results = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "result"
    ]
    assert set(results) <= set(TrainResult.model_fields)
    # The configuration is built; the calls that need a cluster fit their functions.
    names: dict[str, object] = {}
    end = next(i for i, node in enumerate(tree.body) if isinstance(node, ast.Expr))
    exec(compile(ast.Module(tree.body[:end], []), "README.md", "exec"), names)
    assert isinstance(names["cfg"], TrainConfig)
    for function in (dbx_llmtrain.plan, dbx_llmtrain.train):
        inspect.signature(function).bind(names["cfg"])
    inspect.signature(dbx_llmtrain.probe).bind()


def test_commands_parse() -> None:
    found = commands("dbx-llmtrain")
    assert {line[0] for line in found} == {"probe", "plan", "train"}
    group = click.Context(cli.cli, info_name="dbx-llmtrain", **cli.cli.context_settings)
    for name, *arguments in found:
        command = cli.cli.commands[name]
        with command.make_context(name, list(arguments), parent=group) as context:
            for override in context.params.get("overrides", ()):
                minimal = {"model": {"source": "m"}, "data": {"train": "t"}}
                assert TrainConfig.from_dict(minimal, override)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in commands("make"):
        assert re.search(rf"^{line[0]}:", makefile, re.MULTILINE), line
    assert len(commands("make")) >= 5


def test_files_that_are_named_exist() -> None:
    for _, target in re.findall(r"\[([^]]+)]\(([^):]+)\)", PAGES):
        assert (ROOT / target).exists(), target
    for line in commands(".venv/bin/python"):
        assert (ROOT / line[-1]).exists()


def test_the_file_map_has_every_module() -> None:
    listing = README.split("```\ndbx_llmtrain/\n", 1)[1].split("```", 1)[0]
    listed, folders = set(), [ROOT / "dbx_llmtrain"]
    for line in listing.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        folders[depth:] = [folders[depth - 1] / name]
        listed.add(folders[depth].relative_to(ROOT).as_posix().rstrip("/"))
    package = ROOT / "dbx_llmtrain"
    files = {path.relative_to(ROOT).as_posix() for path in package.rglob("*.py")}
    inner = {path for path in files if path.count("/") > 1 and path.endswith("__init__.py")}
    assert {path for path in listed if path.endswith(".py")} == files - inner


def test_metrics_are_those_that_are_logged() -> None:
    section = README.split("Metrics, with optimizer steps as the step:", 1)[1].split("\n", 1)[0]
    assert set(re.findall(r"`(\w+)`", section)) <= set(tracking.METRICS)


def test_versions_in_the_readme_are_those_of_the_package() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'requires-python = ">=3.11"' in pyproject
    assert "Python 3.11+" in README
    assert '"mlflow-skinny>=2.21"' in pyproject
    assert '"transformers>=4.50,<6"' in pyproject
    for name in ("newest", "oldest"):
        pins = (ROOT / "constraints" / f"{name}.txt").read_text(encoding="utf-8")
        assert "\ntorch==2.13.0\n" in pins
