"""The supervisor of one rank: its child, its output, its record and its end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain.outcomes import RankRecord
from dbx_llmtrain.worker import output, supervisor
from dbx_llmtrain.worker.output import LineSplitter

PROGRAMS = Path(__file__).parents[1] / "spark" / "programs"
SUPERVISE = """
import sys
from pathlib import Path
from dbx_llmtrain.worker import supervisor
plan, secrets = Path(sys.argv[1]).read_text(), {"TEST_SECRET": "s3cret"}
supervisor.run(plan, secrets, "rank_program", sys.argv[2])
"""


class Supervised:
    """A supervisor in a process of its own, as a launcher would start it."""

    def __init__(
        self,
        folder: Path,
        action: str,
        *,
        rank: int = 1,
        given: dict[str, str] | None = None,
        debug: bool = False,
        **env: str,
    ) -> None:
        self.run_dir = folder / "run"
        self.run_dir.mkdir(parents=True)
        self.rank = rank
        self.stop_file = folder / "stop"
        variables = {"ACTION": action, "PYTHONPATH": str(PROGRAMS)} | (given or {})
        plan = {
            "attempt": "a1",
            "micro_batch_size": 8,
            "accumulation": 1,
            "run_dir": str(self.run_dir),
            "use_gpu": True,
            "local_dir": str(folder / "local"),
            "config": {"cluster": {"env": variables, "debug": debug}},
        }
        (folder / "plan.json").write_text(json.dumps(plan))
        script = folder / "supervise.py"
        script.write_text(SUPERVISE)
        places = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        environ = os.environ | places | {"TMPDIR": str(self.temporary)} | env
        environ["PYTHONPATH"] = str(Path(__file__).parents[2])
        self.command = [sys.executable, str(script), str(folder / "plan.json"), str(self.stop_file)]
        self.environ = environ
        self.process = subprocess.Popen(
            self.command,
            env=environ,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def end(self) -> tuple[int, str, RankRecord]:
        """Exit code, what reached the launcher, the record."""
        printed = self.process.communicate(timeout=60)[0]
        return self.process.returncode, printed.decode(), self.record()

    def record(self) -> RankRecord:
        path = supervisor.record_path(self.run_dir, self.rank)
        return RankRecord.model_validate_json(path.read_text())

    def log(self) -> str:
        return (self.run_dir / "logs" / f"rank-{self.rank:05d}.log").read_text()

    def trainers(self) -> list[int]:
        """Processes that have this supervisor's temporary folder in their environment."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if b"DBX_LLMTRAIN_RANK_DIR=" + str(self.temporary).encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def wait_for(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line.decode():
                return
        raise AssertionError(f"{text!r} was never printed")


def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_rank_that_finishes(tmp_path: Path) -> None:
    run = Supervised(tmp_path, "finish", rank=0, CUDA_VISIBLE_DEVICES="5")
    code, printed, record = run.end()
    assert code == 0
    assert printed == "[rank 0] hello\n"
    assert run.log() == "hello\n"
    assert (record.status, record.attempt, record.rank, record.exit_code) == (
        "finished",
        "a1",
        0,
        0,
    )
    assert record.result is not None
    assert record.result.metrics == {"rank": 0.0, "world": 2.0}
    assert record.gpu == "5"
    assert not list(run.temporary.glob("dbx_llmtrain-*/rank-*")), "its private folder is gone"


def test_the_environment_of_the_trainer(tmp_path: Path) -> None:
    run = Supervised(tmp_path, "environment", OMP_NUM_THREADS="1")
    code, _, record = run.end()
    assert code == 0
    shown = json.loads((run.run_dir / "shown-1.json").read_text())
    assert shown["secret"] == "s3cret"
    assert shown["omp"] is None
    assert shown["attempt"] == "a1"
    assert shown["cwd_on_path"] == "False"
    assert record.result is None, "rank 0's result is the run's"
    everything = [path.read_bytes() for path in run.run_dir.rglob("*") if path.is_file()]
    assert [b"s3cret" in content for content in everything].count(True) == 1  # the test's own file


def test_caches_of_the_trainer_lie_on_the_nodes_own_disk_unless_they_are_given(
    tmp_path: Path,
) -> None:
    given = {"HF_HOME": "/by/cluster.env", "GIVEN_BY_CONFIG": "yes"}
    run = Supervised(
        tmp_path, "environment", given=given, HF_HOME="/by/node", TRITON_CACHE_DIR="/by/node"
    )
    assert run.end()[0] == 0
    shown = json.loads((run.run_dir / "shown-1.json").read_text())
    assert shown["given"] == "yes"
    assert shown["caches"] == {
        "HF_HOME": "/by/cluster.env",
        "TRITON_CACHE_DIR": "/by/node",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "local/caches/torchinductor"),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "local/caches/torch_extensions"),
    }


def test_a_local_folder_that_cannot_be_made_is_in_the_record(tmp_path: Path) -> None:
    (tmp_path / "local").write_text("a file is in the way")
    code, _, record = Supervised(tmp_path, "finish").end()
    assert code == 1
    assert "StagingError" in record.error
    assert "cluster.local_dir" in record.error


def test_a_lack_of_memory_is_the_cause_in_the_record(tmp_path: Path) -> None:
    code, _, record = Supervised(tmp_path, "out_of_memory").end()
    assert code == 1
    assert record.error.startswith("OutOfMemoryError: CUDA out of memory")
    assert (record.cause, record.step) == ("out_of_memory", 0)
    assert Supervised(tmp_path / "b", "raise").end()[2].cause == ""


def test_a_rank_that_raises(tmp_path: Path) -> None:
    code, printed, record = Supervised(tmp_path, "raise").end()
    assert code == 1
    assert "[rank 1] ValueError: row 17 has no text\n" in printed
    assert record.status == "failed"
    assert record.error == "ValueError: row 17 has no text"
    assert record.traceback.startswith("Traceback (most recent call last)")
    assert record.log_tail.rstrip().endswith("ValueError: row 17 has no text")
    assert (record.step, record.exit_code, record.stopped) == (7, 1, False)


def test_storage_that_takes_nothing_for_a_moment_does_not_fail_a_rank(tmp_path: Path) -> None:
    run = Supervised(tmp_path, "finish", rank=0)
    path = supervisor.record_path(run.run_dir, 0)
    path.mkdir(parents=True)  # nothing can be put in its place

    def make_way() -> None:
        until(lambda: (run.run_dir / "logs" / "rank-00000.log").exists())
        time.sleep(1.5)
        path.rmdir()

    thread = threading.Thread(target=make_way)
    thread.start()
    code, _, record = run.end()
    thread.join()
    assert (code, record.status) == (0, "finished")


def test_a_secret_that_a_rank_prints_is_not_in_its_record(tmp_path: Path) -> None:
    _, _, record = Supervised(tmp_path, "tell").end()
    assert record.exit_code == 3
    assert record.log_tail.rstrip().endswith("it is ***")


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    _, _, record = Supervised(tmp_path, "killed").end()
    assert record.exit_code == -9
    assert "SIGKILL" in record.error


def test_who_has_killed_a_rank_is_told_as_far_as_the_kernel_counts(tmp_path: Path) -> None:
    from dbx_llmtrain.worker import kills

    _, _, record = Supervised(tmp_path, "killed").end()
    assert record.cause == ("lost" if kills.counts() else "host_memory")


def test_debugging_is_for_the_log(tmp_path: Path) -> None:
    given = {"NCCL_DEBUG": "WARN", "MINE": "https://me:pa55word@host/x"}
    rank = Supervised(tmp_path, "finish", given=given, debug=True, API_TOKEN="0123456789")
    code, printed, _ = rank.end()
    assert code == 0
    assert printed == "[rank 1] hello\n"
    lines = rank.log().splitlines()
    assert lines[0].startswith("debug: RANK=1, LOCAL_RANK=0, WORLD_SIZE=2, LOCAL_WORLD_SIZE=1")
    assert "debug: NCCL_DEBUG=WARN" in lines, "what is set wins"
    assert "debug: TORCH_DISTRIBUTED_DEBUG=DETAIL" in lines
    assert "debug: TEST_SECRET=***" in lines
    assert "debug: API_TOKEN=***" in lines
    assert "debug: MINE=https://***@host/x" in lines
    assert "pa55word" not in rank.log()
    assert lines[-1] == "hello"


def test_a_launcher_of_torch_is_ended_and_no_other_parent(tmp_path: Path) -> None:
    """It would print an error of its own around the one that counts."""
    code = "import os, sys; from dbx_llmtrain.worker import supervisor\n"
    code += "supervisor.silence_launcher(os.getppid()); print('alive', flush=True)"
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]]); "
    parent += "print('parent too', flush=True)"
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    for name, said in (("torch.distributed.run", "alive\n"), ("other", "alive\nparent too\n")):
        done = subprocess.run(
            [sys.executable, "-c", parent, code, name],
            env=environ, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.stdout == said, done.stderr
        assert done.returncode == (-signal.SIGKILL if name != "other" else 0)


def test_a_rank_that_is_killed_leaves_no_folder(tmp_path: Path) -> None:
    rank = Supervised(tmp_path, "killed_while_reporting")
    _, printed, record = rank.end()
    assert "1 folder for events" in printed
    assert record.exit_code == -signal.SIGKILL
    private = rank.temporary / f"dbx_llmtrain-{os.getuid()}"
    assert list(rank.temporary.iterdir()) == [private]
    assert list(private.iterdir()) == []


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("exit", "exit code 3"),
        ("plain_error", "ZeroDivisionError: division by zero"),
        ("plain_error_of_lines", "ValueError: 2 faults\n  - one\nsee elsewhere"),
    ],
)
def test_programs_that_leave_no_report(tmp_path: Path, action: str, said: str) -> None:
    _, _, record = Supervised(tmp_path, action).end()
    assert said in record.error
    assert record.exit_code != 0


def test_output_that_is_not_utf8_is_passed_on(tmp_path: Path) -> None:
    run = Supervised(tmp_path, "bytes")
    code, printed, _ = run.end()
    assert code == 0
    lines = printed.splitlines()
    assert "[rank 1] caf\N{REPLACEMENT CHARACTER} is not UTF-8" in lines
    assert max(map(len, lines)) < 4000
    assert "".join(line.removeprefix("[rank 1] ") for line in lines).count("x") == 9000
    progress = [line for line in lines if "progress" in line]
    assert 2 <= len(progress) <= 6  # 50 updates in 2.5 s
    assert progress[-1] == "[rank 1] progress 50/50"
    assert lines[-1] == "[rank 1] end of output"
    assert run.log().splitlines() == [line.removeprefix("[rank 1] ") for line in lines]


def test_lines_for_the_log_are_not_passed_on(tmp_path: Path) -> None:
    run = Supervised(tmp_path, "log_only")
    code, printed, _ = run.end()
    assert code == 0
    assert printed == "[rank 1] for all\n[rank 1] for all too\n"
    log = run.log()
    assert log.splitlines()[:3] == ["for all", "step 1/3", "step 2/3"]
    assert log.splitlines()[-1] == "step 3/3"
    assert output.LOG_ONLY not in log


def test_output_survives_an_ascii_launcher(tmp_path: Path) -> None:
    _, printed, _ = Supervised(tmp_path, "bytes", PYTHONIOENCODING="ascii").end()
    assert printed.isascii()
    assert "[rank 1] caf\\ufffd is not UTF-8" in printed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_trainer(tmp_path: Path, number: int) -> None:
    run = Supervised(tmp_path, "wait")
    run.wait_for("waiting")
    run.process.send_signal(number)
    code, _, record = run.end()
    assert code == 1
    assert record.stopped
    assert record.exit_code == -signal.SIGTERM
    assert not run.trainers()


def test_a_stubborn_trainer_and_its_children_are_killed(tmp_path: Path) -> None:
    run = Supervised(tmp_path, "stubborn")
    run.wait_for("waiting")
    until(lambda: len(run.trainers()) == 2)
    run.process.terminate()
    started = time.monotonic()
    _, _, record = run.end()
    assert time.monotonic() - started > 4.0
    assert record.exit_code == -signal.SIGKILL
    assert record.stopped
    until(lambda: not run.trainers())


def test_a_trainer_that_saves_before_it_ends_is_given_the_time(tmp_path: Path) -> None:
    run = Supervised(tmp_path, "saves", given={"SECONDS": "7"})
    run.wait_for("waiting")
    run.process.terminate()
    started = time.monotonic()
    code, _, record = run.end()
    assert time.monotonic() - started > 6.5, "longer than one that does not answer is given"
    assert code == 1
    assert (record.exit_code, record.stopped, record.step) == (143, True, 7)
    assert record.error == "Stopped: ended after step 7"


def test_a_trainer_that_ends_because_the_run_was_asked_to_has_not_failed(tmp_path: Path) -> None:
    """Nobody has told its supervisor."""
    run = Supervised(tmp_path, "takes_requests", rank=0, given={"SECONDS": "0"})
    run.wait_for("waiting")
    (run.run_dir / "CANCEL").touch()
    _, _, record = run.end()
    assert (record.exit_code, record.stopped) == (143, True)


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({}, False),
        ({"stopped": True}, True),
        ({"status": "finished"}, True),
        ({"attempt": "a0"}, True),
    ],
    ids=["failed", "stopped", "finished", "of an earlier attempt"],
)
def test_it_is_not_waited_for_a_checkpoint_that_another_rank_cannot_write(
    tmp_path: Path, changes: dict[str, Any], waits: bool
) -> None:
    run = Supervised(tmp_path, "saves", given={"SECONDS": "3"})
    run.wait_for("waiting")
    other = {"attempt": "a1", "rank": 0, "status": "failed", "stopped": False}
    supervisor.record_path(run.run_dir, 0).write_text(json.dumps(other | changes))
    run.process.terminate()
    started = time.monotonic()
    _, _, record = run.end()
    took = time.monotonic() - started
    assert record.stopped
    assert (record.exit_code, took > 2.5) == ((143, True) if waits else (-signal.SIGKILL, False))


def test_after_the_stop_file_there_is_no_more_time(tmp_path: Path) -> None:
    """The driver has asked for a checkpoint before, and waited for it."""
    run = Supervised(tmp_path, "saves", given={"SECONDS": "20"})
    run.wait_for("waiting")
    run.stop_file.touch()
    started = time.monotonic()
    _, _, record = run.end()
    assert 4.0 < time.monotonic() - started < 12.0
    assert (record.exit_code, record.stopped) == (-signal.SIGKILL, True)


def test_the_stop_file_ends_the_trainer(tmp_path: Path) -> None:
    run = Supervised(tmp_path, "wait")
    run.wait_for("waiting")
    run.stop_file.touch()
    assert run.end()[2].stopped


def test_a_killed_supervisor_takes_its_trainer_along(tmp_path: Path) -> None:
    run = Supervised(tmp_path, "wait")
    run.wait_for("waiting")
    assert run.trainers()
    run.process.kill()
    run.process.communicate(timeout=20)
    until(lambda: not run.trainers(), 5.0)


def test_a_supervisor_ends_when_its_parent_dies(tmp_path: Path) -> None:
    run = Supervised(tmp_path, "finish")
    run.end()
    plan = json.loads((tmp_path / "plan.json").read_text().replace("finish", "wait"))
    (tmp_path / "plan.json").write_text(json.dumps(plan | {"attempt": "a2"}))
    launcher = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
    environ = os.environ | {"RANK": "1", "WORLD_SIZE": "2", "TMPDIR": str(run.temporary)}
    environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, "-c", launcher, *run.command], env=environ, stdout=subprocess.PIPE
    )
    run.process = parent
    run.wait_for("waiting")
    parent.kill()
    until(lambda: not run.trainers(), 10.0)
    parent.communicate(timeout=20)
    until(lambda: run.record().stopped, 10.0)


def test_what_a_killed_trainer_cannot_remove_is_removed(tmp_path: Path) -> None:
    """Temporary files of a rank, as of offloading, may be as big as its disk."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "optimizer.swp").touch()
    run = Supervised(tmp_path, "killed_with_folder", given={"FOLDER": str(scratch)})
    assert run.end()[2].exit_code == -signal.SIGKILL
    assert not scratch.exists()


def test_an_attempt_that_is_over_is_not_begun_again(tmp_path: Path) -> None:
    """Spark may run its tasks once more; what follows a failure is the driver's to say."""
    run = Supervised(tmp_path, "raise")
    before = run.end()[2]
    again = subprocess.run(
        run.command, env=run.environ, capture_output=True, timeout=60, check=False
    )
    assert again.returncode == 1
    assert run.record() == before
    other = supervisor.record_path(run.run_dir, 0)
    assert not other.exists()
    peer = subprocess.run(
        run.command, env=run.environ | {"RANK": "0"}, capture_output=True, timeout=60, check=False
    )
    assert peer.returncode == 1
    record = RankRecord.model_validate_json(other.read_text())
    assert (record.stopped, record.error) == (True, "not begun: this attempt had failed before")


def test_a_fault_of_the_supervisor_is_in_the_record(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / f"dbx_llmtrain-{os.getuid()}").write_text("a file is in the way")
    code, _, record = Supervised(tmp_path, "finish", TMPDIR=str(tmp_path / "elsewhere")).end()
    assert code == 1
    assert "FileExistsError" in record.error
    assert record.traceback


LAUNCHER = """
if __name__ == "__main__":
    with open("{arguments}", "rb") as f:
        f.read()
    from dbx_llmtrain.worker import supervisor
    for at_end in (False, True):
        supervisor.forget_arguments(at_end=at_end, stopped=at_end and {stopped})
        import os
        print(os.path.exists("{arguments}"))
"""


@pytest.mark.parametrize(
    ("ranks_of_launcher", "stopped", "exists"),
    [
        ("1", False, ["False", "False"]),
        ("2", False, ["True", "False"]),
        ("2", True, ["True", "False"]),
    ],
)
def test_the_file_with_the_secrets_is_deleted(
    tmp_path: Path, ranks_of_launcher: str, stopped: bool, exists: list[str]
) -> None:
    arguments, script = tmp_path / "tmpx1", tmp_path / "train.py"
    arguments.write_bytes(b"secrets")
    script.write_text(LAUNCHER.format(arguments=arguments, stopped=stopped))
    environ = os.environ | {"LOCAL_WORLD_SIZE": ranks_of_launcher}
    environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    run = subprocess.run(
        [sys.executable, str(script)], env=environ, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == exists
    shared = ranks_of_launcher == "2" and not stopped
    assert script.exists() == shared, "a folder that nobody needs any more is removed"


def test_empty_folders_of_the_launcher_are_removed_the_last_rank_takes_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    attempt = tmp_path / "torchelastic_a1" / "none_b2" / "attempt_0"
    for rank in ("0", "1", "2"):
        (attempt / rank).mkdir(parents=True)
    (attempt / "2" / "stdout.log").write_text("somebody's")
    left = [{"0", "1", "2"}, {"1", "2"}, {"2"}]
    for rank, there in enumerate(left):
        assert {path.name for path in attempt.iterdir()} == there
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(attempt / str(rank) / "error.json"))
        supervisor.remove_error_folder()
    assert (attempt / "2" / "stdout.log").exists(), "what has files is not ours"
    (attempt / "2" / "stdout.log").unlink()
    supervisor.remove_error_folder()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["", "/dev/null", "logs/x_1/attempt_0/0/error.json"])
def test_folders_that_are_not_the_launchers_own_stay(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = tmp_path / place if place.startswith("logs") else Path(place)
    outside = tmp_path / "other" / "torchelastic_a" / "x" / "attempt_0" / "0" / "error.json"
    for given in (file, outside):
        if given.is_relative_to(tmp_path):
            given.parent.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(given) if place else "")
        supervisor.remove_error_folder()
        assert given.parent.exists()


def test_only_the_launchers_own_file_is_deleted(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("keep")
    supervisor.forget_arguments(at_end=False)
    supervisor.forget_arguments(at_end=True)
    assert other.exists()


def test_leftovers_of_killed_ranks_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    private = tmp_path / f"dbx_llmtrain-{os.getuid()}"
    private.mkdir(mode=0o700)
    dead, alive, fresh = (
        private / name for name in ("rank-0-a", f"rank-{os.getpid()}-b", "rank-0-c")
    )
    for folder in (dead, alive, fresh):
        folder.mkdir()
    for folder in (dead, alive):
        os.utime(folder, (1, 1))
    supervisor._remove_leftovers()
    assert not dead.exists()
    assert alive.exists()
    assert fresh.exists()


def test_lines_do_not_depend_on_how_the_bytes_arrive() -> None:
    text = "first\nzweite \N{EURO SIGN}\r\n\n日本語\nlast"
    data = text.encode()
    for seed in range(50):
        cuts = sorted(random.Random(seed).choices(range(len(data)), k=6))
        splitter, lines = LineSplitter(), []
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            lines += splitter.feed(data[start:end], 0.0)
        assert lines + splitter.close() == ["first", "zweite \N{EURO SIGN}", "", "日本語", "last"]


def test_progress_is_shown_once_a_second_and_at_its_end() -> None:
    splitter = LineSplitter()
    shown = []
    for tick in range(31):
        shown += splitter.feed(f"\r{tick} of 30".encode(), tick / 10)
    assert shown == ["0 of 30", "10 of 30", "20 of 30"]
    assert splitter.feed(b"\n", 3.1) == ["30 of 30"]
    assert splitter.close() == []


def test_a_line_that_is_not_complete_is_shown_once_when_nothing_comes() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"\r 10%\r 20%", 0.0) == [" 10%"]
    assert splitter.idle(1.0) == [" 20%"]
    assert splitter.idle(2.0) == []
    assert splitter.feed(b"\n", 3.0) == []
    assert splitter.feed(b"75%\r", 4.0) == []
    assert splitter.idle(5.5) == ["75%"]
    assert splitter.feed(b"\n", 6.0) == []


def test_a_bar_that_ends_with_a_carriage_return_is_not_lost() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"1%\r2%\r3%\r", 0.0) == ["2%"]
    assert splitter.feed(b"x\n", 0.1) == ["x"]
    assert splitter.feed(b"8%\r9%\r", 0.2) == []
    assert splitter.close() == ["9%"]


def test_endless_lines_are_cut_between_characters() -> None:
    splitter = LineSplitter()
    lines = []
    for _ in range(9):
        lines += splitter.feed("\N{EURO SIGN}".encode() * 5001, 0.0)
    lines += splitter.close()
    assert "".join(lines) == "\N{EURO SIGN}" * 9 * 5001
    assert max(map(len, lines)) <= output.LINE_LIMIT


def test_a_reader_that_does_not_keep_up_costs_lines_not_time() -> None:
    read, write = os.pipe()
    forwarder = output.Forwarder("", write)
    started = time.monotonic()
    for number in range(20_000):
        forwarder.send(f"{number} " + "x" * 100)
    forwarder.close(timeout_s=0.2)
    assert time.monotonic() - started < 5.0
    os.close(read)  # the writer gets EPIPE and ends
    forwarder._thread.join(5.0)
    assert not forwarder._thread.is_alive()
    os.close(write)


def test_dropped_lines_are_counted() -> None:
    read, write = os.pipe()
    forwarder = output.Forwarder("", write)
    for number in range(10_000):
        forwarder.send(f"{number} " + "x" * 100)
    text = b""
    os.set_blocking(read, False)
    deadline = time.monotonic() + 20.0
    while b"are in this rank's log only" not in text and time.monotonic() < deadline:
        try:
            text += os.read(read, 1 << 20)
        except BlockingIOError:
            forwarder.send("one more")
            time.sleep(0.02)
    assert b"lines are in this rank's log only" in text
    forwarder.close()
    os.close(write)
    os.close(read)
