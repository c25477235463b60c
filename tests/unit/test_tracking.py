from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dbx_llmtrain import (
    tracking,
    tracking_guard,
    tracking_rank,
    tracking_sender,
    tracking_store,
)
from dbx_llmtrain.credentials import collect, redact, uri_credentials, without_credentials
from dbx_llmtrain.errors import TrainingFailed
from dbx_llmtrain.events import Event
from dbx_llmtrain.records import RunPlan, TrackingPlan
from tests import sample
from tests.mlflow_servers import free_port, mlflow_server

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("server"), free_port()) as uri:
        yield uri


@pytest.fixture(autouse=True)
def mlflow_as_new() -> Iterator[None]:
    """No tracking URI and no active run are left behind."""
    import mlflow

    yield
    while mlflow.active_run():
        mlflow.end_run()
    mlflow.set_tracking_uri(None)


@pytest.fixture(scope="module")
def new_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite store with its tables, which take MLflow a second to make."""
    import mlflow

    path = tmp_path_factory.mktemp("new") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(tmp_path: Path, new_store: Path) -> Path:
    """An empty default store in ``tmp_path``."""
    shutil.copy(new_store, tmp_path / "mlflow.db")
    return tmp_path


def client(run: tracking.DriverRun | None) -> object:
    import mlflow

    assert run is not None
    assert run.plan() is not None
    run.wait(30.0)
    return mlflow.MlflowClient(tracking_uri=run.plan().uri)


def stored(run: tracking.DriverRun | None) -> object:
    """The run as the store has it."""
    return client(run).get_run(run.plan().run_id)


def artifacts(run: tracking.DriverRun | None, path: str | None = None) -> set[str]:
    return {item.path for item in client(run).list_artifacts(run.plan().run_id, path)}


def artifact_text(run: tracking.DriverRun | None, name: str, tmp_path: Path) -> str:
    target = tmp_path / "download"
    target.mkdir(exist_ok=True)
    return Path(client(run).download_artifacts(run.plan().run_id, name, str(target))).read_text()


def history(run: tracking.DriverRun | None, name: str) -> list[tuple[int, float]]:
    found = client(run).get_metric_history(run.plan().run_id, name)
    return sorted((item.step, item.value) for item in found)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and record.name.startswith("dbx_llmtrain")
    ]


def test_default_store_is_sqlite_beside_the_runs(tmp_path: Path) -> None:
    store = tmp_path / "runs"
    run = tracking.open_run(sample.config(tracking={"tags": {"team": "a"}}), "first", store)
    plan = run.plan()
    assert plan.uri == f"sqlite:///{store}/mlflow.db"
    assert not plan.by_rank
    found = stored(run)
    assert found.info.status == "RUNNING"
    assert found.info.run_name == "first"
    assert found.data.tags["team"] == "a"
    assert found.data.tags["mlflow.user"]
    assert found.data.tags["mlflow.source.name"]
    assert found.data.tags["dbx_llmtrain.run_dir"] == str(store / "first")
    assert client(run).get_experiment(plan.experiment_id).name == "dbx_llmtrain"
    assert found.info.artifact_uri.startswith((store / "mlartifacts").as_uri())
    assert tracking.how_to_open(plan).startswith("mlflow ui --backend-store-uri sqlite:///")
    spaced = plan.model_copy(update={"uri": "sqlite:////my runs/it's/mlflow.db"})
    words = shlex.split(tracking.how_to_open(spaced), comments=True)
    assert words == ["mlflow", "ui", "--backend-store-uri", "sqlite:////my runs/it's/mlflow.db"]


def test_a_finished_run_has_everything(store: Path, tmp_path: Path) -> None:
    plan = sample.run_plan(tmp_path / "first")
    with tracking.driver_run(plan) as run:
        attached = run.attach(plan)
        run.log_start(attached)
        run.log_event(sample.event(step=1, loss=3.0, learning_rate=1e-5))
        run.log_event(sample.event(step=2, loss=2.0))
        run.log_event(sample.event("eval", step=2, eval_loss=2.5))
        checkpoint = sample.event("checkpoint", step=2).model_copy(update={"data": {"path": "/c"}})
        run.log_event(checkpoint)
        assert stored(run).data.tags["dbx_llmtrain.checkpoint"] == "/c"
        run.log_result(sample.result(tmp_path / "first"))
    found = stored(run)
    assert attached.tracking == run.plan()
    assert found.info.status == "FINISHED"
    assert history(run, "loss") == [(1, 3.0), (2, 2.0)]
    assert history(run, "eval_loss") == [(2, 2.5), (3, 2.7)]
    assert found.data.metrics["train_loss"] == 2.5
    assert found.data.params["train.learning_rate"] == "2e-05"
    assert found.data.params["plan.world_size"] == "2"
    assert found.data.params["plan.model.vocab_size"] == "97"
    assert found.data.params["audit.dropped.no trained token"] == "10"
    assert found.data.tags["dbx_llmtrain.model_path"].endswith("first/export")
    assert {"config.yaml", "plan.json", "audit.json", "result.json"} <= artifacts(run)
    assert RunPlan.model_validate_json(artifact_text(run, "plan.json", tmp_path)) == attached
    inputs = {item.tags[0].value: item.dataset for item in found.inputs.dataset_inputs}
    assert inputs["training"].name == "train.jsonl"
    assert json.loads(inputs["evaluation"].source) == {"uri": "/data/eval.jsonl"}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TrainingFailed("boom\nmore", rank=1, host="worker-2"), "FAILED"),
        (KeyboardInterrupt(), "KILLED"),
        (TrainingFailed("as it was asked to", cause=TrainingFailed.STOPPED), "KILLED"),
    ],
)
def test_a_failed_run_says_so(
    store: Path, tmp_path: Path, error: BaseException, status: str
) -> None:
    with (
        pytest.raises(type(error)),
        tracking.driver_run(sample.run_plan(tmp_path / "first")) as run,
    ):
        raise error
    assert stored(run).info.status == status
    assert type(error).__name__ in artifact_text(run, "error.txt", tmp_path)
    tag = stored(run).data.tags["dbx_llmtrain.error"]
    assert tag == f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
    if status == "FAILED":
        assert tag == "TrainingFailed: training failed: rank 1, on worker-2: boom"
        assert artifact_text(run, "failure.txt", tmp_path) == str(error)


def test_an_end_that_fails_after_all_is_failed(store: Path, tmp_path: Path) -> None:
    run = tracking.open_run(sample.config(), "first", tmp_path)
    assert run.finish("FINISHED")
    assert run.finish("FAILED", "late")
    assert stored(run).info.status == "FAILED"


def test_a_child_of_an_active_run_leaves_it_open(new_store: Path, tmp_path: Path) -> None:
    import mlflow

    shutil.copy(new_store, tmp_path / "mine.db")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mine.db")
    mlflow.set_experiment("mine")
    with mlflow.start_run() as parent:
        with tracking.driver_run(sample.run_plan(tmp_path / "first")) as run:
            pass
        assert mlflow.active_run().info.run_id == parent.info.run_id
        assert stored(run).data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.plan().experiment_id == parent.info.experiment_id
        assert client(run).get_run(parent.info.run_id).info.status == "RUNNING"


def test_the_users_store_and_experiment_are_used(new_store: Path, tmp_path: Path) -> None:
    import mlflow

    shutil.copy(new_store, tmp_path / "mine.db")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mine.db")
    mlflow.set_experiment("mine")
    by_environment = tracking.open_run(sample.config(), "a", tmp_path / "runs")
    assert by_environment.plan().uri == f"sqlite:///{tmp_path}/mine.db"
    assert client(by_environment).get_experiment(by_environment.plan().experiment_id).name == "mine"
    cfg = sample.config(tracking={"experiment": "other"})
    by_config = [tracking.open_run(cfg, name, tmp_path / "runs").plan() for name in ("b", "c")]
    assert client(by_environment).get_experiment(by_config[0].experiment_id).name == "other"
    assert by_config[0].experiment_id == by_config[1].experiment_id
    assert not (tmp_path / "runs").exists()


def test_long_and_odd_parameters_are_clipped(store: Path, tmp_path: Path) -> None:
    env = {f"ODD:{i}": "v" * 7000 for i in range(130)}
    plan = sample.run_plan(tmp_path / "first", config=sample.config(cluster={"env": env}))
    with tracking.driver_run(plan) as run:
        run.log_config(plan)
    params = stored(run).data.params
    assert params["cluster.env.ODD_129"] == "v" * 6000
    assert "v" * 7000 in artifact_text(run, "config.yaml", tmp_path)


def test_secrets_are_never_logged(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    cfg = sample.config(cluster={"env": {"URL": "https://x?t=hf_verysecret"}})
    plan = sample.run_plan(tmp_path / "first", config=cfg)
    run = tracking.open_run(cfg, "first", tmp_path)
    run.log_start(plan)
    run.set_tag("note", "hf_verysecret")
    run.finish("FAILED", "ValueError: hf_verysecret")
    found = stored(run)
    assert found.data.params["cluster.env.URL"] == "https://x?t=***"
    assert found.data.tags["note"] == "***"
    assert found.data.tags["dbx_llmtrain.error"] == "ValueError: ***"
    files = [path for path in (tmp_path / "mlartifacts").rglob("*") if path.is_file()]
    assert len(files) == 4
    assert not [path for path in files if "hf_verysecret" in path.read_text()]


def test_files_are_copied_when_asked(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "first" / "checkpoints" / "step-00000003"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    cfg = sample.config(tracking={"log_checkpoints": True})
    run = tracking.open_run(cfg, "first", tmp_path)
    run.log_start(sample.run_plan(tmp_path / "first", config=cfg))
    run.log_result(sample.result(tmp_path / "first"))
    run.log_artifacts(folder / "manifest.json")
    assert artifacts(run, "checkpoint") == {"checkpoint/manifest.json"}
    assert "manifest.json" in artifacts(run)


def test_rank_zero_logs_through_http(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    plan = sample.run_plan(tmp_path / "first")
    with tracking.driver_run(plan) as run:
        assert run.plan().by_rank
        run.log_start(run.attach(plan))
        ranks = tracking_rank.RankTracker(run.plan())
        for step in range(1, 6):
            event = sample.event(step=step, loss=1.0 / step)
            ranks.log(event)
            run.log_event(event)  # the driver's copy of the event is not logged again
        ranks.log(sample.event("step", step=6, loss=float("nan")))
        ranks.log(sample.event("export", step=6).model_copy(update={"data": {"path": "/m"}}))
        assert ranks.close()
    assert [step for step, _ in history(run, "loss")] == [1, 2, 3, 4, 5, 6]
    found = stored(run)
    assert found.info.status == "FINISHED"
    assert found.data.tags["dbx_llmtrain.model_path"] == "/m"
    assert "config.yaml" in artifacts(run)
    assert len(found.inputs.dataset_inputs) == 2
    assert tracking.how_to_open(run.plan()).startswith(f"{server}/#/experiments/")


def test_nothing_is_logged_by_a_rank_that_has_no_store() -> None:
    plan = TrackingPlan(uri="sqlite:///x.db", experiment_id="1", run_id="r", by_rank=False)
    for given in (None, plan):
        ranks = tracking_rank.RankTracker(given)
        ranks.log(sample.event(loss=1.0))
        assert ranks.close(0.0)


def test_a_dead_server_costs_one_warning_and_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:pa55word@127.0.0.1:{free_port()}")
    start = time.monotonic()
    plan = sample.run_plan(tmp_path / "first")
    with tracking.driver_run(plan) as run:
        assert run.plan() is None
        assert run.attach(plan).tracking is None
        run.log_start(plan)
        run.log_event(sample.event(loss=1.0))
        run.log_result(sample.result())
    assert time.monotonic() - start < 60  # MLflow's own patience: minutes a call
    assert len(warnings_of(caplog)) == 1
    assert "opening the run failed" in caplog.text
    assert "pa55word" not in caplog.text
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ


def test_a_silent_server_costs_its_time_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        uri = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        start = time.monotonic()
        assert tracking.open_run(sample.config(), "first", tmp_path) is None
        assert time.monotonic() - start < 60  # MLflow's own patience: minutes a call
    assert len(warnings_of(caplog)) == 1


@pytest.mark.slow
def test_a_server_that_dies_costs_a_warning_per_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    plan = sample.run_plan(tmp_path / "first")
    with mlflow_server(tmp_path, port) as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        run = tracking.open_run(plan.config, "first", tmp_path)
        ranks = tracking_rank.RankTracker(run.plan(), "/runs/first")
    start = time.monotonic()
    for step in range(1, 50):
        ranks.log(sample.event(step=step, loss=1.0))
    run.log_start(plan)
    assert not ranks.close(2.0)
    assert not run.finish("FINISHED", patience_s=4.0)
    assert time.monotonic() - start < 20  # MLflow's own patience: minutes a call
    told = warnings_of(caplog)
    assert len(told) == len(set(told))
    assert any("setting the status FINISHED (the run may be shown as RUNNING)" in t for t in told)
    assert any("the run lacks 49 values; `dbx-llmtrain log " in text for text in told)
    assert any("the run lacks its status FINISHED, parameters, config.yaml" in t for t in told)
    # The same server comes back: what waited is sent, and the status is set after all.
    with mlflow_server(tmp_path, port):
        assert run.finish("FAILED", "no metrics")
        assert ranks.close()
        assert stored(run).info.status == "FAILED"
        assert len(history(run, "loss")) == 49


def test_metrics_wait_while_the_store_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    now = [0.0]
    run = tracking_store.Run(f"http://127.0.0.1:{free_port()}", "r", clock=lambda: now[0])
    sender = tracking_sender.Sender(run, {})
    sender.add(sample.event(loss=1.0))
    assert not sender.flush()
    assert run.resting()
    assert run.attempt("anything", lambda client: pytest.fail("called")) == "down"
    now[0] = 31.0
    assert not run.resting()
    assert not sender.empty()


def test_a_store_that_cannot_be_written_costs_no_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mlflow.db").mkdir()
    start = time.monotonic()
    assert tracking.open_run(sample.config(), "first", tmp_path) is None
    (tmp_path / "file").write_text("")
    assert tracking.open_run(sample.config(), "first", tmp_path / "file") is None
    assert time.monotonic() - start < 30
    assert len(warnings_of(caplog)) == 2


def test_a_new_store_leaves_the_users_logging_alone(tmp_path: Path) -> None:
    before = list(logging.root.handlers), logging.root.level, logging.root.manager.disable
    assert tracking.open_run(sample.config(), "first", tmp_path) is not None
    after = list(logging.root.handlers), logging.root.level, logging.root.manager.disable
    assert after == before


def test_what_a_full_buffer_has_no_room_for_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    run = tracking_store.Run("http://127.0.0.1:9", "r")
    sender = tracking_sender.Sender(run, {})
    for step in range(tracking_sender.PENDING + 2):
        sender.add_metric(tracking_sender.Value("loss", 1.0, 0, step))
    assert sender.left_out() == tracking_sender.PENDING + 2
    assert not warnings_of(caplog), "it is counted, and told at the end"


def resumed(
    tmp_path: Path, before: tracking.DriverRun, steps: int = 3, **train: object
) -> tracking.DriverRun:
    """A call that goes on in the folder of ``before``, to its end."""
    cfg = sample.config(train=train)
    plan = sample.run_plan(tmp_path / "first", config=cfg, total_steps=steps, began=time.time())
    with tracking.driver_run(plan, before.plan()) as run:
        run.log_start(run.attach(plan))
        run.log_event(sample.event(step=steps, loss=1.0))
        run.log_result(sample.result(tmp_path / "first"))
    return run


def interrupted(tmp_path: Path) -> tracking.DriverRun:
    """A run that failed at its second step."""
    plan = sample.run_plan(tmp_path / "first")
    opened: list[tracking.DriverRun] = []

    def fail() -> None:
        with tracking.driver_run(plan) as run:
            opened.append(run)
            run.log_start(run.attach(plan))
            run.log_event(sample.event(step=1, loss=3.0))
            run.log_event(sample.event(step=2, loss=2.0))
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        fail()
    return opened[0]


@pytest.mark.parametrize("kind", ["sqlite", "http"])
def test_a_run_that_goes_on_is_the_same_mlflow_run(
    kind: str,
    store: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if kind == "http":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", request.getfixturevalue("server"))
    before = interrupted(tmp_path)
    assert stored(before).info.status == "FAILED"
    if kind == "http":  # there rank 0 logs the events
        ranks = tracking_rank.RankTracker(before.plan())
        for step in (1, 2):
            ranks.log(sample.event(step=step, loss=4.0 - step))
        assert ranks.close()
    after = resumed(tmp_path, before, learning_rate=0.5)
    assert after.plan() == before.plan()
    found = stored(after)
    assert found.info.status == "FINISHED"
    assert "dbx_llmtrain.error" not in found.data.tags
    assert history(after, "loss")[:2] == [(1, 3.0), (2, 2.0)]
    assert found.data.metrics["train_loss"] == 2.5
    assert found.data.params["train.learning_rate"] == "2e-05", "as it began"
    assert found.data.tags["changed.train.learning_rate"] == "0.5"
    changed = [name for name in found.data.tags if name.startswith("changed.")]
    assert changed == ["changed.train.learning_rate"]
    assert "learning_rate: 0.5" in artifact_text(after, "config.yaml", tmp_path)
    assert len(found.inputs.dataset_inputs) == 2
    assert not warnings_of(caplog)


def lay_events(folder: Path, events: list[Event]) -> None:
    """The log of a run's events in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [event.model_dump_json() + "\n" for event in events]
    (folder / "events.jsonl").write_text("".join(lines), encoding="utf-8")


def killed_run(tmp_path: Path, logged: list[Event]) -> tracking.DriverRun:
    """A run whose driver logged some events and was killed: nothing has ended it."""
    run = tracking.open_run(sample.config(), "first", tmp_path)
    assert run is not None
    run.log_start(run.attach(sample.run_plan(tmp_path / "first")))
    for event in logged:
        run.log_event(event)
    assert run.wait(30.0)
    return run


def go_on(
    tmp_path: Path, before: tracking.DriverRun, after: int, events: list[Event]
) -> tracking.DriverRun:
    """The next call, which goes on after a step, up to where it is killed as well."""
    run = tracking.open_run(sample.config(), "first", tmp_path, earlier=before.plan())
    assert run is not None
    folder = tmp_path / "first"
    checkpoint = str(folder / "checkpoints" / f"step-{after:08d}")
    run.log_start(run.attach(sample.run_plan(folder, resume_from=checkpoint)))
    for event in events:
        run.log_event(event)
    assert run.wait(30.0)
    return run


@pytest.mark.parametrize("kind", ["sqlite", "http"])
def test_what_a_killed_attempt_could_not_log_is_made_up_for(
    kind: str,
    store: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if kind == "http":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", request.getfixturevalue("server"))
    told = [sample.event(step=step, loss=4.0 - step / 10) for step in range(1, 8)]
    told.insert(4, sample.event("eval", step=4, eval_loss=2.5))
    before = killed_run(tmp_path, told[:2])
    if kind == "http":  # there rank 0 logs the events
        ranks = tracking_rank.RankTracker(before.plan())
        for event in told[:2]:
            ranks.log(event)
        assert ranks.close()
    lay_events(tmp_path / "first", told)
    expected = [(step, 4.0 - step / 10) for step in range(1, 7)]
    for _ in range(2):  # once or more often, it is the same
        after = go_on(tmp_path, before, 6, [])
        assert history(after, "loss") == expected, "step 7 is trained again"
        assert history(after, "eval_loss") == [(4, 2.5)]
    times = {it.step: it.timestamp for it in client(after).get_metric_history(
        after.plan().run_id, "loss")}  # fmt: skip
    assert times[5] == int(told[5].time * 1000), "when it was, not when it was made up for"
    assert not warnings_of(caplog)


def test_of_a_step_that_several_attempts_did_the_one_that_stands_is_logged(
    store: Path, tmp_path: Path
) -> None:
    lost = [sample.event(step=step, loss=9.0) for step in (1, 2, 3)]
    stands = [sample.event(step=step, loss=1.0) for step in (2, 3, 4)]
    before = killed_run(tmp_path, lost[:1])
    lay_events(tmp_path / "first", [*lost, *stands])
    assert history(go_on(tmp_path, before, 4, []), "loss") == [(1, 9.0), (2, 1.0), (3, 1.0),
                                                               (4, 1.0)]  # fmt: skip


def test_a_long_gap_is_filled_in_pieces(store: Path, tmp_path: Path) -> None:
    count = 2 * tracking_sender.ENTITIES + 7
    told = [sample.event(step=step, loss=1.0) for step in range(1, count + 1)]
    before = killed_run(tmp_path, told[:3])
    lay_events(tmp_path / "first", told)
    found = history(go_on(tmp_path, before, count, []), "loss")
    assert [step for step, _ in found] == list(range(1, count + 1))


@pytest.mark.parametrize("by_rank", [False, True])
def test_steps_that_are_done_again_are_logged_once(
    by_rank: bool,
    store: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if by_rank:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", request.getfixturevalue("server"))
    first = [sample.event(step=step, loss=float(step), tokens_per_second=7.0) for step in (1, 2, 3)]
    first.append(sample.event("eval", step=3, eval_loss=3.0))
    first.append(sample.event(step=4, loss=4.0, tokens_per_second=7.0))
    again = [sample.event("started", step=2), *first[2:], sample.event(step=5, loss=5.0)]
    before = killed_run(tmp_path, first)
    after = go_on(tmp_path, before, 2, again)
    if by_rank:
        for events in (first, again):
            ranks = tracking_rank.RankTracker(before.plan())
            for event in events:
                ranks.log(event)
            assert ranks.close()
    assert history(after, "loss") == [(step, float(step)) for step in (1, 2, 3, 4, 5)]
    assert history(after, "eval_loss") == [(3, 3.0)]


def test_an_evaluation_of_other_rows_is_logged_though_its_step_has_one(
    store: Path, tmp_path: Path
) -> None:
    first = [sample.event("eval", 2, eval_loss=3.0), sample.event(step=3, loss=1.0)]
    before = killed_run(tmp_path, first)
    later = sample.event("eval", 2, eval_loss=1.0).model_copy(update={"time": 1.9e9})
    again = [sample.event("started", 0), later]
    after = go_on(tmp_path, before, 0, again)
    after.finish("KILLED")
    assert {value for _, value in history(after, "eval_loss")} == {3.0, 1.0}
    assert stored(after).data.metrics["eval_loss"] == 1.0, "the later one counts"


@pytest.mark.parametrize("by_rank", [False, True])
def test_every_metric_has_one_value_at_the_last_step(
    by_rank: bool,
    store: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if by_rank:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", request.getfixturevalue("server"))
    result = sample.result(tmp_path / "first")
    whole = dict(result.metrics)
    assert {"eval_loss", "tokens_per_second"} <= whole.keys()
    events = [
        sample.event(step=2, loss=2.0, tokens_per_second=1.0),
        sample.event(step=3, loss=1.0, tokens_per_second=2.0, skipped_steps=0.0),
        sample.event("eval", step=3, eval_loss=9.0),  # some rows, by which early stopping ends it
        sample.event("eval", step=3, eval_loss=whole["eval_loss"]),
        sample.event("finished", step=3, **whole),
    ]
    plan = sample.run_plan(tmp_path / "first")
    with tracking.driver_run(plan) as run:
        run.log_start(run.attach(plan))
        ranks = tracking_rank.RankTracker(run.plan())
        for event in events:
            run.log_event(event)
            ranks.log(event)
        assert ranks.close()
        run.log_result(result)
    assert history(run, "tokens_per_second") == [(2, 1.0), (3, whole["tokens_per_second"])]
    for name, value in whole.items():
        assert history(run, name)[-1] == (3, value), name
        assert [step for step, _ in history(run, name)].count(3) == 1, name


def test_a_result_replaces_what_waits_where_the_last_word_of_a_rank_was_lost(
    store: Path, tmp_path: Path
) -> None:
    result = sample.result(tmp_path / "first")
    with tracking.driver_run(sample.run_plan(tmp_path / "first")) as run:
        run.log_event(sample.event(step=3, loss=1.0, tokens_per_second=2.0))
        run.log_result(result)
    assert history(run, "tokens_per_second") == [(3, result.metrics["tokens_per_second"])]


def test_a_gap_stays_for_the_next_call_while_the_store_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = tracking_store.Run(f"http://127.0.0.1:{free_port()}", "r")
    sender = tracking_sender.Sender(run, {})
    told = [sample.event(step=1, loss=1.0)]
    assert run.attempt("filling", lambda client: sender.fill(client, told, 1)) == "down"
    assert sender.empty()
    assert len(warnings_of(caplog)) == 1


def test_a_parameter_that_was_not_there_is_added(store: Path, tmp_path: Path) -> None:
    before = interrupted(tmp_path)
    after = resumed(tmp_path, before, steps=5, early_stopping=2, eval_every=1)
    data = stored(after).data
    assert data.params["train.early_stopping"] == "2"
    assert data.tags["changed.plan.total_steps"] == "5"


def test_it_runs_again_under_a_parent_of_now(store: Path, tmp_path: Path) -> None:
    import mlflow

    before = interrupted(tmp_path)
    mlflow.set_tracking_uri(before.plan().uri)
    plan = sample.run_plan(tmp_path / "first")
    with (
        mlflow.start_run(experiment_id=before.plan().experiment_id) as parent,
        tracking.driver_run(plan, before.plan()) as run,
    ):
        assert stored(run).info.status == "RUNNING"
        assert stored(run).data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert run.plan().run_id == before.plan().run_id


def test_a_run_that_was_deleted_begins_anew_with_a_warning(
    store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = interrupted(tmp_path)
    client(before).delete_run(before.plan().run_id)
    after = resumed(tmp_path, before)
    assert after.plan().run_id != before.plan().run_id
    assert stored(after).info.status == "FINISHED"
    gone = before.plan().model_copy(update={"run_id": "0" * 32})
    with tracking.driver_run(sample.run_plan(tmp_path / "first"), gone) as run:
        assert run.plan().run_id != gone.run_id
    told = warnings_of(caplog)
    assert told == [
        f"MLflow: run {before.plan().run_id} of this folder has been deleted: a new one begins",
        f"MLflow: run {'0' * 32} of this folder does not exist any more: a new one begins",
    ]


def test_a_run_in_another_store_begins_anew_with_a_warning(
    server: str,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = interrupted(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    after = resumed(tmp_path, before)
    assert after.plan().uri == server
    (told,) = warnings_of(caplog)
    assert told.endswith(f"is in another store ({before.plan().uri}): a new one begins")
    assert stored(before).info.status == "FAILED", "it is left as it was"


def test_a_store_that_is_down_when_a_run_goes_on_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uri = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    earlier = TrackingPlan(uri=uri, experiment_id="1", run_id="r", by_rank=True)
    tracking.end_dead(earlier, tmp_path, "gone")
    with tracking.driver_run(sample.run_plan(tmp_path / "first"), earlier) as run:
        assert run.plan() is None
    assert len(warnings_of(caplog)) == 2
    assert "ending the run of a driver that is gone failed" in caplog.text


def test_a_dead_drivers_run_is_failed_and_goes_on(
    store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dead = tracking.open_run(sample.config(), "first", tmp_path)
    tracking.end_dead(dead.plan(), tmp_path, "the driver is gone")
    found = stored(dead)
    assert found.info.status == "FAILED"
    assert found.data.tags["dbx_llmtrain.error"] == "the driver is gone"
    tracking.end_dead(dead.plan(), tmp_path, "once more")
    assert stored(dead).data.tags["dbx_llmtrain.error"] == "the driver is gone", "it has ended"
    after = resumed(tmp_path, dead)
    assert after.plan().run_id == dead.plan().run_id
    assert stored(after).info.status == "FINISHED"
    elsewhere = dead.plan().model_copy(update={"uri": "http://127.0.0.1:9"})
    tracking.end_dead(elsewhere, tmp_path, "not here")
    assert not warnings_of(caplog)


def test_a_run_that_another_call_has_now_is_left_alone(store: Path, tmp_path: Path) -> None:
    plan = sample.run_plan(tmp_path / "first")
    with (
        pytest.raises(KeyError),
        tracking.driver_run(plan, others=(KeyError,)) as run,
    ):
        raise KeyError("taken over")
    assert stored(run).info.status == "RUNNING"


def test_a_rehearsal_is_tagged(store: Path, tmp_path: Path) -> None:
    with tracking.driver_run(sample.run_plan(tmp_path / "first-trial", trial=True)) as run:
        pass
    assert stored(run).data.tags["dbx_llmtrain.trial"] == "true"


def test_without_sqlalchemy_there_is_a_warning_and_no_tracking(tmp_path: Path) -> None:
    """As with mlflow-skinny alone, in a fresh interpreter."""
    code = (
        "import sys; sys.modules['sqlalchemy'] = None\n"
        "from pathlib import Path; from tests import sample; from dbx_llmtrain import tracking\n"
        f"print(tracking.open_run(sample.config(), 'first', Path({str(tmp_path)!r})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "None"
    assert "opening the run failed" in done.stderr
    assert "pip install mlflow" in done.stderr


def test_a_refused_call_is_told_and_the_rest_goes_on(
    store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tracking.open_run(sample.config(), "first", tmp_path)
    run.log_artifacts(tmp_path / "missing")
    run.set_tag("", "a tag without a name")
    run.log_event(sample.event(loss=1.0))
    run.wait(30.0)
    assert len(warnings_of(caplog)) == 2


def test_secrets_for_the_ranks() -> None:
    environ = {
        "HF_TOKEN": "a", "DATABRICKS_HOST": "h", "DATABRICKS_TOKEN": "t", "PATH": "/bin",
        "MLFLOW_TRACKING_URI": "https://me:p%40ss@host:1/x", "DATABRICKS_CLIENT_ID": "",
    }  # fmt: skip
    assert (
        tracking.worker_secrets(environ)
        == collect(environ)
        == {
            "HF_TOKEN": "a",
            "DATABRICKS_HOST": "h",
            "DATABRICKS_TOKEN": "t",
            "MLFLOW_TRACKING_USERNAME": "me",
            "MLFLOW_TRACKING_PASSWORD": "p@ss",
        }
    )
    assert without_credentials(environ["MLFLOW_TRACKING_URI"]) == "https://host:1/x"
    assert without_credentials("databricks://profile") == "databricks://profile"
    assert uri_credentials("sqlite:////x/mlflow.db") == {}


def test_on_databricks_the_notebooks_credentials_are_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("databricks.sdk")
    environ = {"DATABRICKS_RUNTIME_VERSION": "17.3"}
    assert tracking.worker_secrets(environ) == {}
    assert "finding the notebook's credentials failed" in caplog.text
    environ |= {"DATABRICKS_HOST": "https://h", "DATABRICKS_TOKEN": "dapi-1"}
    assert tracking.worker_secrets(environ) == collect(environ)


def test_redact() -> None:
    secrets = {"HF_TOKEN": "hf_abc", "MY_PASSWORD": "p@ss", "DATABRICKS_HOST": "h.net", "A_KEY": ""}
    assert redact("hf_abc at h.net with p%40ss or p@ss", secrets) == "*** at h.net with *** or ***"


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("to http://me:pw@h:1/x?a=b@c, s3://a:b@c", "to http://***@h:1/x?a=b@c, s3://***@c"),
        ("postgresql+psycopg2://me:p@w@h/db", "postgresql+psycopg2://***@h/db"),
        ("http://me:p/w@h", "http://***@h"),
        ("https://t0ken@h/x", "https://***@h/x"),
        ("http://h:5000/a@b", "http://h:5000/a@b"),
        ("abfss://data@account/x:y@z", "abfss://data@account/x:y@z"),
        ('{"a": "http://h:x", "b": "c@d"}', '{"a": "http://h:x", "b": "c@d"}'),
    ],
)
def test_credentials_in_a_uri_are_redacted(text: str, hidden: str) -> None:
    assert redact(text, {}) == hidden


@pytest.mark.parametrize("uri", ["http://me:urlpw98765@127.0.0.1:9", "http://me:urlpw98765@[bad"])
def test_no_warning_has_a_password(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "another-pw")  # used instead of the URI's
    caplog.set_level(logging.DEBUG)
    assert tracking.open_run(sample.config(), "first", tmp_path) is None
    for _ in range(2):
        with tracking_guard.Guard("trying", set()):
            raise OSError(f"no answer from {uri}: another-pw")
    assert "opening the run failed" in caplog.text
    assert caplog.text.count("trying failed") == 2
    assert "urlpw98765" not in caplog.text
    assert "another-pw" not in caplog.text


@pytest.mark.parametrize("text", ["http://h", "https://h", "databricks", "databricks://p"])
def test_stores_that_workers_reach(text: str) -> None:
    assert tracking_store.reachable_from_workers(text)
    assert not tracking_store.reachable_from_workers("sqlite:///x.db")
    plan = TrackingPlan(uri="databricks", experiment_id="1", run_id="r", by_rank=True)
    assert "workspace" in tracking.how_to_open(plan)
