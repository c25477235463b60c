"""A rank's program for the tests: what it does is in the variable ACTION.

Run as ``python -m rank_program plan.json`` by the supervisor; it keeps the trainer's side of the
protocol (result.json, failure.json and step in the rank's folder).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

FOLDER = Path(os.environ.get("DBX_LLMTRAIN_RANK_DIR", "."))
RANK = int(os.environ.get("RANK", "0"))
CACHES = ("HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")


def finish(**metrics: float) -> None:
    result = {"steps": 3, "metrics": metrics, "checkpoint": None, "model_path": None}
    (FOLDER / "result.json").write_text(json.dumps(result))


def action_finish() -> None:
    print("hello", flush=True)
    finish(rank=RANK, world=int(os.environ["WORLD_SIZE"]))


def action_environment() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    import dbx_llmtrain

    shown = {
        "code": str(dbx_llmtrain.__file__),
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "secret": os.environ.get("TEST_SECRET"),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "local_rank": os.environ.get("LOCAL_RANK"),
        "cwd_on_path": str(Path.cwd() in map(Path, sys.path)),
        "attempt": plan["attempt"],
        "given": os.environ.get("GIVEN_BY_CONFIG"),
        "caches": {name: os.environ.get(name) for name in CACHES},
    }
    Path(plan["run_dir"], f"shown-{RANK}.json").write_text(json.dumps(shown))
    finish()


def action_tell() -> None:
    print("it is", os.environ["TEST_SECRET"], flush=True)
    sys.exit(3)


def action_log_only() -> None:
    from dbx_llmtrain.worker.output import LOG_ONLY

    print("for all", flush=True)
    print(f"{LOG_ONLY}step 1/3", flush=True)
    print(f"{LOG_ONLY}step 2/3\nfor all too", flush=True)
    sys.stdout.write(f"{LOG_ONLY}step 3")
    sys.stdout.flush()
    time.sleep(1.5)
    print("/3", flush=True)
    finish()


def action_raise() -> None:
    if RANK == 1:
        (FOLDER / "step").write_text("7")
        raise ValueError("row 17 has no text")
    time.sleep(120)


def action_raise_late() -> None:
    """Rank 0 finishes, rank 1 then fails."""
    if RANK == 1:
        time.sleep(2)
        raise ValueError("row 17 has no text")
    finish()


def action_killed() -> None:
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(120)


def action_killed_while_reporting() -> None:
    from dbx_llmtrain.config import TrainConfig
    from dbx_llmtrain.records import RunPlan
    from dbx_llmtrain.worker.reporting import reporting

    config = TrainConfig(model={"source": "m"}, data={"train": "d.jsonl"})
    with reporting(RunPlan.model_construct(config=config, run_dir=str(FOLDER), attempt="a1"), RANK):
        found = list(FOLDER.glob("dbx_llmtrain-events-*"))
        print(f"{len(found)} folder for events", flush=True)
        action_killed()


def action_killed_with_folder() -> None:
    from dbx_llmtrain.worker.handover import note_folder

    note_folder(Path(os.environ["FOLDER"]))
    action_killed()


def action_out_of_memory() -> None:
    """Rank 1 has memory for two examples at once. It says so as torch does."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    limit = int(os.environ.get("EXAMPLES_THAT_FIT", "2"))
    if RANK == 1 and plan["micro_batch_size"] > limit:

        class OutOfMemoryError(RuntimeError):
            pass

        (FOLDER / "step").write_text(os.environ.get("STEPS_DONE", "0"))
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    finish(micro_batch=plan["micro_batch_size"], accumulation=plan["accumulation"])


def action_wait() -> None:
    print("waiting", flush=True)
    time.sleep(120)


def action_stubborn() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    action_wait()


def action_saves() -> None:
    """Told to end, it says that it will save, takes SECONDS for it and ends by itself."""

    def on_signal(*_: object) -> None:
        (FOLDER / "saving").touch()
        time.sleep(float(os.environ.get("SECONDS", "6")))
        failure = {"error": "Stopped: ended after step 7", "step": 7, "stopped": True}
        (FOLDER / "failure.json").write_text(json.dumps(failure))
        os._exit(143)

    signal.signal(signal.SIGTERM, on_signal)
    action_wait()


def action_takes_requests() -> None:
    """Rank 0 takes the request to end; both leave SECONDS later, as a run that was cancelled."""
    run_dir = Path(json.loads(Path(sys.argv[1]).read_text())["run_dir"])
    print("waiting", flush=True)
    while RANK == 0 and not (run_dir / "CANCEL").exists():
        time.sleep(0.1)
    if RANK == 0:
        (run_dir / "CANCEL").unlink()
        (run_dir / "taken").touch()
    while not (run_dir / "taken").exists():
        time.sleep(0.1)
    time.sleep(float(os.environ.get("SECONDS", "2")))
    failure = {"error": "Stopped: ended after step 7", "step": 7, "stopped": True}
    (FOLDER / "failure.json").write_text(json.dumps(failure))
    sys.exit(143)


def action_bytes() -> None:
    out = sys.stdout.buffer
    out.write(b"caf\xe9 is not UTF-8\n")
    out.write("日本語 is\n".encode())
    out.write(b"x" * 9000 + b"\n")
    for i in range(50):
        out.write(b"\rprogress %d/50" % (i + 1))
        out.flush()
        time.sleep(0.05)
    out.write(b"\nend of output\n")
    out.flush()
    finish()


def action_exit() -> None:
    print("about to leave", flush=True)
    sys.exit(3)


def action_plain_error() -> None:
    """A program that does not keep the protocol."""
    raise SystemExit(os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", "1/0"]))


def action_plain_error_of_lines() -> None:
    """The same with a message of several lines."""
    script = "raise ValueError('2 faults\\n  - one\\nsee elsewhere')"
    raise SystemExit(os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", script]))


def action_import_error() -> None:
    import no_such_package_anywhere  # noqa: F401


def action_no_result() -> None:
    return


def action_all_reduce() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(RANK + 1)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    finish(total=total.item())


def note_launcher() -> None:
    """Where the launcher keeps what it may leave behind, for the test."""
    words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    scripts = [str(Path(word).parent) for word in words if word.endswith("/train.py")]
    errors = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    folders = [str(path) for path in errors.parents if path.name.startswith("torchelastic_")]
    told = Path(json.loads(Path(sys.argv[1]).read_text())["run_dir"], f"launcher-{RANK}.json")
    told.write_text(json.dumps(folders + scripts))


if __name__ == "__main__":
    note_launcher()
    try:
        globals()[f"action_{os.environ['ACTION']}"]()
    except Exception as error:
        step = FOLDER / "step"
        failure = {
            "error": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
            "step": int(step.read_text()) if step.exists() else None,
        }
        (FOLDER / "failure.json").write_text(json.dumps(failure))
        raise
