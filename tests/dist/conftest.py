"""Each way to run ranks is launched once; every test of it reads the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.dist.launch import launch

World = tuple[str, int]
Results = dict[str, Any]

WORLDS = [("single", 1), ("ddp", 1), ("fsdp", 1), ("ddp", 2), ("fsdp", 2)]
"""Strategy and number of ranks; all cases run in each."""

VARIANTS = [("grad_op", 2), ("offload", 2), ("hybrid", 4)]
"""The other shardings of FSDP: those cases that depend on them. Two nodes of two ranks for
``hybrid``; the others share a process group."""

ZERO = [("zero1", 2), ("zero2", 2), ("zero3", 2)]
"""DeepSpeed, in the parity table; what is its own is tested elsewhere."""

TABLES = [*WORLDS, *VARIANTS, *ZERO]
SLOW = {*VARIANTS, ("ddp", 1), ("fsdp", 1)}
"""Left to the full run: what differs from the others in little."""


def _name(world: World) -> str:
    return f"{world[0]}-{world[1]}"


def _params(worlds: list[World]) -> list[Any]:
    """Parameters of a fixture, with the slow ones marked."""
    return [
        pytest.param(world, marks=pytest.mark.slow if world in SLOW else (), id=_name(world))
        for world in worlds
    ]


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[World], Results]:
    """What the cases found on the ranks of a strategy, by case."""
    launched: dict[World, Results] = {}

    def of(world: World) -> Results:
        strategy, size = world
        if world not in launched:
            folder = tmp_path_factory.mktemp(_name(world))
            if world in WORLDS:
                launched[world] = launch(strategy, size, folder)
            elif strategy == "hybrid":
                launched[world] = launch(strategy, size, folder, "tests.dist.variant_cases", 2)
            else:
                group = ZERO if world in ZERO else VARIANTS
                names = [name for name, ranks in group if ranks == size]
                module = f"tests.dist.{'table' if world in ZERO else 'variant'}_cases"
                together = launch(",".join(names), size, folder, module)
                launched.update({(name, size): results for name, results in together.items()})
        return launched[world]

    return of


@pytest.fixture(scope="session", params=_params(WORLDS))
def world(request: pytest.FixtureRequest) -> World:
    """Strategy and number of ranks."""
    chosen: World = request.param
    return chosen


@pytest.fixture(scope="session")
def results(world: World, found: Callable[[World], Results]) -> Results:
    """Of ``world``."""
    return found(world)


@pytest.fixture(scope="session", params=_params([*WORLDS, *VARIANTS]))
def any_world(request: pytest.FixtureRequest) -> World:
    """Strategy and number of ranks, also of the variants."""
    chosen: World = request.param
    return chosen


@pytest.fixture(scope="session")
def any_results(any_world: World, found: Callable[[World], Results]) -> Results:
    """Of ``any_world``."""
    return found(any_world)


@pytest.fixture(scope="session", params=_params(TABLES))
def table_world(request: pytest.FixtureRequest) -> World:
    """Strategy and number of ranks of every launch that has the parity table."""
    chosen: World = request.param
    return chosen


@pytest.fixture(scope="session")
def table(table_world: World, found: Callable[[World], Results]) -> Results:
    """The parity table of ``table_world``."""
    results: Results = found(table_world)["table"]
    return results


@pytest.fixture(scope="session", params=_params(VARIANTS))
def variant(request: pytest.FixtureRequest) -> World:
    """Strategy and number of ranks of a variant."""
    chosen: World = request.param
    return chosen


@pytest.fixture(scope="session")
def variant_results(variant: World, found: Callable[[World], Results]) -> Results:
    """Of ``variant``."""
    return found(variant)
