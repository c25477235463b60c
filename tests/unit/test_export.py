"""Export on one rank without a process group: files, types, generation configuration, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dbx_llmtrain import storage
from dbx_llmtrain.custom_code import private_modules
from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.worker.export import Collected, Place, gather, source_dtype, write_export
from dbx_llmtrain.worker.generation import Generation, check_generation_config
from dbx_llmtrain.worker.model import load_model, load_tokenizer
from dbx_llmtrain.worker.world import World
from tests import tiny, words
from tests.unit.test_model import _bf16

END_OF_TURN = 4
"""Id of ``<|im_end|>``, with which the tiny tokenizer's template ends a turn."""

WORLD = World(
    rank=0, size=1, local_rank=0, node="n", host="h", device="cpu", ranks_on_host=1
)  # fmt: skip


def _trained(folder: Path, *, seed: int = 7) -> Any:
    """The folder's model after a change of every weight, as training makes."""
    model = load_model(folder, attention="sdpa")
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.02)
    return model


def _collect(source: Path, model: Any) -> Collected:
    """What ``export.collect`` gathers, without a process group."""
    ids = torch.arange(3, 15)[None, :]
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, use_cache=False).logits
    dtype = source_dtype(source)
    return Collected(gather(model, dtype, WORLD), ids, logits, dtype)


def _export(
    source: Path, target: Path, collected: Collected | None = None, ends: tuple[int, ...] = ()
) -> Path:
    return write_export(
        target,
        collected=collected or _collect(source, _trained(source)),
        place=Place(source, source.parent / "scratch"),
        generation=check_generation_config(source, ends),
    )


def _keys(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("tied", [True, False])
def test_c94_export_reloads_with_no_key_amiss_and_equal_logits(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    source = tiny.model_folder(tmp_path / "source", tied=tied)
    collected = _collect(source, _trained(source))
    target = _export(source, tmp_path / "export", collected)
    reopened, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        logits = reopened(input_ids=collected.input_ids).logits
    assert float((logits - collected.logits).abs().max()) == 0.0
    assert storage.read_manifest(target) is not None
    assert not any((tmp_path / "scratch").iterdir())


def test_c94_a_model_with_other_logits_is_refused(tmp_path: Path) -> None:
    source = tiny.model_folder(tmp_path / "source")
    collected = _collect(source, _trained(source))
    other = replace(collected, logits=collected.logits.roll(1, dims=1))
    with pytest.raises(CheckpointError, match=r"logits are .* off the running model's"):
        _export(source, tmp_path / "export", other)
    assert not (tmp_path / "export").exists()
    assert not any((tmp_path / "scratch").iterdir())


def test_c94_a_model_with_a_prefix_in_its_names_is_refused(tmp_path: Path) -> None:
    source = tiny.model_folder(tmp_path / "source")
    collected = _collect(source, _trained(source))
    prefixed = {f"module.{name}": tensor for name, tensor in collected.weights.items()}
    with pytest.raises(CheckpointError, match=r"do not fit .*module\.model\.embed_tokens"):
        _export(source, tmp_path / "export", replace(collected, weights=prefixed))
    assert not (tmp_path / "export").exists()


def test_c94_a_lacking_weight_is_refused(tmp_path: Path) -> None:
    source = tiny.model_folder(tmp_path / "source")
    collected = _collect(source, _trained(source))
    del collected.weights["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"missing: model\.norm\.weight"):
        _export(source, tmp_path / "export", collected)


def test_c94_other_weights_than_those_trained_are_refused(tmp_path: Path) -> None:
    """A buffer that the architecture makes anew when it is loaded."""
    source = tiny.custom_folder(tmp_path / "source")
    path = source / "modeling_tiny.py"
    anew = (
        "        self.lm_head.register_buffer('offset', torch.rand(1))\n        self.post_init()\n"
    )
    head, _, tail = path.read_text().rpartition("        self.post_init()\n")
    loaded = "    def eval(self):\n        self.lm_head.offset.uniform_()\n"
    loaded += "        return super().eval()\n"
    path.write_text(head + anew + tail + loaded)
    weights = load_file(source / "model.safetensors") | {"lm_head.offset": torch.rand(1)}
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with private_modules(tmp_path, wanted=True):
        model = load_model(source, attention="auto", trusted=True)
        with pytest.raises(CheckpointError, match="not hold the trained weights: lm_head"):
            write_export(
                tmp_path / "export",
                collected=_collect(source, model),
                place=Place(source, tmp_path / "scratch", trusted=True),
                generation=check_generation_config(source),
            )
    assert not (tmp_path / "export").exists()
    assert not any((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize("template", [None, tiny.CHATML, {"default": "x", "tool_use": "y"}])
def test_the_template_that_the_model_was_trained_with_is_exported(
    tmp_path: Path, template: Any
) -> None:
    source = tiny.model_folder(tmp_path / "source", chat_template=template)
    given = words.TOOLS + "\n"
    target = write_export(
        tmp_path / "export",
        collected=_collect(source, _trained(source)),
        place=Place(source, tmp_path / "scratch", chat_template=given),
        generation=check_generation_config(source, ()),
    )
    tokenizer = load_tokenizer(target)
    assert tokenizer.chat_template == given
    example = words.encode(tokenizer, words.chat("a", "b"))
    trained = words.encode(load_tokenizer(source), words.chat("a", "b"), chat_template=given)
    assert example == trained


def test_c95_tied_weights_are_written_once(tmp_path: Path) -> None:
    source = tiny.model_folder(tmp_path / "source", tied=True)
    model = _trained(source)
    target = _export(source, tmp_path / "export", _collect(source, model))
    assert "lm_head.weight" not in _keys(target)
    size = (target / "model.safetensors").stat().st_size
    wanted = 4 * sum(weight.numel() for weight in model.parameters())
    # The file's header is about 2 kB, which is 1% of a real model but not of this one.
    with (target / "model.safetensors").open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    assert abs(size - header - wanted) <= 0.01 * wanted


def test_a_large_model_is_written_in_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dbx_llmtrain.worker import export

    monkeypatch.setattr(export, "MAX_SHARD", "50KB")
    source = tiny.model_folder(tmp_path / "source")
    target = _export(source, tmp_path / "export")
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert len(index["weight_map"]) == 21
    assert len(set(index["weight_map"].values())) > 2
    # What was exported is a source like any other.
    again = load_model(target, attention="sdpa")
    trained = _trained(source)
    assert torch.equal(again.lm_head.weight, trained.lm_head.weight)


def test_c100_export_has_the_type_of_the_source(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from dbx_llmtrain.compat import dtype_argument

    source = tiny.model_folder(tmp_path / "source", tied=True)
    _bf16(source)
    model = _trained(source)
    target = _export(source, tmp_path / "export", _collect(source, model))
    reopened = AutoModelForCausalLM.from_pretrained(target, **dtype_argument("auto"))
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    masters = dict(model.named_parameters())
    for name, weight in reopened.named_parameters():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, masters[name].to(torch.bfloat16))


def test_type_is_read_from_the_weights_where_the_configuration_is_silent(tmp_path: Path) -> None:
    source = tiny.model_folder(tmp_path / "source", tied=True)
    _bf16(source)
    config = json.loads((source / "config.json").read_text())
    del config["dtype"]
    (source / "config.json").write_text(json.dumps(config))
    assert source_dtype(source) == torch.bfloat16
    target = _export(source, tmp_path / "export")
    assert json.loads((target / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_c77_the_cache_is_on_again_in_the_export(tmp_path: Path) -> None:
    source = tiny.model_folder(tmp_path / "source")
    target = _export(source, tmp_path / "export")
    before, after = (json.loads((f / "config.json").read_text()) for f in (source, target))
    assert before == after
    assert after["use_cache"] is True


def test_c97_a_contradicting_generation_config_is_repaired_before_training(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = tiny.model_folder(tmp_path / "source", chat_template=None)
    llama2 = {"bos_token_id": 1, "eos_token_id": 2, "max_length": 4096, "pad_token_id": 0}
    llama2 |= {"temperature": 0.6, "top_p": 0.9, "do_sample": False}
    (source / "generation_config.json").write_text(json.dumps(llama2))
    checked = check_generation_config(source)
    assert checked.content == llama2 | {"do_sample": True}
    assert checked.notes == ("do_sample: set to true, because temperature=0.6, top_p=0.9 needs it",)
    target = _export(source, tmp_path / "export")
    reopened = AutoModelForCausalLM.from_pretrained(target)
    assert reopened.generation_config.do_sample is True
    assert reopened.generation_config.temperature == 0.6
    reopened.save_pretrained(tmp_path / "again")


def test_c97_what_cannot_be_repaired_is_reset_to_its_token_ids(tmp_path: Path) -> None:
    source = tiny.model_folder(tmp_path / "source", chat_template=None)
    broken = {"eos_token_id": [2, 4], "num_beams": 1, "num_return_sequences": 4}
    (source / "generation_config.json").write_text(json.dumps(broken))
    checked = check_generation_config(source)
    assert checked.content == {"eos_token_id": [2, 4]}
    assert "reset to defaults" in checked.notes[0]
    assert "num_return_sequences" in checked.notes[0]


def test_c97_sampling_settings_in_the_model_config_do_not_stop_an_export(tmp_path: Path) -> None:
    source = tiny.model_folder(tmp_path / "source", chat_template=None)
    config = json.loads((source / "config.json").read_text()) | {"temperature": 0.7, "top_k": 5}
    (source / "config.json").write_text(json.dumps(config))
    (source / "generation_config.json").unlink()
    target = _export(source, tmp_path / "export")
    assert json.loads((target / "config.json").read_text()) == config
    assert not (target / "generation_config.json").exists()


def test_a_sound_generation_config_is_copied_as_it_is(tmp_path: Path) -> None:
    source = tiny.model_folder(tmp_path / "source", chat_template=None)
    text = '{"eos_token_id": 2,   "top_p": 0.9, "do_sample": true, "of_their_own": 1}'
    (source / "generation_config.json").write_text(text)
    assert check_generation_config(source).notes == ()
    target = _export(source, tmp_path / "export")
    assert (target / "generation_config.json").read_text() == text


def test_c98_what_ends_the_answers_ends_generation(tmp_path: Path) -> None:
    source = tiny.model_folder(tmp_path / "source")
    target = _export(source, tmp_path / "export", ends=(END_OF_TURN,))
    exported = json.loads((target / "generation_config.json").read_text())
    assert exported["eos_token_id"] == [2, END_OF_TURN]
    assert check_generation_config(source, [END_OF_TURN]).notes == (
        f"eos_token_id: added {END_OF_TURN}, with which the answers in the data end",
    )
    assert check_generation_config(source, [2]).content is None
    (source / "generation_config.json").unlink()
    assert check_generation_config(source, [END_OF_TURN, 2]).content == {
        "bos_token_id": 1,
        "eos_token_id": [2, END_OF_TURN],
    }


def test_c98_an_export_that_would_not_stop_is_refused(tmp_path: Path) -> None:
    source = tiny.model_folder(tmp_path / "source")
    with pytest.raises(CheckpointError, match=r"would not stop: .* the tokens \[4\], .* are \[2\]"):
        write_export(
            tmp_path / "export",
            collected=_collect(source, _trained(source)),
            place=Place(source, tmp_path / "scratch"),
            generation=Generation(None, (), ends=(2, END_OF_TURN)),
        )
    assert not (tmp_path / "export").exists()


def test_code_that_is_too_old_to_generate_does_not_stop_an_export(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tiny.custom_folder(tmp_path / "source")
    (source / "generation_config.json").write_text('{"eos_token_id": 2, "use_cache": false}')
    path = source / "modeling_tiny.py"
    sound = path.read_text()
    broken = (
        "    def prepare_inputs_for_generation(self, ids):\n        return ids.of_another_time\n"
    )
    for code, told in ((sound, 0), (sound + broken, 1)):
        path.write_text(code)
        with private_modules(tmp_path, wanted=True):
            write_export(
                tmp_path / "export",
                collected=_collect(source, load_model(source, attention="auto", trusted=True)),
                place=Place(source, tmp_path / "scratch", trusted=True),
                generation=check_generation_config(source),
            )
        found = [text for text in caplog.messages if "cannot generate with it" in text]
        assert len(found) == told


def test_c99_tokenizer_and_template_are_the_same_after_reload(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = tiny.model_folder(tmp_path / "source", chat_template=tiny.CHATML_BOS)
    target = _export(source, tmp_path / "export")
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (target, source))
    strings = [f"{word} {number}!\n" for number, word in enumerate("the cat sat on a mat".split())]
    strings += [chr(0x3B1 + number) * number + " \t" for number in range(14)]
    assert [ours(text)["input_ids"] for text in strings] == [
        theirs(text)["input_ids"] for text in strings
    ]
    chats = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]
        for text in strings[:5]
    ]
    assert [ours.apply_chat_template(chat, tokenize=False) for chat in chats] == [
        theirs.apply_chat_template(chat, tokenize=False) for chat in chats
    ]
    assert ours.chat_template == tiny.CHATML_BOS
    for path in source.glob("tokenizer*"):
        assert (target / path.name).read_bytes() == path.read_bytes()


def test_c99_a_tokenizer_file_that_was_not_copied_is_noticed(tmp_path: Path) -> None:
    from dbx_llmtrain.worker.export import check_tokenizer

    source = tiny.model_folder(tmp_path / "source")
    target = _export(source, tmp_path / "export")
    assert check_tokenizer(target, source) is None
    other = tiny.tokenizer(chat_template="{{ 'another' }}")
    other.save_pretrained(target)
    with pytest.raises(CheckpointError, match="exported tokenizer differs"):
        check_tokenizer(target, source)


def test_an_export_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    source = tiny.model_folder(tmp_path / "source")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"the export .* cannot be written"):
        _export(source, tmp_path / "file" / "export")
