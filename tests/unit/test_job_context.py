"""What a Databricks job tells of itself: by its own pyspark's ``dbutils``, or by the properties of
Spark's thread. Both are stood in for by modules and objects of their shape."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dbx_llmtrain.driver import job_context

# As a task of a job with several gives it.
TAGS = {
    "jobId": "1111", "multitaskParentRunId": "2222", "taskKey": "first-task",
    "jobRunOriginalAttempt": "3333", "idInJob": "4444", "runId": "4444", "orgId": "5",
}  # fmt: skip
DBUTILS = """
from types import SimpleNamespace


class Context:
    def toJson(self):
        if FORBIDDEN:
            raise RuntimeError("py4j.security: not allowed")
        return TEXT

    def safeToJson(self):
        return SAFE


class DBUtils:
    def __init__(self, spark):
        notebook = SimpleNamespace(getContext=Context)
        dbutils = SimpleNamespace(notebook=lambda: notebook)
        self.notebook = SimpleNamespace(entry_point=SimpleNamespace(getDbutils=lambda: dbutils))
"""


def spark(**properties: str) -> Any:
    """A session whose thread has these properties."""
    return SimpleNamespace(sparkContext=SimpleNamespace(getLocalProperty=properties.get))


@pytest.fixture
def on_databricks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Put ``pyspark.dbutils`` beside the installed pyspark's modules."""
    import pyspark

    monkeypatch.setattr(pyspark, "__path__", [*pyspark.__path__, str(tmp_path)])

    def context(tags: dict[str, Any], *, attributes: Any = None, forbidden: bool = False) -> None:
        values = {
            "TEXT": json.dumps({"tags": tags, "extraContext": {}}),
            "SAFE": json.dumps({"attributes": attributes or {}}),
            "FORBIDDEN": forbidden,
        }
        lines = [f"{name} = {value!r}" for name, value in values.items()]
        (tmp_path / "dbutils.py").write_text("\n".join(lines) + DBUTILS)

    yield context
    sys.modules.pop("pyspark.dbutils", None)


def test_elsewhere_there_is_no_job() -> None:
    assert job_context.run_name(spark()) is None


def test_the_name_is_of_the_job_its_run_and_the_task(on_databricks: Any) -> None:
    on_databricks(TAGS)
    assert job_context.run_name(spark()) == "job-1111-run-2222-first-task"


def test_c113_a_retry_or_repair_has_the_same_name(on_databricks: Any) -> None:
    on_databricks(TAGS | {"idInJob": "9", "runId": "9", "jobRunOriginalAttempt": "8"})
    assert job_context.run_name(spark()) == "job-1111-run-2222-first-task"


def test_a_notebook_that_somebody_runs_has_no_job(on_databricks: Any) -> None:
    on_databricks({"orgId": "5", "user": "ann", "clusterId": "c"})
    assert job_context.run_name(spark()) is None


def test_a_job_of_one_task_goes_by_its_first_attempt(on_databricks: Any) -> None:
    on_databricks({"jobId": "1", "jobRunOriginalAttempt": "3", "idInJob": "4", "runId": "4"})
    assert job_context.run_name(spark()) == "job-1-run-3"


def test_what_may_not_be_read_is_read_the_other_way(on_databricks: Any) -> None:
    safe = {"jobId": "1", "multitaskParentRunId": "2", "idInJob": "3", "currentRunId": "3"}
    on_databricks({}, attributes=safe, forbidden=True)
    assert job_context.run_name(spark()) == "job-1-run-2"
    told = {"spark.databricks.job.taskKey": "train model/x"}
    assert job_context.run_name(spark(**told)) == "job-1-run-2-train_model_x"


def test_the_properties_of_the_thread_will_do() -> None:
    told = {
        "spark.databricks.job.id": "7", "spark.databricks.job.parentRunId": "8",
        "spark.databricks.job.runId": "9",
    }  # fmt: skip
    assert job_context.run_name(spark(**told)) == "job-7-run-8"
    del told["spark.databricks.job.parentRunId"]
    assert job_context.run_name(spark(**told)) == "job-7-run-9"
