from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from dbx_llmtrain import tracking, tracking_store
from dbx_llmtrain.credentials import collect, redact, uri_credentials, without_credentials
from dbx_llmtrain.errors import TrainingFailed
from dbx_llmtrain.records import RunPlan, TrackingPlan
from tests import sample

pytestmark = pytest.mark.timeout(300)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[str]:
    """A real tracking server over SQLite, in a process group of its own."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/server.db"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    environ = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, env=environ, start_new_session=True
        )
        try:
            _wait_until_up(f"http://127.0.0.1:{port}/health", process, folder / "server.log")
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    pytest.fail(f"the MLflow server did not start:\n{log.read_text()[-3000:]}")


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
    if status == "FAILED":
        tag = stored(run).data.tags["dbx_llmtrain.error"]
        assert tag == "TrainingFailed: training failed: rank 1, on worker-2: boom"


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
        ranks = tracking.RankTracker(run.plan())
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
        ranks = tracking.RankTracker(given)
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


def test_a_server_that_dies_costs_a_warning_per_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    plan = sample.run_plan(tmp_path / "first")
    with mlflow_server(tmp_path, port) as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        run = tracking.open_run(plan.config, "first", tmp_path)
        ranks = tracking.RankTracker(run.plan())
    start = time.monotonic()
    for step in range(1, 50):
        ranks.log(sample.event(step=step, loss=1.0))
    run.log_start(plan)
    assert not ranks.close(15.0)
    assert not run.finish("FINISHED")
    assert time.monotonic() - start < 90  # MLflow's own patience: minutes a call
    told = warnings_of(caplog)
    assert len(told) == len(set(told))
    assert any("setting the status FINISHED (the run may be shown as RUNNING)" in t for t in told)
    assert any("the last metrics could not be logged" in text for text in told)
    # The same server comes back: what waited is sent, and the status is set after all.
    with mlflow_server(tmp_path, port):
        assert run.finish("FAILED", "no metrics")
        assert ranks._sender.flush(always=True)
        assert stored(run).info.status == "FAILED"
        assert len(history(run, "loss")) == 49


def test_metrics_wait_while_the_store_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    now = [0.0]
    run = tracking_store.Run(f"http://127.0.0.1:{free_port()}", "r", clock=lambda: now[0])
    sender = tracking_store.Sender(run, {})
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


def test_a_full_queue_loses_events_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    run = tracking_store.Run("http://127.0.0.1:9", "r")
    sender = tracking_store.Sender(run, {})
    for step in range(tracking_store.PENDING + 2):
        sender.add_metric("loss", 1.0, 0, step)
    assert len(warnings_of(caplog)) == 1


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
        with tracking_store.Guard("trying", set()):
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
