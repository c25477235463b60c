"""What one rank does with DeepSpeed: the cases in which the number of ranks matters."""

from __future__ import annotations

from tests.dist import deepspeed_cases as all_cases

CASES = {
    case.__name__: case
    for case in (
        all_cases.parity,
        all_cases.first_update,
        all_cases.offloaded,
        all_cases.poisoned,
        all_cases.resumed,
        all_cases.moved,
        all_cases.exported,
    )
}
