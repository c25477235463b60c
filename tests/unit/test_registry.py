"""Models in real MLflow stores: SQLite, a server, and what stands in for Unity Catalog."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import dbx_llmtrain as llm
from dbx_llmtrain import compat, storage, tracking
from dbx_llmtrain.custom_code import private_modules
from dbx_llmtrain.driver import model_package, registry
from dbx_llmtrain.errors import CheckpointError, ConfigError, RegistryError
from dbx_llmtrain.outcomes import DATA_FORMAT, KIND, RUN_DIR
from dbx_llmtrain.records import RunPlan, TrainResult
from tests import sample, tiny, unity_catalog
from tests.unit.test_tracking import free_port, mlflow_server

pytestmark = [
    pytest.mark.timeout(300),
    # Of MLflow's own classes, when it is first used.
    pytest.mark.filterwarnings("ignore:.*type hint is inferred as AnyType:UserWarning"),
]

QUESTION = {"messages": [{"role": "user", "content": "what is the answer?"}], "max_tokens": 6}
CHECKPOINT = "checkpoints/step-00000003"


@pytest.fixture(autouse=True)
def mlflow_as_new() -> Iterator[None]:
    """No tracking URI is left behind."""
    import mlflow

    yield
    mlflow.set_tracking_uri(None)


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported folders: of a chat model whose template writes a BOS token as its tokenizer does, of
    one for texts, and of one for masked tokens."""
    folder = tmp_path_factory.mktemp("exports")
    tiny.model_folder(folder / "messages", chat_template=tiny.CHATML_BOS)
    tiny.model_folder(folder / "text", chat_template=None, seed=1)
    words = tiny.tokenizer(chat_template=None)
    words.add_special_tokens({"mask_token": "<mask>", "pad_token": "<pad>"})
    tiny.bert(vocab_size=len(words)).save_pretrained(folder / "mlm")
    words.save_pretrained(folder / "mlm")
    return folder


@pytest.fixture(scope="module")
def new_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite store with its tables."""
    import mlflow

    path = tmp_path_factory.mktemp("new") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("server"), free_port()) as uri:
        yield uri


@pytest.fixture
def runs(tmp_path: Path, new_store: Path) -> Path:
    """A ``checkpoint.dir`` with its own store."""
    shutil.copy(new_store, tmp_path / "mlflow.db")
    return tmp_path


def finished_run(
    runs: Path, export: Path, *, name: str = "first", tracked: bool = True, **sections: Any
) -> tuple[RunPlan, TrainResult]:
    """The folder of a run that has ended, with an export and a record in its MLflow store."""
    folder = runs / name
    (folder / CHECKPOINT).mkdir(parents=True)
    cfg = sample.config(**sections)
    kind = export.name
    data = sample.data().model_copy(update={"format": "text" if kind == "mlm" else kind})
    plan = sample.run_plan(folder, config=cfg, data=data)
    if tracked:
        run = tracking.open_run(cfg, name, runs)
        assert run is not None
        plan = run.attach(plan)
    add_export(folder / "export", export)
    result = sample.result(folder, run_id=plan.tracking.run_id if plan.tracking else None)
    storage.write_text(folder / "plan.json", plan.model_dump_json())
    storage.write_text(folder / "result.json", result.model_dump_json())
    return plan, result


def add_export(target: Path, source: Path, kind: str = "export") -> None:
    shutil.copytree(source, target)
    entries = [entry.model_dump() for entry in storage.entries(target)]
    storage.write_manifest(target, {"files": entries, KIND: kind, DATA_FORMAT: source.name})


def use(plan: RunPlan) -> Any:
    """MLflow as a user has it who works with the store of a run."""
    import mlflow

    assert plan.tracking is not None
    mlflow.set_tracking_uri(plan.tracking.uri)
    return mlflow.MlflowClient()


def load(uri: str) -> Any:
    import mlflow

    return mlflow.pyfunc.load_model(uri)


def content(answers: list[Any]) -> str:
    return str(answers[0]["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def expected(exports: Path) -> str:
    """The answer to QUESTION by ``generate``."""
    found = llm.generate(str(exports / "messages"), [QUESTION["messages"]], max_new_tokens=6)
    assert found[0]
    return found[0]


def test_a_chat_model_is_logged_registered_and_answers(
    runs: Path, exports: Path, expected: str
) -> None:
    import mlflow

    plan, result = finished_run(
        runs, exports / "messages", tracking={"register_as": "answers@champion"}
    )
    kept = registry.log_trained(plan, result)
    assert kept.registered == "models:/answers/1"
    assert kept == llm.load(str(runs / "first")), "the run folder has it, too"
    assert not mlflow.is_tracking_uri_set(), "MLflow is as the user had it"
    assert "MLFLOW_REGISTRY_URI" not in os.environ
    client = use(plan)
    assert mlflow.get_registry_uri() == plan.tracking.uri
    for uri in (kept.registered, "models:/answers@champion", kept.model_uri):
        answers = load(uri).predict(QUESTION)
        assert content(answers) == expected, uri
    # A template that writes BOS itself: with one more from the tokenizer these would be 19.
    assert answers[0]["usage"] == {
        "prompt_tokens": 18,
        "completion_tokens": 6,
        "total_tokens": 24,
    }
    assert answers[0]["choices"][0]["finish_reason"] == "length"
    assert answers[0]["model"] == "first"
    run = client.get_run(plan.tracking.run_id)
    assert run.info.status == "RUNNING", "whoever opened it ends it"
    assert "max_tokens" not in run.data.params
    if compat.at_least("mlflow-skinny", "3"):
        (logged,) = client.search_logged_models([plan.tracking.experiment_id])
        assert (logged.source_run_id, str(logged.status)) == (plan.tracking.run_id, "READY")


def test_what_is_logged_says_where_it_comes_from(runs: Path, exports: Path) -> None:
    sections = {
        "tracking": {"log_model": "final"},
        "train": {"sample_prompts": ["who are you?"]},
        "cluster": {"env": {"SOME_SETTING": "1"}},
    }
    plan, result = finished_run(runs, exports / "messages", **sections)
    kept = registry.log_trained(plan, result)
    assert kept.registered is None
    use(plan)
    import mlflow

    info = mlflow.models.get_model_info(kept.model_uri)
    assert set(info.flavors) == {"python_function", "transformers"}
    assert info.run_id == plan.tracking.run_id
    lineage = {
        "dbx_llmtrain_run_id": plan.tracking.run_id,
        "dbx_llmtrain_run_name": "first",
        "dbx_llmtrain_run_dir": str(runs / "first"),
        "dbx_llmtrain_checkpoint": str(runs / "first" / CHECKPOINT),
        "dbx_llmtrain_base_model": "/models/tiny",
        "dbx_llmtrain_base_fingerprint": "f00d" * 8,
        "dbx_llmtrain_data_fingerprint": "f00d" * 8,
        "dbx_llmtrain_data": "train: /data/train.jsonl; eval: /data/eval.jsonl",
    }
    assert info.metadata == {**lineage, "task": "llm/v1/chat"}
    assert {"messages", "max_tokens"} <= set(info.signature.inputs.input_names())
    assert info.signature.outputs is not None, "Unity Catalog asks for it"
    folder = Path(mlflow.artifacts.download_artifacts(kept.model_uri))
    assert (folder / "config.yaml").read_text() == plan.config.to_yaml()
    example = json.loads((folder / "input_example.json").read_text())
    assert example["messages"] == [{"role": "user", "content": "who are you?"}]
    needed = (folder / "requirements.txt").read_text().split()
    pinned = dict(line.split("==") for line in needed)
    assert {"mlflow", "torch", "transformers", "accelerate"} == set(pinned)
    assert pinned["transformers"] == str(compat.installed("transformers"))
    assert "+" not in "".join(needed), "torch's local part is no version of an index"
    assert not (folder / "LICENSE.txt").exists()
    code = [path.name for path in (folder / "code").iterdir()]
    assert len(code) == 1
    assert "dbx_llmtrain" not in (folder / "code" / code[0]).read_text()
    pipeline = mlflow.transformers.load_model(kept.model_uri)
    assert pipeline.tokenizer.chat_template == tiny.CHATML_BOS


def test_above_the_limit_a_model_is_logged_from_disk(
    runs: Path, exports: Path, expected: str
) -> None:
    import mlflow

    plan, result = finished_run(runs, exports / "messages")
    weights = (runs / "first/export/model.safetensors").stat().st_size
    assert model_package.pack(runs / "first/export", plan, result).from_disk is False
    assert not model_package.pack(runs / "first/export", plan, result, limit=weights).from_disk
    found = registry.register(result, "answers", limit=weights - 1)
    assert found.flavor == "python_function"
    use(plan)
    info = mlflow.models.get_model_info(found.uri)
    assert set(info.flavors) == {"python_function"}
    assert info.metadata["task"] == "llm/v1/chat"
    model = load(found.uri)
    assert content(model.predict(QUESTION)) == expected
    folder = Path(mlflow.artifacts.download_artifacts(found.uri))
    for path in (runs / "first/export").iterdir():
        assert (folder / "data/export" / path.name).read_bytes() == path.read_bytes()
    needed = (folder / "requirements.txt").read_text()
    assert f"transformers=={compat.installed('transformers')}" in needed
    assert "dbx" not in needed


@pytest.mark.parametrize("limit", [None, 0])
def test_a_model_of_texts_goes_on_with_them(runs: Path, exports: Path, limit: int | None) -> None:
    plan, result = finished_run(runs, exports / "text")
    prompts = ["the cat sat", "what is"]
    expected = llm.generate(result, prompts, max_new_tokens=5)
    found = registry.register(result, "texts", limit=limit)
    use(plan)
    model = load(found.uri)
    assert model.predict(prompts, params={"max_tokens": 5}) == expected.texts
    assert model.predict("the cat sat", params={"max_tokens": 5}) == expected.texts[:1]
    assert "task" not in model.metadata.metadata


@pytest.mark.parametrize("limit", [None, 0])
def test_a_model_for_masked_tokens_is_logged_as_one(
    runs: Path, exports: Path, limit: int | None
) -> None:
    from transformers import pipeline

    plan, result = finished_run(
        runs, exports / "mlm", data={"train": "/d.jsonl", "objective": "mlm"}
    )
    text = "the <mask> sat"
    best = pipeline("fill-mask", model=str(exports / "mlm"), device="cpu")(text, top_k=1)
    found = registry.register(result, "masked", limit=limit)
    use(plan)
    assert load(found.uri).predict([text, text]) == [best[0]["token_str"].strip()] * 2
    with pytest.raises(ValueError, match="expected a text with <mask> in it, found 'no'"):
        load(found.uri).predict("no")


def test_a_server_gets_a_model_once(
    server: str, tmp_path: Path, exports: Path, expected: str
) -> None:
    import mlflow

    mlflow.set_tracking_uri(server)
    plan, _ = finished_run(tmp_path, exports / "messages")
    first = llm.register(str(tmp_path / "first"), "answers@champion")
    assert mlflow.get_tracking_uri() == server
    second = llm.register(str(tmp_path / "first"), "answers", alias="challenger")
    assert (first.version, second.version) == ("1", "2")
    assert (first.alias, second.alias) == ("champion", "challenger")
    assert second.flavor == "transformers"
    for uri in ("models:/answers@champion", "models:/answers@challenger", second.uri):
        assert content(load(uri).predict(QUESTION)) == expected
    client = mlflow.MlflowClient()
    one, two = (client.get_model_version("answers", number) for number in ("1", "2"))
    assert one.source == two.source, "it was logged once"
    assert one.tags == two.tags == first.tags
    assert one.tags["dbx_llmtrain_checkpoint"] == str(tmp_path / "first" / CHECKPOINT)
    assert one.run_id == two.run_id == plan.tracking.run_id


def test_the_best_model_is_logged_where_that_is_asked_for(runs: Path, exports: Path) -> None:
    sections = {
        "tracking": {"log_model": "best", "register_as": "best"},
        "checkpoint": {"keep_best": 1},
        "data": {"train": "/d.jsonl", "eval": "/e.jsonl"},
        "train": {"eval_every": 1},
    }
    plan, result = finished_run(runs, exports / "messages", **sections)
    add_export(runs / "first/export-best", exports / "messages")
    best = {
        "best_model_path": str(runs / "first/export-best"),
        "best_checkpoint": str(runs / "first/checkpoints/step-00000002"),
    }
    kept = registry.log_trained(plan, result.model_copy(update=best))
    client = use(plan)
    tags = client.get_model_version("best", "1").tags
    assert tags["dbx_llmtrain_checkpoint"] == best["best_checkpoint"]
    assert kept.model_uri


def test_any_export_in_a_run_folder_can_be_registered(runs: Path, exports: Path) -> None:
    plan, _ = finished_run(runs, exports / "messages")
    export = runs / "first/export-step-00000003"
    add_export(export, exports / "messages")
    found = registry.register(str(export), "early")
    assert found.tags["dbx_llmtrain_checkpoint"] == str(runs / "first" / CHECKPOINT)
    assert llm.load(str(runs / "first")).model_uri is None, "that is not the run's model"
    use(plan)
    assert content(load(found.uri).predict(QUESTION))


def test_an_export_elsewhere_and_in_another_type_can_be_registered(
    runs: Path, exports: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan, _ = finished_run(runs, exports / "messages")
    checkpoint = str(runs / "first" / CHECKPOINT)
    there = tmp_path / "exported"
    shutil.copytree(exports / "messages", there)
    model = AutoModelForCausalLM.from_pretrained(there).to(torch.bfloat16)
    model.save_pretrained(there)
    entries = [entry.model_dump() for entry in storage.entries(there)]
    told = {KIND: "export", RUN_DIR: str(runs / "first"), "checkpoint": checkpoint}
    storage.write_manifest(there, {"files": entries, **told})
    capfd.readouterr()
    found = registry.register(str(there), "early")
    assert found.tags["dbx_llmtrain_checkpoint"] == checkpoint
    said = capfd.readouterr()
    for noise in ("Loading weights", "Writing model shards", "Successfully", "Created version"):
        assert noise not in said.out + said.err
    use(plan)
    assert content(load(found.uri).predict(QUESTION))
    (runs / "first/plan.json").unlink()
    with pytest.raises(ConfigError, match=r"is of the run in .*first: there is no plan.json any"):
        registry.register(str(there), "early")


def test_a_checkpoint_is_exported_before_it_is_registered(runs: Path, exports: Path) -> None:
    finished_run(runs, exports / "messages")
    checkpoint = runs / "first" / CHECKPOINT
    with pytest.raises(CheckpointError) as caught:
        registry.register(str(checkpoint), "early")
    export = runs / "first" / f"export-{checkpoint.name}"
    assert str(caught.value).endswith(
        f"with dbx-llmtrain export {checkpoint}, then dbx-llmtrain register {export} NAME"
    )
    (runs / "first/plan.json").unlink()
    with pytest.raises(CheckpointError, match="and not in the folder of its run: register an exp"):
        registry.register(str(checkpoint), "early")


def test_a_run_without_mlflow_gets_a_run(runs: Path, exports: Path) -> None:
    finished_run(runs, exports / "messages", tracked=False)
    found = registry.register(str(runs / "first"), "late")
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{runs}/mlflow.db")
    run = mlflow.MlflowClient().get_run(found.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert found.tracking_uri == f"sqlite:///{runs}/mlflow.db"


def test_a_run_that_was_opened_for_a_model_fails_with_it(
    runs: Path, exports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    finished_run(runs, exports / "messages", tracked=False)
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(RegistryError, match=r"registering .* as late failed: MlflowException"):
        registry.register(str(runs / "first"), "late")
    monkeypatch.delenv("MLFLOW_REGISTRY_URI")
    mlflow.set_tracking_uri(f"sqlite:///{runs}/mlflow.db")
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert run.info.status == "FAILED"


def test_a_store_that_cannot_be_used_is_told(
    tmp_path: Path, exports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_run(tmp_path, exports / "messages", tracked=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/nowhere/mlflow.db")
    with pytest.raises(RegistryError, match="no MLflow store that can be used"):
        registry.register(str(tmp_path / "first"), "late")


@pytest.mark.parametrize("fault", ["registry", "run", "export"])
def test_a_failure_leaves_the_run_its_result(
    runs: Path,
    exports: Path,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import mlflow

    plan, result = finished_run(runs, exports / "messages", tracking={"register_as": "lost@new"})
    before = (runs / "first/result.json").read_bytes()
    told = {"registry": "MlflowException", "run": "deleted-run", "export": "no complete export"}
    if fault == "registry":
        monkeypatch.setenv("MLFLOW_REGISTRY_URI", f"http://127.0.0.1:{free_port()}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    elif fault == "run":
        gone = plan.tracking.model_copy(update={"run_id": "deleted-run"})
        plan = plan.model_copy(update={"tracking": gone})
    else:
        (runs / "first/export" / storage.MANIFEST).unlink()
    with caplog.at_level(logging.ERROR, logger="dbx_llmtrain"):
        assert registry.log_trained(plan, result) == result
    (record,) = [each for each in caplog.records if each.name == registry.__name__]
    assert told[fault] in record.message
    assert f"dbx-llmtrain register {runs}/first lost --alias new" in record.message
    assert (runs / "first/result.json").read_bytes() == before
    assert not mlflow.is_tracking_uri_set()


def test_nothing_is_logged_unless_that_is_asked_for(runs: Path, exports: Path) -> None:
    plan, result = finished_run(runs, exports / "messages")
    assert registry.log_trained(plan, result) is result
    run = use(plan).get_run(plan.tracking.run_id)
    assert "mlflow.log-model.history" not in run.data.tags


def test_names_and_models_that_cannot_be_are_refused(runs: Path, exports: Path) -> None:
    _, result = finished_run(runs, exports / "messages")
    add_export(runs / "first/adapter", exports / "messages", kind="adapter")
    with pytest.raises(ConfigError, match=r"name: expected a model's name.*found 'a/b'"):
        registry.register(result, "a/b")
    with pytest.raises(ConfigError, match=r"an alias of letters.*found 'a@v2'"):
        registry.register(result, "a", alias="v2")
    with pytest.raises(ConfigError, match=f"an export of a run, found {exports}/text"):
        registry.register(str(exports / "text"), "a")
    with pytest.raises(
        CheckpointError, match=r"adapter by itself: register the whole model, .*/export"
    ):
        registry.register(str(runs / "first/adapter"), "a")
    with pytest.raises(CheckpointError, match=r"there is no such folder|is no complete export"):
        registry.register(str(runs / "first/nothing"), "a")
    (runs / "first/result.json").unlink()
    with pytest.raises(CheckpointError, match="is not finished"):
        registry.register(str(runs / "first"), "a")


def test_faults_show_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.check(sample.config())
    registry.check(sample.config(tracking={"register_as": "answers"}))
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "databricks-uc")
    registry.check(sample.config(tracking={"register_as": "main.ml.answers@new"}))
    with pytest.raises(ConfigError, match=r"register_as: expected catalog.schema.model for Unity"):
        registry.check(sample.config(tracking={"register_as": "answers"}))
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "databricks")
    registry.check(sample.config(tracking={"register_as": "answers"}))
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"log_model: needs pandas on the driver: pip install"):
        registry.check(sample.config(tracking={"log_model": "final"}))


@pytest.mark.parametrize("refuse_tags", [False, True])
def test_unity_catalog_gets_a_model(
    runs: Path,
    exports: Path,
    refuse_tags: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """MLflow's own client, as far as a server on this machine can stand in for the catalog."""
    plan, result = finished_run(runs, exports / "messages")
    with unity_catalog.catalog() as known:
        known.refuse_tags = refuse_tags
        for key, value in {**unity_catalog.USE_SDK, "DATABRICKS_HOST": known.url}.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setenv("DATABRICKS_TOKEN", "t0ken-of-a-test")
        # MLflow 2's own choice on Databricks; three names mean Unity Catalog.
        monkeypatch.setenv("MLFLOW_REGISTRY_URI", "databricks")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        found = registry.register(result, "main.ml.answers", alias="champion")
        assert os.environ["MLFLOW_REGISTRY_URI"] == "databricks"
        monkeypatch.setenv("MLFLOW_REGISTRY_URI", "databricks-uc")
        with pytest.raises(ConfigError, match=r"name: expected catalog.schema.model for Unity"):
            registry.register(result, "answers")
        use(plan)
        answers = load("models:/main.ml.answers@champion").predict(QUESTION)
    assert content(answers) == expected
    assert (found.uri, found.version) == ("models:/main.ml.answers/1", "1")
    assert known.versions["1"]["status"] == "READY"
    assert known.aliases == {"champion": "1"}
    sent = {name.removeprefix("Models/main/ml/answers/1/") for name in known.files}
    assert {"MLmodel", "config.yaml", "model/model.safetensors"} <= sent
    if refuse_tags:
        assert found.tags == known.tags == {}
        assert "version 1 has not all its tags" in caplog.text
        return
    assert known.tags == found.tags
    assert known.tags["dbx_llmtrain_checkpoint"] == result.checkpoint
    assert not [key for key in known.tags if set(key) & set(".,-=/:")], "the catalog refuses those"


def test_an_alias_that_is_refused_names_the_version(
    runs: Path, exports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, result = finished_run(runs, exports / "messages")
    with unity_catalog.catalog() as known:
        known.refuse_aliases = True
        for key, value in {**unity_catalog.USE_SDK, "DATABRICKS_HOST": known.url}.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setenv("DATABRICKS_TOKEN", "t0ken-of-a-test")
        monkeypatch.setenv("MLFLOW_REGISTRY_URI", "databricks-uc")
        with pytest.raises(RegistryError, match="version 1 is there, but setting its alias new"):
            registry.register(result, "main.ml.answers", alias="new")


def test_custom_code_travels_with_its_model(runs: Path, tmp_path: Path) -> None:
    made = tiny.custom_folder(tmp_path / "made" / "text")
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"use_cache": False}))
    generation = {"use_cache": False, "eos_token_id": 2, "bos_token_id": 1}
    (made / "generation_config.json").write_text(json.dumps(generation))
    sections = {"model": {"source": "/models/own", "trust_remote_code": True}}
    plan, result = finished_run(runs, made, **sections)
    expected = llm.generate(result, ["the cat"], max_new_tokens=4)
    use(plan)
    for name, limit in (("loaded", None), ("disk", 0)):
        found = registry.register(str(runs / "first/export"), name, limit=limit)
        with private_modules(tmp_path, wanted=True):
            answers = load(found.uri).predict("the cat", params={"max_tokens": 4})
        assert answers == expected.texts
        result = llm.load(str(runs / "first"))
        kept = result.model_copy(update={"model_uri": None})
        storage.write_text(runs / "first/result.json", kept.model_dump_json())


def test_packages_that_a_model_needs_are_pinned(tmp_path: Path) -> None:
    assert not [line for line in model_package.requirements(tmp_path) if "sentencepiece" in line]
    (tmp_path / "tokenizer.model").touch()
    (tmp_path / "modeling.py").write_text("import yaml\nfrom .other import x\nimport no_such\n")
    assert not [line for line in model_package.requirements(tmp_path) if "YAML" in line]
    found = model_package.requirements(tmp_path, trusted=True)
    assert f"PyYAML=={compat.installed('PyYAML')}" in found


def test_secrets_do_not_travel(runs: Path, exports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "h1dden-word")
    sections = {"cluster": {"env": {"A": "x h1dden-word"}}}
    plan, result = finished_run(runs, exports / "messages", tracked=False, **sections)
    data = plan.data.model_copy(update={"sources": {"train": "https://u:pw1234567@host/x.jsonl"}})
    plan = plan.model_copy(update={"data": data})
    package = model_package.pack(runs / "first/export", plan, result)
    assert "h1dden-word" not in package.config
    assert "pw1234567" not in str(package.lineage)


@pytest.mark.slow
def test_a_model_is_served_without_this_package(runs: Path, exports: Path, expected: str) -> None:
    plan, result = finished_run(runs, exports / "messages")
    found = registry.register(result, "answers")
    program = f"""
import sys, warnings
warnings.simplefilter("ignore")
sys.modules["dbx_llmtrain"] = None
import mlflow
mlflow.set_tracking_uri({plan.tracking.uri!r})
model = mlflow.pyfunc.load_model({found.uri!r})
assert "torch" not in sys.modules, "loaded before it is asked"
print("ANSWER", ascii(model.predict({QUESTION!r})[0]["choices"][0]["message"]["content"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=runs, capture_output=True, text=True, timeout=200
    )
    assert f"ANSWER {expected!a}" in done.stdout, done.stderr[-3000:]
