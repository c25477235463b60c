"""Driver program of ``test_faults``, with a Spark of its own, which loses executors and the JVM.

Run with a folder; writes what it saw to ``seen.json`` there.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import dbx_llmtrain as llm
from tests.spark import faults, spark_env

STEPS = 40


def session(folder: Path) -> Any:
    """``local-cluster`` of two executors of one core."""
    from pyspark.sql import SparkSession

    smi = spark_env.write_script(folder / "bin" / "nvidia-smi", "#!/bin/sh\nexit 0\n")
    spark_env.set_environment(os.environ, spark_env.make_home(folder), smi)
    builder = SparkSession.builder.master("local-cluster[2,1,1024]").appName("faults")
    for key, value in spark_env.base_conf(folder).items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def told(seen: faults.Seen) -> dict[str, Any]:
    error = seen.error
    return {
        "kind": type(error).__name__,
        "error": str(error),
        "cause": getattr(error, "cause", ""),
        "after_s": seen.after_s,
        "gone_s": seen.gone_s,
        "left": seen.left,
        "threads": [one.name for one in threading.enumerate() if "dbx" in one.name],
    }


def main(folder: Path) -> None:
    os.environ["TMPDIR"] = str(folder / "tmp")
    (folder / "tmp").mkdir()
    tempfile.tempdir = None
    faults.set_secret()
    spark = session(folder)
    seen: dict[str, Any] = {}
    lost, jvm = faults.OWN_SPARK
    options = ("checkpoint.export=true",)
    whole = llm.train(faults.config(folder, "whole", *options, steps=STEPS), spark=spark)
    torn = faults.train(
        spark,
        faults.config(folder, "torn", *options, "cluster.max_restarts=1", steps=STEPS),
        folder,
        lost.act,
    )
    seen["restarted"] = told(torn) | {
        "restarts": torn.result.restarts if torn.result else [],
        "files": [exported(result) for result in (whole, torn.result) if result],
    }
    seen[lost.name] = told(faults.train(spark, faults.config(folder, "lost"), folder, lost.act))
    seen[jvm.name] = told(
        faults.train(spark, faults.config(folder, "jvm", "cluster.max_restarts=3"), folder, jvm.act)
    )
    (folder / "seen.json").write_text(json.dumps(seen))


def exported(result: llm.TrainResult) -> dict[str, str]:
    """The exported weights, by their bytes."""
    import hashlib

    assert result.model_path is not None
    files = sorted(Path(result.model_path).glob("*.safetensors"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def wait_to_be_killed(folder: Path) -> None:
    """A run on executors whose driver the test kills."""
    faults.set_secret()
    llm.train(faults.config(folder, "killed"), spark=session(folder))


if __name__ == "__main__":
    {"faults": main, "killed": wait_to_be_killed}[sys.argv[1]](Path(sys.argv[2]))
