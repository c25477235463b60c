"""Exports of checkpoints, in one process, against those of the runs that wrote them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dbx_llmtrain as llm
from dbx_llmtrain import storage
from dbx_llmtrain.driver import run_folder
from dbx_llmtrain.driver.exporting import find_checkpoint
from dbx_llmtrain.driver.sources import resolve_model
from dbx_llmtrain.errors import CheckpointError, ConfigError
from dbx_llmtrain.model_sections import ModelConfig, ParallelConfig
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.text.prepared import Example
from dbx_llmtrain.worker.main import run
from dbx_llmtrain.worker.model import load_tokenizer
from dbx_llmtrain.worker.saving import saving
from dbx_llmtrain.worker.world import open_world
from tests import sample, tiny, words
from tests.dist import plans
from tests.dist.launch import some_slow, two_ranks
from tests.dist.test_main_data import masked_plan
from tests.hub_server import TOKEN, serving, with_hub

pytestmark = pytest.mark.dist

ALL_PARTITIONED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
PARALLEL = {
    "ddp": ParallelConfig(kind="ddp"),
    "fsdp": ParallelConfig(kind="fsdp"),
    "lora": ParallelConfig(kind="fsdp"),
    "zero2": ParallelConfig(kind="deepspeed", stage=2),
    "zero3": ParallelConfig(kind="deepspeed", stage=3, config=ALL_PARTITIONED),
}
QUICK = ("ddp", "fsdp", "lora", "zero3")
CHATS = [
    ("the cat", "sat on the mat"),
    ("what is it?", "forty two."),
    ("hello world", "how are you today?"),
]
STEPS = 40


def rows(folder: Path) -> list[Example]:
    """The conversations as a model of the folder is trained on them."""
    tokenizer = load_tokenizer(folder)
    return [words.encode(tokenizer, words.chat(*chat)) for chat in CHATS]


def chat_plan(folder: Path, name: str, **changes: Any) -> RunPlan:
    """A plan that teaches a tiny model to answer, with a checkpoint halfway."""
    model = folder / f"model-{name}"
    tiny.model_folder(model, tied=name in ("ddp", "zero2"))
    if name in ("fsdp", "zero3"):
        _halved(model)
    settings: dict[str, Any] = {"max_steps": STEPS, "learning_rate": 1e-2, "eval_every": STEPS}
    settings |= changes.pop("train", {})
    plan = plans.plan(
        folder, name, train=settings, every=20, rows=rows(model), model=model, **changes
    )
    plan = plan.model_copy(update={"data": plan.data.model_copy(update={"format": "messages"})})
    return with_model(plan, lora={"r": 4}) if name == "lora" else plan


def _halved(folder: Path) -> None:
    """The folder's weights in bf16, as most models are published."""
    weights = load_file(folder / "model.safetensors")
    halves = {name: tensor.bfloat16() for name, tensor in weights.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    content["dtype" if "dtype" in content else "torch_dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(content))


def with_model(plan: RunPlan, **fields: Any) -> RunPlan:
    """The plan with these fields of its model section, and its source as it is."""
    config = sample.config(
        model={"source": plan.model.source} | fields,
        train=plan.config.train,
        checkpoint=plan.config.checkpoint,
        data=plan.config.data,
    )
    return plan.model_copy(update={"config": config})


def started(plan: RunPlan) -> RunPlan:
    """The plan, as the driver leaves it in the run folder."""
    run_folder.write_start(plan)
    return plan


def same_files(first: Path, second: Path) -> bool:
    """Whether two folders have the same files, byte by byte. (The manifest of one that was made of
    a checkpoint names it besides.)"""
    names = [
        [path.relative_to(folder) for path in storage.list_files(folder)]
        for folder in (first, second)
    ]
    manifests = [storage.read_manifest(folder) or {} for folder in (first, second)]
    told = [{**manifest, "checkpoint": None} for manifest in manifests]
    return (
        names[0] == names[1]
        and told[0] == told[1]
        and all(
            (first / name).read_bytes() == (second / name).read_bytes()
            for name in names[0]
            if str(name) != storage.MANIFEST
        )
    )


class Runs(Mapping[str, RunPlan]):
    """A run of two ranks for each strategy, over; those of a launch are made when one of them is
    first asked for. (DeepSpeed keeps the process group that it has seen first.)"""

    LAUNCHES = (("ddp", "fsdp", "lora"), ("zero2",), ("zero3",))

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: dict[str, RunPlan] = {}

    def __getitem__(self, name: str) -> RunPlan:
        if name not in self._done:
            self._launch(next(names for names in self.LAUNCHES if name in names))
        return self._done[name]

    def _launch(self, names: tuple[str, ...]) -> None:
        places = [self._folder / f"{name}-plan" for name in names]
        for name, place in zip(names, places, strict=True):
            parallel = PARALLEL[name]
            plan = chat_plan(
                self._folder, name, strategy=parallel.kind, parallel=parallel, world_size=2
            )
            self._done[name] = started(plan)
            place.mkdir()
            for rank in (0, 1):
                (place / f"plan-{rank}.json").write_text(plan.model_dump_json())
        two_ranks(self._folder, places, dict(os.environ))
        for place in places:
            outcome = json.loads((place / "outcome-0.json").read_text())
            assert outcome.get("steps") == STEPS, outcome

    def __iter__(self) -> Iterator[str]:
        return iter(PARALLEL)

    def __len__(self) -> int:
        return len(PARALLEL)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, RunPlan]:
    """See ``Runs``."""
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", some_slow(PARALLEL, QUICK))
def test_c94_c96_c100_c101_a_checkpoint_gives_the_export_of_the_run_that_wrote_it(
    runs: Mapping[str, RunPlan], name: str, tmp_path: Path
) -> None:
    run_dir = Path(runs[name].run_dir)
    found = llm.export(str(run_dir), str(tmp_path / "again"))
    assert same_files(tmp_path / "again", run_dir / "export")
    assert (found.step, found.adapter, found.hub) == (STEPS, False, None)
    assert found.source == str(storage.checkpoint_folder(run_dir, STEPS))
    assert found.dtype == ("bf16" if name in ("fsdp", "zero3") else "fp32")
    assert found.bytes == sum(path.stat().st_size for path in (tmp_path / "again").rglob("*"))
    keys = load_file(tmp_path / "again" / "model.safetensors").keys()
    assert ("lm_head.weight" in keys) is (name not in ("ddp", "zero2"))


def test_c102_an_adapter_by_itself_is_that_of_the_run(
    runs: Mapping[str, RunPlan], tmp_path: Path
) -> None:
    run_dir = Path(runs["lora"].run_dir)
    found = llm.export(str(run_dir), str(tmp_path / "again"), merge=False)
    assert same_files(tmp_path / "again", run_dir / "adapter")
    assert (found.adapter, found.dtype) == (True, "fp32")


@pytest.mark.parametrize("name", some_slow([name for name in PARALLEL if name != "lora"], QUICK))
def test_c98_an_overfitted_model_stops_by_itself(runs: Mapping[str, RunPlan], name: str) -> None:
    found = llm.generate(runs[name].run_dir, [question for question, _ in CHATS], max_new_tokens=20)
    assert found.texts == [answer for _, answer in CHATS]
    assert all(sample.stopped and sample.tokens < 20 for sample in found.samples)


def test_an_adapter_answers_as_the_merged_model(runs: Mapping[str, RunPlan]) -> None:
    run_dir = Path(runs["lora"].run_dir)
    asked = [question for question, _ in CHATS]
    merged, adapter = (
        llm.generate(str(run_dir / folder), asked, max_new_tokens=20)
        for folder in ("export", "adapter")
    )
    assert merged.samples == adapter.samples
    assert adapter.model == str(run_dir / "adapter")


def test_an_adapter_without_its_base_is_refused(
    runs: Mapping[str, RunPlan], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(Path(runs["lora"].run_dir) / "adapter", tmp_path / "adapter"))
    content = json.loads((folder / "adapter_config.json").read_text())
    content["base_model_name_or_path"] = str(tmp_path / "gone")
    (folder / "adapter_config.json").write_text(json.dumps(content))
    expected = r"the base of the adapter .*gone cannot be opened: .* Use the run's merged export"
    with pytest.raises(ConfigError, match=expected):
        llm.generate(str(folder), ["the cat"])


def test_c100_the_type_is_the_one_that_is_asked_for(
    runs: Mapping[str, RunPlan], tmp_path: Path
) -> None:
    run_dir = Path(runs["fsdp"].run_dir)
    found = {
        dtype: llm.export(str(run_dir), str(tmp_path / dtype), dtype=dtype)
        for dtype in ("fp32", "fp16", "bf16")
    }
    weights = {
        dtype: load_file(Path(export.path) / "model.safetensors") for dtype, export in found.items()
    }
    types = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    for dtype, tensors in weights.items():
        assert found[dtype].dtype == dtype
        content = json.loads((tmp_path / dtype / "config.json").read_text())
        said = content.get("dtype") or content["torch_dtype"]
        assert said == str(types[dtype]).removeprefix("torch.")
        for name, tensor in tensors.items():
            assert tensor.dtype == types[dtype]
            assert torch.equal(tensor, weights["fp32"][name].to(types[dtype]))
    assert same_files(tmp_path / "bf16", run_dir / "export")


def test_an_adapter_in_another_type(runs: Mapping[str, RunPlan], tmp_path: Path) -> None:
    run_dir = runs["lora"].run_dir
    found = llm.export(run_dir, str(tmp_path / "half"), merge=False, dtype="bf16")
    assert found.dtype == "bf16"
    halves = load_file(tmp_path / "half" / "adapter_model.safetensors")
    whole = load_file(Path(run_dir) / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(halves[name], whole[name].bfloat16()) for name in whole)


def test_an_older_checkpoint_goes_into_a_folder_with_its_step(
    runs: Mapping[str, RunPlan], tmp_path: Path
) -> None:
    run_dir = copy_of(runs["ddp"], tmp_path)
    older = storage.checkpoint_folder(run_dir, 20)
    found = llm.export(str(older))
    assert (found.path, found.step) == (str(run_dir / "export-step-00000020"), 20)
    last = load_file(run_dir / "export" / "model.safetensors")
    earlier = load_file(Path(found.path) / "model.safetensors")
    assert not torch.equal(last["model.norm.weight"], earlier["model.norm.weight"])
    # The newest one goes where the run's own is, in its place; a result means its last one.
    before = load_file(run_dir / "export" / "model.safetensors")
    result = sample.result(run_dir, checkpoint=str(storage.checkpoint_folder(run_dir, STEPS)))
    again = llm.export(result, dtype="bf16")
    assert (again.path, again.step, again.dtype) == (str(run_dir / "export"), STEPS, "bf16")
    after = load_file(run_dir / "export" / "model.safetensors")
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"].bfloat16())


def copy_of(plan: RunPlan, folder: Path) -> Path:
    """A copy of a run's folder, to be changed."""
    return Path(shutil.copytree(plan.run_dir, folder / "run"))


def test_what_is_no_checkpoint_is_refused(runs: Mapping[str, RunPlan], tmp_path: Path) -> None:
    run_dir = copy_of(runs["ddp"], tmp_path)

    def refused(given: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            find_checkpoint(given)
        return str(caught.value)

    assert "there is no folder" in refused(tmp_path / "nowhere")
    assert "which holds a model already" in refused(run_dir / "export")
    assert "expected a run folder (with plan.json)" in refused(tmp_path)
    assert "has left no checkpoint" in refused(sample.result(run_dir, checkpoint=None))
    for found in storage.checkpoints(run_dir):
        (found / ".metadata").unlink()
        assert "is no complete checkpoint" in refused(found)
    assert "has no complete checkpoint yet" in refused(run_dir)
    with pytest.raises(ConfigError, match="checkpoint: expected a TrainResult, or the path"):
        llm.export(None)  # type: ignore[arg-type]


def test_a_damaged_checkpoint_is_not_exported(runs: Mapping[str, RunPlan], tmp_path: Path) -> None:
    run_dir = copy_of(runs["ddp"], tmp_path)
    path = sorted(storage.checkpoint_folder(run_dir, STEPS).glob("*.distcp"))[0]
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{path.name} is damaged"):
        llm.export(str(run_dir), str(tmp_path / "export"))
    assert not (tmp_path / "export").exists()


def test_a_checkpoint_without_its_run_is_refused(
    runs: Mapping[str, RunPlan], tmp_path: Path
) -> None:
    run_dir = copy_of(runs["ddp"], tmp_path)
    (run_dir / "plan.json").write_text('{"attempt": 1}')
    with pytest.raises(CheckpointError, match="another version of dbx_llmtrain may have written"):
        llm.export(str(run_dir))
    (run_dir / "plan.json").unlink()
    with pytest.raises(CheckpointError, match="a checkpoint is read in its run folder"):
        llm.export(str(run_dir))


@pytest.mark.parametrize("name", ["ddp", "lora"])
def test_the_model_that_a_run_started_from_has_to_be_there(
    runs: Mapping[str, RunPlan], name: str, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(runs[name].model.artifact.source, tmp_path / "base"))
    run_dir = copy_of(runs[name], tmp_path)
    artifact = runs[name].model.artifact.model_copy(update={"source": str(base)})
    info = runs[name].model.model_copy(update={"artifact": artifact})
    plan = runs[name].model_copy(update={"model": info, "run_dir": str(run_dir)})
    started(plan)
    # The weights that it started from are needed under an adapter only.
    weights = base / "model.safetensors"
    weights.rename(tmp_path / "kept")
    target = tmp_path / "export"
    if name == "lora":
        with pytest.raises(CheckpointError, match=r"gone: there is no .*model\.safetensors"):
            llm.export(str(run_dir), str(target))
        other = load_file(tmp_path / "kept")
        other["model.norm.weight"][3] += 1
        save_file(other, weights, metadata={"format": "pt"})
        with pytest.raises(
            CheckpointError, match=r"model\.safetensors is not the file that the run"
        ):
            llm.export(str(run_dir), str(target))
    else:
        assert llm.export(str(run_dir), str(target)).step == STEPS
    weights.unlink(missing_ok=True)
    (tmp_path / "kept").rename(weights)
    (base / "tokenizer.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"Put .* back there; .* llm\.plan with .*config.yaml"
    ):
        llm.export(str(run_dir), str(target))
    assert target.exists() is (name == "ddp")


def test_a_target_with_other_files_is_refused(runs: Mapping[str, RunPlan], tmp_path: Path) -> None:
    run_dir, target = runs["ddp"].run_dir, tmp_path / "export"
    target.mkdir()
    llm.export(run_dir, str(target))
    llm.export(run_dir, str(target), dtype="bf16")  # (an earlier export is replaced)
    (target / "notes.txt").write_text("mine")
    with pytest.raises(
        CheckpointError, match=r"holds files that are not .*export: notes\.txt\. Give"
    ):
        llm.export(run_dir, str(target))
    assert (target / "notes.txt").read_text() == "mine"
    assert load_file(target / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    # Neither is a checkpoint, nor a staged model, although each has a manifest.
    model = Path(runs["ddp"].model.artifact.source)
    for other in (storage.checkpoint_folder(Path(run_dir), STEPS), model):
        with pytest.raises(CheckpointError, match="holds files that are not of an earlier export"):
            llm.export(run_dir, str(other))
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(CheckpointError, match="is a file: expected a folder"):
        llm.export(run_dir, str(file))
    with pytest.raises(CheckpointError, match="cannot be written"):
        llm.export(run_dir, str(file / "export"))
    assert not list(Path(runs["ddp"].local_dir or "").glob("export-*"))


def test_arguments_that_cannot_be_are_refused_together(
    runs: Mapping[str, RunPlan], tmp_path: Path
) -> None:
    run_dir = runs["ddp"].run_dir
    with pytest.raises(ConfigError) as caught:
        llm.export(run_dir, "s3://bucket/export", dtype="int8", push_to_hub="no name")
    text = str(caught.value)
    assert "3 problems" in text
    assert "dtype: expected one of fp32, bf16, fp16, or nothing for the source's" in text
    assert "target: expected a path that the driver and every node can open" in text
    assert "push_to_hub: expected ORG/NAME, found 'no name'" in text
    with pytest.raises(ConfigError, match="target: is empty"):
        llm.export(run_dir, " ")
    with pytest.raises(ConfigError, match=r"merge: the run trained no adapter"):
        llm.export(run_dir, merge=False)


# Kinds of models, each of one process


def exported_again(plan: RunPlan, folder: Path) -> bool:
    """Whether the checkpoint of a run gives the same files as the run."""
    run(started(plan))
    found = llm.export(plan.run_dir, str(folder / "again"))
    return same_files(Path(found.path), Path(plan.run_dir) / "export")


def test_c94_a_model_for_masked_tokens_is_exported_as_such(tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM

    plan = masked_plan(tmp_path, train={"max_steps": 2})
    assert exported_again(plan, tmp_path)
    model, report = AutoModelForMaskedLM.from_pretrained(
        tmp_path / "again", output_loading_info=True
    )
    assert type(model).__name__ == "BertForMaskedLM"
    assert not report["missing_keys"]
    with pytest.raises(ConfigError, match=r"fills in masked tokens \(BertForMaskedLM\)"):
        llm.generate(str(tmp_path / "again"), ["the cat"])


def test_a_model_with_its_own_code_is_exported_and_generates(tmp_path: Path) -> None:
    source = tiny.custom_folder(tmp_path / "own")
    (source / "generation_config.json").write_text('{"eos_token_id": 2, "use_cache": false}')
    plan = plans.plan(tmp_path, train={"max_steps": 2}, model=source, rows=tiny.examples(vocab=90))
    plan = with_model(plan, trust_remote_code=True)
    assert exported_again(plan, tmp_path)
    assert (tmp_path / "again" / "modeling_tiny.py").is_file()
    found = llm.generate(plan.run_dir, ["the cat", "a question and an answer"], max_new_tokens=3)
    assert [sample.tokens for sample in found.samples] == [3, 3]
    # Elsewhere nobody has said that it may run.
    with pytest.raises(ConfigError, match=r"again cannot be opened: it needs Python code"):
        llm.generate(str(tmp_path / "again"), ["the cat"])


@pytest.mark.parametrize("lora", [None, {"r": 4, "use_dora": True}], ids=["full", "adapters"])
def test_c68_new_tokens_and_changed_fields_are_in_the_export_of_a_checkpoint(
    tmp_path: Path, lora: Any
) -> None:
    source = tiny.model_folder(tmp_path / "source", tied=True)
    fields: dict[str, Any] = {
        "source": str(source),
        "config": {"attention_dropout": 0.25},
        "new_tokens": [f"<new-{i}>" for i in range(3)],
        "tokenizer": {"pad_vocab_to_multiple_of": 8},
    }
    fields |= {"lora": lora} if lora else {}
    info = resolve_model(ModelConfig(**fields), tmp_path / "cache")
    plan = plans.plan(tmp_path, train={"max_steps": 2}, rows=tiny.examples())
    plan = with_model(plan.model_copy(update={"model": info}), **fields)
    assert exported_again(plan, tmp_path)
    content = json.loads((tmp_path / "again" / "config.json").read_text())
    weights = load_file(tmp_path / "again" / "model.safetensors")
    rows = weights["model.embed_tokens.weight"].shape[0]
    assert rows == content["vocab_size"]
    assert rows % 8 == 0
    assert content["attention_dropout"] == 0.25
    assert content["use_cache"] is True
    found = llm.generate(plan.run_dir, ["the <new-1> cat"], max_new_tokens=4)
    assert found.samples[0].tokens == 4
    if lora:
        alone = llm.export(plan.run_dir, str(tmp_path / "adapter"), merge=False)
        assert same_files(Path(alone.path), Path(plan.run_dir) / "adapter")
        on_base = llm.generate(alone.path, ["the <new-1> cat"], max_new_tokens=4)
        assert on_base.texts == found.texts


def test_a_model_that_starts_at_random_has_no_adapter_for_others(tmp_path: Path) -> None:
    source = tiny.model_folder(tmp_path / "source")
    fields: dict[str, Any] = {"source": str(source), "init": "random", "lora": {"r": 4}}
    info = resolve_model(ModelConfig(**fields), tmp_path / "cache")
    plan = plans.plan(tmp_path, train={"max_steps": 2}, rows=tiny.examples())
    plan = with_model(plan.model_copy(update={"model": info}), **fields)
    assert exported_again(plan, tmp_path)
    with pytest.raises(CheckpointError, match="its base started with random weights"):
        llm.export(plan.run_dir, str(tmp_path / "adapter"), merge=False)


def test_the_best_model_is_exported_beside_the_last(tmp_path: Path) -> None:
    train = {"max_steps": 4, "eval_every": 2, "learning_rate": 0.5, "schedule": "constant"}
    plan = plans.plan(tmp_path, train=train)
    checkpoint = plan.config.checkpoint.model_copy(update={"keep_best": 1, "metric": "eval_loss"})
    config = plan.config.model_copy(update={"checkpoint": checkpoint})
    plan = started(plan.model_copy(update={"config": config}))
    result = run(plan)
    assert result.best_checkpoint is not None
    assert result.best_checkpoint != result.checkpoint  # (so high a rate only harms)
    assert result.best_model_path == str(Path(plan.run_dir) / "export-best")
    found = llm.export(result.best_checkpoint, str(tmp_path / "again"))
    assert same_files(Path(found.path), Path(result.best_model_path))
    assert not same_files(Path(found.path), Path(result.model_path or ""))


def test_values_that_fp16_has_no_room_for(tmp_path: Path) -> None:
    source = tiny.model_folder(tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights["model.embed_tokens.weight"][5] = 7e4
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    plan = plans.plan(tmp_path, train={"max_steps": 1}, model=source, export=False)
    result = run(started(plan))
    assert result.model_path is None
    with pytest.raises(CheckpointError, match=r"has no complete export .*llm\.export"):
        llm.generate(plan.run_dir, ["the cat"])
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight: some values are beyond"):
        llm.export(plan.run_dir, dtype="fp16")
    assert llm.export(plan.run_dir, dtype="bf16").path == str(Path(plan.run_dir) / "export")
    assert llm.generate(plan.run_dir, ["the cat"], max_new_tokens=2).samples[0].tokens == 2


# What else an export does


PUSH = """
import sys
import dbx_llmtrain as llm

found = llm.export(sys.argv[1], sys.argv[2], push_to_hub="org/tiny")
print(found.model_dump_json())
print(found)
"""


def test_an_export_is_uploaded_to_the_hub(runs: Mapping[str, RunPlan], tmp_path: Path) -> None:
    with serving() as hub:
        done = with_hub(hub.address, PUSH, runs["ddp"].run_dir, str(tmp_path / "export"))
        assert done.returncode == 0, done.stderr
        (found,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
        assert found["hub"] == f"{hub.address}/org/tiny"
        files = hub.files["org/tiny"]
        # Without a token that the hub knows nothing is even exported.
        unknown = "hf_" + "z" * 30
        refused = with_hub(
            hub.address, PUSH, runs["ddp"].run_dir, str(tmp_path / "other"), HF_TOKEN=unknown
        )
    assert "push_to_hub: the hub does not know the token" in refused.stderr
    assert not (tmp_path / "other").exists()
    assert hub.private["org/tiny"]
    local = [
        path for path in storage.list_files(tmp_path / "export") if path.name != "manifest.json"
    ]
    assert files == {path.name: path.read_bytes() for path in local}
    said = done.stdout + done.stderr + refused.stdout + refused.stderr
    assert TOKEN not in said
    assert unknown not in said


MEMORY = """
import sys, threading, time
import dbx_llmtrain as llm
import deepspeed, torch, transformers
from dbx_llmtrain.worker import exports
from transformers import LlamaForCausalLM

def held():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

def watch():
    while not done.wait(0.005):
        seen.append(held())

torch.ones(9) @ torch.ones(9)
before, seen, done = held(), [0], threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
llm.export(sys.argv[1], dtype=sys.argv[2])
done.set()
watcher.join()
print("MOST", max(seen) - before)
"""


@pytest.mark.slow
def test_an_export_takes_the_memory_of_one_model(tmp_path: Path) -> None:
    source = tiny.model_folder(tmp_path / "source")
    model = tiny.llama(
        vocab_size=12001, hidden_size=768, intermediate_size=2048, num_hidden_layers=8,
        num_attention_heads=12, num_key_value_heads=12,
    )  # fmt: skip
    model.save_pretrained(source)
    plan = started(plans.plan(tmp_path, model=source))
    folder = storage.checkpoint_folder(Path(plan.run_dir), 1)
    optimizer = torch.optim.SGD(model.parameters())
    with (
        open_world(use_gpu=False) as world,
        saving(plan, world, tmp_path / "scratch", tell=lambda _: None) as saver,
    ):
        saver.save(folder, model=model, optimizer=optimizer, state={}, identity={}, metrics={})
        saver.wait()
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert size > 250e6
    for dtype in ("fp32", "bf16"):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, plan.run_dir, dtype],
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        most = int(done.stdout.rpartition("MOST ")[2])
        assert 0.9 * size < most < 1.6 * size
