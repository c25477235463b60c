"""The Databricks job that this process runs for: its id, its run and its task.

A task that is retried or repaired gets another run id of its own; the id of the job's run and the
key of the task stay. MLflow's tags have only the task's run id, so both are asked for here: the
notebook's context, which a wheel or script task has as well, and the properties that Databricks
gives to the thread for its Spark jobs.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dbx_llmtrain.worker.node import Capture

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PROPERTIES = {
    "jobId": "spark.databricks.job.id",
    "multitaskParentRunId": "spark.databricks.job.parentRunId",
    "taskKey": "spark.databricks.job.taskKey",
    "runId": "spark.databricks.job.runId",
}
_RUN = ("multitaskParentRunId", "jobRunId", "jobRunOriginalAttempt", "idInJob", "runId")
"""The job's run; else the first attempt of its only task; else this attempt."""


def run_name(spark: SparkSession) -> str | None:
    """``job-<id>-run-<id>-<task>`` within a Databricks job, the same for every attempt at the task;
    ``None`` elsewhere."""
    found = {**_properties(spark), **_context(spark)}
    job = found.get("jobId")
    run = next((found[name] for name in _RUN if found.get(name)), None)
    if not job or not run:
        return None
    parts = ["job", job, "run", run, *([found["taskKey"]] if found.get("taskKey") else [])]
    return re.sub(r"[^\w.-]", "_", "-".join(parts))


def _context(spark: SparkSession) -> dict[str, str]:
    """Tags of the notebook's context, by ``dbutils``; empty where there is none."""
    if importlib.util.find_spec("pyspark.dbutils") is None:  # only Databricks' pyspark has it
        return {}
    from pyspark.dbutils import DBUtils

    for method in ("toJson", "safeToJson"):  # some access modes allow the second one alone
        with Capture():
            entry = DBUtils(spark).notebook.entry_point
            text = getattr(entry.getDbutils().notebook().getContext(), method)()
            content: Mapping[str, Any] = json.loads(text)
            return _texts({**content.get("attributes", {}), **content.get("tags", {})}.get)
    return {}


def _properties(spark: SparkSession) -> dict[str, str]:
    """What the thread's Spark jobs are marked with."""
    get = spark.sparkContext.getLocalProperty
    return _texts(lambda name: get(_PROPERTIES[name]) if name in _PROPERTIES else None)


def _texts(get: Callable[[str], Any]) -> dict[str, str]:
    return {name: str(get(name)) for name in ("jobId", "taskKey", *_RUN) if get(name)}
