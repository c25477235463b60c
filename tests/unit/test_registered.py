"""Models of MLflow's registry as the model that is trained: real stores, and what stands in for
Unity Catalog."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dbx_llmtrain import addresses
from dbx_llmtrain.driver import evaluating, model_package, outlines, registered, registry
from dbx_llmtrain.driver.sources import look, resolve_model
from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.model_sections import ModelConfig
from dbx_llmtrain.records import ModelInfo
from tests import sample, tiny, unity_catalog
from tests.unit.test_registry import finished_run

pytestmark = [
    pytest.mark.timeout(200),
    # Of MLflow's own classes, when it is first used.
    pytest.mark.filterwarnings("ignore:.*type hint is inferred as AnyType:UserWarning"),
]

SOURCE = "models:/answers@champion"


@pytest.fixture(autouse=True)
def mlflow_as_new(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No store is known, and none is left behind."""
    import mlflow

    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "DATABRICKS_RUNTIME_VERSION"):
        monkeypatch.delenv(name, raising=False)
    mlflow.set_tracking_uri(None)
    yield
    mlflow.set_tracking_uri(None)
    mlflow.set_registry_uri(None)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("exports") / "messages")


@pytest.fixture(scope="module")
def made(export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs in whose store our own ``register`` has put a model twice: with MLflow's
    flavor for transformers, and from disk."""
    import mlflow

    runs = tmp_path_factory.mktemp("runs")
    for name, limit in (("first", None), ("second", 0)):
        _, result = finished_run(runs, export, name=name)
        registry.register(result, "answers", alias=f"by-{name}", limit=limit)
    mlflow.set_tracking_uri(None)
    return runs


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    """The same for one test alone. (Artifacts stay where they are.)"""
    (tmp_path / "runs").mkdir()
    shutil.copy(made / "mlflow.db", tmp_path / "runs")
    return tmp_path / "runs"


def client(runs: Path) -> Any:
    import mlflow

    uri = f"sqlite:///{runs}/mlflow.db"
    return mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)


def resolve(source: str, runs: Path, **more: Any) -> ModelInfo:
    return resolve_model(ModelConfig(source=source), runs / "cache", runs=runs, **more)


def add_version(runs: Path, name: str, folder: Path) -> str:
    """Any folder as a version of a model; its number."""
    store = client(runs)
    if not store.search_registered_models(f"name='{name}'"):
        store.create_registered_model(name)
    return str(store.create_model_version(name, folder.as_uri()).version)


@pytest.mark.parametrize(("alias", "version"), [("by-first", "1"), ("by-second", "2")])
def test_what_was_registered_here_is_the_model(
    alias: str, version: str, runs: Path, export: Path
) -> None:
    import mlflow

    found = resolve(f"models:/answers@{alias}", runs)
    assert (found.source, found.revision) == (f"models:/answers@{alias}", version)
    folder = Path(found.artifact.source)
    assert folder.is_relative_to(runs / "cache")
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= {
        entry.path for entry in found.artifact.files
    }
    theirs = load_file(export / "model.safetensors")
    ours = load_file(folder / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert not mlflow.is_tracking_uri_set(), "MLflow is as the user had it"
    assert "MLFLOW_TRACKING_URI" not in os.environ
    assert resolve(f"models:/answers/{version}", runs).artifact == found.artifact
    plan = sample.run_plan(runs / "next", model=found)
    lineage = model_package.lineage(runs / "next/export", plan, None)
    assert lineage["dbx_llmtrain_base_model"] == f"models:/answers@{alias}"
    assert lineage["dbx_llmtrain_base_revision"] == version
    assert lineage["dbx_llmtrain_base_fingerprint"] == found.artifact.fingerprint
    assert f"models:/answers@{alias}, version {version} (llama" in str(plan)


def test_a_version_is_downloaded_once_and_an_alias_may_move(
    runs: Path, export: Path, tmp_path: Path
) -> None:
    kept = shutil.copytree(export, tmp_path / "kept")
    first = add_version(runs, "moved", kept)
    client(runs).set_registered_model_alias("moved", "champion", first)
    before = resolve("models:/moved@champion", runs)
    shutil.rmtree(kept)
    assert resolve("models:/moved@champion", runs) == before
    tiny.model_folder(tmp_path / "other", seed=1)
    client(runs).set_registered_model_alias(
        "moved", "champion", add_version(runs, "moved", tmp_path / "other")
    )
    after = resolve("models:/moved@champion", runs)
    assert (before.revision, after.revision) == ("1", "2")
    assert before.artifact.fingerprint != after.artifact.fingerprint


def test_weights_are_not_downloaded_for_data_or_a_forecast(runs: Path, tmp_path: Path) -> None:
    source = "models:/answers@by-first"
    found = resolve(source, runs, weights=False)
    names = {entry.path for entry in found.artifact.files}
    assert "tokenizer.json" in names
    assert not [name for name in names if name.endswith(".safetensors")]
    whole = resolve(source, runs)
    assert whole.artifact.size > found.artifact.size
    assert resolve(source, runs, weights=False).artifact == whole.artifact
    outline = outlines.outline(ModelConfig(source=source), runs=runs)
    assert outline.shape.parameters == whole.parameters
    assert look(ModelConfig(source=source)) is None, "nothing is asked for at first"


def test_one_that_mlflow_itself_has_logged(runs: Path, export: Path, tmp_path: Path) -> None:
    import mlflow
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(export)
    words = transformers.AutoTokenizer.from_pretrained(export)
    mlflow.transformers.save_model(
        {"model": model, "tokenizer": words}, path=tmp_path / "logged",
        task="text-generation", pip_requirements=[],
    )  # fmt: skip
    found = resolve(f"models:/theirs/{add_version(runs, 'theirs', tmp_path / 'logged')}", runs)
    assert "tokenizer.json" in {entry.path for entry in found.artifact.files}
    ours = load_file(Path(found.artifact.source) / "model.safetensors")
    theirs = load_file(export / "model.safetensors")
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_changed_models_are_composed_of_it(runs: Path) -> None:
    config = ModelConfig(source="models:/answers@by-first", new_tokens=["<new>"])
    found = resolve_model(config, runs / "cache", runs=runs)
    assert (found.revision, found.source) == ("1", "models:/answers@by-first")
    assert found.artifact.fingerprint != resolve(found.source, runs).artifact.fingerprint


def test_what_is_no_model_is_refused(runs: Path, export: Path, tmp_path: Path) -> None:
    several = tmp_path / "several"
    for name in ("a", "b"):
        shutil.copytree(export, several / name)
    adapter = tmp_path / "adapter"
    (adapter / "peft").mkdir(parents=True)
    (adapter / "peft" / "adapter_config.json").write_text("{}")
    old = shutil.copytree(export, tmp_path / "old")
    (old / "model.safetensors").rename(old / "pytorch_model.bin")
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    (nothing / "MLmodel").write_text("flavors: {}\n")
    for name, folder, told in (
        ("several", several, r"has several models \(a, b\): expected one"),
        ("adapter", adapter, "has only an adapter: merge it into its base model"),
        ("old", old, "an older format"),
        ("nothing", nothing, "is no Hugging Face model: it has no config.json"),
    ):
        version = add_version(runs, name, folder)
        with pytest.raises(ConfigError, match=told) as caught:
            resolve(f"models:/{name}/{version}", runs)
        assert {problem.path for problem in caught.value.problems} == {"model.source"}
    assert not list((runs / "cache" / "models").glob("*")), "nothing is left"


def test_what_the_registry_does_not_have_is_told(runs: Path, tmp_path: Path) -> None:
    for source in ("models:/answers@nobody", "models:/answers/77", "models:/none@champion"):
        with pytest.raises(ConfigError, match=r"did not give it .*: check the name, and its"):
            resolve(source, runs)
    with pytest.raises(ConfigError, match=r"not been told of a tracking server.*set MLFLOW_"):
        resolve(SOURCE, tmp_path / "other")
    with pytest.raises(ConfigError, match="expected models:/NAME@ALIAS"):
        registered.check_there("models:/answers", runs)
    target = evaluating.find(
        sample.config(data={"train": "a.jsonl", "eval": 0.1}, checkpoint={"dir": str(runs)}),
        "models:/answers@nobody",
    )
    with pytest.raises(ConfigError, match=r"model: .*did not give it"):
        evaluating.reach(target, "models:/answers@nobody")
    registered.check_there("models:/answers@by-first", runs)


def test_a_store_that_does_not_answer_is_told_soon(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:h1dden@127.0.0.1:9")
    with pytest.raises(ConfigError, match="check that the driver can reach it") as caught:
        resolve(SOURCE, runs)
    assert "h1dden" not in str(caught.value)


def test_unity_catalog_gives_a_model(
    runs: Path, export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's own client, as far as a server on this machine can stand in for the catalog."""
    with unity_catalog.catalog() as known:
        for key, value in {**unity_catalog.USE_SDK, "DATABRICKS_HOST": known.url}.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setenv("DATABRICKS_TOKEN", "t0ken-of-a-test")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{runs}/mlflow.db")
        # MLflow 2's own choice on Databricks; three names mean Unity Catalog.
        monkeypatch.setenv("MLFLOW_REGISTRY_URI", "databricks")
        known.versions["1"] = {
            "name": "main.ml.answers", "version": "1", "status": "READY",
            "storage_location": "s3://b/m",
        }  # fmt: skip
        known.aliases["champion"] = "1"
        for path in export.iterdir():
            known.files[f"Models/main/ml/answers/1/model/{path.name}"] = path.read_bytes()
        found = resolve("models:/main.ml.answers@champion", runs)
        assert os.environ["MLFLOW_REGISTRY_URI"] == "databricks"
        monkeypatch.setenv("MLFLOW_REGISTRY_URI", "databricks-uc")
        with pytest.raises(ConfigError, match=r"expected models:/catalog\.schema\.model for Unity"):
            resolve(SOURCE, runs)
    assert found.revision == "1"
    ours = load_file(Path(found.artifact.source) / "model.safetensors")
    assert ours.keys() == load_file(export / "model.safetensors").keys()


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("models:/a/3", ("a", None, "3")),
        ("models:/main.ml.a@best_one", ("main.ml.a", "best_one", None)),
        ("models:/a", None),
        ("models:/a/latest", None),
        ("models:/a/Production", None),
        ("models:/a@", None),
        ("models:/a/b/3", None),
        ("models:a/3", None),
        ("/models/a/3", None),
    ],
)
def test_addresses(source: str, parts: Any) -> None:
    assert addresses.registered(source) == parts


def test_the_parts_of_a_logged_model() -> None:
    one = ["MLmodel", "model/config.json", "model/model.safetensors"]
    words = ["components/processor/vocab.txt", "components/tokenizer/tokenizer.json"]
    assert registered.find_parts([*one, *words], "x") == ["model", "components/tokenizer"]
    assert registered.find_parts([*one, "model/tokenizer.json", *words], "x") == ["model"]
    assert registered.find_parts([*one, "data/config.json"], "x") == ["model"]
    assert registered.find_parts(["config.json"], "x") == ["."]


def test_code_of_its_own_comes_along(runs: Path, tmp_path: Path) -> None:
    folder = tiny.custom_folder(tmp_path / "own")
    version = add_version(runs, "own", folder)
    config = ModelConfig(source=f"models:/own/{version}", trust_remote_code=True)
    found = resolve_model(config, runs / "cache", runs=runs)
    assert [entry.path for entry in found.artifact.files if entry.path.endswith(".py")]
    auto_map = json.loads((Path(found.artifact.source) / "config.json").read_text())["auto_map"]
    assert auto_map
