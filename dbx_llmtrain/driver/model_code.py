"""The Python code that comes with a model: whether it is needed, and which files it is."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbx_llmtrain.errors import Problem

CONFIG = "config.json"
TOKENIZER = "tokenizer_config.json"


def auto_class(objective: str) -> str:
    """The class of transformers that loads a model for a ``data.objective``: a key of
    ``auto_map``."""
    return "AutoModelForMaskedLM" if objective == "mlm" else "AutoModelForCausalLM"


@dataclass(frozen=True)
class _Reference:
    """An entry of an ``auto_map``: ``file.Class``, or ``user/repository--file.Class``."""

    where: str
    key: str
    text: str

    @property
    def elsewhere(self) -> bool:
        return "--" in self.text

    @property
    def file(self) -> str:
        return self.text.partition(".")[0] + ".py"

    def __str__(self) -> str:
        return f"{self.key} in the auto_map of {self.where}"


@dataclass(frozen=True)
class ModelCode:
    """The code of a model folder: its ``files``, what is wrong with it, whether it is needed, and
    whether it has a model of the kind that the objective trains at all.

    ``files`` are those that the ``auto_map`` names and all that they import relatively.
    """

    files: tuple[Path, ...]
    problems: tuple[Problem, ...]
    needed: bool
    fits: bool


def find_code(folder: Path, name: str, *, objective: str = "sft") -> ModelCode:
    """Read which code a model folder has. ``name`` is what the user calls the folder."""
    model = auto_class(objective)
    config, tokenizer = _read(folder / CONFIG), _read(folder / TOKENIZER)
    references = [*_references(CONFIG, config), *_references(TOKENIZER, tokenizer)]
    keys = ("AutoConfig", model, "AutoTokenizer")
    used = [reference for reference in references if reference.key in keys]
    model_needs = bool(config.get("auto_map")) and not _known_model(config, objective)
    needed = model_needs or _tokenizer_needs(config, tokenizer, used)
    problems = []
    used_keys = {reference.key for reference in used}
    fits = model in used_keys or not (model_needs or "AutoConfig" in used_keys)
    if not fits:
        there = ", ".join(sorted({reference.key for reference in references}))
        kind = "a model for masked tokens" if objective == "mlm" else "a causal language model"
        problems.append(
            f"{name}: the auto_map of its {CONFIG} has no {model} (found {there}): expected {kind}"
        )
    problems += [fault for reference in used if (fault := _fault(folder, name, reference))]
    roots = [
        folder / reference.file for reference in references if not _fault(folder, name, reference)
    ]
    files, faults = _closure(folder, roots)
    problems += [f"{name}: {fault}" for fault in faults]
    faults_as_problems = tuple(Problem("model.source", text) for text in dict.fromkeys(problems))
    return ModelCode(tuple(files), faults_as_problems, needed, fits)


def code_problems(
    folder: Path, name: str, *, trusted: bool, objective: str = "sft"
) -> list[Problem]:
    """Why the code of a folder cannot be used, or has to be trusted first. It is not run."""
    code = find_code(folder, name, objective=objective)
    if not code.needed and not trusted:
        return []
    problems = list(code.problems)
    if code.needed and code.fits and not trusted:
        files = ", ".join(path.relative_to(folder).as_posix() for path in code.files)
        problems.append(
            Problem(
                "model.trust_remote_code",
                f"{name} needs Python code that comes with it ({files or 'none is there'}), which "
                "would run on the driver and on every rank: read it, and set "
                "model.trust_remote_code=true if you trust it",
            )
        )
    return problems


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; nothing where there is none: whoever needs it says what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _references(where: str, content: dict[str, Any]) -> Iterator[_Reference]:
    entries = content.get("auto_map") or {}
    if not isinstance(entries, dict):  # a tokenizer's: its slow and its fast class
        entries = {"AutoTokenizer": entries}
    for key, texts in entries.items():
        for text in texts if isinstance(texts, list | tuple) else [texts]:
            if text is not None:
                yield _Reference(where, key, str(text))


def _known_model(config: dict[str, Any], objective: str) -> bool:
    from transformers.models.auto import modeling_auto

    masked, causal = (
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )
    return config.get("model_type") in (masked if objective == "mlm" else causal)


def _tokenizer_needs(
    config: dict[str, Any], tokenizer: dict[str, Any], used: Iterable[_Reference]
) -> bool:
    from transformers.models.auto.tokenization_auto import (
        TOKENIZER_MAPPING_NAMES,
        tokenizer_class_from_name,
    )

    if not any(reference.key == "AutoTokenizer" for reference in used):
        return False
    name = tokenizer.get("tokenizer_class") or config.get("tokenizer_class")
    if name is None:
        return config.get("model_type") not in TOKENIZER_MAPPING_NAMES
    plain = str(name).removesuffix("Fast")
    return not (tokenizer_class_from_name(plain) or tokenizer_class_from_name(f"{plain}Fast"))


def _fault(folder: Path, name: str, reference: _Reference) -> str:
    """What is wrong with an entry; empty when nothing is."""
    if reference.elsewhere:
        repository, _, own = reference.text.partition("--")
        return (
            f"{name}: {reference} is {reference.text}, code of another repository: put its .py "
            f"files from {repository} into a copy of the model folder, write {own} there, and give "
            "that folder"
        )
    module, _, cls = reference.text.partition(".")
    if not (module and cls.isidentifier()):
        return f"{name}: {reference} is {reference.text!r}: expected file.Class"
    path = folder / reference.file
    if not path.is_file() or not path.is_relative_to(folder):
        return f"{name} has no {reference.file}, which {reference} names"
    return ""


def _closure(folder: Path, roots: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """The files and all that they import relatively, and what is wrong with them."""
    found: set[Path] = set()
    faults: list[str] = []
    waiting = list(roots)
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        shown = path.relative_to(folder).as_posix()
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError) as error:
            faults.append(f"{shown} is no Python code that this version reads: {error}")
            continue
        for wanted, candidates in _imports(tree, path):
            there = [file for file in candidates if file.is_file()]
            there = [file for file in there if file.is_relative_to(folder)]
            waiting += there
            if not there:
                faults.append(f"{shown} imports {wanted}, which is not in the folder")
    return sorted(found), sorted(faults)


def _imports(tree: ast.AST, path: Path) -> Iterator[tuple[str, list[Path]]]:
    """Each relative import, as it is written and the files it may mean."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = path.parents[min(node.level, len(path.parents)) - 1]
        dots = "." * node.level
        if node.module is None:
            for alias in node.names:
                yield f"{dots}{alias.name}", [*_module(base, [alias.name]), base / "__init__.py"]
        else:
            parts = node.module.split(".")
            inner = [file for alias in node.names for file in _module(base, [*parts, alias.name])]
            yield f"{dots}{node.module}", [*_module(base, parts), *inner]


def _module(base: Path, parts: list[str]) -> list[Path]:
    """A module's file, or its package's; with those of the packages around it."""
    packages = [base.joinpath(*parts[:end], "__init__.py") for end in range(1, len(parts) + 1)]
    return [base.joinpath(*parts).with_name(f"{parts[-1]}.py"), *packages]
