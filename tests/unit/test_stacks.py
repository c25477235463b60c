"""Where threads are: read by Python, and by a watchdog where Python itself is stuck."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

from dbx_llmtrain.worker import stacks


def in_thread(work: object) -> int:
    """The number of a thread that waits in ``queue.get``."""
    assert isinstance(work, queue.Queue)

    def wait_here() -> None:
        work.get()

    thread = threading.Thread(target=wait_here, name="waits", daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while "wait_here" not in stacks.place_of(thread.ident or 0):
        assert time.monotonic() < deadline
    return thread.ident or 0


def test_a_place_is_our_own_innermost_frame_and_what_it_calls() -> None:
    work: queue.Queue[None] = queue.Queue()
    ident = in_thread(work)
    deadline = time.monotonic() + 10
    while not (told := stacks.place_of(ident)).endswith(", in wait"):
        assert time.monotonic() < deadline, told
    assert told.startswith("wait_here (")
    assert f"{__file__}:" in told
    text = stacks.stacks_text(ident)
    assert text.startswith("main thread:\n")
    assert stacks.place_in(text) == told
    assert "wait_here" in stacks.main_stack(text)
    assert "thread MainThread:" not in text, "the one that asks is not told"
    work.put(None)
    assert stacks.place_of(-1) == ""


def test_a_place_in_our_package_is_told_shortly() -> None:
    text = (
        "main thread:\n"
        '  File "/tmp/x.zip/dbx_llmtrain/worker/loop.py", line 260, in back_propagate\n'
        f'  File "{os.path.dirname(threading.__file__)}/threading.py", line 5, in wait\n'
    )
    told = stacks.place_in(text)
    assert told == "back_propagate (dbx_llmtrain/worker/loop.py:260), in wait"


HANGS = """
import ctypes, sys, threading, time
from pathlib import Path
from dbx_llmtrain.worker import stacks

def hang():
    ctypes.PyDLL(None).sleep(2)  # keeps the interpreter's lock

with stacks.watchdog(Path(sys.argv[1]), 0.5) as dog:
    def feed():
        while True:
            time.sleep(0.1)
            dog.feed()
    threading.Thread(target=feed, daemon=True).start()
    time.sleep(1.0)
    print("well", (Path(sys.argv[1]) / stacks.STUCK).stat().st_size, flush=True)
    hang()
    time.sleep(0.3)
    print("again", (Path(sys.argv[1]) / stacks.STUCK).stat().st_size, flush=True)
"""


def test_the_watchdog_writes_where_native_code_keeps_the_interpreter(tmp_path: Path) -> None:
    home, run_dir = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    assert not stacks.publish_stuck(home, run_dir, "a1", 3)
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS, str(home)], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 30
        while not stacks.publish_stuck(home, run_dir, "a1", 3):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        printed, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert printed == "well 0\nagain 0\n", "what is over is forgotten"
    text = stacks.stacks_path(run_dir, 3).read_text()
    assert text.startswith(f"rank 3, attempt a1, {stacks.BY_WATCHDOG}\n")
    assert stacks.place_in(text).startswith("hang (<string>:7)"), json.dumps(text)
    assert "in hang" in stacks.main_stack(text)


def test_without_a_folder_there_is_no_watchdog() -> None:
    with stacks.watchdog(None, 1.0) as dog:
        assert dog is None
