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
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from dbx_llmtrain import storage
from dbx_llmtrain.credentials import redact
from dbx_llmtrain.worker import node, requests
from dbx_llmtrain.worker.trainer import (
    LOGS,
    PR_SET_PDEATHSIG,
    Ending,
    Job,
    Trainer,
    failed_elsewhere,
    read_json,
)

TRAINER = "dbx_llmtrain.worker.main"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_DAY = 24 * 3600
_WRITING_S = 20.0
_LIBC = ctypes.CDLL(None, use_errno=True)


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
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    forget_arguments(at_end=False)
    plan = json.loads(plan_json)
    settings = plan["config"].get("cluster", {})
    job = Job(
        attempt=plan["attempt"],
        rank=int(os.environ["RANK"]),
        run_dir=storage.local_path(plan["run_dir"]),
        env=settings.get("env", {}),
        use_gpu=bool(plan.get("use_gpu")),
        plan_json=plan_json,
        secrets=secrets,
        module=module,
        stop_file=stop_file,
        local_dir=plan.get("local_dir"),
        debug=bool(settings.get("debug")),
    )
    ending = None
    with node.Capture() as capture:
        ending = _ended_before(job) or _supervise(job, parent)
    if ending is None:
        ending = Ending(1, False, time.time(), error=capture.text(), traceback=capture.traceback())
        write_record(job, ending)
    remove_error_folder()
    if ending.exit_code != 0:
        forget_arguments(at_end=True, stopped=ending.stopped)
        silence_launcher(parent)
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


def _ended_before(job: Job) -> Ending | None:
    """The ending of a rank of an attempt that is over: Spark has begun its tasks anew, but what
    follows is the driver's to say, which goes on from a checkpoint if at all. Records stay."""
    own = read_json(record_path(job.run_dir, job.rank)) or {}
    again = own.get("attempt") == job.attempt
    if not again and not failed_elsewhere(job, stopped=True):
        return None
    ending = Ending(1, True, time.time(), error="not begun: this attempt had failed before")
    if not again:
        write_record(job, ending)
    return ending


def silence_launcher(parent: int) -> None:
    """End torch's launcher, which has nothing left to do but to print an error of its own, without
    a cause, around what was said of it. (It would end the other ranks: as their parent's end does.)
    """
    with node.Capture():
        words = Path("/proc", str(parent), "cmdline").read_bytes().split(b"\0")
        if b"torch.distributed.run" in words and os.getppid() == parent:
            os.kill(parent, signal.SIGKILL)


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
        _remove_noted(folder / requests.FOLDERS)
        shutil.rmtree(folder, ignore_errors=True)


def _remove_noted(list_of_folders: Path) -> None:
    """Temporary files of a trainer, which removes them itself unless it was killed."""
    with node.Capture():
        for line in list_of_folders.read_text(encoding="utf-8").splitlines():
            shutil.rmtree(line, ignore_errors=True)


def _remove_leftovers() -> None:
    """Folders of ranks that were killed: their process is gone, and they are old."""
    for folder in node.private_dir().glob("rank-*-*"):
        with node.Capture():
            alive = Path("/proc", folder.name.split("-")[1]).exists()
            if not alive and time.time() - folder.stat().st_mtime > _DAY / 24:
                shutil.rmtree(folder, ignore_errors=True)


def write_record(job: Job, ending: Ending) -> None:
    """Put this rank's ``records.RankRecord`` into the run folder. Raises ``OSError`` where that
    cannot be written for 20 s (the driver waits for 30)."""
    fields = asdict(ending)
    for name in ("error", "traceback", "log_tail"):
        fields[name] = redact(fields[name], job.secrets)
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
    text, deadline = json.dumps(fields, indent=1), time.monotonic() + _WRITING_S
    while True:
        try:
            storage.write_text(record_path(job.run_dir, job.rank), text)
            return
        except OSError:  # of the storage, for a moment: a rank that has finished has not failed
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def record_path(run_dir: Path, rank: int) -> Path:
    """Where a rank says how it ended."""
    return run_dir / LOGS / f"rank-{rank:05d}.json"


def _gpu() -> str:
    """This rank's GPU as ``CUDA_VISIBLE_DEVICES`` names it; without that its number."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return visible[local_rank] if local_rank < len(visible) else str(local_rank)
