"""The guide to strategies: its Python runs, and its numbers are what the code says."""

from __future__ import annotations

import pytest

from tests.pages import ROOT, blocks

GUIDE = ROOT / "docs" / "parallelism.md"
PLAIN, ARITHMETIC = blocks("python", GUIDE)


def test_the_baseline_that_is_not_offered_does_nothing_without_gpus() -> None:
    exec(compile(PLAIN, GUIDE.name, "exec"), {})


def test_the_table_of_memory_is_what_the_arithmetic_gives(
    capsys: pytest.CaptureFixture[str],
) -> None:
    exec(compile(ARITHMETIC, GUIDE.name, "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 8
    text = GUIDE.read_text(encoding="utf-8")
    assert [line for line in printed if line not in text] == []


def test_every_strategy_has_a_line() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    for kind in ("single", "ddp", "fsdp", "deepspeed"):
        assert f"| `kind: {kind}`" in text
    for option in ("grad_op", "full", "hybrid", "cpu_offload", "stage: 1", "stage: 2", "stage: 3"):
        assert option in text
