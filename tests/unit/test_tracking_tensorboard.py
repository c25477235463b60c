from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbx_llmtrain import tracking
from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.events import Event
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.tracking_tensorboard import GROUPS, check, event_files
from tests import sample
from tests.event_files import scalars

ROOT = Path(__file__).parents[2]
ON = sample.config(tracking={"tensorboard": True})


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    return sample.run_plan(tmp_path / "first", config=ON)


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """So that a test sees what is left in it."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def step(number: int, **metrics: float) -> Event:
    return sample.event("step", number, **metrics)


def fp32(value: float) -> float:
    return float(np.float32(value))


def test_every_metric_has_a_group() -> None:
    names = [name for group in GROUPS.values() for name in group]
    assert sorted(names) == sorted(tracking.METRICS)


def test_every_value_and_step_is_read_back(plan: RunPlan) -> None:
    events = [sample.event("started", 0)]
    for number in range(1, 8):
        values = {name: number / 7 + i for i, name in enumerate(sorted(tracking.METRICS))}
        events.append(step(number, **values))
    events.append(sample.event("eval", 7, eval_loss=1.25, eval_perplexity=float("inf")))
    events.append(sample.event("checkpoint", 7))
    events.append(sample.event("finished", 7, eval_loss=1.5, peak_memory_bytes=2**33))
    with event_files(plan) as write:
        for event in events:
            write(event)
    wanted: dict[str, list[tuple[int, float, float]]] = {}
    groups = {name: group for group, names in GROUPS.items() for name in names}
    for event in events:
        for name, value in event.metrics.items():
            group = "result" if event.kind == "finished" else groups[name]
            point = (event.step, fp32(value), event.time)
            wanted.setdefault(f"{group}/{name}", []).append(point)
    assert scalars(Path(plan.run_dir) / "tensorboard") == wanted
    assert len(wanted) == len(tracking.METRICS) + 2


def test_held_out_sets_with_a_name_are_beside_the_others(plan: RunPlan) -> None:
    with event_files(plan) as write:
        write(sample.event("eval", 0, eval_loss=2.0, eval_easy_loss=1.0, eval_easy_perplexity=2.7))
        write(sample.event("eval", 3, test_loss=0.5))
    assert set(scalars(Path(plan.run_dir) / "tensorboard")) == {
        "eval/eval_loss", "eval/eval_easy_loss", "eval/eval_easy_perplexity", "eval/test_loss",
    }  # fmt: skip


def test_files_are_published_while_the_run_lasts(plan: RunPlan) -> None:
    folder = Path(plan.run_dir) / "tensorboard"
    with event_files(plan, every=0.05) as write:
        assert len(list(folder.iterdir())) == 1  # already there to be opened
        for number in (1, 2):
            write(step(number, loss=1.0))
            deadline = time.monotonic() + 60
            while len(scalars(folder).get("train/loss", [])) < number:
                assert time.monotonic() < deadline, "not published"
                time.sleep(0.05)
    assert len(list(folder.iterdir())) == 1


def test_an_open_page_sees_what_is_published_later(plan: RunPlan) -> None:
    """TensorBoard's server keeps a file open: the published one must stay the same file."""
    with event_files(plan, every=0.05) as write:
        (file,) = (Path(plan.run_dir) / "tensorboard").iterdir()
        with file.open("rb") as opened:
            before = len(opened.read())
            write(step(1, loss=1.0))
            deadline = time.monotonic() + 60
            while not opened.read():
                assert time.monotonic() < deadline, "not seen"
                time.sleep(0.05)
            assert opened.tell() > before


@pytest.mark.parametrize(("notebook", "before"), [(False, ""), (True, "%load_ext tensorboard\n%")])
def test_how_they_are_opened_is_printed_once(
    plan: RunPlan, capsys: pytest.CaptureFixture[str], notebook: bool, before: str
) -> None:
    with event_files(plan, notebook=notebook) as write:
        write(step(1, loss=1.0))
    printed = capsys.readouterr().out
    assert printed == f"{before}tensorboard --logdir {plan.run_dir}/tensorboard\n"


def test_a_folder_with_a_space_is_quoted(
    tmp_path: Path, plan: RunPlan, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my runs" / "first"
    with event_files(plan.model_copy(update={"run_dir": str(folder)})):
        pass
    command = capsys.readouterr().out
    assert shlex.split(command) == ["tensorboard", "--logdir", f"{folder}/tensorboard"]


def test_nothing_is_done_without_the_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = sample.run_plan(tmp_path / "first")
    with event_files(plan) as write:
        write(step(1, loss=1.0))
    assert not (tmp_path / "first").exists()
    assert capsys.readouterr().out == ""


def test_another_attempt_adds_a_file_and_takes_over_from_its_first_step(plan: RunPlan) -> None:
    with event_files(plan) as write:
        write(sample.event("started", 0))
        for number in range(1, 6):
            write(step(number, loss=number))
    folder = Path(plan.run_dir) / "tensorboard"
    (first,) = folder.iterdir()
    kept = first.read_bytes()
    with event_files(plan.model_copy(update={"attempt": "b2"})) as write:
        write(sample.event("started", 3))  # steps 4 and 5 are lost, and done again
        for number in range(4, 7):
            write(step(number, loss=10 * number))
    assert len(list(folder.iterdir())) == 2
    assert first.read_bytes() == kept
    points = [(at, value) for at, value, _ in scalars(folder)["train/loss"]]
    assert points == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0), (6, 60.0)]


def test_a_failure_leaves_what_was_written_and_no_local_file(
    plan: RunPlan, own_temporary_folder: Path
) -> None:
    def fail() -> None:
        with event_files(plan) as write:
            write(step(1, loss=1.0))
            assert list(own_temporary_folder.iterdir())
            raise RuntimeError("rank 1 failed")

    with pytest.raises(RuntimeError, match="rank 1"):
        fail()
    assert len(scalars(Path(plan.run_dir) / "tensorboard")["train/loss"]) == 1
    assert not list(own_temporary_folder.iterdir())


def test_only_rank_0_counts(plan: RunPlan) -> None:
    with event_files(plan) as write:
        write(step(1, loss=1.0).model_copy(update={"rank": 1}))
    assert scalars(Path(plan.run_dir) / "tensorboard") == {}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [item.getMessage() for item in caplog.records if item.levelno >= logging.WARNING]


def test_storage_that_cannot_be_written_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "first").write_text("a file where the run folder should be")
    with event_files(sample.run_plan(tmp_path / "first", config=ON), every=0.02) as write:
        write(step(1, loss=1.0))
        time.sleep(0.2)
        write(step(2, loss=1.0))
    (warning,) = warnings_of(caplog)
    assert f"TensorBoard: writing to {tmp_path}/first/tensorboard failed: " in warning
    assert warning.endswith("Training goes on.")


def test_storage_that_comes_back_gets_everything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "first"
    folder.write_text("in the way")
    with event_files(sample.run_plan(folder, config=ON)) as write:
        write(step(1, loss=1.0))
        folder.unlink()
    assert len(scalars(folder / "tensorboard")["train/loss"]) == 1
    assert len(warnings_of(caplog)) == 1


def test_no_local_folder_is_one_warning(
    plan: RunPlan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    with event_files(plan) as write:
        write(step(1, loss=1.0))
    (warning,) = warnings_of(caplog)
    assert "TensorBoard: opening the event file failed: FileNotFoundError" in warning


def test_an_event_that_cannot_be_written_is_one_warning(
    plan: RunPlan, caplog: pytest.LogCaptureFixture
) -> None:
    odd: Any = step(1).model_copy(update={"metrics": {"loss": "high"}})
    with event_files(plan) as write:
        write(odd)
        write(odd)
        write(step(2, loss=2.0))
    assert [at for at, *_ in scalars(Path(plan.run_dir) / "tensorboard")["train/loss"]] == [2]
    (warning,) = warnings_of(caplog)
    assert "TensorBoard: writing an event failed: TypeError" in warning


FULL_DISK = """
import resource, sys, tempfile
from pathlib import Path
from dbx_llmtrain.tracking_tensorboard import event_files
from tests import sample
plan = sample.run_plan(sys.argv[1], config=sample.config(tracking={"tensorboard": True}))
with event_files(plan) as write:
    write(sample.event("step", 1, loss=1.0))
    (file,) = Path(tempfile.gettempdir()).glob("dbx_llmtrain-tensorboard-*/*")
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    # The next record ends half way.
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 20, hard))
    for number in (2, 3):
        write(sample.event("step", number, loss=1.0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    write(sample.event("step", 4, loss=1.0))
print("went on")
"""


def test_a_full_disk_costs_the_events_that_did_not_fit(
    tmp_path: Path, own_temporary_folder: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "first")],
        capture_output=True, text=True, timeout=60, check=True, cwd=ROOT,
        env={**os.environ, "TMPDIR": str(own_temporary_folder)},
    )  # fmt: skip
    assert done.stdout.endswith("went on\n")
    assert done.stderr.count("TensorBoard: writing an event failed: OSError") == 1
    points = scalars(tmp_path / "first" / "tensorboard")["train/loss"]
    assert [at for at, *_ in points] == [1, 4]


def test_the_package_is_asked_for_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    check(ON)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for name in [name for name in sys.modules if name.startswith("tensorboard.")]:
        monkeypatch.delitem(sys.modules, name)
    check(sample.config())
    with pytest.raises(ConfigError) as caught:
        check(ON)
    (problem,) = caught.value.problems
    assert problem.path == "tracking.tensorboard"
    assert "package tensorboard on the driver" in problem.message
    assert "dbx_llmtrain[tensorboard]" in problem.message


def test_neither_tensorflow_nor_torch_is_loaded(tmp_path: Path) -> None:
    """Also where TensorFlow is installed: a stand-in that must not be imported comes first."""
    stand_in = tmp_path / "tensorflow"
    stand_in.mkdir()
    (stand_in / "__init__.py").write_text("raise SystemExit('TensorFlow was imported')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from tests import sample\n"
        "from dbx_llmtrain.tracking_tensorboard import check, event_files\n"
        "cfg = sample.config(tracking={'tensorboard': True})\n"
        "check(cfg)\n"
        f"with event_files(sample.run_plan({str(tmp_path / 'first')!r}, config=cfg)) as write:\n"
        "    write(sample.event('step', 1, loss=1.0))\n"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True, cwd=ROOT)
    assert list((tmp_path / "first" / "tensorboard").iterdir())
