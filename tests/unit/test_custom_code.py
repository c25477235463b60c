"""Models that come with their own Python code: what is refused, carried, imported and exported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from dbx_llmtrain import compat, custom_code
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.driver.prepare import prepare_data
from dbx_llmtrain.driver.sources import resolve_model
from dbx_llmtrain.errors import CheckpointError, ConfigError
from dbx_llmtrain.model_sections import ModelConfig
from dbx_llmtrain.records import ModelInfo
from dbx_llmtrain.worker.export import Place, write_export
from dbx_llmtrain.worker.generation import check_generation_config
from dbx_llmtrain.worker.loss import LossModule
from dbx_llmtrain.worker.model import load_model, load_tokenizer
from dbx_llmtrain.worker.probe import probe
from tests import tiny
from tests.unit.test_export import _collect

CODE = ["configuration_tiny.py", "modeling_tiny.py", "tiny_block.py", "tiny_numbers.py"]

TOKENIZER = """
from transformers import PreTrainedTokenizerFast

from .tiny_words import GREETING


class TinyTokenizerFast(PreTrainedTokenizerFast):
    greeting = GREETING

    def encode_plus(self, *args, **kwargs):
        from .tiny_words import GREETING as later

        assert later == self.greeting
        return super().encode_plus(*args, **kwargs)
"""


def resolve(folder: Path, cache: Path, *, trusted: bool, objective: str = "sft") -> ModelInfo:
    config = ModelConfig(source=str(folder), trust_remote_code=trusted)
    return resolve_model(config, cache, objective=objective)


def problems(folder: Path, *, trusted: bool, objective: str = "sft") -> list[str]:
    """Why a folder is refused."""
    with pytest.raises(ConfigError) as caught:
        resolve(folder, folder.parent / "cache", trusted=trusted, objective=objective)
    return [str(problem) for problem in caught.value.problems]


def edit(folder: Path, name: str = "config.json", **changes: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def map_entries(folder: Path, **entries: str | None) -> None:
    """Change the ``auto_map`` of the configuration; ``None`` removes an entry."""
    known = json.loads((folder / "config.json").read_text()).get("auto_map", {}) | entries
    edit(folder, auto_map={key: text for key, text in known.items() if text is not None})


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(3, 20)[None]).logits
    return found


# What is refused, before any of it runs ------------------------------------------------------


def test_code_is_refused_by_the_names_of_its_files(tmp_path: Path) -> None:
    folder = tiny.custom_folder(tmp_path / "model")
    (folder / "training_script.py").write_text("raise SystemExit")
    assert problems(folder, trusted=False) == [
        f"model.trust_remote_code: {folder} needs Python code that comes with it "
        f"({', '.join(CODE)}), which would run on the driver and on every rank: read it, and set "
        "model.trust_remote_code=true if you trust it"
    ]


def test_what_is_missing_is_told_together(tmp_path: Path) -> None:
    folder = tiny.custom_folder(tmp_path / "model")
    for name in ("tokenizer.json", "model.safetensors", "tiny_numbers.py"):
        (folder / name).unlink()
    found = problems(folder, trusted=False)
    assert len(found) == 4
    assert "tiny_block.py imports .tiny_numbers, which is not in the folder" in found[0]
    assert found[1].startswith("model.trust_remote_code: ")
    assert "has no tokenizer" in found[2]
    assert "has no model.safetensors" in found[3]


def elsewhere(folder: Path) -> None:
    map_entries(folder, AutoConfig="org/other--configuration_tiny.TinyConfig")


def outside(folder: Path) -> None:
    (folder.parent / "outside.py").write_text("")
    path = folder.parent / "outside"
    map_entries(folder, AutoConfig=f"{path}.TinyConfig")


def not_found(folder: Path) -> None:
    (folder / "modeling_tiny.py").unlink()


def no_class(folder: Path) -> None:
    map_entries(folder, AutoConfig="configuration_tiny")


def broken(folder: Path) -> None:
    (folder / "tiny_block.py").write_text("def\n")


def above(folder: Path) -> None:
    (folder.parent / "above.py").write_text("")
    (folder / "tiny_numbers.py").write_text("from ..above import x\n")


def no_member(folder: Path) -> None:
    (folder / "tiny_numbers.py").write_text("SCALE = 1\nfrom . import nothing\n")


def no_model(folder: Path) -> None:
    map_entries(folder, AutoModelForCausalLM=None, AutoModel="modeling_tiny.TinyModel")


def no_package(folder: Path) -> None:
    path = folder / "modeling_tiny.py"
    path.write_text("import no_such_package\n" + path.read_text())


def no_such_class(folder: Path) -> None:
    map_entries(folder, AutoModelForCausalLM="modeling_tiny.Misspelled")


def raises(folder: Path) -> None:
    (folder / "tiny_numbers.py").write_text("SCALE = 1 / 0\n")


def no_vocabulary(folder: Path) -> None:
    path = folder / "configuration_tiny.py"
    path.write_text(path.read_text().replace("self.vocab_size", "self.words"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (elsewhere, "AutoConfig in the auto_map of config.json is org/other--configuration_tiny.Tin"
         "yConfig, code of another repository: put its .py files from org/other into a copy"),
        (outside, "outside.py, which AutoConfig in the auto_map of config.json names"),
        (not_found, "has no modeling_tiny.py, which AutoModelForCausalLM in the auto_map of conf"),
        (no_class, "AutoConfig in the auto_map of config.json is 'configuration_tiny': expected f"),
        (broken, "tiny_block.py is no Python code that this version reads: "),
        (above, "tiny_numbers.py imports ..above, which is not in the folder"),
        (no_member, "tiny_numbers.py imports .nothing, which is not in the folder"),
        (no_model, "config.json has no AutoModelForCausalLM (found AutoConfig, AutoModel): expect"),
        (no_package, "its code cannot be imported: ImportError: "),
        (no_package, "no_such_package"),
        (no_such_class, "its code cannot be imported: AttributeError: "),
        (raises, "its code cannot be imported: ZeroDivisionError: division by zero"),
        (no_vocabulary, "its configuration has no vocab_size"),
    ],
)  # fmt: skip
def test_code_that_cannot_be_used_is_refused(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    folder = tiny.custom_folder(tmp_path / "model")
    change(folder)
    (found,) = problems(folder, trusted=True)
    assert found.startswith(f"model.source: {folder}")
    assert message in found


@pytest.mark.parametrize("trusted", [False, True])
def test_code_without_a_causal_model_is_refused_either_way(tmp_path: Path, trusted: bool) -> None:
    folder = tiny.custom_folder(tmp_path / "model")
    no_model(folder)
    (found,) = problems(folder, trusted=trusted)
    assert "config.json has no AutoModelForCausalLM (found AutoConfig, AutoModel)" in found


def test_an_architecture_without_code_is_refused_with_the_flag_too(tmp_path: Path) -> None:
    folder = tiny.custom_folder(tmp_path / "model")
    edit(folder, auto_map={})
    (found,) = problems(folder, trusted=True)
    assert "transformers cannot read its config.json" in found
    assert "tiny_of_our_own" in found


def test_files_may_be_links_as_in_the_hubs_cache(tmp_path: Path) -> None:
    blobs = tiny.custom_folder(tmp_path / "blobs")
    folder = tmp_path / "snapshots" / "0123.v1"
    folder.mkdir(parents=True)
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(path)
    info = resolve(folder, tmp_path / "cache", trusted=True)
    assert {e.path for e in info.artifact.files} == {path.name for path in blobs.iterdir()}


# What is carried -----------------------------------------------------------------------------


def test_every_file_of_the_code_is_part_of_the_model(tmp_path: Path) -> None:
    folder = tiny.custom_folder(tmp_path / "model.v1-x")
    (folder / "training_script.py").write_text("raise SystemExit")
    first = resolve(folder, tmp_path / "cache", trusted=True)
    assert [e.path for e in first.artifact.files if e.path.endswith(".py")] == CODE
    assert (first.model_type, first.vocab_size, first.max_positions) == (
        "tiny_of_our_own",
        320,
        None,
    )
    (folder / "training_script.py").write_text("raise SystemExit(1)")
    assert resolve(folder, tmp_path / "cache", trusted=True) == first
    (folder / "tiny_numbers.py").write_text("SCALE = 1.5\n")
    second = resolve(folder, tmp_path / "cache", trusted=True)
    assert second.artifact.fingerprint != first.artifact.fingerprint


def test_packages_and_files_in_folders_are_found(tmp_path: Path) -> None:
    from dbx_llmtrain.driver.model_code import find_code

    folder = tiny.custom_folder(tmp_path / "model")
    (folder / "code" / "parts" / "inner").mkdir(parents=True)
    for name in ("__init__", "inner/__init__", "inner/deep", "other", "unused"):
        (folder / "code" / "parts" / f"{name}.py").write_text("")
    (folder / "code" / "top.py").write_text("")
    (folder / "code" / "parts" / "inner" / "deep.py").write_text("from ...top import x\n")
    (folder / "code" / "modeling.py").write_text(
        "from .parts.inner.deep import x\n\ndef later():\n    from .parts import other, name\n"
    )
    map_entries(folder, AutoModelForCausalLM="code/modeling.TinyForCausalLM")
    code = find_code(folder, "it")
    assert code.problems == ()
    assert [path.relative_to(folder).as_posix() for path in code.files] == [
        "code/modeling.py",
        "code/parts/__init__.py",
        "code/parts/inner/__init__.py",
        "code/parts/inner/deep.py",
        "code/parts/other.py",
        "code/top.py",
        "configuration_tiny.py",
    ]


def test_code_in_a_folder_is_loaded(tmp_path: Path) -> None:
    if not compat.at_least("transformers", "5"):
        pytest.skip("transformers 4 looks for relative imports in the model's folder only")
    folder = tiny.custom_folder(tmp_path / "model")
    (folder / "code").mkdir()
    for name in CODE:
        (folder / name).rename(folder / "code" / name)
    map_entries(
        folder,
        AutoConfig="code/configuration_tiny.TinyConfig",
        AutoModelForCausalLM="code/modeling_tiny.TinyForCausalLM",
    )
    model = resolve(folder, tmp_path / "cache", trusted=True)
    names = [e.path for e in model.artifact.files if e.path.endswith(".py")]
    assert names == [f"code/{name}" for name in CODE]
    with custom_code.private_modules(tmp_path, wanted=True):
        loaded = load_model(folder, attention="auto", trusted=True)
        assert type(loaded).__name__ == "TinyForCausalLM"


def bomb(folder: Path) -> Path:
    """A model that transformers has, with code that must not run."""
    tiny.model_folder(folder)
    (folder / "modeling_llama.py").write_text("raise RuntimeError('this code was run')\n")
    entry = "modeling_llama.LlamaForCausalLM"
    edit(folder, auto_map={"AutoModelForCausalLM": entry, "AutoConfig": entry})
    edit(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": [None, entry]})
    return folder


def test_transformers_own_class_trains_a_model_that_it_has(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = bomb(tmp_path / "model")
    info = resolve(folder, tmp_path / "cache", trusted=False)
    assert not [e.path for e in info.artifact.files if e.path.endswith(".py")]
    model = load_model(folder, attention="auto")
    assert type(model).__module__.startswith("transformers.models.llama")
    assert load_tokenizer(folder)("the cat")["input_ids"]
    target = export(folder, tmp_path / "export", model, trusted=False)
    for name in ("config.json", "tokenizer_config.json"):
        assert "auto_map" not in json.loads((target / name).read_text())
    again = AutoModelForCausalLM.from_pretrained(target, trust_remote_code=True)
    assert torch.equal(logits(again), logits(model))


def test_with_the_flag_its_code_runs_as_in_transformers(tmp_path: Path) -> None:
    (found,) = problems(bomb(tmp_path / "model"), trusted=True)
    assert "its code cannot be imported: RuntimeError: this code was run" in found


def test_code_has_to_have_a_model_of_the_kind_that_is_trained(tmp_path: Path) -> None:
    causal = tiny.custom_folder(tmp_path / "causal")
    masked = tiny.custom_folder(tmp_path / "masked", masked=True)
    for folder, objective, lacks, there, kind in (
        (causal, "mlm", "MaskedLM", "CausalLM", "a model for masked tokens"),
        (masked, "pretrain", "CausalLM", "MaskedLM", "a causal language model"),
    ):
        for trusted in (True, False):
            assert problems(folder, trusted=trusted, objective=objective) == [
                f"model.source: {folder}: the auto_map of its config.json has no "
                f"AutoModelFor{lacks} (found AutoConfig, AutoModelFor{there}): expected {kind}"
            ]
    (found,) = problems(masked, trusted=False, objective="mlm")
    assert found.startswith("model.trust_remote_code: ")
    info = resolve(masked, tmp_path / "cache", trusted=True, objective="mlm")
    assert {*CODE} <= {entry.path for entry in info.artifact.files}


def own_tokenizer(folder: Path) -> Path:
    """A Llama whose tokenizer comes with code."""
    tiny.model_folder(folder)
    (folder / "tokenization_tiny.py").write_text(TOKENIZER)
    (folder / "tiny_words.py").write_text("GREETING = 'hello'\n")
    entry = "tokenization_tiny.TinyTokenizerFast"
    edit(
        folder,
        "tokenizer_config.json",
        tokenizer_class="TinyTokenizerFast",
        auto_map={"AutoTokenizer": [None, entry]},
    )
    return folder


def test_a_tokenizer_with_code_of_its_own(tmp_path: Path) -> None:
    folder = own_tokenizer(tmp_path / "model")
    (found,) = problems(folder, trusted=False)
    assert found.startswith("model.trust_remote_code: ")
    assert "(tiny_words.py, tokenization_tiny.py)" in found
    info = resolve(folder, tmp_path / "cache", trusted=True)
    assert {"tiny_words.py", "tokenization_tiny.py"} <= {e.path for e in info.artifact.files}
    with custom_code.private_modules(tmp_path, wanted=True):
        tokenizer = load_tokenizer(folder, trusted=True)
        assert tokenizer.greeting == "hello"
        model = load_model(folder, attention="auto", trusted=True)
        target = export(folder, tmp_path / "export", model, trusted=True)
        assert load_tokenizer(target, trusted=True).greeting == "hello"


def test_other_ways_to_name_the_code_of_a_tokenizer(tmp_path: Path) -> None:
    folder = own_tokenizer(tmp_path / "model")
    entry = "tokenization_tiny.TinyTokenizerFast"
    # The older form.
    edit(folder, "tokenizer_config.json", auto_map=[None, entry])
    assert "model.trust_remote_code: " in problems(folder, trusted=False)[0]
    # No class is named: it is the one that transformers has for the model, if it has one.
    edit(folder, "tokenizer_config.json", tokenizer_class=None)
    edit(folder, model_type="gpt2")
    info = resolve(folder, tmp_path / "cache", trusted=False)
    assert not [e.path for e in info.artifact.files if e.path.endswith(".py")]


def test_a_preview_reads_back_what_a_tokenizer_with_code_has_made(tmp_path: Path) -> None:
    from dbx_llmtrain.driver.examples import show_examples

    folder = own_tokenizer(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "the cat sat"}\n{"text": "on the mat"}\n')
    cfg = TrainConfig(
        model={"source": str(folder), "trust_remote_code": True}, data={"train": str(rows)}
    )
    model = resolve_model(cfg.model, tmp_path / "cache")
    data = prepare_data(cfg, model, tmp_path / "cache")
    shown = show_examples(cfg, model, data, count=1, split="train")
    text = "".join(piece.text for row in shown.examples[0].documents for piece in row.pieces)
    assert "the cat sat" in text
    assert "on the mat" in text


def test_rows_are_tokenised_by_a_tokenizer_with_code(tmp_path: Path) -> None:
    folder = own_tokenizer(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "the cat sat"}\n{"text": "on the mat"}\n')
    cfg = TrainConfig(
        model={"source": str(folder), "trust_remote_code": True}, data={"train": str(rows)}
    )
    model = resolve_model(cfg.model, tmp_path / "cache")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    data = prepare_data(cfg, model, tmp_path / "cache", progress=lambda n: None, work_dir=scratch)
    assert data.audit.train_rows == 2
    assert not list(scratch.iterdir())


# Where it is imported ------------------------------------------------------------------------


def test_the_place_of_the_code_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    from transformers import dynamic_module_utils

    folder = tiny.custom_folder(tmp_path / "model")
    place = tmp_path / "scratch"
    place.mkdir()
    before = dynamic_module_utils.HF_MODULES_CACHE, list(sys.path)
    theirs = type(sys)("transformers_modules")
    sys.modules["transformers_modules"] = theirs
    try:
        with suppress(ZeroDivisionError), custom_code.private_modules(place, wanted=True):
            model = load_model(folder, attention="auto", trusted=True)
            (private,) = place.iterdir()
            assert private in Path(sys.modules[type(model).__module__].__file__ or "").parents
            assert sys.modules["transformers_modules"] is not theirs
            raise ZeroDivisionError
        assert sys.modules["transformers_modules"] is theirs
    finally:
        del sys.modules["transformers_modules"]
    assert not list(place.iterdir())
    assert (dynamic_module_utils.HF_MODULES_CACHE, list(sys.path)) == before
    assert not [name for name in sys.modules if name.startswith("transformers_modules")]
    assert not [path for path in Path(before[0]).rglob("*") if path.name in CODE]


def test_code_is_not_imported_elsewhere(tmp_path: Path) -> None:
    folder = tiny.custom_folder(tmp_path / "model")
    with pytest.raises(AssertionError, match="outside private_modules"):
        load_model(folder, attention="auto", trusted=True)
    with custom_code.private_modules(tmp_path / "nowhere", wanted=False):
        pass


def test_two_versions_of_the_code_under_one_name_do_not_mix(tmp_path: Path) -> None:
    def scale(model: Any) -> float:
        block = sys.modules[type(model.model.layers[0]).__module__]
        return float(block.SCALE)

    folders = [tiny.custom_folder(tmp_path / str(n) / "model", scale=n) for n in (1.0, 2.0)]
    with custom_code.private_modules(tmp_path, wanted=True):
        models = [load_model(folder, attention="auto", trusted=True) for folder in folders]
        assert [scale(model) for model in models] == [1.0, 2.0]
    assert not torch.allclose(logits(models[0]), logits(models[1]))
    # The same folder, changed since.
    (folders[0] / "tiny_numbers.py").write_text("SCALE = 3.0\n")
    with custom_code.private_modules(tmp_path, wanted=True):
        assert scale(load_model(folders[0], attention="auto", trusted=True)) == 3.0


# What is exported ----------------------------------------------------------------------------


def export(source: Path, target: Path, model: Any, *, trusted: bool) -> Path:
    return write_export(
        target,
        collected=_collect(source, model),
        place=Place(source, target.parent / "scratch", trusted=trusted),
        generation=check_generation_config(source),
    )


ELSEWHERE = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
assert AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)("the cat")["input_ids"]
with torch.no_grad():
    torch.save(model(input_ids=torch.arange(3, 20)[None]).logits, sys.argv[2])
"""


@pytest.mark.slow
def test_the_export_carries_the_code_and_loads_elsewhere(tmp_path: Path) -> None:
    source = tiny.custom_folder(tmp_path / "source")
    (source / "generation_config.json").write_text('{"eos_token_id": 2}')
    if not compat.at_least("transformers", "5"):
        # By itself it copies the direct imports of the first file only.
        path = source / "modeling_tiny.py"
        path.write_text(path.read_text() + "\nfrom .tiny_numbers import SCALE\n")
    with custom_code.private_modules(tmp_path, wanted=True):
        model = load_model(source, attention="auto", trusted=True)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.02)
        found = probe(LossModule(model), LossModule(model), device="cpu", max_length=32)
        target = export(source, tmp_path / "export", model, trusted=True)
    assert found.loss_difference < 1e-5
    assert sorted(path.name for path in target.glob("*.py")) == CODE
    for name in CODE:
        assert (target / name).read_bytes() == (source / name).read_bytes()
    before, after = (json.loads((f / "config.json").read_text()) for f in (source, target))
    assert after["auto_map"] == before["auto_map"]
    subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(target), str(tmp_path / "logits")],
        env=os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")},
        check=True,
        timeout=120,
    )
    assert torch.equal(torch.load(tmp_path / "logits"), logits(model))


def test_an_export_with_other_code_than_was_trained_is_refused(tmp_path: Path) -> None:
    source = tiny.custom_folder(tmp_path / "source")
    with custom_code.private_modules(tmp_path, wanted=True):
        model = load_model(source, attention="auto", trusted=True)
        (source / "tiny_numbers.py").write_text("SCALE = 2.0\n")
        with pytest.raises(CheckpointError, match="off the running model's"):
            export(source, tmp_path / "export", model, trusted=True)
