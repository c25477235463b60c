"""A Spark for the tests on one machine: its home, environment, fake GPUs and a fake nvidia-smi."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

FAKE_SMI = """#!/bin/sh
# Prints the file that the test wrote; without it there is no GPU. Beside it, as the test likes, lie
# the processes on the GPUs and the head of the table that is printed without arguments.
case "$1" in
  --query-compute-apps*) cat "{listing}.apps" 2>/dev/null; exit 0 ;;
  "") cat "{listing}.head" 2>/dev/null; exit 0 ;;
esac
if [ -f "{listing}" ]; then cat "{listing}"; else echo "No devices were found"; fi
"""
DISCOVER = """#!/bin/sh
echo '{{"name": "gpu", "addresses": [{addresses}]}}'
"""


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def gpu_lines(names: list[str]) -> str:
    """What nvidia-smi prints for these GPU uuids."""
    return "".join(
        f"{i}, {uuid}, NVIDIA Fake, 81559, 12, 550.54, 9.0\n" for i, uuid in enumerate(names)
    )


def make_home(folder: Path) -> Path:
    """A SPARK_HOME of links into the installed pyspark, so that its work folder is ours."""
    import pyspark

    home = folder / "spark-home"
    home.mkdir()
    for entry in Path(str(pyspark.__file__)).parent.iterdir():
        if entry.name != "work":
            (home / entry.name).symlink_to(entry)
    return home


def set_environment(environ: MutableMapping[str, str], home: Path, smi: Path) -> None:
    """For the driver; executors of ``local-cluster`` inherit it."""
    environ["SPARK_HOME"] = str(home)
    environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    environ["PYSPARK_PYTHON"] = sys.executable
    environ["PATH"] = f"{smi.parent}{os.pathsep}{environ['PATH']}"


def base_conf(folder: Path) -> dict[str, str]:
    return {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.local.dir": str(folder / "spark-local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.sql.shuffle.partitions": "2",
    }
