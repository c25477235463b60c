"""Each way to run ranks is launched once; every test of it reads the same results."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.launch import launch

WORLDS = [("single", 1), ("ddp", 1), ("fsdp", 1), ("ddp", 2), ("fsdp", 2)]


@pytest.fixture(scope="session", params=WORLDS, ids=lambda world: f"{world[0]}-{world[1]}")
def world(request: pytest.FixtureRequest) -> tuple[str, int]:
    """Strategy and number of ranks."""
    chosen: tuple[str, int] = request.param
    return chosen


@pytest.fixture(scope="session")
def results(world: tuple[str, int], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the cases found on these ranks, by case."""
    strategy, size = world
    return launch(strategy, size, tmp_path_factory.mktemp(f"{strategy}-{size}"))
