"""The examples of a preview are those that training takes, with the counts that it has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain import cli, storage
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver import examples
from dbx_llmtrain.driver.inputs import Places, find_inputs
from dbx_llmtrain.driver.prepare import prepare_data
from dbx_llmtrain.driver.sources import resolve_model
from dbx_llmtrain.errors import ConfigError, DataError
from dbx_llmtrain.model_sections import ModelConfig
from dbx_llmtrain.preview_html import preview_page
from dbx_llmtrain.preview_parts import facts
from dbx_llmtrain.previewing import DocumentPreview, Preview
from dbx_llmtrain.records import ModelInfo, PreparedData
from dbx_llmtrain.text.prepared import Split
from dbx_llmtrain.worker.order import Arrangement
from tests import tiny, words


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    folder = tiny.model_folder(tmp_path_factory.mktemp("model"))
    return resolve_model(ModelConfig(source=str(folder)), folder / "cache", weights=False)


def chats(count: int, answer: str = "the cat sat") -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"question {number}"},
                {"role": "assistant", "content": f"{answer} {number}"},
            ]
        }
        for number in range(count)
    ]


def config(folder: Path, model: ModelInfo, rows: list[dict[str, Any]], **data: Any) -> TrainConfig:
    file = folder / "rows.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    file.write_text("".join(lines), encoding="utf-8")
    train = data.pop("train", {})
    settings = {"train": str(file), "max_length": 96, "cache_dir": str(folder / "cache")} | data
    return TrainConfig(model={"source": model.source}, data=settings, train=train)


def show(
    cfg: TrainConfig, model: ModelInfo, count: int = 3, split: str = "train"
) -> tuple[Preview, PreparedData]:
    cache = Path(str(cfg.data.cache_dir))
    data = prepare_data(cfg, model, cache, progress=lambda rows: None)
    return examples.show_examples(cfg, model, data, count=count, split=split), data


def text(document: DocumentPreview) -> str:
    return "".join(piece.text for piece in document.pieces)


def trained(document: DocumentPreview) -> str:
    return "".join(piece.text for piece in document.pieces if piece.trained)


def test_rows_are_shown_as_the_model_sees_them(tmp_path: Path, model: ModelInfo) -> None:
    cfg = config(tmp_path, model, chats(6), packing=False)
    found, data = show(cfg, model, 6)
    shown = {text(example.documents[0]): example for example in found.examples}
    for number in range(6):
        expected = (
            f"<|im_start|>user\nquestion {number}<|im_end|>\n"
            f"<|im_start|>assistant\nthe cat sat {number}<|im_end|>\n"
        )
        (document,) = shown[expected].documents
        assert trained(document) == f"the cat sat {number}<|im_end|>"
        assert document.trained_ends == 1
        named = [piece.text for piece in document.pieces if piece.kind == "token"]
        assert named == ["<|im_start|>", "<|im_end|>"] * 2
    assert sum(example.tokens for example in found.examples) == data.audit.tokens
    assert sum(example.trained for example in found.examples) == data.audit.trained_tokens
    assert sum(example.trained_ends for example in found.examples) == data.audit.trained_end_tokens
    assert found.audit == data.audit
    assert found.count == 6


@pytest.mark.parametrize("changes", [{}, {"shuffle": False}, {"train": {"seed": 5}}])
def test_the_order_is_that_of_the_first_epoch(
    tmp_path: Path, model: ModelInfo, changes: dict[str, Any]
) -> None:
    cfg = config(tmp_path, model, chats(30), packing=False, eval=0.3, **changes)
    found, data = show(cfg, model, 5)
    split = Split(Path(data.artifact.source), "train")
    arrangement = Arrangement(cfg.train.seed, cfg.data.shuffle)
    expected = arrangement.epoch(0, split.tokens, 32)[:5].tolist()
    assert [example.number for example in found.examples] == expected
    assert [example.documents[0].row for example in found.examples] == [
        split.keys(number)[0] for number in expected
    ]
    again, _ = show(cfg, model, 5)
    assert again == found
    held_out, _ = show(cfg, model, 2, "eval")
    assert [example.number for example in held_out.examples] == [0, 1]
    assert held_out.count == data.splits["eval"].examples
    assert Path(str(held_out.page)).name == "preview-eval.html"


def test_held_out_rows_have_their_own_counts(tmp_path: Path, model: ModelInfo) -> None:
    long = [{"messages": [
        {"role": "user", "content": "question"}, {"role": "assistant", "content": "cat " * 90},
    ]}]  # fmt: skip
    rows = "".join(json.dumps(row) + "\n" for row in [*chats(3), *long])
    (tmp_path / "test.jsonl").write_text(rows)
    cfg = config(tmp_path, model, chats(6), test=str(tmp_path / "test.jsonl"))
    found, data = show(cfg, model, 2, "test")
    info = data.splits["test"]
    assert found.info == info
    assert (info.rows, info.truncated_rows, info.rows_in_train) == (4, 1, 3)
    assert info.cut_tokens > 0
    shown = dict(facts(found))
    assert shown["test rows"] == "4, of them 1 truncated; 3 are training rows too"
    told = f"{info.tokens}, of them {info.trained} ({info.trained / info.tokens:.1%}) trained"
    assert shown["test tokens"] == f"{told}; {info.cut_tokens} cut away, 0 of what was dropped"
    assert "train rows" not in dict(facts(show(cfg, model, 2)[0]))


def test_damaged_data_is_named(tmp_path: Path, model: ModelInfo) -> None:
    cfg = config(tmp_path, model, chats(6))
    _, data = show(cfg, model)
    folder = Path(data.artifact.source)
    file = folder / "train" / "packs.arrow"
    content = file.read_bytes()
    middle = len(content) // 2
    for damaged in (b"ARROW1" + bytes(len(content) - 12) + b"ARROW1", content[:middle]):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match=r"is damaged \(.+\): delete the folder") as caught:
            examples.show_examples(cfg, model, data, count=1, split="train")
        assert str(folder) in str(caught.value)


def test_a_pack_has_the_boundaries_of_its_documents(tmp_path: Path, model: ModelInfo) -> None:
    found, data = show(config(tmp_path, model, chats(8), max_length=400), model)
    assert found.count == data.audit.packs == len(found.examples)
    documents = [part for example in found.examples for part in example.documents]
    assert len(documents) == 8
    assert {text(part).count("question") for part in documents} == {1}
    assert sum(part.tokens for part in documents) == data.audit.tokens
    split = Split(Path(data.artifact.source), "train")
    assert [part.row for part in found.examples[0].documents] == split.keys(
        found.examples[0].number
    )


def test_of_a_big_pack_the_first_documents_are_shown(tmp_path: Path, model: ModelInfo) -> None:
    found, _ = show(config(tmp_path, model, chats(41), max_length=8000), model)
    (example,) = found.examples
    assert len(example.documents) == 12
    assert example.hidden == 29
    assert example.trained_ends == 41, "all are counted"
    assert example.trained > sum(document.trained for document in example.documents)


def test_of_a_long_document_both_ends_are_shown(tmp_path: Path, model: ModelInfo) -> None:
    rows = chats(1, answer="log " * 3000)
    found, data = show(config(tmp_path, model, rows, max_length=8000), model)
    ((long,),) = [example.documents for example in found.examples]
    shown = [sum(piece.tokens for piece in part) for part in (long.pieces, long.tail)]
    assert shown == [800, 400]
    assert long.tokens == data.audit.tokens == long.hidden + 1200
    assert long.trained == data.audit.trained_tokens
    assert [piece.text for piece in long.tail[-2:]] == ["<|im_end|>", "\n"]


def test_what_may_be_masked(tmp_path: Path) -> None:
    folder, tokenizer = tmp_path / "bert", words.wordpiece()
    tiny.bert(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    source = ModelConfig(source=str(folder))
    model = resolve_model(source, tmp_path / "cache", objective="mlm", weights=False)
    cfg = config(tmp_path, model, [{"text": "the cat sat"}], objective="mlm")
    found, _ = show(cfg, model)
    ((document,),) = [example.documents for example in found.examples]
    assert found.objective == "mlm"
    assert trained(document).split() == ["the", "cat", "sat"]
    others = [(piece.text, piece.kind) for piece in document.pieces if not piece.trained]
    assert others == [("[CLS]", "token"), ("[SEP]", "token")]


def test_the_page_is_kept_beside_the_data_and_disturbs_nothing(
    tmp_path: Path, model: ModelInfo
) -> None:
    cfg = config(tmp_path, model, chats(6))
    found, data = show(cfg, model)
    folder = Path(data.artifact.source)
    assert found.page == str(folder / "preview.html")
    assert Path(found.page).read_text(encoding="utf-8") == preview_page(found)
    assert storage.read_manifest(folder) is not None
    assert "preview.html" not in [entry.path for entry in data.artifact.files]
    assert show(cfg, model)[1].artifact == data.artifact


def test_data_that_may_only_be_read_is_shown(tmp_path: Path, model: ModelInfo) -> None:
    cfg = config(tmp_path, model, chats(6))
    data = prepare_data(cfg, model, tmp_path / "cache", progress=lambda rows: None)
    page = Path(data.artifact.source, "preview.html")
    page.mkdir()  # nothing can be written over it, not even by root
    found = examples.show_examples(cfg, model, data, count=1, split="train")
    assert found.page is None
    assert re.match(rf"{re.escape(str(page))}: \w", found.problem)
    assert f"not kept: {found.problem}" in " ".join(str(found).split())


@pytest.mark.parametrize(
    ("count", "split", "data", "message"),
    [
        (0, "train", None, "n: expected a whole number of at least 1, found 0"),
        (True, "train", None, "n: expected a whole number of at least 1, found True"),
        ("3", "train", None, "n: expected a whole number of at least 1, found '3'"),
        (1, "dev", None, "split: expected train, eval, eval-NAME or test, found 'dev'"),
        (1, "eval", None, "split: eval has no rows: set data.eval, or pass rows as eval"),
    ],
)
def test_what_cannot_be_shown_is_refused_first(
    count: Any, split: str, data: Any, message: str
) -> None:
    cfg = TrainConfig(model={"source": "nowhere"}, data={"train": "missing.jsonl"})
    with pytest.raises(ConfigError) as caught:
        examples.require(cfg, count, split, data)
    assert [str(problem) for problem in caught.value.problems] == [message]


def test_a_split_that_the_data_does_not_have(tmp_path: Path, model: ModelInfo) -> None:
    cfg = config(tmp_path, model, chats(20), eval=0.3)
    examples.require(cfg, 1, "eval-math", None)
    with pytest.raises(ConfigError, match=r"\(train, eval\), found 'eval-math'"):
        show(cfg, model, 1, "eval-math")


def test_neither_weights_nor_absolute_paths_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers run in another folder than the driver, so they get absolute paths."""
    folder = tiny.model_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    monkeypatch.chdir(tmp_path)
    model = resolve_model(ModelConfig(source="model"), tmp_path / "cache", weights=False)
    assert model.artifact.source == str(folder)
    cfg = config(Path(), model, chats(3), cache_dir=str(tmp_path / "cache"))
    (source,) = find_inputs(cfg.data, None, Places(None, tmp_path / "cache"))
    assert source.files == (tmp_path / "rows.jsonl",)
    found, _ = show(cfg, model)
    assert found.audit.train_rows == 3
    assert found.sources == {"train": "rows.jsonl"}


def test_the_command_refuses_before_spark_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {source: x}\ndata: {train: y}\n")
    wrong = ["-n", "0", "--split", "test", "--master", "no such master"]
    assert cli.run(["preview", str(path), *wrong]) == 2
    told = capsys.readouterr().err
    assert "n: expected a whole number of at least 1, found 0" in told
    assert "split: test has no rows: set data.test, or pass rows as test" in told
