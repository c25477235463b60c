"""Answers to sample prompts as a table of the MLflow run."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain.events import Event
from dbx_llmtrain.tracking_sender import ANSWERS, Sender
from dbx_llmtrain.tracking_store import Run
from tests import sample


def answered(step: int, *texts: str) -> Event:
    """An event with an answer of each text."""
    samples = [
        {"prompt": f"prompt {number}", "text": text, "tokens": 3, "stopped": not number}
        for number, text in enumerate(texts)
    ]
    event = sample.event("samples", step)
    return event.model_copy(update={"data": {"samples": samples}})


@pytest.fixture
def client(tmp_path: Path) -> Any:
    import mlflow

    from dbx_llmtrain.tracking_guard import opening

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    with opening(uri):
        made = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
        made.create_experiment("e", artifact_location=(tmp_path / "artifacts").as_uri())
    return made


def test_answers_of_all_evaluations_are_rows_of_one_table(
    client: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_id = client.create_run(client.get_experiment_by_name("e").experiment_id).info.run_id
    sender = Sender(Run(client.tracking_uri, run_id), {"HF_TOKEN": "hf_secret_of_mine"})
    capfd.readouterr()
    sender.add(answered(0, "one", "hf_secret_of_mine"))
    assert not sender.empty()
    assert sender.flush()
    assert sender.empty()
    sender.add(answered(2, "three", "four"))
    sender.add(sample.event("eval", 2, eval_loss=1.5))
    assert sender.flush(always=True)
    assert capfd.readouterr() == ("", ""), "no bar of the table that is read back"
    (file,) = (tmp_path / "artifacts").rglob(ANSWERS)
    table = json.loads(file.read_text())
    assert table["columns"] == ["step", "prompt", "text", "tokens", "stopped"]
    rows = table["data"]
    assert [row[0] for row in rows] == [0, 0, 2, 2]
    assert [row[2] for row in rows[::2]] == ["one", "three"]
    assert rows[1][2] != "hf_secret_of_mine"
    assert "hf_secret" not in file.read_text()
    assert rows[3][1:] == ["prompt 1", "four", 3, False]
    found = client.get_run(run_id).data
    assert found.metrics == {"eval_loss": 1.5}
    shown = json.loads(found.tags["mlflow.loggedArtifacts"])
    assert shown == [{"path": "samples.json", "type": "table"}], "the pages show it as a table"


def test_answers_wait_while_the_store_is_down() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    sender = Sender(Run(f"http://127.0.0.1:{port}", "run"), {})
    sender.add(answered(1, "one"))
    assert not sender.flush()
    assert not sender.empty()


def test_answers_that_the_store_refuses_are_given_up(client: Any) -> None:
    sender = Sender(Run(client.tracking_uri, "no-such-run"), {})
    sender.add(answered(1, "one"))
    assert sender.flush()
    assert sender.empty()
