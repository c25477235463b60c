"""The code blocks of the pages that users read."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str, *pages: Path) -> list[str]:
    """The fenced blocks of a language, in the given pages or in all."""
    texts = [page.read_text(encoding="utf-8") for page in pages or PAGES]
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [block for text in texts for block in pattern.findall(text)]


def lines_of_shell(*pages: Path) -> list[list[str]]:
    """Every command of the shell blocks of the given pages or of all, split into words."""
    lines = [line for block in blocks("bash", *pages) for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def commands(program: str, *pages: Path) -> list[list[str]]:
    """Arguments of every call of ``program`` in the shell blocks of the given pages or of all."""
    return [words[1:] for words in lines_of_shell(*pages) if words[0] == program]
