"""A rank's trainer as a child process: its environment, its output, its end.

Standard library and pure modules only, as ``supervisor``, which starts it.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import dbx_llmtrain
from dbx_llmtrain import storage
from dbx_llmtrain.errors import Cause
from dbx_llmtrain.worker import (
    caches,
    debugging,
    failures,
    kills,
    node,
    output,
    requests,
    stacks,
)
from dbx_llmtrain.worker.lifeline import Lifeline

RANK_DIR = "DBX_LLMTRAIN_RANK_DIR"
LOGS = "logs"
GRACE_S = 5.0
"""A trainer that was told to end is killed after so long,"""
SAVING_GRACE_S = 25.0
"""and after so long where it has answered that it will save first,"""
CUT_GRACE_S = 10.0
"""or after so long where nobody waits for it: its launcher, Spark task or driver is gone."""
PR_SET_PDEATHSIG = 1
_PUBLISH_S = 30.0
_TICK_S = 0.25
_LOOK_S = 1.0
"""Between two looks at the records of other ranks."""
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Job:
    """What this rank has to run, and who it is."""

    attempt: str
    rank: int
    run_dir: Path
    env: dict[str, str]
    use_gpu: bool
    plan_json: str
    secrets: dict[str, str]
    module: str
    stop_file: str | None
    local_dir: str | None = None
    debug: bool = False


@dataclass
class Ending:
    """How the trainer ended; becomes the rank's record."""

    exit_code: int
    stopped: bool
    time: float
    step: int | None = None
    phase: str = ""
    cause: Cause = ""
    error: str = ""
    traceback: str = ""
    log_tail: str = ""
    result: dict[str, Any] | None = None


class Trainer:
    """The child process, its output and its end."""

    def __init__(self, job: Job, folder: Path, parent: int) -> None:
        self._job = job
        self._folder = folder
        self._lifeline = Lifeline(parent, job.secrets)
        self._cut = False
        self._stop_at: float | None = None
        self._hard = False
        self._in_vain = False
        self._looked = float("-inf")
        self._ended = threading.Event()
        logs = job.run_dir / LOGS
        logs.mkdir(parents=True, exist_ok=True)
        name = f"rank-{job.rank:05d}.log"
        self._log: storage.GrowingFile | None = storage.GrowingFile(
            folder / name, logs / name, every=float("inf")
        )
        plan = folder / "plan.json"
        plan.write_text(job.plan_json, encoding="utf-8")
        given = environment(job, folder)
        if job.debug:
            for line in debugging.of_process(given, job.secrets):
                self._log.write(f"{line}\n".encode())
        self._kills = kills.counts()
        # Spark's Python daemon hangs up on its children when its executor is lost.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        # -P: the current folder's files never stand in for a package's modules.
        # No thread may run yet: the child does something between fork and exec.
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", job.module, str(plan)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=given,
            start_new_session=True,
            preexec_fn=_die_with_supervisor,
        )
        self._forward = output.Forwarder(f"[rank {job.rank}] ")
        self._pump = threading.Thread(target=self._read, name="read-output", daemon=True)
        self._pump.start()
        threading.Thread(target=self._publish, name="publish-log", daemon=True).start()
        self._lifeline.watch()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stop_at is None:
            self._stop_at = time.time()

    def _read(self) -> None:
        assert self._child.stdout is not None
        output.pump(self._child.stdout.fileno(), self._take)
        self._ended.set()

    def _take(self, line: str) -> None:
        text = line.removeprefix(output.LOG_ONLY)
        if text == line:
            self._forward.send(line)
        if self._log is not None:
            try:
                self._log.write(text.encode() + b"\n")
            except OSError as error:  # a full disk ends the log, not the training
                self._log = None
                self._forward.send(f"this rank's log ends here: {error}")

    def _publish(self) -> None:
        while self._log is not None:
            self._log.publish()
            if self._ended.wait(_PUBLISH_S):
                return

    def wait(self) -> Ending:
        """Wait until the trainer and everything it started is gone; how it ended."""
        told = False
        stuck = False
        while not _has_exited(self._child.pid):
            job = self._job
            stuck = stuck or stacks.publish_stuck(self._folder, job.run_dir, job.attempt, job.rank)
            if self._ended.wait(_TICK_S):
                time.sleep(_TICK_S / 10)  # its output has ended, it is about to
            if self._must_stop() and self._stop_at is None:
                self._stop_at = time.time()
            if self._stop_at is None:
                continue
            if not told:
                _signal_group(self._child.pid, signal.SIGTERM)
                told = True
            if time.time() - self._stop_at > self._grace_s():
                _signal_group(self._child.pid, signal.SIGKILL)
        ended = time.time()
        _signal_group(self._child.pid, signal.SIGKILL)  # before the number can be used again
        code = self._child.wait()
        self._pump.join(GRACE_S)
        return self._ending(code, ended)

    def _must_stop(self) -> bool:
        if self._job.stop_file and os.path.exists(self._job.stop_file):
            self._hard = True  # the driver has asked for a checkpoint before, and waited for it
            return True
        self._cut = self._cut or self._lifeline.is_cut()
        return self._cut

    def _grace_s(self) -> float:
        """Seconds that a trainer has which was told to end. None where another rank has failed: it
        would wait for that one in vain."""
        if self._hard or not (self._folder / requests.SAVING).exists():
            return GRACE_S
        if time.monotonic() - self._looked >= _LOOK_S:
            self._in_vain = failed_elsewhere(self._job)
            self._looked = time.monotonic()
        if self._in_vain:
            return 0.0
        return CUT_GRACE_S if self._cut else SAVING_GRACE_S

    def _ending(self, code: int, ended: float) -> Ending:
        failure = read_json(self._folder / "failure.json") or {}
        with node.Capture():
            # Ending a process takes its time; what went wrong was known before.
            ended = min(ended, (self._folder / "failure.json").stat().st_mtime)
        ending = Ending(
            exit_code=code,
            # A fault that comes of being stopped is none; one from before is.
            stopped=code != 0 and (bool(failure.get("stopped")) or self._was_told(before=ended)),
            time=ended,
            step=_read_step(self._folder, failure),
            phase=_read_text(self._folder / "phase"),
            result=read_json(self._folder / "result.json") if code == 0 else None,
        )
        if code != 0:
            with node.Capture():
                ending.log_tail = self._log.tail() if self._log else ""
            ending.traceback = str(failure.get("traceback") or _traceback(ending.log_tail))
            ending.error = str(failure.get("error") or _error(code, ending))
            ending.cause = failure.get("cause", failures.cause_of_text(ending.error))
            if code == -signal.SIGKILL and not ending.stopped and not failure:
                self._blame_kernel(ending)
        return ending

    def _blame_kernel(self, ending: Ending) -> None:
        """Who has killed the trainer, as far as the kernel tells."""
        counted = kills.counted(self._kills, kills.counts())
        ending.cause = failures.LOST if counted is False else failures.HOST_MEMORY
        if counted:
            ending.error += "; the kernel has counted a kill for lack of memory here meanwhile"

    def _was_told(self, *, before: float) -> bool:
        return self._stop_at is not None and not before < self._stop_at

    def close(self) -> None:
        """Let the last lines and the log go where they belong. The folder of the stop file is
        that of the driver, which may be gone."""
        if self._cut and self._job.stop_file:
            with node.Capture():
                Path(self._job.stop_file).parent.rmdir()
        self._forward.close()
        if self._log is not None:
            with node.Capture():
                self._log.close()


def failed_elsewhere(job: Job, *, stopped: bool = False) -> bool:
    """Whether another rank of this attempt has failed by itself, as its record says; with
    ``stopped`` also one that was ended."""
    records = (read_json(path) or {} for path in (job.run_dir / LOGS).glob("rank-*.json"))
    return any(
        record.get("attempt") == job.attempt
        and record.get("status") == "failed"
        and (stopped or not record.get("stopped"))
        for record in records
    )


def environment(job: Job, folder: Path) -> dict[str, str]:
    """The trainer's environment: the launcher's, then secrets, then ``cluster.env``; caches lie on
    the node's own disk unless one of these says where."""
    env = dict(os.environ)
    # torchrun and Spark set 1 for everybody; the trainer decides by the host's CPUs and ranks.
    env.pop("OMP_NUM_THREADS", None)
    env |= job.secrets | job.env
    env |= caches.variables(env, job.env, job.local_dir)
    code = str(Path(str(dbx_llmtrain.__file__)).parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(
        [code, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    )
    env["PYTHONUNBUFFERED"] = "1"
    env.setdefault("PYTHONFAULTHANDLER", "1")
    env[RANK_DIR] = str(folder)
    if job.debug:
        env = debugging.VARIABLES | env
    return env


def _die_with_supervisor() -> None:
    """In the child, before it becomes the trainer."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _has_exited(pid: int) -> bool:
    """Whether a child has ended. It keeps its number until it is waited for."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, pid, flags) is not None


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def read_json(path: Path) -> dict[str, Any] | None:
    """The mapping in a file of JSON, if there is one that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _read_step(folder: Path, failure: dict[str, Any]) -> int | None:
    if isinstance(failure.get("step"), int):
        return int(failure["step"])
    try:
        return int((folder / "step").read_text())
    except (OSError, ValueError):
        return None


def _traceback(tail: str) -> str:
    """The last traceback in the output of a program that left no report."""
    start = tail.rfind("Traceback (most recent call last)")
    return tail[start:] if start >= 0 else ""


def _error(code: int, ending: Ending) -> str:
    if ending.stopped:
        return "ended because the run was stopped"
    if code < 0:
        with node.Capture():
            return f"the trainer was ended by signal {-code} ({signal.Signals(-code).name})"
    said = _exception(ending.traceback)
    return said or f"the trainer ended with exit code {code} and left no report"


def _exception(traceback: str) -> str:
    """The exception at the end of a traceback: its type and all lines of its message.

    Frames are indented and a message's further lines may be, too, so it begins with the first line
    that is not. torch puts the rank before every line.
    """
    lines = re.sub(r"^\[rank\d+\]: ?", "", traceback.rstrip(), flags=re.M).split("\n")
    begins = (i for i, line in enumerate(lines[1:], 1) if line and not line[0].isspace())
    return "\n".join(lines[next(begins, len(lines) - 1) :]).strip()
