from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dbx_llmtrain import resuming, storage
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver.prepare import prepare_data
from dbx_llmtrain.driver.sources import resolve_model
from dbx_llmtrain.errors import CheckpointError, ConfigError, DataError
from dbx_llmtrain.model_sections import ModelConfig
from dbx_llmtrain.records import ModelInfo, PreparedData, RunPlan
from dbx_llmtrain.text.prepared import Split
from dbx_llmtrain.worker.data import Order
from dbx_llmtrain.worker.loss import LossModule
from dbx_llmtrain.worker.model import load_tokenizer
from dbx_llmtrain.worker.probe import probe
from tests import reference, tiny
from tests.sample import run_plan

EOS = 2
WORDS = "the cat sat on the mat and the dog sat on the log".split()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    """A model whose tokenizer has no chat template."""
    folder = tiny.model_folder(tmp_path_factory.mktemp("plain"), chat_template=None)
    return resolve_model(ModelConfig(source=str(folder)), folder / "cache")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    folder = tiny.model_folder(tmp_path_factory.mktemp("chatty"))
    return resolve_model(ModelConfig(source=str(folder)), folder / "cache")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def prompts(count: int, *, answer: int = 3) -> list[dict[str, str]]:
    return [
        {"prompt": f"question {i}", "completion": " ".join((WORDS * 3)[i % 5 : i % 5 + answer])}
        for i in range(count)
    ]


def prepare(
    tmp_path: Path, model: ModelInfo, rows: list[dict[str, Any]] | None = None, **data: Any
) -> PreparedData:
    if rows is not None:
        data["train"] = str(write(tmp_path / "train.jsonl", rows))
    settings = {"max_length": 64} | data
    cfg = TrainConfig(model={"source": model.source}, data=settings)
    return prepare_data(cfg, model, tmp_path / "cache", progress=lambda rows: None)


def split_of(data: PreparedData, name: str = "train") -> Split:
    return Split(Path(data.artifact.source), name)


def keys_of(data: PreparedData, name: str = "train") -> list[str]:
    split = split_of(data, name)
    return [key for example in range(len(split)) for key in split.keys(example)]


def documents(data: PreparedData, name: str = "train") -> list[tuple[list[int], list[bool]]]:
    split = split_of(data, name)
    return [
        (ids.tolist(), marks.tolist())
        for example in range(len(split))
        for ids, marks in split.documents(example)
    ]


def test_a_prepared_folder_is_complete_and_counted(tmp_path: Path, plain: ModelInfo) -> None:
    data = prepare(tmp_path, plain, prompts(20), eval=0.25)
    folder = Path(data.artifact.source)
    assert folder.parent == tmp_path / "cache" / "data"
    assert folder.name.startswith(data.artifact.fingerprint)
    assert storage.read_manifest(folder) is not None
    paths = [entry.path for entry in data.artifact.files]
    assert sorted(path for path in paths if not path.startswith("rows/")) == [
        "eval/packs.arrow",
        "train/packs.arrow",
    ]
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert there == {*paths, "manifest.json"}, "nothing else is left"
    assert data.format == "prompt_completion"
    assert data.sources == {"train": str(tmp_path / "train.jsonl")}
    assert data.end_tokens == (EOS,)

    train, audit = documents(data), data.audit
    assert audit.read_rows == 20 == audit.train_rows + audit.eval_rows
    assert 0 < audit.eval_rows == data.eval_rows < 20
    assert len(train) == audit.train_rows == audit.trained_end_tokens
    assert audit.tokens == sum(len(ids) for ids, _ in train)
    assert audit.trained_tokens == sum(sum(marks) for _, marks in train)
    assert audit.packs == data.train_examples == len(split_of(data))
    assert data.eval_examples == len(split_of(data, "eval"))
    assert audit.packing_efficiency == audit.tokens / (audit.packs * 64)


def test_the_held_out_rows_depend_on_content_not_on_position(
    tmp_path: Path, plain: ModelInfo
) -> None:
    rows = prompts(40)
    first = prepare(tmp_path, plain, rows, eval=0.3)
    second = prepare(tmp_path, plain, rows[::-1], eval=0.3)
    assert first.artifact.fingerprint != second.artifact.fingerprint
    assert set(keys_of(first, "eval")) == set(keys_of(second, "eval"))
    assert not set(keys_of(first, "eval")) & set(keys_of(first))
    more = prepare(tmp_path, plain, [*rows, *prompts(60)[40:]], eval=0.3)
    assert set(keys_of(first, "eval")) <= set(keys_of(more, "eval"))


def test_a_repeated_row_is_never_on_both_sides(tmp_path: Path, plain: ModelInfo) -> None:
    data = prepare(tmp_path, plain, prompts(20) * 3, eval=0.25)
    assert len(keys_of(data, "eval")) % 3 == 0
    assert not set(keys_of(data, "eval")) & set(keys_of(data))


def test_held_out_rows_of_their_own_file(tmp_path: Path, plain: ModelInfo) -> None:
    held_out = write(tmp_path / "eval.jsonl", [{"text": "the cat"}, {"text": " "}])
    data = prepare(tmp_path, plain, prompts(5), eval=str(held_out))
    assert (data.audit.train_rows, data.audit.eval_rows, data.audit.read_rows) == (5, 1, 7)
    assert data.audit.dropped == {"empty text (eval)": 1}
    assert data.sources["eval"] == str(held_out)


def test_without_held_out_rows_there_is_no_eval_folder(tmp_path: Path, plain: ModelInfo) -> None:
    data = prepare(tmp_path, plain, prompts(5))
    assert {entry.path.split("/")[0] for entry in data.artifact.files} == {"train", "rows"}
    assert list(data.splits) == ["train"]
    assert (data.eval_rows, data.eval_examples) == (0, 0)


def test_chats_are_trained_on_their_answers(tmp_path: Path, chatty: ModelInfo) -> None:
    tokenizer = tiny.tokenizer()
    data = prepare(tmp_path, chatty, prompts(3))
    expected = [row["completion"] + "<|im_end|>" for row in prompts(3)]
    found = [
        tokenizer.decode([id_ for id_, mark in zip(ids, marks, strict=True) if mark])
        for ids, marks in documents(data)
    ]
    assert sorted(found) == sorted(expected)
    assert data.end_tokens == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)


def test_c15_every_dropped_row_is_counted(tmp_path: Path, plain: ModelInfo) -> None:
    long = {"prompt": "question " * 40, "completion": "yes"}
    rows = [row for short in prompts(4) for row in (short, long)]
    audit = prepare(tmp_path, plain, rows, max_length=40).audit
    assert audit.dropped == {"answer cut away by data.max_length": 4}
    assert (audit.read_rows, audit.train_rows) == (8, 4)
    audit = prepare(tmp_path, plain, rows, max_length=40, overflow="drop").audit
    assert audit.dropped == {"longer than data.max_length": 4}


def test_c16_eos_is_trained_in_rows_that_are_not_cut(tmp_path: Path, plain: ModelInfo) -> None:
    rows = [{"text": "the cat"}, {"text": "the cat sat on the mat " * 20}] * 2
    data = prepare(tmp_path, plain, rows, packing=False)
    trained = [
        id_ for ids, marks in documents(data) for id_, mark in zip(ids, marks, strict=True) if mark
    ]
    assert trained.count(EOS) == 2 == data.audit.trained_end_tokens
    assert data.audit.truncated_rows == 2
    assert data.train_examples == 4


@pytest.mark.parametrize("overflow", ["truncate", "drop", "split"])
def test_c28_every_token_that_was_encoded_is_counted(
    tmp_path: Path, plain: ModelInfo, overflow: str
) -> None:
    """In every split: those trained on or evaluated, cut away, and of what was dropped."""
    long = [{"prompt": f"question {i} " * 30, "completion": "yes"} for i in range(2)]
    rows = [*prompts(6), *prompts(3, answer=14), *long]
    files: dict[str, Any] = {
        name: str(write(tmp_path / f"{name}.jsonl", rows)) for name in ("train", "test")
    }
    files["eval"] = {"a": str(write(tmp_path / "a.jsonl", rows[3:]))}
    whole = prepare(tmp_path, plain, **files, max_length=1024)
    data = prepare(tmp_path, plain, **files, max_length=16, overflow=overflow)
    for name, info in data.splits.items():
        assert info.tokens + info.cut_tokens + info.dropped_tokens == whole.splits[name].tokens
        assert info.dropped_tokens > 100
        assert (info.cut_tokens > 0) == (info.truncated_rows > 0) == (overflow == "truncate")
    found, splits = data.audit, data.splits.values()
    assert found.truncated_rows == sum(info.truncated_rows for info in splits)
    assert found.cut_tokens == sum(info.cut_tokens for info in splits)
    assert found.dropped_tokens == sum(info.dropped_tokens for info in splits)
    reasons = found.dropped or found.dropped_examples
    assert {name.rpartition(" (")[2] for name in reasons} > {"eval-a)", "test)"}
    assert f"{found.cut_tokens:,} cut away, {found.dropped_tokens:,} of what was" in str(data)


def test_rows_of_training_that_are_held_out_too_are_told(tmp_path: Path, plain: ModelInfo) -> None:
    rows = [{"text": f"the cat {i}"} for i in range(12)]
    same = str(write(tmp_path / "train.jsonl", rows[:8] * 2))
    some = str(write(tmp_path / "some.jsonl", [*rows[:2], rows[9]]))
    new = str(write(tmp_path / "new.jsonl", rows[9:]))
    held_out = {"same": same, "some": some, "new": new}
    data = prepare(tmp_path, plain, train=same, eval=held_out, test=new)
    counts = {name: info.rows_in_train for name, info in data.splits.items()}
    assert counts == {"train": 0, "eval-same": 16, "eval-some": 2, "eval-new": 0, "test": 0}
    told = " ".join(str(data).split())
    assert "Warning: 16 of 16 rows of eval-same are training rows too: their loss says" in told
    assert "Warning: 2 of 3 rows of eval-some are training rows" in told
    assert told.count("Warning") == 2
    assert "Warning" not in str(prepare(tmp_path, plain, train=same, eval=0.5))


def test_rows_that_weights_repeat_are_told_in_words(tmp_path: Path, plain: ModelInfo) -> None:
    file = str(write(tmp_path / "train.jsonl", prompts(6)))
    other = str(write(tmp_path / "other.jsonl", prompts(9)[6:]))
    twice = prepare(tmp_path, plain, train={"path": file, "weight": 2})
    assert (twice.audit.read_rows, twice.audit.source_rows) == (12, 6)
    assert "12: 6 rows, read 2 times" in str(twice)
    mixed = prepare(tmp_path, plain, train=[{"path": file, "weight": 2}, other])
    assert "15: 9 rows, by the weights of their sources" in str(mixed)
    assert "rows read 9\n" in re.sub(" +", " ", str(prepare(tmp_path, plain, train=[file, other])))


def test_c18_a_token_without_an_embedding_is_named(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = tiny.model_folder(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(folder)
    model = resolve_model(ModelConfig(source=str(folder)), tmp_path / "cache")
    with pytest.raises(
        ConfigError, match=r"model\.source: .*token '<extra>' the id 320, but .*320"
    ):
        prepare(tmp_path, model, prompts(3))


def test_nothing_left_to_train_on(tmp_path: Path, plain: ModelInfo) -> None:
    rows = [{"text": " "}, {"text": ""}]
    with pytest.raises(DataError, match=r"of 2 rows none is left to train on .*2: empty text\)"):
        prepare(tmp_path, plain, rows)
    assert list((tmp_path / "cache" / "data").glob("*")) == []


def test_rows_that_are_refused_leave_nothing_on_the_drivers_disk(
    tmp_path: Path, plain: ModelInfo
) -> None:
    train = write(tmp_path / "train.jsonl", [*prompts(3), {"prompt": 1, "completion": "x"}])
    cfg = TrainConfig(model={"source": plain.source}, data={"train": str(train)})
    disk = tmp_path / "disk"
    disk.mkdir()
    with pytest.raises(DataError, match="1 row cannot be used"):
        prepare_data(cfg, plain, tmp_path / "cache", progress=lambda rows: None, work_dir=disk)
    assert not list(disk.iterdir())
    assert not list((tmp_path / "cache").rglob("*"))


def test_nothing_left_to_evaluate_on(tmp_path: Path, plain: ModelInfo) -> None:
    with pytest.raises(DataError, match=r"of 3 rows none is left to evaluate on: give data\.eval"):
        prepare(tmp_path, plain, prompts(3), eval=1e-9)


@pytest.mark.parametrize(("share", "what"), [(1e-9, "to evaluate on"), (1 - 1e-9, "to train on")])
def test_equal_rows_cannot_be_parted(
    tmp_path: Path, plain: ModelInfo, share: float, what: str
) -> None:
    with pytest.raises(DataError, match=f"none is left {what}") as caught:
        prepare(tmp_path, plain, prompts(1) * 5, eval=share)
    assert "(rows dropped: none; all rows are equal, and equal rows are never parted)" in str(
        caught.value
    )
    with pytest.raises(DataError, match=f"none is left {what}") as caught:
        prepare(tmp_path, plain, prompts(5), eval=share)
    assert "equal" not in str(caught.value)


def test_bad_rows_are_reported_together(tmp_path: Path, plain: ModelInfo) -> None:
    rows = [*prompts(2), {"prompt": 1, "completion": "x"}, {"prompt": "x"}, *prompts(2)]
    with pytest.raises(DataError) as caught:
        prepare(tmp_path, plain, rows)
    lines = str(caught.value).splitlines()
    path = tmp_path / "train.jsonl"
    assert lines == [
        "2 rows cannot be used:",
        f"  - {path}, line 3: column 'prompt': expected a string, found int '1'",
        f"  - {path}, line 4: expected a column 'completion', found prompt",
        "Correct them, or leave them out: data.formatter names a function that gets each row and "
        "leaves it out by returning None.",
    ]


def test_reading_stops_after_many_bad_rows(tmp_path: Path, plain: ModelInfo) -> None:
    rows = [*prompts(1), *[{"prompt": 1, "completion": "x"}] * 50]
    with pytest.raises(DataError, match=r"at least 50 rows cannot be used:\n.*the first"):
        prepare(tmp_path, plain, rows)
    with pytest.raises(DataError, match="1 row cannot be used"):
        prepare(tmp_path, plain, rows[:2])


def test_text_cannot_be_trained_on_answers(tmp_path: Path, plain: ModelInfo) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.train_on: rows of the format text have no answers"
    ):
        prepare(tmp_path, plain, [{"text": "a"}], train_on="completion")


def test_messages_need_a_template(tmp_path: Path, plain: ModelInfo) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    with pytest.raises(
        ConfigError, match=r"data\.chat_template: the tokenizer has no chat template"
    ):
        prepare(tmp_path, plain, rows)


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = tiny.model_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    model = resolve_model(ModelConfig(source=str(folder)), tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"model\.source: the tokenizer of .* cannot be loaded"):
        prepare(tmp_path, model, prompts(3))


def times(data: PreparedData) -> list[int]:
    folder = Path(data.artifact.source)
    return [(folder / entry.path).stat().st_mtime_ns for entry in data.artifact.files]


def test_the_same_data_is_prepared_once(tmp_path: Path, plain: ModelInfo) -> None:
    first = prepare(tmp_path, plain, prompts(5), eval=0.5)
    written = times(first)
    source = tmp_path / "train.jsonl"
    assert prepare(tmp_path, plain, train=str(source), eval=0.5) == first
    assert times(first) == written


@pytest.mark.parametrize("name", ["train/packs.arrow", "rows"])
@pytest.mark.parametrize(
    "damage", [lambda content: bytes(len(content)), lambda content: content[:-20] + bytes(20)]
)
def test_a_damaged_file_is_not_used(
    tmp_path: Path, plain: ModelInfo, name: str, damage: Callable[[bytes], bytes]
) -> None:
    data = prepare(tmp_path, plain, prompts(5))
    folder = Path(data.artifact.source)
    file = folder / name
    file = next(file.iterdir()) if file.is_dir() else file
    file.write_bytes(damage(file.read_bytes()))
    source = str(tmp_path / "train.jsonl")
    with pytest.raises(DataError) as caught:
        prepare(tmp_path, plain, train=source)
    told = str(caught.value)
    assert told.startswith(f"{file}, a file of the prepared data, is damaged (")
    assert told.endswith(f"delete the folder {folder}, and the data is prepared anew")
    storage.remove(folder)
    assert prepare(tmp_path, plain, train=source).splits == data.splits


def test_a_folder_that_is_not_complete_is_made_again(tmp_path: Path, plain: ModelInfo) -> None:
    source = str(write(tmp_path / "train.jsonl", prompts(5)))
    first = prepare(tmp_path, plain, train=source)
    whole = documents(first)
    rows = next((Path(first.artifact.source) / "rows").glob("*.arrow"))
    rows.write_bytes(rows.read_bytes()[:-8])
    second = prepare(tmp_path, plain, train=source)
    assert second.artifact.source != first.artifact.source
    assert (second.audit, documents(second)) == (first.audit, whole)
    manifest = Path(second.artifact.source) / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["prepared"]["audit"]
    manifest.write_text(json.dumps(content))
    third = prepare(tmp_path, plain, train=source)
    assert third.artifact.source not in (first.artifact.source, second.artifact.source)


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 63},
        {"packing": False},
        {"train_on": "all"},
        {"overflow": "drop"},
        {"eval": 0.4},
        {"format": "prompt_completion"},
        {"shuffle": False},
        {"chat_template": "{% for m in messages %}{{ m.content }}</s>{% endfor %}"},
        {"formatter": "tests.unit.test_prepare:as_it_is"},
        {"objective": "pretrain", "format": "text", "columns": {"text": "completion"}},
        {"test": 0.1},
        {"eval": {"path": "train.jsonl", "max_rows": 1}},
    ],
)
def test_c91_another_setting_is_another_data_set(
    tmp_path: Path, plain: ModelInfo, change: dict[str, Any]
) -> None:
    source = str(write(tmp_path / "train.jsonl", prompts(12)))
    if "eval" in change and isinstance(change["eval"], dict):
        change = {"eval": change["eval"] | {"path": source}}
    first = prepare(tmp_path, plain, train=source)
    other = prepare(tmp_path, plain, train=source, **change)
    assert first.artifact.fingerprint != other.artifact.fingerprint
    again = prepare(tmp_path, plain, train=source, **change)
    assert again.artifact == other.artifact, "and found again"


def as_it_is(row: dict[str, Any]) -> dict[str, Any]:
    return row


def test_c91_settings_of_the_run_alone_change_nothing(tmp_path: Path, plain: ModelInfo) -> None:
    source = str(write(tmp_path / "train.jsonl", prompts(12)))
    names = {
        prepare(tmp_path, plain, train=source, packing=False, **change).artifact.fingerprint
        for change in ({}, {"group_by_length": True}, {"longest_first": True})
    }
    assert len(names) == 1


def test_c91_a_changed_template_file_is_another_data_set(tmp_path: Path, plain: ModelInfo) -> None:
    source = str(write(tmp_path / "train.jsonl", prompts(5)))
    template, names = tmp_path / "template.jinja", set()
    for line in ("A: ", "B: "):
        text = "{% for m in messages %}" + line + "{{ m.content }}</s>{% endfor %}"
        template.write_text(text)
        found = prepare(tmp_path, plain, train=source, chat_template=str(template))
        assert found.chat_template == text
        names.add(found.artifact.fingerprint)
    assert len(names) == 2


def test_c91_the_formatter_is_part_of_the_name(tmp_path: Path, plain: ModelInfo) -> None:
    source = str(write(tmp_path / "train.jsonl", [{"n": i} for i in range(9)]))

    def formatter(scale: int) -> Any:
        return lambda row: {"text": str(row["n"] * scale)} if row["n"] != 3 else None

    def run(function: Any) -> PreparedData:
        cfg = TrainConfig(model={"source": "x"}, data={"train": source, "max_length": 64})
        cache = tmp_path / "cache"
        return prepare_data(cfg, plain, cache, formatter=function, progress=lambda rows: None)

    first, same, other = run(formatter(1)), run(formatter(1)), run(formatter(2))
    assert first == same
    assert first.artifact.fingerprint != other.artifact.fingerprint
    assert (first.audit.train_rows, first.audit.dropped) == (8, {"left out by data.formatter": 1})
    with pytest.raises(ConfigError, match=r"data\.formatter: the function, variable 'scale'"):
        run(formatter(object()))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"line 1: data\.formatter failed with KeyError: 'm'"):
        run(lambda row: row["m"])
    with pytest.raises(DataError, match=r"line 1: data\.formatter has to return a mapping .* int"):
        run(lambda row: row["n"])
    with pytest.raises(DataError, match="leaves out each of the first rows"):
        run(lambda row: None)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("template", r"data\.chat_template: .* then, .* now"),
        ("max_length", r"data\.max_length: 64 then, 63 now\."),
        ("rows", r"data\.train: \d+ rows (then, \d+ now|as then, but others)"),
        ("eval", r"data\.train: \d+ rows then, \d+ now; .* data\.eval: 0\.3 then, 0\.6 now"),
    ],
)
def test_c86_a_run_on_other_data_does_not_go_on(
    tmp_path: Path, plain: ModelInfo, change: str, told: str
) -> None:
    source = write(tmp_path / "train.jsonl", prompts(12))
    before = planned(tmp_path, plain, train=str(source), eval=0.3)
    settings: dict[str, Any] = {"eval": 0.3}
    if change == "template":
        settings["chat_template"] = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    elif change == "rows":
        write(source, prompts(13))
    else:
        settings[change] = {"max_length": 63, "eval": 0.6}[change]
    after = planned(tmp_path, plain, train=str(source), **settings)
    manifest = {"identity": resuming.identity(before), "state": {"step": 1}}
    resuming.check_resume(before, manifest, "/r/step-1")
    with pytest.raises(CheckpointError, match=rf"^this run cannot go on from /r/step-1: {told}"):
        resuming.check_resume(after, manifest, "/r/step-1")


def planned(tmp_path: Path, model: ModelInfo, **data: Any) -> RunPlan:
    settings = {"max_length": 64} | data
    config = TrainConfig(model={"source": "x"}, data=settings)
    return run_plan(data=prepare(tmp_path, model, **data), config=config)


@pytest.mark.parametrize("changed", ["eval rows", "another set", "test", "the file's name"])
def test_c86_held_out_rows_may_change_and_files_may_move(
    tmp_path: Path, plain: ModelInfo, changed: str
) -> None:
    source = write(tmp_path / "train.jsonl", prompts(12))
    held_out = write(tmp_path / "held.jsonl", prompts(3, answer=2))
    before = planned(tmp_path, plain, train=str(source), eval=str(held_out))
    settings: dict[str, Any] = {"train": str(source), "eval": str(held_out)}
    if changed == "eval rows":
        write(held_out, prompts(4, answer=2))
    elif changed == "another set":
        settings["eval"] = {"a": str(held_out), "b": str(write(tmp_path / "b.jsonl", prompts(2)))}
    elif changed == "test":
        settings["test"] = str(held_out)
    else:
        settings["train"] = str(source.rename(tmp_path / "moved.jsonl"))
    after = planned(tmp_path, plain, **settings)
    assert before.data.artifact.fingerprint != after.data.artifact.fingerprint
    state = {"step": 1, "held_out": resuming.held_out(before)}
    manifest = {"identity": resuming.identity(before), "state": state}
    resuming.check_resume(after, manifest, "/r/step-1")
    told = resuming.judged_by_other_rows(after, manifest)
    assert told == {
        "eval rows": "data.eval: 3 then, 4 now",
        "another set": "data.eval: 3 then, none now; data.eval.a: none then, 3 now; "
        "data.eval.b: none then, 2 now",
    }.get(changed, "")


def test_sources_are_mixed_by_weight(tmp_path: Path, plain: ModelInfo) -> None:
    rows = prompts(60)
    files = [str(write(tmp_path / f"{i}.jsonl", rows[20 * i : 20 * i + 20])) for i in range(3)]
    sources = [files[0], {"path": files[1], "weight": 2}, {"path": files[2], "weight": 0.5}]
    data = prepare(tmp_path, plain, train=sources, test=files[0])
    audit = data.audit
    sampled = 20 - audit.dropped["not sampled (data.train weight)"]
    assert 0 < sampled < 20
    assert (audit.train_rows, audit.test_rows) == (20 + 40 + sampled, 20)
    assert audit.read_rows == 20 + 40 + 20 + 20
    counts = Counter(keys_of(data))
    assert sorted(Counter(counts.values()).items()) == [(1, 20 + sampled), (2, 20)]
    assert data.sources == {
        "train": f"{files[0]}, {files[1]} x 2, {files[2]} x 0.5", "test": files[0],
    }  # fmt: skip


def test_named_evaluations_and_shares(tmp_path: Path, plain: ModelInfo) -> None:
    rows = prompts(60)
    files = [str(write(tmp_path / f"{i}.jsonl", rows[20 * i : 20 * i + 20])) for i in range(3)]
    data = prepare(tmp_path, plain, train=files[0], eval={"b": files[1], "a": files[2]}, test=0.3)
    assert list(data.splits) == ["train", "eval-a", "eval-b", "test"]
    assert (data.audit.eval_rows, data.eval_rows) == (40, 40)
    assert data.audit.train_rows + data.audit.test_rows == 20
    empty = write(tmp_path / "empty.jsonl", [{"text": ""}])
    with pytest.raises(DataError, match=r"of 1 rows none is left to evaluate on as x: give"):
        prepare(tmp_path, plain, train=files[0], eval={"x": str(empty)})
    with pytest.raises(DataError, match=r"of 20 rows none is left to test on: give data\.test"):
        prepare(tmp_path, plain, train=files[0], test=1e-9)


def test_rows_keep_their_order_without_shuffle(tmp_path: Path, plain: ModelInfo) -> None:
    rows = [{"text": f"row {i}"} for i in range(30)]
    files = [write(tmp_path / name, rows[i * 10 : i * 10 + 10]) for i, name in enumerate("cab")]
    for i, file in enumerate(files):
        files[i] = file.rename(file.with_suffix(".jsonl"))
    data = prepare(tmp_path, plain, train=[str(file) for file in files], shuffle=False)
    tokenizer = tiny.tokenizer(chat_template=None)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in documents(data)]
    assert texts == [row["text"] for row in rows]


def test_it_prints_well(tmp_path: Path, plain: ModelInfo) -> None:
    data = prepare(tmp_path, plain, prompts(20), eval=0.25)
    text = str(data)
    for part in ("Prepared data", "prompt_completion", "rows held out",
                 "tokens of a training document", "8 to 15",
                 str(tmp_path / "train.jsonl")):  # fmt: skip
        assert part in text
    assert "<table>" in data._repr_html_()


def test_c91_another_tokenizer_or_file_is_another_data_set(
    tmp_path: Path, plain: ModelInfo, chatty: ModelInfo
) -> None:
    source = write(tmp_path / "train.jsonl", prompts(5))
    names = {
        prepare(tmp_path, model, train=str(source)).artifact.fingerprint
        for model in (plain, chatty)
    }
    os.utime(source, ns=(1, 1))
    names.add(prepare(tmp_path, plain, train=str(source)).artifact.fingerprint)
    assert len(names) == 3


def test_progress_is_reported(tmp_path: Path, plain: ModelInfo) -> None:
    source = write(tmp_path / "train.jsonl", prompts(5))
    cfg = TrainConfig(model={"source": "x"}, data={"train": str(source), "max_length": 64})
    seen: list[int] = []
    prepare_data(cfg, plain, tmp_path / "cache", progress=seen.append)
    assert seen == [5]


def test_preparing_by_itself_prints_nothing(
    tmp_path: Path, plain: ModelInfo, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "train.jsonl", prompts(5))
    cfg = TrainConfig(model={"source": "x"}, data={"train": str(source), "max_length": 64})
    prepare_data(cfg, plain, tmp_path / "cache")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_c19_padding_is_right_and_changes_no_loss_whatever_the_tokenizers_side(
    tmp_path: Path, family: str, side: str
) -> None:
    folder = tmp_path / "model"
    words = tiny.tokenizer(chat_template=None)
    words.pad_token = "</s>"
    words.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"padding_side": side}))
    assert load_tokenizer(folder).padding_side == side
    model = {"llama": tiny.llama, "gpt2": tiny.gpt2}[family](vocab_size=len(words))
    model.save_pretrained(folder)
    info = resolve_model(ModelConfig(source=str(folder)), tmp_path / "cache")
    rows = [{"prompt": "the cat " * (1 + 3 * n), "completion": "the log " * n} for n in (1, 4, 7)]
    split = split_of(prepare(tmp_path, info, rows, max_length=128, packing=False))

    def step(micro_batch: int) -> tuple[float, dict[str, torch.Tensor]]:
        """Mean loss and gradient of all rows; and every pad is behind what it pads."""
        module, total = LossModule(model), 0.0
        padded = probe(module, module, device="cpu", max_length=128).padded
        order = Order(split, seed=0, global_batch=3, micro_batch=micro_batch, padded=padded)
        for batch in (whole := order.step(0)).batches:
            assert bool((batch.segment_ids.diff(dim=1) <= 0).all())
            assert bool((batch.position_ids[:, 0] == 0).all())
            assert bool((batch.segment_ids == 0).any()) == (micro_batch == 3)
            loss = module(**batch.inputs())
            (loss / whole.trained_total).backward()
            total += float(loss.detach()) / whole.trained_total
        found = {name: p.grad.clone() for name, p in module.named_parameters()}
        module.zero_grad(set_to_none=True)
        return total, found

    (padded, padded_gradient), (alone, gradient) = step(3), step(1)
    assert abs(padded - alone) < 1e-6
    assert reference.difference(padded_gradient, gradient) < 1e-6
    # The model's own loss, row by row.
    total = 0.0
    for row in range(3):
        ids, trained = split.document(row)
        labels = torch.tensor(ids.astype("int64")).where(torch.tensor(trained), -100)[None]
        out = model(input_ids=torch.tensor(ids.astype("int64"))[None], labels=labels)
        total += float(out.loss.detach()) * int((labels[:, 1:] != -100).sum())
    assert abs(padded - total / int(split.trained.sum())) < 1e-5
