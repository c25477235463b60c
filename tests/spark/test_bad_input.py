"""What a user can get wrong in model, data and cluster: each refused by name, nothing started.

What shows without a session is in ``tests/unit/test_bad_input.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dbx_llmtrain as llm
from dbx_llmtrain import cli, storage
from dbx_llmtrain.errors import CheckpointError, ClusterError, ConfigError, DataError, LlmTrainError
from tests import tiny

ROWS = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]}]

Sections = dict[str, dict[str, Any]]
Case = tuple[Callable[[Path], Sections], type[LlmTrainError], int, list[str]]


def rows(folder: Path, content: str, name: str = "bad.jsonl") -> Sections:
    (folder / name).write_text(content)
    return {"data": {"train": str(folder / name)}}


def model(folder: Path, **settings: Any) -> Path:
    return tiny.model_folder(folder / "other", **settings)


def no_file(folder: Path) -> Sections:
    return {"data": {"train": str(folder / "none-*.jsonl")}}


def a_folder(folder: Path) -> Sections:
    return {"data": {"train": str(folder)}}


def no_file_and_no_model(folder: Path) -> Sections:
    """Faults of every part are told together, those of the cluster too."""
    data = {"eval": str(folder / "none.jsonl"), "train": "x.jsonl"}
    return {"data": data} | missing_model(folder) | too_many_processes(folder)


def empty(folder: Path) -> Sections:
    return rows(folder, "\n")


def broken(folder: Path) -> Sections:
    return rows(folder, '{"messages": []\n')


def no_parquet(folder: Path) -> Sections:
    return rows(folder, "PAR", "bad.parquet")


def other_columns(folder: Path) -> Sections:
    return rows(folder, '{"question": "a", "reply": "b"}\n')


def format_without_column(folder: Path) -> Sections:
    found = rows(folder, '{"question": "a"}\n')
    found["data"]["format"] = "text"
    return found


def two_bad_rows(folder: Path) -> Sections:
    return rows(folder, '{"text": "a b"}\n{"text": 1}\n{"text": ["x"]}\n')


def nothing_left(folder: Path) -> Sections:
    return rows(folder, '{"text": " "}\n{"text": ""}\n')


def missing_model(folder: Path) -> Sections:
    return {"model": {"source": str(folder / "no-such-model")}}


def incomplete_model(folder: Path) -> Sections:
    path = model(folder)
    (path / "tokenizer.json").unlink()
    (path / "model.safetensors").unlink()
    return {"model": {"source": str(path)}}


def no_template(folder: Path) -> Sections:
    return {"model": {"source": str(model(folder, chat_template=None))}}


def other_tokenizer(folder: Path) -> Sections:
    path = model(folder)
    words = tiny.tokenizer()
    words.add_tokens(["<extra>"])
    words.save_pretrained(path)
    return {"model": {"source": str(path)}}


def broken_tokenizer(folder: Path) -> Sections:
    path = model(folder)
    (path / "tokenizer.json").write_text("{}")
    return {"model": {"source": str(path)}}


def needs_code(folder: Path) -> Sections:
    return {"model": {"source": str(tiny.custom_folder(folder / "other"))}}


def too_long(folder: Path) -> Sections:
    """It shows before the rows are read."""
    (folder / "rows.jsonl").write_text("no row\n")
    return {"data": {"max_length": 129, "train": str(folder / "rows.jsonl")}}


def too_many_processes(folder: Path) -> Sections:
    return {"cluster": {"processes": 3}}


def gpus_that_are_not_there(folder: Path) -> Sections:
    return {"cluster": {"processes": 5, "use_gpu": True}}


def batch_that_does_not_divide(folder: Path) -> Sections:
    numbers = {"global_batch_size": 5, "micro_batch_size": 2, "gradient_accumulation_steps": 1}
    return {"train": numbers}


def no_place(folder: Path) -> Sections:
    (folder / "file").write_text("")
    return {"checkpoint": {"dir": str(folder / "file" / "runs")}}


def another_runs_folder(folder: Path) -> Sections:
    """A run of this name went three steps with another model, other rows and another seed."""
    checkpoint = storage.checkpoint_folder(folder / "runs" / "first", 3)
    checkpoint.mkdir(parents=True)
    identity = {
        "model": {"fingerprint": "f", "source": "another/one", "revision": "abc"},
        "data": {"digest": "d", "rows": 7, "source": "others.jsonl", "held_out": {}},
        "global_batch_size": 4,
        "seed": 7,
    }
    manifest = {"files": [], "identity": identity, "state": {"step": 3}}
    storage.write_manifest(checkpoint, manifest)
    return {}


def no_checkpoint(folder: Path) -> Sections:
    return {"checkpoint": {"dir": str(folder / "runs"), "resume": str(folder / "step-1")}}


CASES: list[Case] = [
    (no_file, DataError, 2, ["no file", "none-*.jsonl"]),
    (a_folder, DataError, 2, ["data.train: ", "is a folder without files that end in .jsonl"]),
    (no_file_and_no_model, ConfigError, 2,
     ["4 problems", "- data.train: no file x.jsonl", "- data.eval: no file", "none.jsonl",
      "- model.source: no folder, .gguf file or hub model",
      "- cluster.processes: 3 ranks need 3 task slots at once, the cluster has 2"]),
    (empty, DataError, 2, ["bad.jsonl has no rows"]),
    (broken, DataError, 2, ["bad.jsonl, line 1: expected a JSON object"]),
    (no_parquet, DataError, 2, ["bad.parquet: expected a Parquet file"]),
    (other_columns, DataError, 2, ["no known format has the columns", "question", "data.columns"]),
    (format_without_column, DataError, 2, ["expected a column 'text'", "question"]),
    (two_bad_rows, DataError, 2, ["2 rows cannot be used", "line 2", "line 3"]),
    (nothing_left, DataError, 2, ["of 2 rows none is left to train on", "2: empty text"]),
    (missing_model, ConfigError, 2, ["model.source: no folder, .gguf file or hub model"]),
    (incomplete_model, ConfigError, 2,
     ["2 problems", "has no tokenizer: expected one of", "has no model.safetensors"]),
    (no_template, ConfigError, 2, ["data.chat_template: ", "no chat template", "messages"]),
    (other_tokenizer, ConfigError, 2, ["model.source: ", "token '<extra>' the id 320"]),
    (broken_tokenizer, ConfigError, 2, ["model.source: the tokenizer of", "cannot be loaded"]),
    (needs_code, ConfigError, 2,
     ["model.trust_remote_code: ", "modeling_tiny.py", "model.trust_remote_code=true"]),
    (too_long, ConfigError, 2, ["data.max_length: expected at most 128", "found 129"]),
    (batch_that_does_not_divide, ConfigError, 2,
     ["train.global_batch_size: expected micro-batch x ranks x accumulation = 2 x 2 x 1 = 4"]),
    (too_many_processes, ClusterError, 3,
     ["task slots", "3 ranks need 3 task slots at once, the cluster has 2", "cluster.processes=2"]),
    (gpus_that_are_not_there, ClusterError, 3, ["5 ranks need", "has no GPU", "use_gpu=false"]),
    (no_place, CheckpointError, 2, ["checkpoint.dir: ", "cannot be made"]),
    (another_runs_folder, CheckpointError, 2,
     ["cannot go on from", "the model: another/one at abc then, ", "data.train: 7 rows then, ",
      "(of others.jsonl then, of ", "train.seed: 7 then, 0 now",
      "another tracking.run_name"]),
    (no_checkpoint, CheckpointError, 2, ["checkpoint.resume: ", "not a complete checkpoint"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and rows that are right."""
    folder = tmp_path_factory.mktemp("good")
    tiny.model_folder(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS * 4))
    return folder


def config(good: Path, folder: Path, changes: Sections) -> llm.TrainConfig:
    base: Sections = {
        "model": {"source": str(good / "model")},
        "data": {"train": str(good / "rows.jsonl"), "max_length": 64},
        "train": {"global_batch_size": 4},
        "checkpoint": {"dir": str(folder / "runs")},
        "tracking": {"run_name": "first"},
        "cluster": {"use_gpu": False, "local_dir": str(folder / "local")},
    }
    for name, fields in changes.items():
        base[name] = base[name] | fields
    return llm.TrainConfig(**base)


def shown(folder: Path) -> list[str]:
    """What a run that was started leaves."""
    names = ("plan.json", "config.yaml", "logs", "events.jsonl", "mlflow.db")
    return [str(path) for path in folder.rglob("*") if path.name in names]


@pytest.mark.parametrize(
    ("make", "kind", "code", "words"), CASES, ids=[case[0].__name__ for case in CASES]
)
def test_bad_input_is_refused_before_anything_is_started(
    spark: Any, good: Path, tmp_path: Path, make: Any, kind: Any, code: int, words: list[str]
) -> None:
    cfg = config(good, tmp_path, make(tmp_path))
    with pytest.raises(kind) as caught:
        llm.train(cfg, spark=spark)
    told = str(caught.value)
    assert not [text for text in words if text not in told], told
    assert cli.exit_code(caught.value) == code
    assert shown(tmp_path) == []


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        (incomplete_model, 2, "2 problems in the configuration"),
        (too_many_processes, 3, "task slots"),
    ],
)
def test_the_shell_says_it_without_a_traceback(
    spark: Any,
    good: Path,
    tmp_path: Path,
    make: Any,
    code: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config(good, tmp_path, make(tmp_path)).to_yaml())
    assert cli.run(["train", str(path)]) == code
    told = capsys.readouterr().err
    assert "error: " in told
    assert words in told
    assert "Traceback" not in told


def test_findings_of_the_cluster_are_told_together(spark: Any, good: Path, tmp_path: Path) -> None:
    cfg = config(good, tmp_path, gpus_that_are_not_there(tmp_path))
    with pytest.raises(ClusterError) as caught:
        llm.plan(cfg, spark=spark)
    assert {finding.check for finding in caught.value.findings} >= {"task slots", "GPUs"}


def test_a_master_is_refused_where_a_session_is_there(
    spark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in (["--master", "local[2]"], ["--conf", "spark.app.name=x"]):
        assert cli.run(["probe", *option]) == 3
        assert "a Spark session is there already: leave --master" in capsys.readouterr().err
