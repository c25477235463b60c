"""The list of checks: where writing is tried, what MLflow and the hub are asked, what is shown."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver import checklist, probing
from dbx_llmtrain.errors import ClusterError, Finding
from tests.unit.test_node_checks import RANKS, cluster, machine


def config(**sections: Any) -> TrainConfig:
    given: dict[str, Any] = {"model": {"source": "org/model"}, "data": {"train": "rows.jsonl"}}
    return TrainConfig.from_dict(given | sections)


# Where writing is tried -----------------------------------------------------------------------


def test_nothing_stays_of_the_trial_not_even_after_an_error(tmp_path: Path) -> None:
    def stop() -> None:
        with checklist.trial_folder(tmp_path / "not" / "yet") as folder:
            assert folder is not None
            (folder / "file").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert list(tmp_path.iterdir()) == []


def test_what_others_have_put_there_stays(tmp_path: Path) -> None:
    parent = tmp_path / "runs"
    with checklist.trial_folder(parent):
        (parent / "a-run").mkdir()
    assert [path.name for path in parent.iterdir()] == ["a-run"]


def test_what_a_killed_driver_left_is_removed_in_time(tmp_path: Path) -> None:
    old, fresh = tmp_path / ".probe-old", tmp_path / ".probe-fresh"
    for folder in (old, fresh):
        folder.mkdir()
        (folder / "file").touch()
    os.utime(old, (1, 1))
    with checklist.trial_folder(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == [fresh]


def test_a_folder_that_cannot_be_made_is_told_by_who_writes_to_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with checklist.trial_folder(tmp_path / "file" / "runs") as folder:
        assert folder is not None
        assert not folder.exists()
    with checklist.trial_folder(None) as nowhere:
        assert nowhere is None


def test_where_run_folders_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATABRICKS_RUNTIME_VERSION", raising=False)
    elsewhere, here = cluster(), cluster(machine("driver"))
    assert checklist.place(config()) == tmp_path / "runs"
    assert not checklist.has_place(config(), elsewhere)
    assert checklist.has_place(config(), here)
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17.3")
    assert checklist.place(config()) is None
    assert not checklist.has_place(config(), here)
    volume = config(checkpoint={"dir": "dbfs:/Volumes/a/b/c"})
    assert checklist.place(volume) == Path("/Volumes/a/b/c")
    assert checklist.has_place(volume, elsewhere)


# What is asked and shown ----------------------------------------------------------------------


def test_the_nodes_ask_mlflow_without_a_password_in_the_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        checklist.tracking_trial, "uri_for_workers", lambda _: "https://me:pass-word@mlflow/x"
    )
    asked = checklist._tracking(config(), {"spark.master": "spark://h:1"})
    assert asked is not None
    assert asked[0] == "https://mlflow/x"
    assert asked[1]["MLFLOW_TRACKING_PASSWORD"] == "pass-word"
    assert checklist._tracking(config(), {"spark.master": "local[2]"}) is None
    local = config(cluster={"local_mode": True})
    assert checklist._tracking(local, {"spark.master": "spark://h:1"}) is None


def test_warnings_are_shown_and_errors_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    fine = Finding("ok", "memory", "enough")
    warning = Finding("warning", "GPU memory", "GPU 0 of a is not free")
    checklist.require((fine, warning))
    assert capsys.readouterr().err == "[warning] GPU memory: GPU 0 of a is not free\n"
    error = Finding("error", "NCCL", "2.1 on a, 2.2 on b")
    with pytest.raises(ClusterError) as caught:
        checklist.require((fine, warning, error, error))
    assert caught.value.findings == (warning, error)


def hub(cfg: TrainConfig) -> Finding:
    (finding,) = probing._hub(cfg)
    assert finding.check == "hub"
    return finding


def test_access_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    refused = OfflineModeIsEnabled("no way there")
    answers: list[Exception | None] = [None, refused]

    def model_info(*_: object, **__: object) -> object:
        answer = answers.pop(0)
        if answer:
            raise answer
        return object()

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    assert hub(config()) == Finding("ok", "hub", "gives org/model")
    assert hub(config()).level == "error"
    assert "the Hugging Face hub did not give it" in hub_text(config(), answers, refused)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "offline" in hub(config()).message
    folder = config(model={"source": str(tmp_path)})
    assert hub(folder) == Finding("ok", "hub", f"not needed: {tmp_path} is here")
    assert hub(config(model={"source": "/no/such/folder"})).level == "error"
    assert probing._hub(config(model={"source": "models:/a.b.c/1"})) == []


def hub_text(cfg: TrainConfig, answers: list[Exception | None], error: Exception) -> str:
    answers.append(error)
    return hub(cfg).message


def test_what_deepspeed_would_compile() -> None:
    parallel = {"kind": "deepspeed", "offload_optimizer": "cpu"}
    built = cluster(machine("a", tools=("g++", "ninja", "cpu_adam")))
    bare = cluster(machine("a", tools=("g++", "ninja")))
    for report, told in ((built, "nothing has to be"), (bare, "cpu_adam is compiled on every")):
        looked = checklist.Looked(report, RANKS, ())
        (finding,) = probing._operators(config(parallel=parallel), looked)
        assert (finding.level, finding.check) == ("ok", "DeepSpeed's operators")
        assert finding.message.startswith(told)
    refused = Finding("error", "DeepSpeed's operators", "a cannot build them")
    looked = checklist.Looked(bare, RANKS, (refused,))
    assert probing._operators(config(parallel=parallel), looked) == []
    assert probing._operators(config(), looked) == []
