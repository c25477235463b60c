"""The faults that a run is put to: what is done, how it ends, and how soon."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import dbx_llmtrain as llm
from dbx_llmtrain.worker import node
from tests import tiny
from tests.spark.helpers import processes_with

SECRET = "s3cret-value-of-the-fault-suite"
BEGUN = 3
"""Steps that every rank has done before something happens to it."""
GONE_S = 15.0
"""From the fault, or where the run is ended by us from then on, until no trainer is left."""


class Ranks:
    """The trainers of a run, by the mark in their environment."""

    def __init__(self, mark: Path) -> None:
        self.mark = f"MARK={mark}"

    def processes(self) -> list[int]:
        return processes_with(self.mark)

    def trainers(self) -> dict[int, psutil.Process]:
        """By rank; a trainer's own children are not among them."""
        found = {}
        for pid in self.processes():
            try:
                process = psutil.Process(pid)
                if "dbx_llmtrain.worker.main" in process.cmdline():
                    found[int(process.environ()["RANK"])] = process
            except (psutil.Error, KeyError):
                continue
        return found

    def have_begun(self) -> bool:
        steps = []
        for process in self.trainers().values():
            try:
                home = Path(process.environ()["DBX_LLMTRAIN_RANK_DIR"])
                steps.append(int((home / "step").read_text()))
            except (psutil.Error, KeyError, OSError, ValueError):
                return False
        return len(steps) == 2 and min(steps) >= BEGUN


def trainer(ranks: Ranks, spark: Any) -> None:
    ranks.trainers()[1].kill()


def python_worker(ranks: Ranks, spark: Any) -> None:
    """Above a trainer: its supervisor, torch's launcher, the launcher's wrapper, Spark's worker."""
    worker = ranks.trainers()[1].parents()[3]
    assert "pyspark" in " ".join(worker.cmdline()), worker
    worker.kill()


def executor(ranks: Ranks, spark: Any) -> None:
    above = ranks.trainers()[1].parents()
    next(one for one in above if "CoarseGrainedExecutorBackend" in " ".join(one.cmdline())).kill()


def stopped_rank(ranks: Ranks, spark: Any) -> None:
    ranks.trainers()[1].send_signal(signal.SIGSTOP)


def cancelled_job(ranks: Ranks, spark: Any) -> None:
    spark.sparkContext.cancelAllJobs()


def drivers_jvm(ranks: Ranks, spark: Any) -> None:
    spark.sparkContext._gateway.proc.kill()


def full_disk(ranks: Ranks, spark: Any) -> None:
    """Fill the run's ``cluster.local_dir``, a small disk of its own."""
    folder = Path(ranks.mark.removeprefix("MARK=")) / "local"
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            return


@dataclass(frozen=True)
class Fault:
    """Something that happens to a running run, and how that ends; ``name`` says what.

    ``seconds``: from the fault until ``train`` raises, as docs/troubleshooting.md says;
    ``message``: what it says then, a pattern; ``causes``: those that it may have.
    """

    name: str
    act: Callable[[Ranks, Any], None]
    seconds: float
    message: str
    causes: tuple[str, ...]
    settings: tuple[str, ...] = ()


FAULTS = (
    Fault(
        "a rank is killed", trainer, 30.0,
        r"rank 1, on \S+, at step \d+, exit code -9: the trainer was ended by signal 9 \(SIGKILL\)",
        ("lost", "host_memory"),
    ),
    Fault(
        "a Python worker of Spark is killed", python_worker, 60.0,
        r"as it was asked to \(SIGTERM\)|the first to end, says", ("lost",),
    ),
    Fault(
        "a rank stands still (SIGSTOP)", stopped_rank, 90.0,
        r"(?s)no rank has moved for \d+ s \(cluster.stall_timeout\).*silent: rank 1", ("stalled",),
        ("cluster.stall_timeout=20",),
    ),
    Fault("the Spark job is cancelled", cancelled_job, 60.0, r"[Cc]ancelled", ("stopped",)),
    Fault(
        "a node's disk is full before the first checkpoint", full_disk, 60.0,
        r"there is no room for the checkpoint .* are needed in \S+/local/\S+ on", ("disk_full",),
        ("checkpoint.every=8", "train.max_steps=16"),
    ),
)  # fmt: skip
"""Those that leave Spark as it was, and"""
OWN_SPARK = (
    Fault(
        "an executor is killed", executor, 60.0, r"ExecutorLostFailure", ("lost", "host_memory")
    ),
    Fault("the driver's JVM is killed", drivers_jvm, 90.0, r"this Spark session has been stopped",
          ("lost",)),
)  # fmt: skip
"""those that do not."""


@dataclass
class Seen:
    """How a run ended that something was done to; seconds count from then."""

    error: BaseException | None
    result: llm.TrainResult | None
    after_s: float
    gone_s: float
    left: list[str]


def config(folder: Path, name: str, *overrides: str, steps: int = 100_000) -> llm.TrainConfig:
    """A small run of two ranks, with dropout, that lasts until something happens to it."""
    if not (folder / "model").exists():
        tiny.model_folder(folder / "model")
        rows = [{"text": f"the cat sat on mat {i} " + "and sat " * (i % 5)} for i in range(40)]
        (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    found = llm.TrainConfig(
        model={"source": str(folder / "model"), "config": {"attention_dropout": 0.1}},
        data={"train": str(folder / "rows.jsonl"), "max_length": 64, "packing": False},
        parallel={"kind": "ddp"},
        train={"max_steps": steps, "global_batch_size": 4, "learning_rate": 1e-2},
        checkpoint={"dir": str(folder / "runs"), "every": 10, "export": False},
        tracking={"run_name": name},
        cluster={"use_gpu": False, "processes": 2, "local_mode": False,
                 "local_dir": str(folder / "local"),
                 "env": {"GLOO_SOCKET_IFNAME": "lo", "MARK": str(folder)}},
    )  # fmt: skip
    return found.override(*overrides)


def train(spark: Any, cfg: llm.TrainConfig, folder: Path, act: Callable[..., None]) -> Seen:
    """Train, and do that to it when it has begun."""
    ranks = Ranks(folder)
    when: list[float] = []
    gone: list[float] = []

    def watch() -> None:
        deadline = time.monotonic() + 180
        while not ranks.have_begun():
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
        when.append(time.monotonic())
        act(ranks, spark)
        while ranks.processes():
            time.sleep(0.1)
        gone.append(time.monotonic())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    seen, began = Seen(None, None, 0.0, 0.0, []), time.time()
    try:
        seen.result = llm.train(cfg, spark=spark)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is looked at
        seen.error = error
    ended = time.monotonic()
    watcher.join(GONE_S + 5)
    assert when, f"nothing was done to it: {seen.error}"
    assert gone, f"trainers are left: {ranks.processes()}"
    seen.after_s, seen.gone_s = ended - when[0], gone[0] - when[0]
    deadline = time.monotonic() + 5  # supervisors leave a record first, and clean up then
    while (left := leftovers(began)) and time.monotonic() < deadline:
        time.sleep(0.2)
    seen.left = left
    return seen


def leftovers(began: float) -> list[str]:
    """Folders of ranks that are gone, of since ``began``, and files with the secret."""
    folders = [path for path in node.private_dir().glob("rank-*") if not _is_alive(path)]
    found = [str(path) for path in folders if path.stat().st_mtime > began]
    for path in Path(tempfile.gettempdir()).glob("tmp*/*"):
        try:
            if SECRET.encode() in path.read_bytes():
                found.append(str(path))
        except OSError:
            continue
    return found


def _is_alive(folder: Path) -> bool:
    return Path("/proc", folder.name.split("-")[1]).exists()


def set_secret() -> None:
    """A credential that goes to the ranks."""
    os.environ["HF_TOKEN"] = SECRET
