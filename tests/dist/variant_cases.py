"""What the other shardings of FSDP go through: the cases that a sharding could break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.dist import cases
from tests.dist.runs import Context
from tests.dist.strategy_cases import OF_ALL, OF_FSDP

CASES: dict[str, Callable[[Context], dict[str, Any]]] = {
    case.__name__: case
    for case in (
        *OF_ALL,
        *OF_FSDP,
        cases.world,
        cases.poisoned,
        cases.precision,
        cases.training,
        cases.clipping,
        cases.tying,
    )
}
