"""One Spark for the whole run: two executors of one core, with one fake GPU each.

``SPARK`` stays up for every test that asks for ``spark``. The fake ``nvidia-smi`` lists no GPU
until a test writes some with ``fake_gpus``, so that nothing else believes in them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark import spark_env


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/spark/" in str(item.path):
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def spark_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spark")


@pytest.fixture(scope="session")
def spark(spark_folder: Path) -> Iterator[Any]:
    """The session: ``local-cluster[2,1,2048]``, GPU amounts of one a worker, executor and task."""
    from pyspark.sql import SparkSession

    listing = spark_folder / "gpus.csv"
    smi = spark_env.write_script(
        spark_folder / "bin" / "nvidia-smi", spark_env.FAKE_SMI.format(listing=listing)
    )
    discover = {
        count: spark_env.write_script(
            spark_folder / "bin" / f"discover-{count}",
            spark_env.DISCOVER.format(addresses=", ".join(f'"{i}"' for i in range(count))),
        )
        for count in (1, 2)
    }
    before = dict(os.environ)
    spark_env.set_environment(os.environ, spark_env.make_home(spark_folder), smi)
    conf = spark_env.base_conf(spark_folder) | {
        "spark.worker.resource.gpu.amount": "1",
        "spark.worker.resource.gpu.discoveryScript": str(discover[1]),
        "spark.executor.resource.gpu.amount": "1",
        "spark.executor.resource.gpu.discoveryScript": str(discover[1]),
        "spark.task.resource.gpu.amount": "1",
        "spark.driver.resource.gpu.amount": "2",
        "spark.driver.resource.gpu.discoveryScript": str(discover[2]),
        "spark.executorEnv.PYTHONPATH": str(Path(__file__).parent / "programs"),
    }
    builder = SparkSession.builder.master("local-cluster[2,1,2048]").appName("tests")
    for key, value in conf.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def fake_gpus(spark: Any, spark_folder: Path) -> Iterator[Callable[[str], None]]:
    """Let the fake nvidia-smi print a text for the rest of the test."""
    listing = spark_folder / "gpus.csv"
    yield listing.write_text
    listing.unlink(missing_ok=True)
