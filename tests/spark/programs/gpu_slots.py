"""Prepare data in a Spark of its own: one executor with two cores and one GPU a task.

Arguments: a folder to work in, the model's folder. Prints what the tasks may use, and the audit.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

import dbx_llmtrain as llm
from dbx_llmtrain import compat
from dbx_llmtrain.driver import cluster, tasks
from tests.spark import spark_env


def main(folder: Path, model: str) -> None:
    script = spark_env.write_script(
        folder / "bin" / "discover", spark_env.DISCOVER.format(addresses='"0"')
    )
    spark_env.set_environment(os.environ, spark_env.make_home(folder), script)
    conf = spark_env.base_conf(folder) | {
        "spark.worker.resource.gpu.amount": "1",
        "spark.worker.resource.gpu.discoveryScript": str(script),
        "spark.executor.resource.gpu.amount": "1",
        "spark.executor.resource.gpu.discoveryScript": str(script),
        "spark.task.resource.gpu.amount": "1",
    }
    builder = SparkSession.builder.master("local-cluster[1,2,1024]")
    for key, value in conf.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    cfg = llm.TrainConfig(
        model={"source": model},
        data={
            "train": str(folder / "rows.jsonl"),
            "cache_dir": str(folder / "cache"),
            "max_length": 128,
        },
        cluster={"local_dir": str(folder / "local")},
    )
    slots = tasks.find_slots(spark)
    by_file = llm.prepare(cfg, spark=spark)
    frame = spark.read.json(str(folder / "rows.jsonl"))
    by_frame = llm.prepare(cfg, data=frame, spark=spark)
    found = {
        "with_gpu": cluster.slots(spark.sparkContext),
        "count": slots.count,
        "threads": slots.threads,
        "profile": slots.profile is not None,
        "expected": compat.at_least("pyspark", "4.0"),
        "rows": [by_file.audit.train_rows, by_frame.audit.train_rows],
    }
    spark.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
