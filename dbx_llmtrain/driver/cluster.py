"""Reaching every node of the cluster: the one place that knows RDDs, executors and job groups.

Spark promises no placement: tasks spread over an idle cluster, but a busy executor gets none. So
``run_on_nodes`` starts more tasks than there are slots, has each node answer once, and repeats
until every live executor's host has answered or the time is over.
"""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dbx_llmtrain.driver import preflight, shipping
from dbx_llmtrain.errors import ClusterError, Finding
from dbx_llmtrain.reports import ClusterReport, NodeReport
from dbx_llmtrain.worker import facts, node, shared_folder

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

_SESSION_KEYS = ("spark.task.resource.gpu.amount", "spark.ssl.enabled", preflight.IGNORE_SSL)
_START_S = 60.0
"""How long to wait for the executors that the configuration promises."""
_SETTLE_S = 2.0
"""Without such a promise, executors are all there when none has come for so long."""
_settled: dict[str, int] = {}
"""Executors that each application ended up with: what has been waited for once."""
_FIRST_HOLD_S, _LATER_HOLD_S = 0.3, 1.0


@dataclass(frozen=True)
class Outcome:
    """What one node answered. ``missing``: the host of an executor that did not answer in time."""

    node: str
    host: str
    status: Literal["ok", "failed", "missing"]
    value: Any = None
    error: str = ""
    traceback: str = ""
    addresses: tuple[str, ...] = ()


def session(spark: SparkSession | None = None) -> SparkSession:
    """The given session, else the active one.

    Raises ``ClusterError`` where there is none or it has been stopped, and for Spark Connect
    (standard access mode, serverless), which cannot reach the nodes.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise _no_session(
            f"pyspark cannot be imported ({error}): run this on a cluster, or install the extra "
            "dbx_llmtrain[spark] for a Spark on this machine"
        ) from error
    found = spark if spark is not None else SparkSession.getActiveSession()
    if found is None:
        raise _no_session(
            "there is no active Spark session: make one first, or pass spark=... (in a thread of "
            "its own the session has to be passed)"
        )
    if type(found).__module__.startswith("pyspark.sql.connect"):
        raise _no_session(
            "this is a Spark Connect session (standard access mode or serverless), which cannot "
            "start training on the nodes: use a classic compute with dedicated access mode"
        )
    if _is_stopped(found):
        raise _no_session(
            "this Spark session has been stopped: make a new one (a cluster's notebook gets one "
            "when it is attached again)"
        )
    return found


def _is_stopped(spark: SparkSession) -> bool:
    """Whether the session's context has been stopped, here or in the JVM, or the JVM is gone."""
    context = getattr(spark, "_sc", None)
    if context is None:
        return False
    with node.Capture() as capture:
        return context._jsc is None or bool(context._jsc.sc().isStopped())
    return capture.error is not None


def _no_session(message: str) -> ClusterError:
    return ClusterError([Finding("error", "spark session", message)])


def conf(spark: SparkSession) -> dict[str, str]:
    """Every Spark setting that is set, those of the session included."""
    settings: dict[str, str] = dict(spark.sparkContext.getConf().getAll())
    for key in _SESSION_KEYS:
        value = spark.conf.get(key, None)
        if value is not None:
            settings[key] = value
    return settings


class SparkJob:
    """An action in a thread of its own, under a Spark job group, so that it can be given up.

    The thread has the caller's local properties (on Databricks: its credentials), is a daemon, and
    keeps the action's result or exception for ``result``.
    """

    def __init__(self, sc: SparkContext, description: str, action: Callable[[], Any]) -> None:
        from pyspark import InheritableThread

        self.group = f"dbx_llmtrain-{uuid.uuid4().hex}"
        self._sc = sc
        self._future: Future[Any] = Future()
        self._thread = InheritableThread(target=self._run, args=(description, action))
        self._thread.daemon = True
        self._thread.start()

    def _run(self, description: str, action: Callable[[], Any]) -> None:
        with node.Capture() as capture:
            self._sc.setJobGroup(self.group, description, interruptOnCancel=False)
            self._future.set_result(action())
        if capture.error:
            self._future.set_exception(capture.error)

    def wait(self, timeout_s: float) -> bool:
        """Wait; ``True`` when the action has ended."""
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """Ask Spark to end the jobs of this action."""
        self._sc.cancelJobGroup(self.group)

    def result(self) -> Any:
        """The action's result; its exception is raised. Only after it has ended."""
        return self._future.result(timeout=0)

    def error(self) -> BaseException | None:
        """The action's exception, if any. Only after it has ended."""
        return self._future.exception(timeout=0)

    def active_tasks(self) -> int:
        """Tasks of this action that run at the moment."""
        tracker = self._sc.statusTracker()
        jobs = [tracker.getJobInfo(number) for number in tracker.getJobIdsForGroup(self.group)]
        stages = [tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
        return sum(stage.numActiveTasks for stage in stages if stage)


def run_on_nodes(
    spark: SparkSession, target: str, args: Sequence[Any] = (), *, timeout_s: float = 120.0
) -> dict[str, Outcome]:
    """Call ``module:function`` once on every node; each node's outcome by its name.

    An exception on a node is that node's outcome. An executor host that has not answered after
    ``timeout_s`` seconds has an outcome of status ``missing`` under its own name. Where the master
    is ``local[N]`` the driver's machine is the only node. Raises ``ClusterError`` for settings
    under which no job would ever run, and when no executor comes up.
    """
    preflight.require(preflight.check_before_jobs(conf(spark)))
    sc = spark.sparkContext
    if preflight.is_local(sc.master):
        return run_here(target, args)
    deadline = time.monotonic() + timeout_s
    wait_for_executors(sc, deadline)
    answers: dict[str, Outcome] = {}
    job, hold_s = uuid.uuid4().hex, _FIRST_HOLD_S
    while True:
        answers |= _round(sc, (job, sorted(answers), hold_s, target, tuple(args)), deadline)
        hold_s = _LATER_HOLD_S
        missing = [host for host in executor_hosts(sc) if not _answered(host, answers)]
        if not missing or time.monotonic() > deadline:
            break
    for host in missing:
        answers[host] = Outcome(
            node=host,
            host=host,
            status="missing",
            error=f"no answer within {timeout_s:.0f} s: busy with another job, unreachable or lost",
        )
    return answers


def run_here(target: str, args: Sequence[Any] = ()) -> dict[str, Outcome]:
    """The same on the driver's machine alone, without Spark."""
    return _by_node([node.call(target, args)])


def _by_node(outcomes: Iterable[Mapping[str, Any] | None]) -> dict[str, Outcome]:
    return {
        found["node"]: Outcome(
            node=found["node"],
            host=found["host"],
            status="failed" if found["error"] else "ok",
            value=found["value"],
            error=found["error"],
            traceback=found["traceback"],
            addresses=tuple(found["addresses"]),
        )
        for found in outcomes
        if found is not None
    }


def _round(sc: SparkContext, args: tuple[Any, ...], deadline: float) -> dict[str, Outcome]:
    """One job with twice as many tasks as slots; what its tasks have answered by the deadline."""
    from pyspark.accumulators import AddingAccumulatorParam

    answers = sc.accumulator((), AddingAccumulatorParam(()))
    task = shipping.node_task(answers.add, args)
    count = max(2 * slots(sc), 2 * len(executor_hosts(sc)), 1)
    target = args[-2]
    job = SparkJob(
        sc,
        f"dbx_llmtrain: {target} on every node",
        lambda: sc.parallelize(range(count), count).foreach(task),
    )
    try:
        ended = job.wait(deadline - time.monotonic())
    except BaseException:
        with node.Capture():  # the JVM may be gone: the cause is what has to be told
            job.cancel()
        raise
    if ended:
        job.result()
    else:
        job.cancel()
        job.wait(10.0)
    return _by_node(answers.value)


def _answered(host: str, answers: Mapping[str, Outcome]) -> bool:
    """Whether the machine with this address or name is among those that answered."""
    names = node.resolve(host)
    return any(
        not names.isdisjoint({outcome.host, *outcome.addresses}) for outcome in answers.values()
    )


def executor_hosts(sc: SparkContext) -> list[str]:
    """The host, as Spark knows it, of every live executor; several may be on one host."""
    tracker = sc._jsc.sc().statusTracker()
    hosts = [str(info.host()) for info in tracker.getExecutorInfos()]
    driver = sc.getConf().get("spark.driver.host")
    if driver in hosts:  # the driver is listed among them
        hosts.remove(driver)
    return hosts


def slots(sc: SparkContext) -> int:
    """Tasks that can run at once, by cores and GPUs: the number that a barrier stage checks."""
    context = sc._jsc.sc()
    profile = context.resourceProfileManager().defaultResourceProfile()
    return int(context.maxNumConcurrentTasks(profile))


def wait_for_executors(sc: SparkContext, deadline: float) -> None:
    """Executors register some seconds after the session is made: wait for all of them, once.

    ``deadline`` is a time of ``time.monotonic``. Raises ``ClusterError`` when none has come.
    """
    if sc.getConf().get(preflight.DYNAMIC, "false").lower() == "true":
        return  # they are started for a job, not before
    if len(executor_hosts(sc)) >= _settled.get(sc.applicationId, sys.maxsize):
        return
    wanted = preflight.promised_executors(dict(sc.getConf().getAll()), sc.master)
    until = min(deadline, time.monotonic() + _START_S)
    count, since = 0, time.monotonic()
    while time.monotonic() < (until if count else deadline):
        now = len(executor_hosts(sc)) if slots(sc) else 0
        if now != count:
            count, since = now, time.monotonic()
        settled = time.monotonic() - since >= _SETTLE_S
        if count and (count >= wanted if wanted else settled):
            break
        time.sleep(0.2)
    if not count:
        raise ClusterError(
            [
                Finding(
                    "error",
                    "executors",
                    f"no executor of {sc.master} has registered: start the cluster's workers, and "
                    "look at Spark's log for executors that end at once",
                )
            ]
        )
    if wanted and count < wanted:
        logger.warning("%d executors are there, %d were expected", count, wanted)
    _settled[sc.applicationId] = count


def probe(
    spark: SparkSession | None = None,
    *,
    local_dir: str | None = None,
    timeout_s: float = 120.0,
    folder: str | None = None,
    tracking: tuple[str, dict[str, str]] | None = None,
) -> ClusterReport:
    """One report of every node and of the driver.

    ``local_dir`` is ``cluster.local_dir``. A node that failed to report is in ``nodes`` with its
    problem; an executor host that did not answer is in ``missing``. Every node tries to write to
    ``folder`` on shared storage, where that is given, and to reach the MLflow of ``tracking`` (its
    URI, and the secrets for it). Raises ``ClusterError``.
    """
    found = session(spark)
    host = conf(found).get("spark.driver.host")
    # Before the nodes, which look for its file.
    driver = facts.report(local_dir, host, folder, who=shared_folder.DRIVER)
    target = "dbx_llmtrain.worker.facts:report"
    args = (local_dir, host, folder, tracking)
    outcomes = run_on_nodes(found, target, args, timeout_s=timeout_s).values()
    reports = tuple(_report(outcome) for outcome in outcomes if outcome.status != "missing")
    return glance(found, driver=NodeReport.model_validate(driver)).model_copy(
        update={
            "nodes": tuple(sorted(reports, key=lambda report: report.node)),
            "missing": tuple(
                sorted(outcome.host for outcome in outcomes if outcome.status == "missing")
            ),
        }
    )


def glance(
    spark: SparkSession, *, local_dir: str | None = None, driver: NodeReport | None = None
) -> ClusterReport:
    """What a report says without asking the nodes: no job is run and nothing waited for. ``driver``
    is what is known of the driver's machine already."""
    sc = spark.sparkContext
    local = preflight.is_local(sc.master)
    return ClusterReport(
        master=sc.master,
        spark_version=sc.version,
        local=local,
        executors=() if local else tuple(sorted(executor_hosts(sc))),
        slots=slots(sc),
        task_gpus=conf(spark).get("spark.task.resource.gpu.amount"),
        driver=driver or NodeReport.model_validate(node.report(local_dir)),
        nodes=(),
        missing=(),
    )


def _report(outcome: Outcome) -> NodeReport:
    if outcome.status == "ok":
        return NodeReport.model_validate(outcome.value)
    return NodeReport(
        node=outcome.node,
        host=outcome.host,
        addresses=outcome.addresses,
        cpus=0,
        memory_total=0,
        memory_available=0,
        local_dir="",
        disk_free=0,
        python="",
        problem=outcome.error,
    )
