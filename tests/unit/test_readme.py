"""What the pages show is true: it parses, it exists, it can be called so.

``tests/spark/test_pages.py`` runs what of it runs.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import dbx_llmtrain
from dbx_llmtrain import cli, config, option_names, tracking
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.records import TrainResult
from dbx_llmtrain.tracking_tensorboard import GROUPS
from tests.pages import PAGES, ROOT, blocks, commands, lines_of_shell

README = PAGES[0].read_text(encoding="utf-8")
CONFIGURATION = ROOT / "docs" / "configuration.md"


def test_every_block_is_of_a_language_that_is_checked() -> None:
    found = [
        line.removeprefix("```")
        for page in PAGES
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("```")
    ]
    assert set(found[0::2]) == {"bash", "python", "yaml", "json", "text", ""}
    assert set(found[1::2]) == {""}
    assert found.count("text") == 3  # how TensorBoard is opened; a run that is watched; a stall
    assert found[0::2].count("") == 1  # the file map


def test_every_command_is_of_a_program_that_is_checked() -> None:
    programs = {words[0] for words in lines_of_shell()}
    known = {"make", "dbx-llmtrain", "mlflow", "tensorboard", "accelerate", ".venv/bin/python"}
    known |= {"source", "export"}
    assert programs == known


@pytest.mark.parametrize("text", blocks("yaml"))
def test_configurations_are_valid(text: str) -> None:
    model = TrainConfig.from_yaml(text).model
    assert model.source or model.config


def test_the_reference_has_every_field_with_its_default() -> None:
    import yaml

    text = next(block for block in blocks("yaml", CONFIGURATION) if "shard:" in block)
    listed = [f"{name}.{key}" for name, fields in yaml.safe_load(text).items() for key in fields]
    assert listed == config.field_paths()
    shown = TrainConfig.from_yaml(text)
    bare = TrainConfig(model={"source": shown.model.source}, data={"train": shown.data.train})
    assert shown == bare


def used(tree: ast.Module, name: str) -> set[str]:
    """The attributes of a name that the code uses."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == name
    }


def test_python_uses_names_that_exist() -> None:
    shown = [ast.parse(code) for code in blocks("python") if "import dbx_llmtrain" in code]
    for tree in shown:
        assert used(tree, "llm") <= set(dbx_llmtrain.__all__)
        assert used(tree, "result") <= {*TrainResult.model_fields, "plot"}
    functions = {name for name in dbx_llmtrain.__all__ if name.islower() and "__" not in name}
    assert functions <= {name for tree in shown for name in used(tree, "llm")}
    ours = shown[:2]
    assert {"TrainConfig", "probe", "plan", "train"} <= used(ours[0], "llm")
    # The configuration is built; the calls that need a cluster fit their functions.
    names: dict[str, object] = {}
    body = ours[0].body
    end = next(i for i, node in enumerate(body) if isinstance(node, ast.Expr))
    exec(compile(ast.Module(body[:end], []), "README.md", "exec"), names)
    assert isinstance(names["cfg"], TrainConfig)
    for function in (dbx_llmtrain.plan, dbx_llmtrain.prepare, dbx_llmtrain.preview):
        inspect.signature(function).bind(names["cfg"], spark=None)
    inspect.signature(dbx_llmtrain.train).bind(names["cfg"], spark=None)
    inspect.signature(dbx_llmtrain.probe).bind()


def test_commands_parse() -> None:
    found = commands("dbx-llmtrain")
    assert {line[0] for line in found} == set(cli.cli.commands)
    group = click.Context(cli.cli, info_name="dbx-llmtrain", **cli.cli.context_settings)
    for name, *arguments in found:
        command = cli.cli.commands[name]
        with command.make_context(name, list(arguments), parent=group) as context:
            for override in context.params.get("overrides", ()):
                minimal = {"model": {"source": "m"}, "data": {"train": "t"}}
                assert TrainConfig.from_dict(minimal, override)


@pytest.mark.parametrize(
    ("program", "help_of"),
    [
        ("mlflow", ["mlflow", "ui", "--help"]),
        ("tensorboard", ["tensorboard.main", "--helpfull"]),
    ],
)
def test_other_programs_have_the_options_that_are_shown(program: str, help_of: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *help_of],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    (shown,) = commands(program)
    options = [word for word in shown if word.startswith("--")]
    assert options
    for option in options:
        assert option in done.stdout + done.stderr


def test_extras_that_are_named_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    named = {name for text in texts for name in re.findall(r"dbx_llmtrain\[(\w+)\]", text)}
    assert "tensorboard" in named
    assert named <= set(project["optional-dependencies"])


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in commands("make"):
        assert re.search(rf"^{line[0]}:", makefile, re.MULTILINE), line
    assert len(commands("make")) >= 5
    for target in re.findall(r"`make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_make_setup_says_how_the_environment_is_used() -> None:
    """With what the page says, in an environment whose set-up has been done."""
    ready = [f"--assume-old={name}" for name in (".venv/packages.stamp", ".venv/java_home")]
    done = subprocess.run(
        ["make", "--no-print-directory", *ready, "setup"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "make demo, make test" in done.stdout
    (shown,) = (text for text in blocks("bash") if text.startswith("source "))
    assert [line.strip() for line in done.stdout.splitlines()[-2:]] == shown.splitlines()


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings."""
    return {
        re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("#")
    }


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for _, target in re.findall(r"\[([^]]+)]\(([^):]+)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = target.partition("#")
            other = page.parent / name if name else page
            assert other.exists(), target
            assert not anchor or anchor in headings(other), target
    for line in commands(".venv/bin/python"):
        assert (ROOT / line[-1]).exists()


def test_the_readers_own_test_is_pointed_to() -> None:
    assert "(examples/test_my_training.py)" in README
    assert "(notebooks/01_quickstart.ipynb)" in README


# The side-by-side -----------------------------------------------------------------------------


def their_settings() -> dict[str, Any]:
    """What the blocks of TRL and DeepSpeed set, by their names."""
    (code,) = (block for block in blocks("python") if "SFTConfig" in block)
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    (args,) = (node for node in calls if getattr(node.func, "id", "") == "SFTConfig")
    found = {item.arg: ast.literal_eval(item.value) for item in args.keywords if item.arg}
    (text,) = blocks("json")
    return found | dict(leaves(json.loads(text)))


def leaves(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from leaves(item, f"{prefix}{key}.")
        else:
            yield prefix + key, item


def our_settings() -> TrainConfig:
    section = README.split("## I come from", 1)[1]
    text = section.split("```yaml\n", 1)[1].split("```", 1)[0]
    return TrainConfig.from_yaml(text)


def test_the_side_by_side_says_the_same() -> None:
    ours, theirs = our_settings(), their_settings()
    (launch,) = commands("accelerate")
    processes = int(launch[launch.index("--num_processes") + 1])
    translated = {
        "assistant_only_loss": "assistant",
        "report_to": True,
        "bf16.enabled": "bf16",
        "zero_optimization.stage": "fsdp",
        "gradient_accumulation_steps": None,
    }
    for name, value in theirs.items():
        option = next(iter(option_names.find(name)), None)
        assert option is not None, name
        assert option.ours is not None, name
        path = "parallel.kind" if option.ours == "parallel.stage" else option.ours
        section, field = path.split(".")
        expected = translated.get(name, value)
        assert getattr(getattr(ours, section), field) == expected, name
    assert theirs["train_micro_batch_size_per_gpu"] == theirs["per_device_train_batch_size"]
    batch = theirs["per_device_train_batch_size"] * theirs["gradient_accumulation_steps"]
    assert ours.train.global_batch_size == batch * processes
    (code,) = (block for block in blocks("python") if "SFTConfig" in block)
    assert f'"{ours.model.source}"' in code
    assert f'"{ours.data.train}"' in code
    for word in launch:
        if word.startswith("--"):
            assert option_names.find(word[2:]), word


# Facts ----------------------------------------------------------------------------------------


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
    text = CONFIGURATION.read_text(encoding="utf-8")
    section = text.split("Metrics, with optimizer steps as the step:", 1)[1].split("\n", 1)[0]
    assert set(re.findall(r"`(\w+)`", section)) <= set(tracking.METRICS)


def test_tensorboard_is_opened_where_the_files_are() -> None:
    usual = TrainConfig.from_yaml(blocks("yaml", CONFIGURATION)[0])
    folder = f"{usual.checkpoint.dir}/{usual.tracking.run_name}/tensorboard"
    (text,) = blocks("text", CONFIGURATION)
    assert text == f"%load_ext tensorboard\n%tensorboard --logdir {folder}\n"


def test_tags_of_tensorboard_are_those_that_are_written() -> None:
    section = CONFIGURATION.read_text(encoding="utf-8").split("## TensorBoard", 1)[1]
    tags = {f"{group}/{name}" for group, names in GROUPS.items() for name in names}
    named = set(re.findall(r"`((?:train|eval|speed|seen)/\w+)`", section))
    assert len(named) >= 5
    assert named <= tags


def test_versions_in_the_readme_are_those_of_the_package() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'requires-python = ">=3.11"' in pyproject
    assert "Python 3.11+" in README
    assert '"mlflow-skinny>=2.21"' in pyproject
    assert '"transformers>=4.50,<6"' in pyproject
    for name in ("newest", "oldest"):
        pins = (ROOT / "constraints" / f"{name}.txt").read_text(encoding="utf-8")
        assert "\ntorch==2.13.0\n" in pins
