"""SIGTERM of the driver: an end with its clean-up."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

from dbx_llmtrain.driver import signals

PROGRAM = """
import signal, sys, time
from dbx_llmtrain.driver import signals

before = signal.getsignal(signal.SIGTERM)
try:
    with signals.terminated():
        try:
            print("ready", flush=True)
            time.sleep(60)
        finally:
            signal.raise_signal(signal.SIGTERM)  # a second one
            print("cleaned up", flush=True)
finally:
    print(signal.getsignal(signal.SIGTERM) is before, flush=True)
"""


def test_sigterm_ends_with_clean_up() -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "cleaned up\nTrue\n"
    assert process.returncode == 143


def test_other_threads_set_no_handler() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with signals.terminated():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
