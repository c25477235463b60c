from __future__ import annotations

import csv
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dbx_llmtrain import storage
from dbx_llmtrain.driver import fingerprints
from dbx_llmtrain.driver.inputs import check_files
from dbx_llmtrain.driver.rows import read_rows, source_files
from dbx_llmtrain.driver.sources import only_on_driver, resolve_model
from dbx_llmtrain.errors import ConfigError, DataError
from dbx_llmtrain.model_sections import ModelConfig
from dbx_llmtrain.records import ModelInfo
from dbx_llmtrain.sections import DataConfig, SourceConfig
from tests import tiny

ROWS = [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(5)]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# Rows ----------------------------------------------------------------------------------------


def test_jsonl_rows_know_their_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\ufeff{"a": 1}\n\n{"a": "\u3042"}\n', encoding="utf-8")
    assert list(read_rows(str(path))) == [
        ({"a": 1}, f"{path}, line 1"),
        ({"a": "\u3042"}, f"{path}, line 3"),
    ]


def test_json_csv_and_parquet_give_the_same_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    (tmp_path / "rows.json").write_text(json.dumps(ROWS), encoding="utf-8")
    with (tmp_path / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(ROWS)
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    for name, where in (("json", "row 2"), ("csv", "line 3"), ("parquet", "row 2")):
        found = list(read_rows(str(tmp_path / f"rows.{name}")))
        assert [row for row, _ in found] == ROWS
        assert found[1][1] == f"{tmp_path}/rows.{name}, {where}"


def test_a_pattern_reads_its_files_in_order(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", ROWS[2:])
    write_jsonl(tmp_path / "a.jsonl", ROWS[:2])
    rows = [row for row, _ in read_rows(f"{tmp_path}/*.jsonl")]
    assert rows == ROWS


def test_max_rows(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    rows = [row for row, _ in read_rows(SourceConfig(path=str(path), max_rows=2))]
    assert rows == ROWS[:2]


def test_messages_of_a_parquet_file_are_lists_of_dicts(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"messages": [{"role": "user", "content": "a"}]}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert [row for row, _ in read_rows(str(tmp_path / "rows.parquet"))] == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"a": 1}\n{"a": \n', "x.jsonl, line 2: expected a JSON object: Expecting"),
        ("x.jsonl", b"null\n", "x.jsonl, line 1: expected a JSON object, found null"),
        ("x.json", b"null", "x.json: expected a JSON list of objects, found null"),
        ("x.jsonl", b"[1]\n", "x.jsonl, line 1: expected a JSON object, found list"),
        ("x.jsonl", b"\n", "x.jsonl has no rows"),
        ("x.jsonl", b'{"a": "\xff"}\n', "x.jsonl, line 1: expected UTF-8 text"),
        ("x.json", b'{"a": 1}\n{"a": 2}\n', "x.json: expected a JSON list of objects: Extra data"),
        ("x.json", b'{"a": 1}', "x.json: expected a JSON list of objects, found dict"),
        ("x.json", b"[1]", "x.json, row 1: expected a JSON object, found int"),
        ("x.json", b'["\xff"]', "x.json: expected UTF-8 text"),
        ("x.json", b"[]", "x.json has no rows"),
        (
            "x.jsonl",
            b'{"a": "\\ud83d\\ude00"}\n{"a": "bad \\ud83d half"}\n',
            "x.jsonl, line 2, field 'a': the text cannot be encoded as UTF-8: it has \\ud83d, half",
        ),
        ("x.jsonl", b'{"a": [{"b": "\\udc00"}]}\n', "x.jsonl, line 1, field 'a': the text cannot"),
        ("x.jsonl", b'{"a\\udc00": 1}\n', "x.jsonl, line 1: a key cannot be encoded as UTF-8"),
        ("x.json", b'[{"a": {"\\udc00": 1}}]', "x.json, row 1, field 'a': the text cannot"),
        ("x.csv", b"a,b\n1\n", "x.csv, line 2: expected 2 fields as in the first line"),
        ("x.csv", b"a\n1,2\n", "x.csv, line 2: expected 1 fields as in the first line"),
        ("x.csv", b'a\n"1"2\n', "x.csv, after line 1: ',' expected after"),
        ("x.csv", b"", "x.csv has no rows"),
        ("x.parquet", b"PAR", "x.parquet: expected a Parquet file"),
        ("x.txt", b"a", "x.txt: expected a file that ends in .jsonl, .json, .csv, .parquet"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(read_rows(str(tmp_path / name)))
    assert message in str(caught.value)


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file .*none\.jsonl \(looked for"):
        source_files(str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="no file"):
        source_files(f"{tmp_path}/*.jsonl")
    with pytest.raises(DataError, match=r"is a folder without files that end in"):
        source_files(str(tmp_path))


@pytest.mark.parametrize("name", ["main.ml.rows", "main.ml.`my rows`"])
def test_a_table_without_its_prefix_is_recognised(name: str) -> None:
    with pytest.raises(DataError, match=rf"no file {name} .*did you mean table:{name}\?$"):
        source_files(name)


@pytest.mark.parametrize("name", ["rows.jsonl", "a/b.c.d", "rows.v1.2.jsonl", "rows"])
def test_what_cannot_be_a_table_is_not_called_one(name: str) -> None:
    with pytest.raises(DataError, match=r"that the driver can read$"):
        source_files(name)


def test_every_missing_data_file_is_told_before_a_model_is_looked_for(tmp_path: Path) -> None:
    rows = str(write_jsonl(tmp_path / "rows.jsonl", ROWS))
    check_files(DataConfig(train=rows))
    check_files(DataConfig(train=rows, eval=0.5))
    check_files(DataConfig(train=rows, eval=rows))
    with pytest.raises(DataError) as caught:
        check_files(DataConfig(train=f"{tmp_path}/a.jsonl", eval=f"{tmp_path}/b.jsonl"))
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"data.train: no file {tmp_path}/a.jsonl")
    assert second.startswith(f"data.eval: no file {tmp_path}/b.jsonl")


def test_missing_files_among_several_sources_are_told_together(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = str(write_jsonl(tmp_path / "rows.jsonl", ROWS))
    (tmp_path / "delta" / "_delta_log").mkdir(parents=True)
    # What is no file is looked for when it is read.
    others = ["table:main.ml.answers", str(tmp_path / "delta"), "s3://bucket/rows", "org/answers"]
    check_files(DataConfig(train=[rows, *others], eval={"one": rows, "two": "org/answers"}))
    missing = {
        "train": [rows, {"path": f"{tmp_path}/a.jsonl", "weight": 2}],
        "eval": {"one": f"{tmp_path}/b.jsonl", "two": rows, "three": f"{tmp_path}/b.jsonl"},
        "test": [f"{tmp_path}/c.jsonl"],
    }
    with pytest.raises(DataError) as caught:
        check_files(DataConfig(**missing))
    lines = [line.split()[0:4:3] for line in str(caught.value).splitlines()]
    names = {"train": "a", "eval.one": "b", "eval.three": "b", "test": "c"}
    assert lines == [[f"data.{role}:", f"{tmp_path}/{file}.jsonl"] for role, file in names.items()]
    assert [problem.path for problem in caught.value.problems] == [f"data.{role}" for role in names]
    # A source that is passed takes the place of the configuration's.
    given = {"train": Dataset.from_list(ROWS), "eval": Dataset.from_list(ROWS)}
    with pytest.raises(DataError) as caught:
        check_files(DataConfig(**missing), given)
    assert str(caught.value).startswith(f"data.test: no file {tmp_path}/c.jsonl")
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_vanishes_while_reading(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS[:1])
    last = write_jsonl(tmp_path / "b.jsonl", ROWS[:1])
    rows = read_rows(f"{tmp_path}/*.jsonl")
    next(rows)
    last.unlink()
    with pytest.raises(DataError, match=r"b\.jsonl cannot be read: "):
        next(rows)


# Models --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("model"))


def copy_of(model: Path, target: Path) -> Path:
    for path in model.iterdir():
        storage.copy_file(path, target / path.name)
    return target


def resolve(source: Any, cache: Path, **settings: Any) -> Any:
    return resolve_model(ModelConfig(source=str(source), **settings), cache)


def test_a_folder_is_used_as_it_is_without_the_files_it_does_not_need(
    model: Path, tmp_path: Path
) -> None:
    folder = copy_of(model, tmp_path / "model")
    (folder / "README.md").write_text("x")
    (folder / "consolidated.safetensors").write_bytes(b"x")
    info = resolve(folder, tmp_path / "cache")
    assert info.artifact.source == str(folder)
    assert {entry.path for entry in info.artifact.files} == {path.name for path in model.iterdir()}
    assert info.artifact.files == storage.entries(
        folder, [folder / entry.path for entry in info.artifact.files]
    )
    assert (info.model_type, info.vocab_size, info.max_positions) == ("llama", 320, 128)
    assert info.parameters == sum(p.numel() for p in tiny.llama(vocab_size=320).parameters())
    assert (info.revision, info.sliding_window) == (None, None)


def test_the_fingerprint_is_of_the_content(model: Path, tmp_path: Path) -> None:
    one = resolve(model, tmp_path / "cache").artifact
    two = resolve(copy_of(model, tmp_path / "copy"), tmp_path / "cache").artifact
    assert one.fingerprint == two.fingerprint
    config = tmp_path / "copy" / "config.json"
    config.write_text(config.read_text() + "\n")
    changed = resolve(tmp_path / "copy", tmp_path / "cache").artifact
    assert changed.fingerprint != one.fingerprint


def test_a_file_is_hashed_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []
    real = storage.hash_file
    monkeypatch.setattr(storage, "hash_file", lambda path: (hashed.append(path), real(path))[1])
    first = resolve(model, tmp_path)
    assert sorted(hashed) == sorted(model.iterdir())
    assert resolve(model, tmp_path) == first
    assert len(hashed) == len(first.artifact.files)


def test_broken_notes_of_hashes_are_made_anew(model: Path, tmp_path: Path) -> None:
    first = resolve(model, tmp_path)
    (notes,) = (tmp_path / "models" / ".hashes").iterdir()
    whole = notes.read_bytes()
    for broken in (b"{", b"[]"):
        notes.write_bytes(broken)
        assert resolve(model, tmp_path) == first
        assert notes.read_bytes() == whole


def test_shards_are_those_that_the_index_names(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny.llama(vocab_size=320).save_pretrained(folder, max_shard_size="40KB")
    tiny.tokenizer().save_pretrained(folder)
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 1
    (folder / "model-extra.safetensors").write_bytes(b"x")
    info = resolve(folder, tmp_path)
    names = [entry.path for entry in info.artifact.files]
    assert [name for name in names if name.endswith(".safetensors")] == shards
    assert "model.safetensors.index.json" in names
    (folder / shards[1]).unlink()
    with pytest.raises(ConfigError, match=f"has no {shards[1]}, which its model.safetensors.ind"):
        resolve(folder, tmp_path)


def test_sliding_window_counts_where_the_model_uses_it(tmp_path: Path) -> None:
    tiny.mistral(sliding_window=8, vocab_size=320).save_pretrained(tmp_path / "m")
    tiny.tokenizer().save_pretrained(tmp_path / "m")
    assert resolve(tmp_path / "m", tmp_path).sliding_window == 8


def test_only_on_driver() -> None:
    volume = Path("/Volumes/main/x/runs/.cache")
    assert only_on_driver(Path("/local_disk0/model"), volume)
    assert not only_on_driver(Path("/Volumes/main/x/model"), volume)
    assert not only_on_driver(Path("/home/me/model"), Path("/home/me/runs/.cache"))


def test_a_folder_that_only_the_driver_sees_is_copied(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dbx_llmtrain.driver.sources._SHARED_ROOTS", (str(tmp_path / "shared"),))
    for _ in range(2):
        artifact = resolve(model, tmp_path / "shared" / "cache").artifact
        folder = tmp_path / "shared" / "cache" / "models" / artifact.fingerprint
        assert artifact.source == str(folder)
        files = [folder / entry.path for entry in artifact.files]
        assert storage.entries(folder, files) == artifact.files


def remove(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def only_bin(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def only_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def only_gguf(folder: Path) -> None:
    (folder / "config.json").rename(folder / "x.gguf")


def edit(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove("config.json"), "has no config.json"),
        (only_adapter, "has no config.json, only an adapter: merge it into its base model first"),
        (only_gguf, "x.gguf itself"),
        (remove("model.safetensors"), "has no model.safetensors (nor model.safetensors.index"),
        (only_bin, "has no model.safetensors, only pytorch_model.bin, an older format: convert"),
        (remove("tokenizer.json"), "has no tokenizer: expected one of tokenizer.json, "),
        (
            lambda folder: (folder / "generation_config.json").write_text("{"),
            "generation_config.json is broken: Expecting property name",
        ),
        (
            lambda folder: (folder / "tokenizer_config.json").write_text("[1]"),
            "tokenizer_config.json is broken: expected an object, found list",
        ),
        (
            lambda folder: (folder / "config.json").write_bytes(b"\xff"),
            "config.json is broken: 'utf-8' codec can't decode",
        ),
        (edit(model_type="unheard_of"), "transformers cannot read its config.json"),
        (edit(model_type="t5"), "is of type t5: expected a causal language model"),
        (edit(quantization_config={"quant_method": "gptq", "bits": 4}), "has quantised weights"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"\x05" + b"\0" * 9),
            "model.safetensors is not a safetensors file",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
            "model.safetensors.index.json is broken",
        ),
    ],
)
def test_a_folder_that_cannot_be_trained_is_refused(
    model: Path, tmp_path: Path, change: Any, message: str
) -> None:
    folder = copy_of(model, tmp_path / "model")
    change(folder)
    with pytest.raises(ConfigError) as caught:
        resolve(folder, tmp_path / "cache")
    (problem,) = caught.value.problems
    assert problem.path == "model.source"
    assert message in problem.message
    assert str(folder) in problem.message


@pytest.mark.parametrize("lost", [1, 1000, -1, -7])
def test_weights_that_are_not_whole_are_refused(tmp_path: Path, lost: int) -> None:
    """Of one shard and of several, on the driver, before anything of them is read."""
    folder = tiny.model_folder(tmp_path / "model")
    sharded = copy_of(folder, tmp_path / "sharded")
    (sharded / "model.safetensors").unlink()
    tiny.llama(vocab_size=320).save_pretrained(sharded, max_shard_size="40KB")
    for place, count in ((folder, 1), (sharded, 2)):
        files = sorted(place.glob("*.safetensors"))[:count]
        for file in files:
            content = file.read_bytes()
            file.write_bytes(content[:-lost] if lost > 0 else content + b"x" * -lost)
        with pytest.raises(ConfigError) as caught:
            resolve(place, tmp_path / "cache")
        told = [problem.message for problem in caught.value.problems]
        assert len(told) == count
        for message, file in zip(told, files, strict=True):
            size = file.stat().st_size
            assert f"{file.name} has {size:,} bytes, by its header it has to" in message
            assert f"have {size + lost:,}: it was cut off or is damaged" in message


def test_weights_that_end_in_their_header_are_refused(tmp_path: Path) -> None:
    folder = tiny.model_folder(tmp_path / "model")
    file = folder / "model.safetensors"
    content = file.read_bytes()
    for size in (0, 4, 8, 100):
        file.write_bytes(content[:size])
        with pytest.raises(ConfigError, match=r"model\.safetensors is not a safetensors file, or"):
            resolve(folder, tmp_path / "cache")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("s3://bucket/model", "or a mount), or a hub id, found an address (s3:)"),
        ("https://host/org/model", "or a mount), or a hub id, found a web address"),
        ("file:///models/x", "expected a path, found 'file:///models/x': leave out the file:"),
        ("hf://org/model", "expected the name alone"),
        ("/no/such/folder", "no folder, .gguf file or hub model /no/such/folder"),
        ("dbfs:/Volumes/a/b", "(looked for /Volumes/a/b)"),
        ("package:no_such_package/x.gguf", "no such package is installed"),
        ("package:json", "expected package:NAME/FILE"),
        ("package:__main__/x", "no such package is installed"),
        ("package:a.b/x", "no such package is installed"),
        ("package:json/none.gguf", "no folder, .gguf file or hub model package:json/none.gguf"),
    ],
)
def test_a_source_that_is_not_there(source: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(source, tmp_path)
    assert caught.value.problems[0].path == "model.source"
    assert message in caught.value.problems[0].message


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"is a file: expected a folder, a \.gguf file or a hub"):
        resolve(tmp_path / "model.bin", tmp_path)


def test_a_folder_has_no_revisions(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.revision: only a hub model has revisions"):
        resolve(model, tmp_path, revision="main")


# GGUF ----------------------------------------------------------------------------------------


def write_gguf(path: Path, model: Any, tokenizer: Any, *, without: str = "-") -> None:
    """A GGUF file of a tiny Llama with a byte-level BPE, as llama.cpp's converter writes it."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    state = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if number < 5 else 1 for number in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in state["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if without in name or (config.tie_word_embeddings and name == "lm_head.weight"):
            continue
        base, kind = name.rsplit(".", 1)
        for projection, count in heads.items():
            if projection in name:  # llama.cpp interleaves the halves of every head
                halves = tensor.reshape(count, 2, -1, tensor.shape[1])
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"{names.get_name(base)}.{kind}", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_becomes_a_folder_once(tmp_path: Path, tied: bool) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = tiny.tokenizer(add_bos=False)
    model = tiny.llama(tied=tied, vocab_size=len(tokenizer))
    source = model.to(torch.bfloat16).float()
    write_gguf(tmp_path / "tiny.gguf", source, tokenizer)
    info = resolve(tmp_path / "tiny.gguf", tmp_path / "cache")
    folder = Path(info.artifact.source)
    assert folder == tmp_path / "cache" / "models" / info.artifact.fingerprint
    assert storage.entries(folder, [folder / e.path for e in info.artifact.files]) == (
        info.artifact.files
    )
    assert info.parameters == sum(p.numel() for p in source.parameters())

    tensors = load_file(folder / "model.safetensors").values()
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    made = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        difference = made.float()(ids).logits - source.eval()(ids).logits
    assert difference.abs().max() < 1e-5
    words = AutoTokenizer.from_pretrained(folder)
    for text in ("the cat sat", "<|im_start|>user\nhello<|im_end|>\n", "a\u3042 1"):
        assert words(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert words.chat_template == tokenizer.chat_template
    assert words.eos_token == "</s>"
    assert words.get_vocab() == tokenizer.get_vocab(), "no token is added"

    made_at = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve(tmp_path / "tiny.gguf", tmp_path / "cache") == info
    assert (folder / "model.safetensors").stat().st_mtime_ns == made_at


def test_a_gguf_file_that_lacks_tensors_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer(add_bos=False)
    model = tiny.llama(vocab_size=len(tokenizer))
    write_gguf(tmp_path / "x.gguf", model, tokenizer, without="layers.1.mlp.up_proj")
    disk = tmp_path / "disk"
    disk.mkdir()
    config = ModelConfig(source=str(tmp_path / "x.gguf"))
    with pytest.raises(ConfigError, match=r"tensors missing: \['model\.layers\.1\.mlp\.up_proj"):
        resolve_model(config, tmp_path / "cache", work_dir=disk)
    assert not list((tmp_path / "cache" / "models").glob("*/manifest.json"))
    assert not list(disk.iterdir())


def test_a_broken_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(ConfigError, match=r"model\.source: .*x\.gguf cannot be read: "):
        resolve(tmp_path / "x.gguf", tmp_path / "cache")
    assert not list((tmp_path / "cache" / "models").glob("*/manifest.json"))


def test_a_gguf_file_needs_the_package_gguf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"x\.gguf needs a package: .*pip install gguf"):
        resolve(tmp_path / "x.gguf", tmp_path / "cache")


def test_a_file_in_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    package = tmp_path / "with_a_model"
    copy_of(model, package / "data")
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    info = resolve("package:with_a_model/data", tmp_path / "cache")
    assert info.artifact.source == str(package / "data")
    assert info.source == "package:with_a_model/data"


# Hub -----------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"

RESOLVE = """
import json, sys
from pathlib import Path
from dbx_llmtrain.model_sections import ModelConfig
from dbx_llmtrain.driver.sources import resolve_model
from dbx_llmtrain.errors import ConfigError

for source, revision, *wishes in json.loads(sys.argv[1]):
    try:
        trusted, weights = "trusted" in wishes, "small" not in wishes
        more = next((wish for wish in wishes if isinstance(wish, dict)), {})
        model = ModelConfig(source=source, revision=revision, trust_remote_code=trusted, **more)
        info = resolve_model(model, Path(sys.argv[2]), weights=weights)
        print(info.model_dump_json())
    except ConfigError as error:
        print(json.dumps(str(error)))
"""


def hub_answer(folder: Path, path: str) -> tuple[int, dict[str, str], bytes]:
    """What the hub answers of the model in ``folder``: the part that a download needs."""
    files = sorted(folder.iterdir())
    if path in ("/api/models/org/tiny", f"/api/models/org/tiny/revision/{COMMIT}"):
        names = [{"rfilename": file.name} for file in files]
        answer = {"id": "org/tiny", "sha": COMMIT, "siblings": names}
        return 200, {}, json.dumps(answer).encode()
    if path == f"/api/models/org/tiny/tree/{COMMIT}":
        tree = [
            {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0"}
            for file in files
        ]
        return 200, {}, json.dumps(tree).encode()
    if path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
        body = (folder / path.rsplit("/", 1)[1]).read_bytes()
        return 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{len(body)}"'}, body
    if path.startswith("/api/models/org/tiny/revision/"):
        return 404, {"X-Error-Code": "RevisionNotFound"}, b""
    if path.startswith("/api/models/org/gated"):
        return 403, {"X-Error-Code": "GatedRepo"}, b""
    return 404, {"X-Error-Code": "RepoNotFound"}, b""


@pytest.fixture
def hub(model: Path, tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub with one model, and the requests that it got."""
    folder = copy_of(model, tmp_path / "hub")
    (folder / "pytorch_model.bin").write_bytes(b"not needed")
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            asked.append(f"{self.command} {self.path}")
            status, headers, body = hub_answer(folder, self.path.split("?")[0])
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def resolve_elsewhere(endpoint: str, cache: Path, *models: tuple[Any, ...]) -> list[Any]:
    """Model or error text of each id and revision (and ``trusted``: with its code, ``small``:
    without its weights; and more fields of the section).

    The hub's client reads its settings when it is imported, hence a process of its own.
    """
    env = os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", RESOLVE, json.dumps(models), str(cache)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line[0] in '{"']


def test_a_hub_model_is_downloaded_once_at_a_commit(
    hub: tuple[str, list[str]], model: Path, tmp_path: Path
) -> None:
    endpoint, asked = hub
    cache = tmp_path / "cache"
    info, again = resolve_elsewhere(endpoint, cache, ("org/tiny", None), ("org/tiny", None))
    assert again == info
    folder = Path(info["artifact"]["source"])
    assert folder.parent == cache / "models"
    assert info["revision"] == COMMIT
    names = {path.name for path in model.iterdir()}
    assert {path.name for path in folder.iterdir()} == names | {"manifest.json"}
    for name in names:
        assert (folder / name).read_bytes() == (model / name).read_bytes()
        assert asked.count(f"GET /org/tiny/resolve/{COMMIT}/{name}") == 1
    assert asked.count("GET /api/models/org/tiny") == 2
    assert not any("pytorch_model" in line for line in asked)
    # The commit itself needs no network: this process has none.
    known = resolve("org/tiny", cache, revision=COMMIT)
    assert json.loads(known.model_dump_json()) == info


@pytest.mark.slow
def test_code_of_a_hub_model_is_read_before_its_weights(
    hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    endpoint, asked = hub
    shutil.rmtree(tmp_path / "hub")
    folder = tiny.custom_folder(tmp_path / "hub")
    (folder / "train.py").write_text("raise SystemExit")
    cache = tmp_path / "cache"
    (refused,) = resolve_elsewhere(endpoint, cache, ("org/tiny", None))
    assert "model.trust_remote_code: org/tiny needs Python code that comes with it (" in refused
    assert "(configuration_tiny.py, modeling_tiny.py, tiny_block.py, tiny_numbers.py)" in refused
    assert not any("safetensors" in line for line in asked)
    names = {path.name for path in folder.iterdir()} - {"train.py"}
    # To prepare data its code and its tokenizer are enough.
    (small,) = resolve_elsewhere(endpoint, cache, ("org/tiny", None, "trusted", "small"))
    files = [entry["path"] for entry in small["artifact"]["files"]]
    assert sorted(files) == sorted(names - {"model.safetensors"})
    assert not any("safetensors" in line for line in asked)
    (info,) = resolve_elsewhere(endpoint, cache, ("org/tiny", None, "trusted"))
    assert info["model_type"] == "tiny_of_our_own"
    prepared = [fingerprints.tokenizer(ModelInfo(**found)).fingerprint for found in (small, info)]
    assert prepared[0] == prepared[1]
    assert {entry["path"] for entry in info["artifact"]["files"]} == names
    made = Path(info["artifact"]["source"])
    assert {path.name for path in made.iterdir()} == names | {"manifest.json"}
    assert asked.count(f"GET /org/tiny/resolve/{COMMIT}/model.safetensors") == 1


@pytest.mark.slow
def test_a_hub_model_that_starts_at_random_needs_no_weights(
    hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    endpoint, asked = hub
    wanted = {"init": "random", "config": {"num_hidden_layers": 3}}
    (info,) = resolve_elsewhere(endpoint, tmp_path / "cache", ("org/tiny", None, wanted))
    assert info["shape"]["blocks"] == 3
    assert info["revision"] == COMMIT
    assert not any("safetensors" in line for line in asked)


@pytest.mark.slow
def test_fields_of_a_hub_model_are_checked_before_its_weights_are_downloaded(
    hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    endpoint, asked = hub
    cache = tmp_path / "cache"
    (refused,) = resolve_elsewhere(
        endpoint, cache, ("org/tiny", None, {"config": {"num_hidden_layers": 3}})
    )
    assert "num_hidden_layers would give the model another shape" in refused
    assert not any("safetensors" in line for line in asked)
    (info,) = resolve_elsewhere(
        endpoint, cache, ("org/tiny", None, {"config": {"attention_dropout": 0.1}})
    )
    (weights,) = (entry for entry in info["artifact"]["files"] if "safetensors" in entry["path"])
    assert Path(weights["origin"]).is_file()
    assert sum("model.safetensors" in line for line in asked if line.startswith("GET")) == 1


@pytest.mark.slow
def test_a_tokenizer_of_the_hub(hub: tuple[str, list[str]], model: Path, tmp_path: Path) -> None:
    endpoint, asked = hub
    source = copy_of(model, tmp_path / "own")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (source / name).unlink(missing_ok=True)
    words = {"tokenizer": {"source": "org/tiny", "revision": COMMIT}}
    lost = {"tokenizer": "org/none"}
    info, refused = resolve_elsewhere(
        endpoint, tmp_path / "cache", (str(source), None, words), (str(source), None, lost)
    )
    made = Path(info["artifact"]["source"])
    assert (made / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert not any("safetensors" in line for line in asked)
    assert "model.tokenizer: no folder org/none, and the Hugging Face hub did not" in refused


def test_a_hub_model_lacks_two_things(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "hub" / name).unlink()
    (refused,) = resolve_elsewhere(endpoint, tmp_path / "cache", ("org/tiny", None))
    assert "2 problems" in refused
    assert "org/tiny has no config.json" in refused
    assert "org/tiny has no tokenizer" in refused
    assert not any("safetensors" in line for line in asked)
    assert not list((tmp_path / "cache" / "models").glob("*/manifest.json"))


def test_what_the_hub_refuses(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    models = ("org/none", None), ("org/gated", None), ("org/tiny", "no-such")
    missing, gated, revision = resolve_elsewhere(hub[0], tmp_path, *models)
    assert "model.source: no folder org/none, and the Hugging Face hub did not give it" in missing
    assert "check the name; a private model needs HF_TOKEN" in missing
    assert "accept its licence on the hub, and set HF_TOKEN" in gated
    assert "model.revision: org/tiny has no such revision on the hub" in revision


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("org/none", tmp_path)
    (problem,) = caught.value.problems
    assert problem.path == "model.source"
    assert "check that the driver can reach the hub, or download the model" in problem.message
