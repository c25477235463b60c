"""What the fault suite puts a run to, and how soon that ends, is on the page about failures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark.faults import FAULTS, OWN_SPARK, Fault

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


@pytest.mark.parametrize("fault", [*FAULTS, *OWN_SPARK], ids=lambda fault: fault.act.__name__)
def test_the_page_says_how_soon_a_fault_ends_a_run(fault: Fault) -> None:
    causes = " or ".join(f"`{cause}`" for cause in fault.causes)
    assert f"| {fault.name} | {causes} | {fault.seconds:.0f} s |" in PAGE.read_text("utf-8")


def test_the_page_has_no_fault_that_nobody_tries() -> None:
    section = PAGE.read_text("utf-8").split("## How soon a run ends", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(FAULTS) + len(OWN_SPARK)
