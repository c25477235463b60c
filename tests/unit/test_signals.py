"""Signals that end the driver: an end with its clean-up, and the exit code that shells expect."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading

import pytest

from dbx_llmtrain.driver import signals

PROGRAM = """
import signal, sys, time
from dbx_llmtrain.driver import signals

number = int(sys.argv[1])
before = signal.getsignal(number)
try:
    with signals.terminated():
        try:
            print("ready", flush=True)
            time.sleep(60)
        finally:
            signal.raise_signal(number)  # a second one
            print("cleaned up", flush=True)
            if sys.argv[2] == "fail":
                raise ConnectionError("the JVM is gone")
finally:
    print(signal.getsignal(number) is before, flush=True)
"""


@pytest.mark.parametrize("clean_up", ["well", "fail"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_with_clean_up(number: int, code: int, clean_up: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(int(number)), clean_up],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.communicate(timeout=60) == ("cleaned up\nTrue\n", "")
    assert process.returncode == code


NOHUP = """
import signal
from dbx_llmtrain.driver import signals

signal.signal(signal.SIGHUP, signal.SIG_IGN)
with signals.terminated():
    signal.raise_signal(signal.SIGHUP)
print("goes on")
"""


def test_a_signal_that_is_ignored_stays_so() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOHUP], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "goes on\n")


IN_A_TERMINAL = """
import fcntl, sys, termios, time
from dbx_llmtrain.driver import signals

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
with signals.terminated():
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("a message " * 1000, flush=True)
        print("another", file=sys.stderr, flush=True)
        with open(sys.argv[1], "w") as file:
            file.write("cleaned up")
"""


def test_a_closed_terminal_does_not_disturb_the_clean_up(tmp_path: object) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, f"{tmp_path}/done"],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    assert os.read(ours, 100).startswith(b"ready")
    os.close(ours)
    assert process.wait(timeout=60) == 129
    with open(f"{tmp_path}/done") as file:
        assert file.read() == "cleaned up"


OF_SOMEBODY_ELSE = """
import signal
from dbx_llmtrain.driver import signals

signal.signal(signal.SIGTERM, lambda *_: print("theirs", flush=True))
with signals.terminated(by_default=True):
    signal.raise_signal(signal.SIGTERM)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
try:
    with signals.terminated(by_default=True):
        signal.raise_signal(signal.SIGTERM)
finally:
    print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True)
"""


def test_the_handler_of_somebody_else_is_left_alone_where_that_is_asked() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OF_SOMEBODY_ELSE], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (143, "theirs\nTrue\n")


def test_other_threads_set_no_handler() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with signals.terminated():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
