"""Runs a rank's trainer as a child process and tells the driver how it ended.

This is what ``TorchDistributor`` starts on every rank. Its launcher throws exit codes away, decodes
output strictly and may leave trainers behind, so a rank's process is watched here: its output goes
to a log and, valid and prefixed, to the driver; it ends when its parents end; and the way it ended
is a record in the run folder, which alone decides success. Standard library and pure modules only.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import dbx_llmtrain
from dbx_llmtrain import storage
from dbx_llmtrain.worker import node, output

TRAINER = "dbx_llmtrain.worker.main"
RANK_DIR = "DBX_LLMTRAIN_RANK_DIR"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
LOGS = "logs"
GRACE_S = 5.0
"""A trainer that was told to end is killed after so long."""
_PUBLISH_S = 30.0
_TICK_S = 0.25
_DAY = 24 * 3600
_PR_SET_PDEATHSIG = 1
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


@dataclass
class Ending:
    """How the trainer ended; becomes the rank's record."""

    exit_code: int
    stopped: bool
    time: float
    step: int | None = None
    error: str = ""
    traceback: str = ""
    log_tail: str = ""
    result: dict[str, Any] | None = None


def run(
    plan_json: str,
    secrets: dict[str, str],
    module: str = TRAINER,
    stop_file: str | None = None,
) -> dict[str, int]:
    """Run ``python -m module plan.json`` as this rank's trainer and wait for it.

    ``plan_json`` is a ``RunPlan``; ``secrets`` become the trainer's environment and are written
    nowhere; when ``stop_file`` appears (local mode) the trainer is ended. Returns the rank. Raises
    ``SystemExit`` when the trainer failed; the record says why, so nothing more is printed.
    """
    parent = os.getppid()
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    forget_arguments(at_end=False)
    plan = json.loads(plan_json)
    job = Job(
        attempt=plan["attempt"],
        rank=int(os.environ["RANK"]),
        run_dir=storage.local_path(plan["run_dir"]),
        env=plan["config"].get("cluster", {}).get("env", {}),
        use_gpu=bool(plan.get("use_gpu")),
        plan_json=plan_json,
        secrets=secrets,
        module=module,
        stop_file=stop_file,
    )
    ending = None
    with node.Capture() as capture:
        ending = _supervise(job, parent)
    if ending is None:
        ending = Ending(1, False, time.time(), error=capture.text(), traceback=capture.traceback())
        write_record(job, ending)
    remove_error_folder()
    if ending.exit_code != 0:
        forget_arguments(at_end=True, stopped=ending.stopped)
        raise SystemExit(1)
    return {"rank": job.rank}


def forget_arguments(*, at_end: bool, stopped: bool = False) -> None:
    """Delete the file in which the launcher left this function's arguments, secrets included.

    The launcher deletes its folder at the end, unless it is killed, as Spark does when another
    rank has failed. A rank with a launcher of its own deletes the file at once and, if it failed,
    the folder; ranks that share one delete the file at the end, since another may not have read it,
    and the folder when the run was ``stopped``: the launcher may be gone, and does without it.
    """
    alone = os.environ.get("LOCAL_WORLD_SIZE") == "1"
    script = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    if script.name != "train.py":
        return
    with node.Capture():
        found = re.search(r'open\("([^"]+)", "rb"\)', script.read_text(encoding="utf-8"))
        if found and Path(found[1]).parent == script.parent:
            if alone or at_end:
                Path(found[1]).unlink(missing_ok=True)
            if at_end and (alone or stopped):
                shutil.rmtree(script.parent, ignore_errors=True)


def remove_error_folder() -> None:
    """Delete this rank's part of the folder that torch's launcher makes in the temporary folder and
    leaves there: its place for an error report, which nobody writes here. Only empty folders go, so
    that those of ranks which still run stay; the last rank's takes the whole along. The launcher
    looks for a report when a rank has failed, and takes a missing one for none."""
    file = Path(os.environ.get(_ERROR_FILE, ""))
    root = next((path for path in file.parents if path.name.startswith("torchelastic_")), None)
    if root is None or root.parent != Path(tempfile.gettempdir()):
        return
    with node.Capture():
        for path in file.parents:
            path.rmdir()
            if path == root:
                return


def _supervise(job: Job, parent: int) -> Ending:
    """Start, watch and record one trainer. Its private folder is gone afterwards."""
    _remove_leftovers()
    folder = Path(tempfile.mkdtemp(prefix=f"rank-{os.getpid()}-", dir=node.private_dir()))
    try:
        trainer = Trainer(job, folder, parent)
        ending = trainer.wait()
        write_record(job, ending)
        trainer.close()
        return ending
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers() -> None:
    """Folders of ranks that were killed: their process is gone, and they are old."""
    for folder in node.private_dir().glob("rank-*-*"):
        with node.Capture():
            alive = Path("/proc", folder.name.split("-")[1]).exists()
            if not alive and time.time() - folder.stat().st_mtime > _DAY / 24:
                shutil.rmtree(folder, ignore_errors=True)


class Trainer:
    """The child process, its output and its end."""

    def __init__(self, job: Job, folder: Path, parent: int) -> None:
        self._job = job
        self._folder = folder
        self._parent = parent
        self._stop_at: float | None = None
        self._ended = threading.Event()
        logs = job.run_dir / LOGS
        logs.mkdir(parents=True, exist_ok=True)
        name = f"rank-{job.rank:05d}.log"
        self._log: storage.GrowingFile | None = storage.GrowingFile(
            folder / name, logs / name, every=float("inf")
        )
        plan = folder / "plan.json"
        plan.write_text(job.plan_json, encoding="utf-8")
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
            env=environment(job, folder),
            start_new_session=True,
            preexec_fn=_die_with_supervisor,
        )
        self._forward = output.Forwarder(f"[rank {job.rank}] ")
        self._pump = threading.Thread(target=self._read, name="read-output", daemon=True)
        self._pump.start()
        threading.Thread(target=self._publish, name="publish-log", daemon=True).start()

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
        while not _has_exited(self._child.pid):
            if self._ended.wait(_TICK_S):
                time.sleep(_TICK_S / 10)  # its output has ended, it is about to
            if self._stop_at is None and self._must_stop():
                self._stop_at = time.time()
            if self._stop_at is not None and not told:
                _signal_group(self._child.pid, signal.SIGTERM)
                told = True
            if self._stop_at is not None and time.time() - self._stop_at > GRACE_S:
                _signal_group(self._child.pid, signal.SIGKILL)
        ended = time.time()
        _signal_group(self._child.pid, signal.SIGKILL)  # before the number can be used again
        code = self._child.wait()
        self._pump.join(GRACE_S)
        return self._ending(code, ended)

    def _must_stop(self) -> bool:
        if self._job.stop_file and os.path.exists(self._job.stop_file):
            return True
        return os.getppid() != self._parent

    def _ending(self, code: int, ended: float) -> Ending:
        failure = _read_json(self._folder / "failure.json") or {}
        with node.Capture():
            # Ending a process takes its time; what went wrong was known before.
            ended = min(ended, (self._folder / "failure.json").stat().st_mtime)
        ending = Ending(
            exit_code=code,
            # A fault that comes of being stopped is none; one from before is.
            stopped=code != 0 and self._stop_at is not None and not ended < self._stop_at,
            time=ended,
            step=_read_step(self._folder, failure),
            result=_read_json(self._folder / "result.json") if code == 0 else None,
        )
        if code != 0:
            with node.Capture():
                ending.log_tail = self._log.tail() if self._log else ""
            ending.traceback = str(failure.get("traceback") or _traceback(ending.log_tail))
            ending.error = str(failure.get("error") or _error(code, ending))
        return ending

    def close(self) -> None:
        """Let the last lines and the log go where they belong."""
        self._forward.close()
        if self._log is not None:
            with node.Capture():
                self._log.close()


def environment(job: Job, folder: Path) -> dict[str, str]:
    """The trainer's environment: the launcher's, then secrets, then ``cluster.env``."""
    env = dict(os.environ)
    # torchrun and Spark set 1 for everybody; the trainer decides by the host's CPUs and ranks.
    env.pop("OMP_NUM_THREADS", None)
    env |= job.secrets | job.env
    code = str(Path(str(dbx_llmtrain.__file__)).parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(
        [code, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    )
    env["PYTHONUNBUFFERED"] = "1"
    env.setdefault("PYTHONFAULTHANDLER", "1")
    env[RANK_DIR] = str(folder)
    return env


def write_record(job: Job, ending: Ending) -> None:
    """Put this rank's ``records.RankRecord`` into the run folder."""
    fields = asdict(ending)
    fields["status"] = "failed" if ending.exit_code else "finished"
    if job.rank != 0 or ending.exit_code:
        fields["result"] = None
    fields |= {
        "attempt": job.attempt,
        "rank": job.rank,
        "node": node.node_id(),
        "host": socket.gethostname(),
        "gpu": _gpu() if job.use_gpu else None,
    }
    storage.write_text(record_path(job.run_dir, job.rank), json.dumps(fields, indent=1))


def record_path(run_dir: Path, rank: int) -> Path:
    """Where a rank says how it ended."""
    return run_dir / LOGS / f"rank-{rank:05d}.json"


def _gpu() -> str:
    """This rank's GPU as ``CUDA_VISIBLE_DEVICES`` names it; without that its number."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return visible[local_rank] if local_rank < len(visible) else str(local_rank)


def _die_with_supervisor() -> None:
    """In the child, before it becomes the trainer."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _has_exited(pid: int) -> bool:
    """Whether a child has ended. It keeps its number until it is waited for."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, pid, flags) is not None


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


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
    last = ending.traceback.rstrip().rsplit("\n", 1)[-1].strip()
    return last or f"the trainer ended with exit code {code} and left no report"
