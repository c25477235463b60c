"""Answers: batches against one prompt at a time, what ends them, what is drawn, what is refused."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dbx_llmtrain as llm
from dbx_llmtrain import storage
from dbx_llmtrain.driver.generating import Found, find_model
from dbx_llmtrain.errors import CheckpointError, ConfigError
from dbx_llmtrain.outcomes import DATA_FORMAT
from dbx_llmtrain.worker.generate import Opened, Sampling, answer, open_model
from tests import sample, tiny

PROMPTS = [
    "the",
    "what is the answer? the answer is " * 4,
    "hello world, how are you today?",
    "a question and an answer, one after the other " * 2,
    "the",
]
"""From 2 tokens to some 60."""


def folder_of(build: Callable[..., Any], folder: Path, template: str | None = None) -> Path:
    """A model of a family, its weights large enough to make what it writes depend on them."""
    words = tiny.tokenizer(chat_template=template)
    model = build(vocab_size=len(words))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.mul_({"wte": 6, "wpe": 60}.get(name.split(".")[-2], 3))
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


FAMILIES: dict[str, tuple[Callable[..., Any], str | None]] = {
    "llama": (tiny.llama, None),
    "llama-chat": (tiny.llama, tiny.CHATML),
    "gpt2": (tiny.gpt2, None),
    "mistral": (tiny.mistral, None),
}


@pytest.fixture(scope="module", params=FAMILIES)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    build, template = FAMILIES[request.param]
    folder = folder_of(build, tmp_path_factory.mktemp("models") / request.param, template)
    return open_model(folder, device="cpu")


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.5}, {"temperature": 0.7, "top_p": 0.8, "seed": 3}]
)
def test_a_batch_gives_the_texts_that_each_prompt_gets_by_itself(
    opened: Opened, settings: dict[str, Any]
) -> None:
    apart = PROMPTS[:-1]
    together = answer(opened, apart, Sampling(max_new_tokens=12, **settings))
    alone = [
        answer(opened, [prompt], Sampling(max_new_tokens=12, **settings))[0] for prompt in apart
    ]
    assert together == alone
    assert len({found.text for found in together}) > 2
    pairs = answer(opened, apart, Sampling(max_new_tokens=12, batch_size=2, **settings))
    assert pairs == together


def test_a_batch_is_what_plain_transformers_writes(opened: Opened) -> None:
    """Greedy, one prompt at a time, with nothing of ours."""
    for found, prompt in zip(
        answer(opened, PROMPTS, Sampling(max_new_tokens=8)), PROMPTS, strict=True
    ):
        words = opened.tokenizer
        text = prompt
        if opened.chats:
            text = words.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
        ids = torch.tensor([words(text, add_special_tokens=not opened.chats)["input_ids"]])
        expected = []
        for _ in range(8):
            with torch.no_grad():
                logits = opened.model(torch.cat([ids, torch.tensor([expected]).long()], 1)).logits
            expected.append(int(logits[0, -1].argmax()))
            if expected[-1] == 2:
                break
        assert found.text == words.decode(expected, skip_special_tokens=True)
        assert found.tokens == len(expected)


def test_what_is_drawn_depends_on_seed_and_prompt_alone(opened: Opened) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, again, other, cold = (
        answer(opened, PROMPTS, Sampling(max_new_tokens=12, temperature=heat, seed=seed))
        for heat, seed in ((1.0, 0), (1.0, 0), (1.0, 1), (1e-4, 0))
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first == again
    assert [found.text for found in first] != [found.text for found in other]
    assert first[0].text != first[-1].text  # the same prompt a second time
    greedy = answer(opened, PROMPTS, Sampling(max_new_tokens=12))
    assert cold == greedy
    assert greedy[0] == greedy[-1]


def test_top_p_leaves_out_what_is_unlikely(tmp_path: Path) -> None:
    opened = open_model(folder_of(tiny.llama, tmp_path / "m"), device="cpu")
    only = answer(opened, PROMPTS, Sampling(max_new_tokens=8, temperature=1.0, top_p=1e-6))
    assert only == answer(opened, PROMPTS, Sampling(max_new_tokens=8))


def test_draws_have_the_probabilities_of_the_softmax() -> None:
    from dbx_llmtrain.worker.generate import _Draw

    scores = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(20_000, 4)
    draws = [torch.Generator().manual_seed(seed) for seed in range(20_000)]
    drawn = _Draw(draws, Sampling(temperature=2.0))(torch.zeros(20_000, 1), scores).argmax(dim=1)
    shares = torch.bincount(drawn, minlength=4) / 20_000
    assert torch.allclose(shares, (scores[0] / 2).softmax(0), atol=0.015)


def with_ends(folder: Path, *ends: int) -> Path:
    """The folder's model, which generation ends at these tokens."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ends)}))
    return folder


def test_answers_end_at_any_end_token_and_say_so(tmp_path: Path) -> None:
    folder = folder_of(tiny.llama, tmp_path / "m")
    free = open_model(with_ends(folder, 2), device="cpu")
    whole = answer(free, PROMPTS[:1], Sampling(max_new_tokens=12))[0]
    assert (whole.stopped, whole.tokens) == (False, 12)
    ids = free.tokenizer(PROMPTS[0])["input_ids"]
    out = free.model.generate(torch.tensor([ids]), max_new_tokens=12)[0, len(ids) :].tolist()
    end = next(token for token in out[3:] if token not in out[:3])
    # (Another row goes on, and this one is padded meanwhile.)
    cut = open_model(with_ends(folder, 2, end), device="cpu")
    found = answer(cut, PROMPTS[:3], Sampling(max_new_tokens=12))[0]
    place = out.index(end)
    assert (found.stopped, found.tokens) == (True, place + 1)
    assert found.text == free.tokenizer.decode(out[:place], skip_special_tokens=True)


def test_settings_of_the_models_own_do_not_join_ours(tmp_path: Path) -> None:
    folder = folder_of(tiny.llama, tmp_path / "m")
    plain = llm.generate(str(folder), PROMPTS, max_new_tokens=8, device="cpu")
    own = {"eos_token_id": 2, "do_sample": True, "temperature": 0.6, "repetition_penalty": 5.0}
    own |= {"max_length": 4, "top_k": 3}
    (folder / "generation_config.json").write_text(json.dumps(own))
    assert llm.generate(str(folder), PROMPTS, max_new_tokens=8, device="cpu") == plain


def test_a_prompt_near_the_last_position_gets_a_shorter_answer(tmp_path: Path) -> None:
    for build in (tiny.gpt2, tiny.llama):
        opened = open_model(folder_of(build, tmp_path / build.__name__), device="cpu")
        opened.model.generation_config.eos_token_id = None
        opened.model.config.eos_token_id = None
        long = "cat" + " the cat" * 59
        count = len(opened.tokenizer(long)["input_ids"])
        assert 110 < count < 128  # positions
        short, near = answer(opened, ["the", long], Sampling(max_new_tokens=30))
        assert (short.tokens, near.tokens) == (30, 128 - count)
        with pytest.raises(ConfigError, match=r"prompts\[1\]: has \d+ tokens, the model has 128"):
            answer(opened, ["the", long * 2], Sampling(max_new_tokens=30))


def test_a_text_is_a_message_to_a_model_that_was_trained_on_chats(tmp_path: Path) -> None:
    folder = folder_of(tiny.llama, tmp_path / "m", tiny.CHATML)

    def ids(data_format: str | None, prompt: Any) -> str:
        opened = open_model(folder, device="cpu", data_format=data_format)
        return answer(opened, [prompt], Sampling(max_new_tokens=8))[0].text

    message = ids("messages", [{"role": "user", "content": "the cat"}])
    assert ids(None, "the cat") == ids("messages", "the cat") == message
    assert ids("text", "the cat") == ids("text, tokens", "the cat") != message
    assert ids("text", [{"role": "user", "content": "the cat"}]) == message
    # What an export says of its data is what counts.
    for data_format, same in (("text", False), ("prompt_completion", True)):
        storage.write_manifest(folder, {"files": [], DATA_FORMAT: data_format})
        found = llm.generate(str(folder), ["the cat"], max_new_tokens=8, device="cpu")
        assert (found[0] == message) is same


def test_what_generate_gives_back(tmp_path: Path) -> None:
    folder = folder_of(tiny.llama, tmp_path / "m", tiny.CHATML)
    asked = ["the cat", [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]]
    found = llm.generate(str(folder), asked, max_new_tokens=4)
    assert found.model == str(folder)
    assert [one.prompt for one in found.samples] == ["the cat", "system: be\nuser: hi"]
    assert list(found) == found.texts == [one.text for one in found.samples]
    assert len(found) == 2
    assert found[1] == found.texts[1]


# Which model ----------------------------------------------------------------------------------


def test_a_run_means_its_export(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"model: there is no folder .*run"):
        find_model(run_dir)
    run_dir.mkdir()
    (run_dir / "plan.json").write_text(sample.run_plan(run_dir).model_dump_json())
    nothing = sample.result(run_dir, model_path=None)
    for given in (run_dir, nothing, sample.result(run_dir)):
        with pytest.raises(CheckpointError, match=r"has no complete export .*with llm\.export"):
            find_model(given)
    storage.write_manifest(run_dir / "export", {"files": [], DATA_FORMAT: "text"})
    wanted = Found(str(run_dir / "export"), data_format="text")
    for given in (run_dir, str(run_dir), nothing, sample.result(run_dir)):
        assert find_model(given) == wanted


def test_code_runs_where_the_run_was_told_so(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "export").mkdir(parents=True)
    (run_dir / "export" / "config.json").write_text("{}")
    for trusted in (False, True):
        config = sample.config(model={"source": "m", "trust_remote_code": trusted})
        plan = sample.run_plan(run_dir, config=config)
        (run_dir / "plan.json").write_text(plan.model_dump_json())
        assert find_model(run_dir / "export").trusted is trusted
    assert find_model((run_dir / "export").rename(tmp_path / "moved")).trusted is False


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    def refused(given: Any) -> str:
        with pytest.raises((ConfigError, CheckpointError)) as caught:
            llm.generate(given, ["the cat"], device="cpu")
        return str(caught.value)

    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "file.gguf").write_text("x")
    (tmp_path / "empty").mkdir()
    assert "is a checkpoint, and no model to generate with: make one" in refused(
        tmp_path / "step-00000003"
    )
    assert "is a file: expected a folder or a hub id" in refused(str(tmp_path / "file.gguf"))
    assert "holds no model: expected a config.json" in refused(str(tmp_path / "empty"))
    assert "expected a TrainResult, a folder or a hub id, found None" in refused(None)
    assert "found an address (s3:)" in refused("s3://bucket/model")
    there = tmp_path / "nosuch"
    assert f"there is no folder {there}" in refused(there)
    assert "and 'nosuch' is no hub id, which has an owner (ORG/NAME)" in refused("nosuch")
    assert "no folder org/none, and the Hugging Face hub did not" in refused("org/none")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "org/none"}')
    assert "the base of the adapter " in (told := refused(str(adapter)))
    assert told.endswith("Use the run's merged export instead")
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "no such"}')
    assert "empty cannot be opened: " in refused(str(tmp_path / "empty"))


def test_models_that_cannot_generate_are_refused(tmp_path: Path) -> None:
    tiny.bert().save_pretrained(tmp_path / "bert")
    with pytest.raises(ConfigError, match=r"bert fills in masked tokens \(BertForMaskedLM\)"):
        llm.generate(str(tmp_path / "bert"), ["the cat"])
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    (tmp_path / "t5").mkdir()
    (tmp_path / "t5" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="t5 is an encoder with a decoder"):
        llm.generate(str(tmp_path / "t5"), ["the cat"])
    tiny.llama().save_pretrained(tmp_path / "mute")
    with pytest.raises(ConfigError, match="mute has no tokenizer that can be opened"):
        llm.generate(str(tmp_path / "mute"), ["the cat"])
    folder = folder_of(tiny.llama, tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"prompts\[0\]: is a list of messages, and the token"):
        llm.generate(str(folder), [[{"role": "user", "content": "hi"}]])


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device: expected cpu or cuda, found 'gpu'"):
        open_model(tmp_path, device="gpu")


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts: expected a list with one prompt or more, found []"),
        ("the cat", "prompts: expected a list with one prompt or more, found 'the cat'"),
        (None, "prompts: expected a list with one prompt or more, found None"),
        (["a", " "], "prompts[1]: expected a text, or messages with role and content, found ' '"),
        ([7], "prompts[0]: expected a text, or messages with role and content, found 7"),
        ([[]], "prompts[0]: expected a text, or messages"),
        ([[{"role": "user"}]], "prompts[0]: expected a text, or messages"),
        ([{"role": "user", "content": "hi"}], "prompts[0]: expected a text, or messages"),
    ],
)
def test_prompts_that_are_none(prompts: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        llm.generate("org/none", prompts)
    assert message in str(caught.value)


def test_settings_that_cannot_be_are_refused_together() -> None:
    with pytest.raises(ConfigError) as caught:
        llm.generate(
            "org/none", ["x"], max_new_tokens=0, temperature=-1, top_p=0, seed=-1, batch_size=True
        )
    text = str(caught.value)
    assert "5 problems" in text
    for line in (
        "max_new_tokens: expected a whole number of at least 1, found 0",
        "batch_size: expected a whole number of at least 1, found True",
        "seed: expected a whole number of at least 0, found -1",
        "temperature: expected a number, 0 (the likeliest token) or more, found -1",
        "top_p: expected a number above 0 and at most 1, found 0",
    ):
        assert line in text
    for value in (float("nan"), float("inf"), "warm", None):
        with pytest.raises(ConfigError, match="temperature"):
            llm.generate("org/none", ["x"], temperature=value)  # type: ignore[arg-type]


WAITS = """
import sys, time
import huggingface_hub
import dbx_llmtrain as llm
from dbx_llmtrain.driver import hub
hub.ASK_S = 2.0
for model in sys.argv[1:]:
    began = time.monotonic()
    try:
        llm.generate(model, ["the cat"], device="cpu")
    except llm.ConfigError as error:
        print(f"{time.monotonic() - began:.1f}", " ".join(str(error).split()))
"""


@pytest.mark.parametrize("answers", [False, None])
def test_a_hub_that_cannot_be_reached_is_told_soon(tmp_path: Path, answers: bool | None) -> None:
    """One that refuses the connection, and one that takes it and never says a word."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if answers is None:
            silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-c", WAITS, "org/none", "nosuch"],
            env=os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path)},
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (took, reached), (at_once, bare) = (line.split(" ", 1) for line in done.stdout.splitlines())
    assert "model: no folder org/none, and the Hugging Face hub did not give it" in reached
    assert "check that the driver can reach the hub" in reached
    assert float(took) < 10
    assert "'nosuch' is no hub id" in bare
    assert float(at_once) < 1
