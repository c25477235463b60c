"""The tasks of a preparation, on Spark's executors or here.

Every task returns one small row: what became of its rows, and the files it has written.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from dbx_llmtrain import compat
from dbx_llmtrain.driver import causes, cluster, preflight, shipping
from dbx_llmtrain.errors import DataError
from dbx_llmtrain.worker import node, part

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

Progress = Callable[[int], None]
"""Called with the number of rows read so far."""

_POLL_S = 0.1
_START_S = 120.0
_TASKS_A_SLOT = 3
_ROWS_A_TASK = 2000


@dataclass(frozen=True)
class Frame:
    """The rows of a table that Spark reads: source number, DataFrame, their count if known, and
    whether the column ``part.PLACE`` has their order."""

    source: int
    frame: Any
    rows: int | None = None
    placed: bool = False


@dataclass(frozen=True)
class Slots:
    """How many tasks run at once, with how many threads of the tokenizer each (0: as it likes), and
    the resource profile they need for it."""

    count: int
    threads: int = 0
    profile: Any = None


def find_slots(spark: SparkSession | None) -> Slots:
    """What a task of preparing may use. It needs no GPU: where a task of the cluster takes one, it
    runs under a profile of its own (from Spark 4 on), else with several threads."""
    if spark is None:
        return Slots(1)
    sc = spark.sparkContext
    if preflight.is_local(sc.master):
        return Slots(int(sc.defaultParallelism), 1)
    cluster.wait_for_executors(sc, time.monotonic() + _START_S)
    slots, cores = max(1, cluster.slots(sc)), max(1, int(sc.defaultParallelism))
    profile = _cpu_profile(spark) if cores > slots else None
    if profile is not None:
        return Slots(cores, 1, profile)
    return Slots(slots, max(1, cores // slots))


def _cpu_profile(spark: SparkSession) -> Any:
    """A resource profile of one core and no GPU a task, where this Spark can use one."""
    if not compat.at_least("pyspark", "4.0"):
        return None
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    sc = spark.sparkContext
    profile = ResourceProfileBuilder().require(TaskResourceRequests().cpus(1)).build
    supported = False
    with node.Capture():  # raised where the master or its settings do not take one
        manager = sc._jsc.sc().resourceProfileManager()
        supported = bool(manager.isSupported(profile._java_resource_profile))
    return profile if supported else None


def run_here(
    job: part.Job, tasks: Sequence[part.Task], progress: Progress
) -> Iterator[dict[str, Any]]:
    """Run the tasks one after the other in this process."""
    count = Counter()
    for task in tasks:
        yield part.files_task(asdict(job), asdict(task), count.into(progress))


class Counter:
    """Adds up what tasks report."""

    def __init__(self) -> None:
        self.value = 0

    def into(self, progress: Progress) -> Progress:
        """A function that adds its argument and reports the sum."""

        def add(more: int) -> None:
            self.value += more
            progress(self.value)

        return add


def run_on_spark(
    spark: SparkSession,
    job: part.Job,
    tasks: Sequence[part.Task],
    frames: Sequence[Frame],
    slots: Slots,
    progress: Progress,
    *,
    in_order: bool = False,
) -> list[dict[str, Any]]:
    """Run the tasks as one Spark job, and one more for every table; their results.

    Raises ``DataError`` where tasks fail every time they are tried. Whatever interrupts the wait
    cancels the job.
    """
    sc = spark.sparkContext
    counter = sc.accumulator(0)
    # Workers cannot load our classes before the package has come with the call: plain data only.
    shipped = (shipping.caller(), asdict(job), counter.add)
    results: list[dict[str, Any]] = []

    def collect(action: Callable[[], list[str]]) -> None:
        found = _wait(sc, action, lambda: progress(counter.value))
        results.extend(json.loads(text) for text in found)

    if tasks:
        run = partial(shipping.by_value(_run_tasks), *shipped, [asdict(task) for task in tasks])
        collect(_file_job(sc, len(tasks), run, slots))
    for item in frames:
        frame = _in_order(item, slots) if in_order else _spread(item, slots)
        run = partial(shipping.by_value(_run_partition), *shipped, item.source)
        collect(_frame_job(frame, run, slots))
    return results


def _file_job(
    sc: SparkContext, count: int, run: Callable[..., Any], slots: Slots
) -> Callable[[], list[str]]:
    """One task for every number. An RDD, since the first query costs a Spark some seconds."""
    rdd = sc.parallelize(range(count), count).mapPartitions(run)
    if slots.profile is not None:
        rdd = rdd.withResources(slots.profile)
    return lambda: list(rdd.collect())


def _frame_job(frame: DataFrame, run: Callable[..., Any], slots: Slots) -> Callable[[], list[str]]:
    """One task for every partition of a table."""
    profile = {"profile": slots.profile} if slots.profile is not None else {}
    mapped = frame.mapInArrow(run, "result string", **profile)
    return lambda: [row["result"] for row in mapped.collect()]


def _spread(item: Frame, slots: Slots) -> DataFrame:
    """The rows of a table in enough partitions, where they are full ones or of unknown size, and in
    few where they are nearly empty, since a task costs the start of a worker's tokenizer."""
    found, wanted = item.frame.rdd.getNumPartitions(), _full(item, slots)
    if _too_many(item, slots):
        return item.frame.coalesce(max(wanted, slots.count))
    wanted = min(wanted, task_count(slots))
    return item.frame if found >= min(wanted, slots.count) else item.frame.repartition(wanted)


def _in_order(item: Frame, slots: Slots) -> DataFrame:
    """The rows of a table, their order kept from one partition to the next.

    Nearly empty partitions become few by a sort: Spark joins partitions by where they lie, in no
    order.
    """
    if not item.placed:
        return item.frame
    frame = item.frame
    if _too_many(item, slots):
        wanted = max(_full(item, slots), slots.count)
        frame = frame.repartitionByRange(wanted, part.PLACE).sortWithinPartitions(part.PLACE)
    return frame.drop(part.PLACE)


def _too_many(item: Frame, slots: Slots) -> bool:
    found = int(item.frame.rdd.getNumPartitions())
    return item.rows is not None and found > max(task_count(slots), _full(item, slots))


def _full(item: Frame, slots: Slots) -> int:
    """How many partitions the rows would fill; one a slot where their number is not known."""
    return slots.count if item.rows is None else math.ceil(item.rows / _ROWS_A_TASK) or 1


def task_count(slots: Slots) -> int:
    """How many tasks files should be shared out to."""
    return _TASKS_A_SLOT * slots.count


def _wait(
    sc: SparkContext, action: Callable[[], list[str]], on_poll: Callable[[], None]
) -> list[str]:
    """The result of an action that may be given up."""
    job = cluster.SparkJob(sc, "dbx_llmtrain: preparing data", action)
    try:
        while not job.wait(_POLL_S):
            on_poll()
    except BaseException:
        job.cancel()
        raise
    on_poll()
    error = job.error()
    if error is not None:
        _fail(sc, error)
    found: list[str] = job.result()
    return found


def _fail(sc: SparkContext, error: BaseException) -> NoReturn:
    """Raise the Python exception behind Spark's, without the stacks that are around it."""
    told = "preparing the data failed on a worker"
    cause = causes.of_worker(error)
    if cause is None:
        raise DataError(f"{told}: {causes.first_line(error)}") from error
    if cause.startswith(("ModuleNotFoundError", "ImportError")):
        cause += (
            f". Spark's workers run {_workers_python(sc)}, the driver {sys.executable}: set "
            "PYSPARK_PYTHON to a Python that has the packages, on every node, before the session "
            "is started"
        )
    raise DataError(f"{told}: {cause}") from None


def _workers_python(sc: SparkContext) -> str:
    """The Python of a worker: its path, or the name that Spark starts it by."""
    found = str(sc.pythonExec)
    with node.Capture():  # the message that is being made must not be lost
        found = str(sc.parallelize([0], 1).map(shipping.by_value(_executable)).first())
    return found


def _executable(_: int) -> str:
    """Pickled by value: self-contained."""
    import sys

    return sys.executable


def _run_tasks(
    call_shipped: Callable[..., Any],
    job: Any,
    progress: Callable[[int], None],
    tasks: Sequence[Any],
    numbers: Iterator[int],
) -> Iterator[str]:
    """What a Spark task does for files. Pickled by value: self-contained."""
    import json

    for number in numbers:
        target = "dbx_llmtrain.worker.part:files_task"
        yield json.dumps(call_shipped(target, job, tasks[number], progress))


def _run_partition(
    call_shipped: Callable[..., Any],
    job: Any,
    progress: Callable[[int], None],
    source: int,
    batches: Iterator[Any],
) -> Iterator[Any]:
    """What a Spark task does for a table. Pickled by value: self-contained."""
    import json

    import pyarrow as pa
    from pyspark import TaskContext

    target = "dbx_llmtrain.worker.part:table_task"
    context = TaskContext.get()
    partition = context.partitionId() if context else 0
    result = call_shipped(target, job, source, partition, batches, progress)
    yield pa.RecordBatch.from_pydict({"result": [json.dumps(result)]})
