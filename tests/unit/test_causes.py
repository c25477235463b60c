"""What is told of an error that Spark wraps."""

from __future__ import annotations

from dbx_llmtrain.driver import causes

JOB = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 1 in stage 7.0 failed 4
times, most recent: org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "/opt/spark/worker.py", line 1830, in main
    process()
  File "part.py", line 3, in run
ZeroDivisionError: division by zero

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "part.py", line 5, in run
dbx_llmtrain.errors.DataError: the row cannot be used

\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:572)
java.lang.RuntimeException: of Spark itself
org.apache.spark.api.python.PythonException: told again
"""


def test_the_last_python_exception_is_the_cause() -> None:
    told = causes.of_worker(RuntimeError(JOB))
    assert told == "dbx_llmtrain.errors.DataError: the row cannot be used"


def test_what_spark_says_of_the_python_of_its_workers_is_kept() -> None:
    line = "pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in"
    assert causes.of_worker(RuntimeError(f"x\nTraceback (most recent call last):\n{line}")) == line


def test_an_error_without_python_has_no_such_cause() -> None:
    for text in ("", "[TABLE_NOT_FOUND] no such table\nio.delta.SomeException: x", JOB[:200]):
        assert causes.of_worker(RuntimeError(text)) is None


def test_the_first_line_of_a_message() -> None:
    assert causes.first_line(RuntimeError("\n  one \ntwo")) == "one"
    assert causes.first_line(KeyboardInterrupt()) == "KeyboardInterrupt"
