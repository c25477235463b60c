"""Question/answer pairs from the docstrings of the installed Python's standard library.

Reads the library's ``.py`` files with ``ast``; nothing of it is imported. The same Python gives the
same rows in the same order. Usage::

    python examples/make_stdlib_qa.py [--out examples/data] [--rows 1000]

writes ``stdlib_qa.jsonl`` (training rows) and ``stdlib_qa_heldout.jsonl`` (40 other rows), one chat
per line: ``{"messages": [{"role": "user", ...}, {"role": "assistant", ...}]}``.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

HELD_OUT_ROWS = 40
MIN_ANSWER, MAX_ANSWER = 30, 400  # characters
MAX_SIGNATURE = 70  # characters; longer argument lists are left out of the question

_SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo",
    "ensurepip", "encodings", "__pycache__", "__phello__", "pydoc_data",
}  # fmt: skip
# Docstrings that describe a call rather than say what it does, or hold code, tables or markup.
_NOT_PROSE = re.compile(
    r">>>|::|\|  |\*\*\w|={4}|-{4}|^\s*\w[\w.]*\(.*\)\s*(->|$)|[{}\\]|https?:"
    r"|^\s*[-*] |^\s*(Arguments|Args|Parameters|Return|Returns|Internal)\s*:",
    re.MULTILINE,
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Pair(NamedTuple):
    """One question with its answer."""

    question: str
    answer: str


def stdlib_folder() -> Path:
    """Where the running Python keeps the source of its standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def collect_pairs(folder: Path) -> list[Pair]:
    """Every pair that can be made, each question and each answer once, in an order that depends
    on the questions' text alone."""
    pairs: list[Pair] = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if any(part.startswith("_") and part != "__init__" for part in parts):
            continue
        if _SKIPPED_FOLDERS.intersection(parts):
            continue
        module = ".".join(part for part in parts if part != "__init__")
        pairs += _pairs_of_module(path, module)
    pairs.sort(key=lambda pair: hashlib.sha256(pair.question.encode()).digest())
    return _unique(pairs)


def _pairs_of_module(path: Path, module: str) -> Iterator[Pair]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    answer = _answer(tree)
    if answer:
        yield Pair(f"What is the Python module `{module}` for?", answer)
    yield from _pairs_of_body(tree.body, module, in_class=False)


def _pairs_of_body(body: Iterable[ast.stmt], prefix: str, *, in_class: bool) -> Iterator[Pair]:
    for node in body:
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)) or node.name.startswith("_"):
            continue
        name = f"{prefix}.{node.name}"
        answer = _answer(node)
        if isinstance(node, ast.ClassDef):
            if answer:
                yield Pair(f"What is the Python class `{name}`?", answer)
            yield from _pairs_of_body(node.body, name, in_class=True)
        elif answer:
            kind = "method" if in_class else "function"
            signature = name + _arguments(node, skip_first=in_class)
            yield Pair(f"What does the Python {kind} `{signature}` do?", answer)


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef, *, skip_first: bool) -> str:
    """``(a, b=1)`` without annotations and without ``self``; ``()`` where that is too long."""
    arguments = node.args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    names = ast.unparse(arguments)
    if skip_first:
        names = re.sub(r"^(self|cls|mcs)\b(, )?(/, )?", "", names)
    return f"({names})" if len(names) <= MAX_SIGNATURE else "()"


def _answer(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The docstring's first paragraph as one to a few whole sentences, or an empty string."""
    docstring = ast.get_docstring(node, clean=False)
    if not docstring:
        return ""
    paragraph = inspect.cleandoc(docstring).split("\n\n")[0]
    if _NOT_PROSE.search(paragraph):
        return ""
    text = re.sub(r"\s+", " ", paragraph.replace("``", "`")).strip()
    if not text.isascii() or not text[:1].isalpha():
        return ""
    text = text[0].upper() + text[1:]
    if text[-1].isalnum() or text[-1] in "`'\")":
        text += "."
    if text[-1] not in ".!":
        return ""
    while len(text) > MAX_ANSWER:
        shorter = re.match(r"(.*[.!]) [A-Z].*", text, re.DOTALL)
        if not shorter:
            return ""
        text = shorter.group(1)
    return text if len(text) >= MIN_ANSWER else ""


def _unique(pairs: Iterable[Pair]) -> list[Pair]:
    questions: set[str] = set()
    answers: set[str] = set()
    kept = []
    for pair in pairs:
        if pair.question in questions or pair.answer in answers:
            continue
        questions.add(pair.question)
        answers.add(pair.answer)
        kept.append(pair)
    return kept


def write_rows(path: Path, pairs: Iterable[Pair]) -> int:
    """Write one chat per line; returns how many."""
    rows = [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": pair.question},
                    {"role": "assistant", "content": pair.answer},
                ]
            }
        )
        for pair in pairs
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return len(rows)


def make_files(out: Path, rows: int) -> tuple[Path, Path]:
    """Write both files to ``out``; ``SystemExit`` where the library has too few docstrings."""
    pairs = collect_pairs(stdlib_folder())
    if len(pairs) < rows + HELD_OUT_ROWS:
        raise SystemExit(
            f"{stdlib_folder()} gives {len(pairs)} pairs, {rows + HELD_OUT_ROWS} are needed: "
            "give a smaller --rows, or use a Python whose library has its sources and docstrings"
        )
    train, held_out = out / "stdlib_qa.jsonl", out / "stdlib_qa_heldout.jsonl"
    write_rows(held_out, pairs[:HELD_OUT_ROWS])
    write_rows(train, pairs[HELD_OUT_ROWS : HELD_OUT_ROWS + rows])
    return train, held_out


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--rows", type=int, default=1000, help="training rows (default 1000)")
    arguments = parser.parse_args()
    train, held_out = make_files(arguments.out, arguments.rows)
    print(f"{train}: {arguments.rows} rows\n{held_out}: {HELD_OUT_ROWS} rows")


if __name__ == "__main__":
    main()
