"""A tracking server that is away, slow or unwilling: training does not notice, nothing is lost."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain import cli, tracking, tracking_rank
from dbx_llmtrain.driver import lease, results, run_folder, sending
from dbx_llmtrain.driver.run_folder import RunFolder
from dbx_llmtrain.errors import CheckpointError, RegistryError
from dbx_llmtrain.events import Event
from dbx_llmtrain.outcomes import Evaluation
from dbx_llmtrain.records import TrackingPlan, TrainResult
from dbx_llmtrain.tracking_courier import Call, Courier
from dbx_llmtrain.tracking_sender import PENDING, Sender, Value
from dbx_llmtrain.tracking_store import Run
from tests import sample
from tests.mlflow_servers import Door, door, free_port, mlflow_server

pytestmark = pytest.mark.timeout(120)

STEPS = 30


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("server"), free_port()) as uri:
        yield uri


@pytest.fixture
def way(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    """The way to the server, which is the one in use, with a patience of a test's size."""
    import mlflow

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with door(server) as found:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", found.uri)
        yield found
    mlflow.set_tracking_uri(None)


def steps(count: int = STEPS) -> list[Event]:
    told = [sample.event(step=step, loss=1.0 / step) for step in range(1, count + 1)]
    return [*told, sample.event("eval", count, eval_loss=0.5)]


def lay(
    folder: Path,
    events: list[Event] | None = None,
    *,
    result: TrainResult | None = None,
    tracked: TrackingPlan | None = None,
    **held: Any,
) -> None:
    """The folder of a run that is over, as train leaves it."""
    run_folder.write_start(sample.run_plan(folder, tracking=tracked))
    lines = [event.model_dump_json() + "\n" for event in (steps() if events is None else events)]
    (folder / "events.jsonl").write_text("".join(lines), encoding="utf-8")
    now = time.time()
    values: dict[str, Any] = {
        "attempt": "a1", "run_name": folder.name, "user": "ann", "host": "elsewhere", "pid": 7,
        "since": now - 100, "renewed": now - 90, "status": "finished", "tracking": tracked,
    }  # fmt: skip
    text = lease.Lease(**(values | held)).model_dump_json()
    (folder / lease.LEASE).write_text(text, encoding="utf-8")
    if result is not None:
        (folder / run_folder.RESULT).write_text(result.model_dump_json(), encoding="utf-8")


def finished(folder: Path, run_id: str | None = None) -> TrainResult:
    return sample.result(folder, run_id=run_id, steps=STEPS)


def client(server: str) -> Any:
    import mlflow

    return mlflow.MlflowClient(tracking_uri=server)


def history(server: str, run_id: str, name: str) -> list[int]:
    return sorted(item.step for item in client(server).get_metric_history(run_id, name))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and record.name.startswith("dbx_llmtrain")
    ]


@pytest.mark.parametrize(
    "mode",
    [
        "hang", 500, 403,
        pytest.param("slow", marks=pytest.mark.slow), pytest.param(400, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_server_that_fails_in_the_middle_costs_nothing_and_is_made_up_for(
    mode: str | int, way: Door, server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "first"
    plan = sample.run_plan(folder)
    run = tracking.start_run(plan.config, "first", tmp_path)
    ranks = tracking_rank.RankTracker(run.plan(), str(folder))
    way.mode, way.delay = mode, 3.0
    began = time.monotonic()
    run.log_start(run.attach(plan))
    for event in steps():
        ranks.log(event)
    run.log_result(finished(folder))
    assert time.monotonic() - began < 0.5, "training waits for nothing"
    assert not ranks.close(0.7)
    assert not run.finish("FINISHED", patience_s=0.7)
    assert time.monotonic() - began < 4.0
    told = warnings_of(caplog)
    assert max(map(told.count, told)) <= 2, "once a kind, of the rank and of the driver"
    command = f"`dbx-llmtrain log {folder}`"
    assert [text for text in told if "the run lacks 31 values" in text and command in text]
    assert [text for text in told if "its status FINISHED" in text and command in text]
    way.mode = "open"
    lay(folder, result=finished(folder, run.plan().run_id), tracked=run.plan())
    logged = sending.log(str(folder))
    assert logged.run_id == run.plan().run_id
    assert not logged.created
    assert history(server, logged.run_id, "loss") == list(range(1, STEPS + 1))
    found = client(server).get_run(logged.run_id)
    assert found.info.status == logged.status == "FINISHED"
    assert found.data.params["train.learning_rate"] == "2e-05"
    again = sending.log(str(folder))
    assert again.values == 0
    assert history(server, logged.run_id, "loss") == list(range(1, STEPS + 1))


def test_a_server_that_is_slow_gets_everything(way: Door, server: str, tmp_path: Path) -> None:
    plan = sample.run_plan(tmp_path / "first")
    way.mode, way.delay = "slow", 0.1
    run = tracking.start_run(plan.config, "first", tmp_path)
    ranks = tracking_rank.RankTracker(run.plan())
    began = time.monotonic()
    run.log_start(plan)
    for event in steps():
        ranks.log(event)
    assert time.monotonic() - began < 0.5
    assert ranks.close()
    assert run.finish("FINISHED")
    run_id = run.plan().run_id
    assert history(server, run_id, "loss") == list(range(1, STEPS + 1))
    assert client(server).get_run(run_id).info.status == "FINISHED"


def test_what_was_not_answered_is_sent_again(way: Door, server: str, tmp_path: Path) -> None:
    plan = sample.run_plan(tmp_path / "first")
    run = tracking.start_run(plan.config, "first", tmp_path)
    ranks = tracking_rank.RankTracker(run.plan())
    way.mode = 500
    run.log_start(plan)
    for event in steps():
        ranks.log(event)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not [path for path in way.seen if "log-batch" in path]:
        time.sleep(0.05)
    way.mode = "open"
    assert ranks.close()
    assert run.finish("FINISHED")
    assert history(server, run.plan().run_id, "loss") == list(range(1, STEPS + 1))
    assert "audit.dropped.no trained token" in client(server).get_run(run.plan().run_id).data.params


def test_a_store_of_artifacts_that_is_down_keeps_no_metric_back(
    way: Door, server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = sample.run_plan(tmp_path / "first")
    run = tracking.start_run(plan.config, "first", tmp_path)
    way.mode, way.where = 500, "mlflow-artifacts"
    run.log_start(plan)
    run.log_result(finished(tmp_path / "first"))
    assert run.finish("FINISHED", patience_s=4.0)
    found = client(server).get_run(run.plan().run_id)
    assert found.info.status == "FINISHED"
    assert found.data.metrics["train_loss"] == 2.5
    (told,) = [text for text in warnings_of(caplog) if "the run lacks" in text]
    assert "the run lacks config.yaml, plan.json, audit.json, result.json;" in told


def test_a_server_that_asks_for_an_hour_is_not_obeyed(
    way: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    way.mode, way.headers = 503, {"Retry-After": "3600"}
    began = time.monotonic()
    assert tracking.open_run(sample.config(), "first", tmp_path) is None
    assert time.monotonic() - began < 20


def test_a_server_that_is_down_at_the_start_is_made_up_for(
    way: Door, server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "first"
    way.mode = "hang"
    plan = sample.run_plan(folder)
    with tracking.driver_run(plan) as run:
        assert run.plan() is None
        run.log_start(run.attach(plan))
        run.log_event(sample.event(loss=1.0))
        run.log_usage("node", time.time(), {"cpu_percent": 1.0})
        assert run.wait(0.1)
    (told,) = warnings_of(caplog)
    assert "opening the run failed" in told
    assert f"Training goes on; `dbx-llmtrain log {folder}` (in a notebook llm.log) sends" in told
    lay(folder, result=finished(folder), since=1.0)
    way.mode = "open"
    logged = sending.log(str(folder))
    assert logged.created
    assert "(new)" in str(logged)
    assert "(new)" in logged._repr_html_()
    found = client(server).get_run(logged.run_id)
    assert found.info.run_name == "first"
    assert found.info.status == "FINISHED"
    first, last = steps()[0], steps()[-1]
    assert found.info.start_time == int(first.time * 1000), "when it was, not when it was sent"
    assert found.info.end_time == int(last.time * 1000)
    assert found.data.tags["dbx_llmtrain.model_path"] == f"{folder}/export"
    names = {file.path for file in client(server).list_artifacts(logged.run_id)}
    assert {"config.yaml", "plan.json", "audit.json", "result.json"} <= names
    assert history(server, logged.run_id, "eval_loss") == [STEPS]
    assert logged.values == STEPS + 1 + len(finished(folder).metrics) - 1
    loaded = results.load(str(folder))
    assert loaded.run_id == logged.run_id
    assert results.read_plan(folder).tracking.run_id == logged.run_id
    assert lease.read(folder).tracking.run_id == logged.run_id
    again = sending.log(loaded)
    assert (again.run_id, again.values, again.created) == (logged.run_id, 0, False)
    assert "nothing: it had all of them" in str(again)


@pytest.mark.parametrize(
    ("held", "status", "error"),
    [
        ({"status": "failed", "error": "ValueError: boom"}, "FAILED", "ValueError: boom"),
        ({"status": "stopped", "error": "KeyboardInterrupt"}, "KILLED", "KeyboardInterrupt"),
        ({"status": "running"}, "FAILED", "the driver is gone: first, by ann on elsewhere"),
    ],
)
def test_a_run_without_a_result_ends_as_its_lease_says(
    held: dict[str, str], status: str, error: str, way: Door, server: str, tmp_path: Path
) -> None:
    folder = tmp_path / "first"
    told = [*steps(), sample.event("checkpoint", STEPS).model_copy(update={"data": {"path": "/c"}})]
    lay(folder, told, **held)
    logged = sending.log(str(folder))
    found = client(server).get_run(logged.run_id)
    assert found.info.status == logged.status == status
    assert found.data.tags["dbx_llmtrain.error"].startswith(error)
    assert found.data.tags["dbx_llmtrain.checkpoint"] == "/c"
    assert {file.path for file in client(server).list_artifacts(logged.run_id)} >= {"error.txt"}


@pytest.mark.parametrize(("kind", "status"), [("finished", "FINISHED"), ("step", "FAILED")])
def test_ranks_that_were_started_by_hand_end_as_their_events_say(
    kind: str, status: str, way: Door, tmp_path: Path
) -> None:
    folder = tmp_path / "first"
    lay(folder, [sample.event(step=1, loss=1.0), sample.event(kind, 2, loss=0.5)])
    (folder / lease.LEASE).unlink()
    assert sending.log(str(folder)).status == status


def test_answers_are_sent_once(way: Door, server: str, tmp_path: Path) -> None:
    folder = tmp_path / "first"
    answers = [{"prompt": "p", "text": "t", "tokens": 1, "stopped": True}]
    told = sample.event("samples", 2).model_copy(update={"data": {"samples": answers}})
    lay(folder, [*steps(), told], result=finished(folder))
    for _ in range(2):
        logged = sending.log(str(folder))
    path = client(server).download_artifacts(logged.run_id, "samples.json", str(tmp_path))
    assert json.loads(Path(path).read_text())["data"] == [[2, "p", "t", 1, True]]


def test_an_evaluation_is_sent_too(way: Door, server: str, tmp_path: Path) -> None:
    folder = tmp_path / "evaluation-1"
    run_folder.write_start(sample.run_plan(folder, purpose="evaluate"))
    with pytest.raises(CheckpointError, match=r"has not finished: there is no evaluation\.json"):
        sending.log(str(folder))
    lines = [sample.event("eval", 0, eval_loss=2.0).model_dump_json() + "\n"]
    (folder / "events.jsonl").write_text("".join(lines))
    found = Evaluation(model="my model", metrics={"eval_loss": 2.0}, rows=3, trained_tokens=9)
    (folder / "evaluation.json").write_text(found.model_dump_json())
    logged = sending.log(str(folder))
    stored = client(server).get_run(logged.run_id)
    assert stored.info.status == "FINISHED"
    assert stored.data.metrics["eval_loss"] == 2.0
    assert stored.data.tags["dbx_llmtrain.purpose"] == "evaluate"
    assert stored.data.tags["dbx_llmtrain.evaluated"] == "my model"
    kept = Evaluation.model_validate_json((folder / "evaluation.json").read_text())
    assert kept.run_id == logged.run_id


def test_a_server_that_dies_while_it_is_sent_is_told_and_goes_on_later(
    way: Door, server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "first"
    lay(folder, steps(2500), result=finished(folder))
    way.requests = 10
    with pytest.raises(RegistryError, match=r"was not logged whole to MLflow at http.*Call this"):
        sending.log(str(folder), patience_s=1.0)
    way.requests = None
    logged = sending.log(str(folder))
    assert not logged.created, "the run of the first call"
    assert history(server, logged.run_id, "loss") == list(range(1, 2501))
    assert client(server).get_run(logged.run_id).info.status == "FINISHED"


def test_a_server_that_is_still_down_is_told_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:pa55word@127.0.0.1:{port}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    folder = tmp_path / "first"
    lay(folder)
    assert cli.run(["log", str(folder)]) == 1
    told = capsys.readouterr().err
    assert f"{folder} cannot be logged to MLflow at http://127.0.0.1:{port}:" in told
    assert "all of it stays in events.jsonl" in told
    assert "pa55word" not in told


def test_the_command_says_what_it_has_sent(
    way: Door, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "first"
    lay(folder, result=finished(folder))
    assert cli.run(["log", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "FINISHED (new)" in told
    assert "36 values" in told
    assert cli.run(["log", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["values"] == 0


@pytest.mark.parametrize(("made", "why"), [(False, "there is no such folder"), (True, "plan.json")])
def test_a_folder_of_no_run_is_refused(made: bool, why: str, tmp_path: Path) -> None:
    if made:
        (tmp_path / "first").mkdir()
    with pytest.raises(CheckpointError, match=f"is not the folder of a run: .*{why}"):
        sending.log(str(tmp_path / "first"))


def test_a_run_that_goes_on_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "first"
    run_folder.write_start(sample.run_plan(path))
    with lease.held(RunFolder("first", path, tmp_path, "a1")) as held:
        held.begin()
        with pytest.raises(CheckpointError, match=r"is running \(first, by .*call this again then"):
            sending.log(str(path))


def test_the_store_of_a_run_is_found_without_a_setting(tmp_path: Path) -> None:
    """A shell that knows nothing of the store that the notebook used."""
    import mlflow

    uri = f"sqlite:///{tmp_path}/mine.db"
    mlflow.set_tracking_uri(uri)
    plan = sample.run_plan(tmp_path / "runs" / "first")
    run = tracking.start_run(plan.config, "first", tmp_path / "runs")
    assert run.finish("FAILED")
    mlflow.set_tracking_uri(None)
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    folder = tmp_path / "runs" / "first"
    lay(folder, result=finished(folder), tracked=run.plan())
    logged = sending.log(str(folder))
    assert (logged.tracking_uri, logged.run_id) == (uri, run.plan().run_id)
    assert not (tmp_path / "runs" / "mlflow.db").exists()


def test_what_waits_is_bounded_and_what_has_no_room_is_counted() -> None:
    run = Run(f"http://127.0.0.1:{free_port()}", "r")
    sender = Sender(run, {})
    courier = Courier(run, sender)
    count = 2 * PENDING + 7
    began = time.monotonic()
    for step in range(count):
        courier.feed(partial(sender.add_metric, Value("loss", 1.0, 0, step)))
    assert time.monotonic() - began < 10
    assert not courier.settle(1.0, final=True)
    assert len(sender._metrics) <= PENDING
    assert courier._inbox.qsize() <= PENDING
    assert courier.left_out() == (count, ())


def refusing(client: Any) -> None:
    raise ValueError("not this")


def test_calls_that_are_refused_or_too_many_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run("http://127.0.0.1:9", "r")
    courier = Courier(run, Sender(run, {}))
    for _ in range(1000):
        courier.call(Call("a file", "logging a file", refusing))
    assert not courier.settle(5.0)
    assert courier.left_out() == (0, ("a file",))
    assert len(warnings_of(caplog)) == 1


def test_an_event_that_cannot_be_taken_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    run = Run("http://127.0.0.1:9", "r")
    courier = Courier(run, Sender(run, {}))
    done: list[int] = []

    def broken() -> None:
        raise KeyError("tokens")

    takes: list[Callable[[], None]] = [broken, partial(done.append, 1)]
    for take in takes:
        courier.feed(take)
    assert courier.settle(5.0)
    assert done == [1]
    assert "taking an event failed: KeyError" in caplog.text


def test_a_silent_server_leaves_no_thread_and_no_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        run = Run(f"http://127.0.0.1:{listener.getsockname()[1]}", "r")
        sender = Sender(run, {})
        courier = Courier(run, sender)
        courier.feed(partial(sender.add_tag, "a", "b"))
        began = time.monotonic()
        assert not courier.settle(0.3, final=True)
        assert time.monotonic() - began < 1.0
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and courier._thread is not None:
            time.sleep(0.05)
        assert courier._thread is None, "it ends with the call that it is in"
    ours = "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER"
    while time.monotonic() < deadline and ours in os.environ:  # of threads of earlier tests
        time.sleep(0.05)
    assert ours not in os.environ
