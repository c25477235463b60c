"""One run writes to a folder: real processes, real files."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver import checks, lease
from dbx_llmtrain.driver.run_folder import RunFolder
from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.records import TrackingPlan
from tests import tiny

pytestmark = pytest.mark.timeout(120)

HOLD = """
import sys, time
from pathlib import Path
from dbx_llmtrain.driver import lease
from dbx_llmtrain.driver.run_folder import RunFolder
from dbx_llmtrain.errors import CheckpointError

time.sleep(max(0.0, float(sys.argv[3]) - time.time()))
try:
    path = Path(sys.argv[1])
    with lease.held(RunFolder("r", path, path, sys.argv[2])) as holder:
        holder.begin()
        print("held", flush=True)
        time.sleep(float(sys.argv[4]))
except CheckpointError as error:
    print("refused", error, flush=True)
"""


def written(run_dir: Path, **changes: Any) -> lease.Lease:
    """A lease of somebody else, in the folder."""
    now = time.time()
    values: dict[str, Any] = {
        "attempt": "theirs", "run_name": "r", "user": "ann", "host": "elsewhere", "pid": 7,
        "since": now - 100, "renewed": now,
    }  # fmt: skip
    theirs = lease.Lease(**(values | changes))
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / lease.LEASE).write_text(theirs.model_dump_json())
    return theirs


def folder(path: Path, attempt: str) -> RunFolder:
    return RunFolder("r", path, path, attempt)


def hold(run_dir: Path, attempt: str, *, at: float = 0.0, seconds: float = 60.0) -> Any:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_dir), attempt, str(at), str(seconds)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Any]:
    """A process that holds the lease of ``tmp_path/r``."""
    process = hold(tmp_path / "r", "first")
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def state(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / lease.LEASE).read_text())
    return found


def test_of_calls_at_once_exactly_one_gets_the_folder(tmp_path: Path) -> None:
    at = time.time() + 4.0  # all have imported what they need by then
    calls = [hold(tmp_path / "r", f"a{i}", at=at, seconds=6.0) for i in range(4)]
    said = [call.communicate(timeout=60)[0] for call in calls]
    assert sorted(text.split()[0] for text in said) == ["held", "refused", "refused", "refused"]
    winner = next(i for i, text in enumerate(said) if text.startswith("held"))
    assert (state(tmp_path / "r")["attempt"], state(tmp_path / "r")["status"]) == (
        f"a{winner}", "finished",
    )  # fmt: skip


def test_a_second_call_is_told_who_writes_there(tmp_path: Path, holder: Any) -> None:
    with (
        pytest.raises(CheckpointError) as caught,
        lease.held(folder(tmp_path / "r", "second")),
    ):
        pytest.fail("held twice")
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/r is in use: r, by ")
    assert f" on {socket.gethostname()} (process {holder.pid}) since 20" in text
    assert "Wait until that run has ended, or give this one another tracking.run_name" in text
    assert "ends 60 s after it was renewed last" in text
    assert state(tmp_path / "r")["attempt"] == "first"


BEGIN = """
import sys, time
import dbx_llmtrain as llm
from dbx_llmtrain import cli
from dbx_llmtrain.driver import checks

cfg = llm.TrainConfig(model={"source": "m"}, data={"train": "d.jsonl"},
                      checkpoint={"dir": sys.argv[1]}, tracking={"run_name": "r"})
began = time.process_time()
try:
    llm.train(cfg, trial=sys.argv[2] == "trial")
except llm.LlmTrainError as error:
    print(type(error).__name__, error)
print(time.process_time() - began, sorted({"torch", "transformers", "pyspark"} & {*sys.modules}))
with open("config.yaml", "w") as file:
    file.write(cfg.to_yaml())
sys.exit(cli.run(["train", "config.yaml"]))
"""


@pytest.mark.parametrize("what", ["run", "trial"])
def test_a_second_call_is_refused_before_anything_is_spent_on_it(
    tmp_path: Path, holder: Any, what: str
) -> None:
    """Without a Spark session, and before the configuration's files are looked at."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN, str(tmp_path), what],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    said, spent = done.stdout.strip().rsplit("\n", 1)
    in_use = f"{tmp_path}/r is in use: r, by "
    if what == "trial":  # that has a folder of its own
        assert in_use not in said
    else:
        assert said.startswith(f"CheckpointError {in_use}")
        seconds, heavy = spent.split(" ", 1)
        assert (float(seconds) < 2, heavy) == (True, "[]")
    assert f"error: {in_use}" in done.stderr
    assert state(tmp_path / "r")["attempt"] == "first"


@pytest.mark.slow
def test_one_on_another_machine_is_watched_before_a_session_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "r", renewed=time.time() + 20.0 - lease.STALE_S)
    tiny.model_folder(tmp_path / "model")
    (tmp_path / "d.jsonl").write_text('{"text": "a"}')
    cfg = TrainConfig(
        model={"source": str(tmp_path / "model")},
        data={"train": str(tmp_path / "d.jsonl"), "max_length": 64},
        checkpoint={"dir": str(tmp_path)},
        tracking={"run_name": "r"},
    )
    assert checks.require(cfg, purpose="train", begins="run") is cfg
    assert "waiting to see whether that one is alive" in capsys.readouterr().err
    assert state(tmp_path / "r")["attempt"] == "theirs", "nothing is written"
    written(tmp_path / "r", renewed=time.time() - 30)
    renewing = threading.Timer(5.0, written, [tmp_path / "r"])
    renewing.start()
    with pytest.raises(CheckpointError, match="ann on elsewhere"):
        checks.require(cfg, purpose="train", begins="run")
    renewing.join()
    checks.require(cfg, purpose="train")


@pytest.mark.parametrize("reaped", [True, False])
def test_the_lease_of_a_killed_driver_of_this_machine_is_taken_at_once(
    tmp_path: Path, holder: Any, reaped: bool
) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | (0 if reaped else os.WNOWAIT))
    began = time.monotonic()
    with lease.held(folder(tmp_path / "r", "second")) as mine:
        assert mine.dead is not None
        assert mine.dead.attempt == "first"
        mine.begin()
        assert state(tmp_path / "r")["attempt"] == "second"
    assert time.monotonic() - began < 10
    holder.returncode = 0  # it has been waited for


def test_a_number_that_this_process_has_now_is_of_a_dead_driver(tmp_path: Path) -> None:
    """In a container the driver is often process 1, before and after."""
    written(tmp_path, host=socket.gethostname(), pid=os.getpid())
    with lease.held(folder(tmp_path, "mine")) as mine:
        assert mine.dead is not None
        with (
            pytest.raises(CheckpointError, match="is in use"),
            lease.held(folder(tmp_path, "another")),
        ):
            pytest.fail("held twice by one process")


def test_a_lease_of_another_machine_is_watched_until_it_is_stale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, renewed=time.time() - lease.STALE_S + 2.5)
    began = time.monotonic()
    with lease.held(folder(tmp_path, "mine")) as mine:
        assert mine.dead is not None
    assert 1.0 < time.monotonic() - began < 20
    said = capsys.readouterr().err
    assert said.startswith(f"{tmp_path} is in use by r, by ann on elsewhere (process 7) since ")
    assert said.count("waiting to see whether that one is alive") == 1


def test_a_lease_of_another_machine_that_is_renewed_is_respected(tmp_path: Path) -> None:
    written(tmp_path, renewed=time.time() - 30)
    renewing = threading.Timer(2.0, written, [tmp_path])
    renewing.start()
    with (
        pytest.raises(CheckpointError, match="ann on elsewhere"),
        lease.held(folder(tmp_path, "mine")),
    ):
        pytest.fail("held twice")
    renewing.join()
    assert state(tmp_path)["attempt"] == "theirs"


@pytest.mark.parametrize("left", [{"status": "failed"}, {"renewed": 1.0}])
def test_what_is_over_or_stale_is_taken(tmp_path: Path, left: dict[str, Any]) -> None:
    written(tmp_path, **left)
    with lease.held(folder(tmp_path, "mine")) as mine:
        assert (mine.dead is None) == ("status" in left)


def test_a_clock_that_is_ahead_does_not_block_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "STALE_S", 2.0)
    written(tmp_path, renewed=time.time() + 3600)
    with lease.held(folder(tmp_path, "mine")):
        assert state(tmp_path)["attempt"] == "mine"


def test_it_is_renewed_and_a_lost_one_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "RENEW_S", 0.2)

    def run() -> None:
        with lease.held(folder(tmp_path, "mine")) as mine:
            mine.begin()
            first = state(tmp_path)["renewed"]
            time.sleep(1.0)
            assert state(tmp_path)["renewed"] > first
            mine.check()
            written(tmp_path)
            time.sleep(1.0)
            mine.check()

    with pytest.raises(lease.Lost, match="taken over by another call: r, by ann"):
        run()
    assert state(tmp_path)["attempt"] == "theirs", "the other's stays"
    assert state(tmp_path)["status"] == "running"


def test_one_that_cannot_be_renewed_is_told_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lease, "RENEW_S", 0.2)
    run_dir = tmp_path / "r"
    with lease.held(folder(run_dir, "mine")) as mine:
        mine.begin()
        (run_dir / lease.LEASE).unlink()
        run_dir.rmdir()
        run_dir.write_text("a file")
        time.sleep(0.8)
        mine.check()
    assert "the lease of " in caplog.text
    assert "cannot be renewed" in caplog.text


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "finished"),
        (ValueError("at https://me:word@a\nb"), "failed"),
        (KeyboardInterrupt(), "stopped"),
    ],
)
def test_afterwards_it_says_how_the_run_ended(
    tmp_path: Path, error: BaseException | None, status: str
) -> None:
    plan = TrackingPlan(uri="sqlite:///x", experiment_id="1", run_id="r1", by_rank=False)

    def run() -> None:
        with lease.held(folder(tmp_path, "mine")) as mine:
            mine.begin()
            mine.track(plan)
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    left = lease.read(tmp_path)
    assert left is not None
    assert (left.status, left.tracking) == (status, plan)
    assert left.error == ("ValueError: at https://***@a" if status == "failed" else left.error)
    assert not lease.is_alive(left)


def test_a_run_that_did_not_begin_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    new = tmp_path / "runs" / "r"
    with pytest.raises(ValueError, match="no"), lease.held(folder(new, "mine")):
        raise ValueError("no")
    assert not (tmp_path / "runs").exists()
    before = written(tmp_path / "old", status="failed")
    with lease.held(folder(tmp_path / "old", "mine")):
        pass
    assert lease.read(tmp_path / "old") == before


def test_a_file_in_the_way_is_told_by_its_field(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with (
        pytest.raises(CheckpointError, match=r"^checkpoint\.dir: .*cannot be made"),
        lease.held(folder(tmp_path / "runs" / "r", "mine")),
    ):
        pytest.fail("held")


def test_a_lease_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert lease.read(tmp_path) is None
    (tmp_path / lease.LEASE).write_text('{"attempt": ')
    assert lease.read(tmp_path) is None
    with lease.held(folder(tmp_path, "mine")) as mine:
        assert mine.before is None
