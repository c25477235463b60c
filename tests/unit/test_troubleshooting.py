"""The page about failures has what the code says."""

from __future__ import annotations

import re
import textwrap
from typing import get_args

from dbx_llmtrain.errors import Cause, TrainingFailed
from dbx_llmtrain.worker import debugging, failures
from tests.pages import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def test_every_known_failure_is_in_the_page_with_its_cause_and_what_to_do() -> None:
    entries = [*failures.KNOWN, *failures.ENDINGS, *failures.OTHERS]
    expected = [f"| {known.name} | `{known.cause}` | {known.advice} |" for known in entries]
    tables = PAGE.partition("## How soon a run ends")[0]
    rows = [line for line in tables.splitlines() if re.match(r"\| .* \| `(?!cause)\w+` \| ", line)]
    assert rows == expected


def test_every_cause_is_named() -> None:
    assert {cause for cause in get_args(Cause) if f"`{cause}`" not in PAGE} <= {""}


def test_the_error_that_is_shown_is_one() -> None:
    shown = "\n".join(line for line in PAGE.splitlines() if line.startswith("    ") or not line)
    lines = [line for line in textwrap.dedent(shown).strip().splitlines() if line]
    error = TrainingFailed(
        "ZeroDivisionError: division by zero", rank=3, host="10.0.1.7", gpu="GPU-5b1c", step=120,
        exit_code=1, traceback="\n".join(lines[2:6]), log=lines[6].rpartition(" ")[2],
    )  # fmt: skip
    assert [line for line in str(error).splitlines() if line] == lines


def test_what_debugging_sets_is_named() -> None:
    for name, value in debugging.VARIABLES.items():
        assert f"`{name}={value}`" in PAGE
