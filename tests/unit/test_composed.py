"""Models that the configuration changes or defines, and tokenizers of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from dbx_llmtrain import planning
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver import fingerprints
from dbx_llmtrain.driver.model_changes import changed
from dbx_llmtrain.driver.sources import find_tokenizer, look, resolve_model
from dbx_llmtrain.errors import ConfigError, StagingError
from dbx_llmtrain.model_sections import ModelConfig
from dbx_llmtrain.records import ModelInfo
from dbx_llmtrain.worker.staged import stage
from tests import sample, tiny

SMALL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``model``: a model with 320 rows and tokens; ``words``: a tokenizer of 300."""
    root = tmp_path_factory.mktemp("composed")
    tiny.model_folder(root / "model")
    tiny.tokenizer(size=300).save_pretrained(root / "words")
    return root


def resolve(folders: Path, cache: Path, **model: Any) -> ModelInfo:
    """The model, with ``@`` in a source for the folders."""
    for field in ("source", "tokenizer"):
        if isinstance(model.get(field), str):
            model[field] = model[field].replace("@", str(folders))
    return resolve_model(ModelConfig(**model), cache)


def config_of(info: ModelInfo) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((Path(info.artifact.source) / "config.json").read_text())
    return content


def refusal(folders: Path, cache: Path, **model: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(folders, cache, **model)
    return "; ".join(map(str, caught.value.problems))


# Fields of the configuration


def test_a_field_is_changed_and_the_weights_stay_where_they_are(
    folders: Path, tmp_path: Path
) -> None:
    plain = resolve(folders, tmp_path, source="@/model")
    info = resolve(folders, tmp_path, source="@/model", config={"attention_dropout": 0.1})
    assert config_of(info) == config_of(plain) | {"attention_dropout": 0.1}
    (weights,) = (entry for entry in info.artifact.files if "safetensors" in entry.path)
    assert weights.origin == str(folders / "model" / "model.safetensors")
    assert not (Path(info.artifact.source) / "model.safetensors").exists()
    assert info.artifact.fingerprint != plain.artifact.fingerprint
    assert info.parameters == plain.parameters
    again = resolve(folders, tmp_path, source="@/model", config={"attention_dropout": 0.1})
    assert again == info
    staged = stage(info.artifact.model_dump(), str(tmp_path / "local"))
    assert (staged / "model.safetensors").read_bytes() == Path(weights.origin or "").read_bytes()
    assert json.loads((staged / "config.json").read_text())["attention_dropout"] == 0.1


def test_a_file_at_its_origin_that_is_gone_or_changed_is_named(
    folders: Path, tmp_path: Path
) -> None:
    source = tmp_path / "model"
    shutil.copytree(folders / "model", source)
    info = resolve(folders, tmp_path, source=str(source), config={"attention_dropout": 0.1})
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(StagingError, match=r"model\.safetensors is not the file that was regist"):
        stage(info.artifact.model_dump(), str(tmp_path / "local"))
    weights.unlink()
    with pytest.raises(StagingError, match=r"model/model\.safetensors is missing"):
        stage(info.artifact.model_dump(), str(tmp_path / "local"))


@pytest.mark.parametrize(
    "fields",
    [{"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5}}],
)
def test_rotary_settings_by_their_old_and_new_names(
    folders: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    info = resolve(folders, tmp_path, source="@/model", config=fields)
    loaded = AutoConfig.from_pretrained(info.artifact.source)
    parameters = getattr(loaded, "rope_parameters", None) or {"rope_theta": loaded.rope_theta}
    assert parameters["rope_theta"] == 5e5


def test_rotary_settings_keep_the_form_they_have() -> None:
    old = {"model_type": "llama", "rope_theta": 1e4, "rope_scaling": None}
    fields = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}
    assert changed(old, fields, "m") == old | {
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }
    new = {"model_type": "llama", "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
    assert changed(new, {"rope_theta": 5e5}, "m")["rope_parameters"] == {
        "rope_theta": 5e5,
        "rope_type": "default",
    }
    assert changed(new, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "m") == {
        "model_type": "llama",
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0},
    }


def test_fields_of_an_inner_configuration_are_changed_one_by_one() -> None:
    content = {"model_type": "gemma3", "text_config": {"hidden_size": 8, "num_hidden_layers": 2}}
    found = changed(content, {"text_config": {"hidden_size": 16}}, "m")
    assert found["text_config"] == {"hidden_size": 16, "num_hidden_layers": 2}


def test_a_field_goes_by_the_name_of_the_architecture() -> None:
    assert changed({"model_type": "gpt2", "n_embd": 8}, {"hidden_size": 16}, "m") == {
        "model_type": "gpt2",
        "n_embd": 16,
    }


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"source": "@/model", "config": {"atention_dropout": 0.1}},
            "model.config.atention_dropout: llama has no such field: did you mean "
            "'attention_dropout'?",
        ),
        (
            {"source": "@/model", "config": {"num_hidden_layers": 3, "attention_dropout": 0.1}},
            "model.config.num_hidden_layers: num_hidden_layers would give the model another shape",
        ),
        (
            {"source": "@/model", "config": {"num_attention_heads": 8}},
            "model.config.num_attention_heads: num_attention_heads would give the model another",
        ),
        (
            {"source": "@/model", "config": {"tie_word_embeddings": True}},
            "model.config.tie_word_embeddings: tie_word_embeddings would give the model another",
        ),
        (
            {"source": "@/model", "config": {"vocab_size": 400}},
            "model.config.vocab_size: vocab_size would give the model another shape",
        ),
        (
            {"source": "@/model", "config": {"model_type": "gpt2"}},
            "is of type llama: leave model.source out to define a gpt2",
        ),
        (
            {"source": "@/model", "init": "random", "config": {"vocab_size": 10}},
            "model.config.vocab_size: is 10, but the tokenizer has ids up to 319: expected 320",
        ),
        (
            {"source": "@/model", "init": "random", "config": {"vocab_size": "many"}},
            "model.config.vocab_size: expected a whole number, found 'many'",
        ),
        (
            {"init": "random", "tokenizer": "@/words", "config": {"model_type": "lama"}},
            "model.config.model_type: transformers has no model type 'lama': did you mean 'llama'?",
        ),
        (
            {"init": "random", "tokenizer": "@/words", "config": {"hidden_size": 32}},
            "model.config.model_type: missing: expected llama, qwen3",
        ),
        (
            {"init": "random", "config": SMALL},
            "model.tokenizer: missing: a model that model.config defines has none",
        ),
        (
            {"source": "@/model", "tokenizer": "@/nowhere"},
            "model.tokenizer: no folder or hub tokenizer",
        ),
        (
            {"source": "@/model", "tokenizer": "@"},
            "has no tokenizer: expected one of tokenizer.json, tokenizer.model",
        ),
        (
            {"source": "@/model", "new_tokens": ["<new>", "<s>"]},
            "model.new_tokens: '<s>' is in the tokenizer already (id 1)",
        ),
        pytest.param(
            {"source": "@/model", "config": {"attention_dropout": "some"}},
            "model.config: ",
            marks=tiny.TYPES_ARE_CHECKED,
        ),
        pytest.param(
            {
                "init": "random",
                "tokenizer": "@/words",
                "config": SMALL | {"attention_dropout": "some"},
            },
            "model.config: transformers cannot read it: ",
            marks=tiny.TYPES_ARE_CHECKED,
        ),
        (
            {"init": "random", "tokenizer": "@/words", "config": SMALL | {"model_type": "bert"}},
            "model.config: is of type bert",
        ),
        (
            {"source": "@/model", "tokenizer": "@/model/model.gguf"},
            "model.tokenizer: no folder or hub tokenizer",
        ),
        (
            {"source": "@/model", "tokenizer": "@/model/config.json"},
            "config.json is a file, expected a hub id or a folder",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_its_field(
    folders: Path, tmp_path: Path, model: dict[str, Any], message: str
) -> None:
    assert message in refusal(folders, tmp_path, **model)


def test_a_tokenizer_that_is_not_there_shows_at_once(folders: Path, tmp_path: Path) -> None:
    file = tmp_path / "words.gguf"
    file.write_bytes(b"GGUF")
    empty = tmp_path / "empty"
    empty.mkdir()
    for given, message in (
        (str(tmp_path / "nowhere"), "no folder or hub tokenizer"),
        ("no/such/place.gguf", "no folder or hub tokenizer no/such/place.gguf"),
        ("gone.gguf", "no folder or hub tokenizer gone.gguf"),
        (
            str(file),
            "words.gguf is a file, expected a hub id or a folder: the tokenizer of a .gguf",
        ),
        (str(empty), "has no tokenizer: expected one of tokenizer.json"),
        (" ", "is empty: expected a hub id or a folder"),
        ("s3://bucket/words", "s3://"),
        ("package:no_such_package/words", "no such package is installed"),
        ({"source": str(folders / "words"), "revision": "main"}, "only a hub tokenizer has"),
    ):
        models: list[dict[str, Any]] = [
            {"source": str(folders / "model")}, {"config": SMALL, "init": "random"},
        ]  # fmt: skip
        for model in models:
            with pytest.raises(ConfigError) as caught:
                find_tokenizer(ModelConfig(**model | {"tokenizer": given}))
            (problem,) = caught.value.problems
            assert problem.path == "model.tokenizer"
            assert message in problem.message
    assert find_tokenizer(ModelConfig(source="m", tokenizer="org/words")) is None
    assert find_tokenizer(ModelConfig(source="m")) is None
    own = str(folders / "words")
    assert find_tokenizer(ModelConfig(source="m", tokenizer=own)) == folders / "words"


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({"config": SMALL, "tokenizer": "x"}, "model.init: a model that model.config defines has"),
        ({"config": SMALL, "init": "random"}, "model.tokenizer: missing"),
        (
            {"source": "", "config": SMALL, "init": "random", "tokenizer": "x"},
            "model.source: is empty",
        ),
        (
            {"config": SMALL, "init": "random", "tokenizer": {"pad_vocab_to_multiple_of": 8}},
            "model.tokenizer: missing",
        ),
        ({"source": "x", "new_tokens": ["a", "b", "a"]}, "model.new_tokens: has a more than once"),
        ({"source": "x", "new_tokens": ["a", " "]}, "model.new_tokens: has an empty token"),
    ],
)
def test_what_cannot_be_is_refused_by_the_configuration(
    model: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(model=model, data={"train": "/x"})
    assert problem in "; ".join(map(str, caught.value.problems))


def test_c81_positions_that_are_changed_are_those_that_rows_are_held_against(
    folders: Path, tmp_path: Path
) -> None:
    short, long = (
        resolve(folders, tmp_path, source="@/model", config={"max_position_embeddings": positions})
        for positions in (64, 256)
    )
    assert (short.max_positions, long.max_positions) == (64, 256)
    config = sample.config(data={"train": "/x", "max_length": 129})
    planning.check_length(config, long)
    with pytest.raises(ConfigError, match=r"64"):
        planning.check_length(config, short)


# Without weights


def test_a_random_start_needs_no_weights(folders: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(folders / "model", source)
    (source / "model.safetensors").unlink()
    model = {"source": str(source), "init": "random"}
    look(ModelConfig(**model))
    info = resolve(folders, tmp_path, **model)
    assert info.artifact.source == str(source)
    assert info.parameters == tiny.llama(vocab_size=320).num_parameters()
    more = resolve(folders, tmp_path, **model, config={"num_hidden_layers": 3})
    assert config_of(more)["num_hidden_layers"] == 3
    assert (more.parameters or 0) > (info.parameters or 0)
    assert not any("safetensors" in entry.path for entry in more.artifact.files)


def test_a_model_that_is_defined_has_the_vocabulary_of_its_tokenizer(
    folders: Path, tmp_path: Path
) -> None:
    info = resolve(folders, tmp_path, config=SMALL, init="random", tokenizer="@/words")
    content = config_of(info)
    assert content["vocab_size"] == info.vocab_size == 300
    assert content["architectures"] == ["LlamaForCausalLM"]
    assert (content["bos_token_id"], content["eos_token_id"]) == (1, 2)
    assert content["rms_norm_eps"] == 1e-6  # defaults are written down
    assert info.model_type == "llama"
    assert info.source == "model.config"
    assert look(ModelConfig(config=SMALL, init="random", tokenizer="x")) is None
    words = AutoTokenizer.from_pretrained(info.artifact.source)
    assert words("the cat")["input_ids"] == tiny.tokenizer(size=300)("the cat")["input_ids"]


def test_a_vocabulary_is_padded_on_request(folders: Path, tmp_path: Path) -> None:
    words = {"source": str(folders / "words"), "pad_vocab_to_multiple_of": 64}
    for size, rows in ((None, 320), (400, 448)):
        config = SMALL | ({"vocab_size": size} if size else {})
        info = resolve(folders, tmp_path, config=config, init="random", tokenizer=words)
        assert config_of(info)["vocab_size"] == info.vocab_size == rows


# Tokenizers


def test_c18_a_tokenizer_of_its_own_takes_the_place_of_the_models(
    folders: Path, tmp_path: Path
) -> None:
    info = resolve(folders, tmp_path, source="@/model", tokenizer="@/words")
    assert info.vocab_size == 320  # the rows of the weights
    assert len(AutoTokenizer.from_pretrained(info.artifact.source)) == 300
    larger = folders / "larger"
    tiny.tokenizer(size=330).save_pretrained(larger)
    grown = resolve(folders, tmp_path, source="@/model", tokenizer="@/larger")
    assert len(AutoTokenizer.from_pretrained(larger)) == grown.vocab_size > 320
    plain = resolve(folders, tmp_path, source="@/model")
    names = {fingerprints.tokenizer(one).fingerprint for one in (info, grown, plain)}
    assert len(names) == 3


def test_c68_new_tokens_are_in_the_tokenizer_and_have_rows(folders: Path, tmp_path: Path) -> None:
    info = resolve(
        folders,
        tmp_path,
        source="@/model",
        new_tokens=["<a>", "<b>"],
        tokenizer={"pad_vocab_to_multiple_of": 8},
    )
    words = AutoTokenizer.from_pretrained(info.artifact.source)
    assert words.convert_tokens_to_ids(["<a>", "<b>"]) == [320, 321]
    assert words.chat_template == tiny.CHATML
    plain = tiny.tokenizer()
    assert words("the <a> cat")["input_ids"][0] == 1
    assert 320 in words("the <a>cat")["input_ids"]
    assert words("the cat")["input_ids"] == plain("the cat")["input_ids"]
    assert config_of(info)["vocab_size"] == info.vocab_size == 328


def test_a_model_without_a_tokenizer_is_given_one(folders: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    tiny.llama(vocab_size=320).save_pretrained(source)
    model = {"source": str(source), "tokenizer": str(folders / "words")}
    look(ModelConfig(**model))
    assert resolve(folders, tmp_path, **model).vocab_size == 320
    with pytest.raises(ConfigError, match="has no tokenizer"):
        look(ModelConfig(source=str(source)))


def test_without_weights_the_same_tokens_are_prepared(folders: Path, tmp_path: Path) -> None:
    config = ModelConfig(source=str(folders / "model"), new_tokens=["<a>"])
    infos = [resolve_model(config, tmp_path, weights=weights) for weights in (True, False)]
    first, second = (fingerprints.tokenizer(info).fingerprint for info in infos)
    assert first == second
    assert infos[0].vocab_size == infos[1].vocab_size == 321
