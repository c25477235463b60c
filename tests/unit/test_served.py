"""What answers for a registered model, asked directly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dbx_llmtrain as llm
from dbx_llmtrain.compat import dtype_argument
from dbx_llmtrain.driver import model_package, served
from tests import tiny

TURNS = [{"role": "user", "content": "what is the answer?"}]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("chat") / "export", seed=3)


def answers(folder: Path, task: str = served.CHAT, **settings: Any) -> served.Answers:
    base = {
        "task": task,
        "name": "first",
        "kind": "AutoModelForCausalLM",
        "load": dtype_argument("auto"),
        "defaults": {"max_tokens": 8, "temperature": 0.0},
        "model": ".",
        "tokenizer": ".",
    }
    return served._load_pyfunc(str(folder), base | settings)


def content(completion: dict[str, Any]) -> str:
    return str(completion["choices"][0]["message"]["content"])


def test_a_request_may_lack_everything_but_messages(chat: Path) -> None:
    expected = llm.generate(str(chat), [TURNS], max_new_tokens=8)[0]
    (found,) = answers(chat).predict({"messages": TURNS})
    assert content(found) == expected
    assert found["object"] == "chat.completion"
    assert found["usage"]["completion_tokens"] == 8


def test_rows_of_a_table_are_answered_one_by_one(chat: Path) -> None:
    """As Spark gives them: arrays for lists, NaN for what a row does not say."""
    import numpy
    import pandas

    other = [{"role": "user", "content": "how are you today?", "name": None}]
    table = pandas.DataFrame(
        {
            "messages": [numpy.array(TURNS, dtype=object), numpy.array(other, dtype=object)],
            "max_tokens": [3.0, float("nan")],
            "tools": [None, None],
        }
    )
    found = answers(chat).predict(table)
    assert [each["usage"]["completion_tokens"] for each in found] == [3, 8]
    plain = [{"role": "user", "content": "how are you today?"}]
    assert content(found[1]) == llm.generate(str(chat), [plain], max_new_tokens=8)[0]


def test_an_answer_ends_before_a_stop_string(chat: Path) -> None:
    whole = content(answers(chat).predict({"messages": TURNS})[0])
    stop = whole[2]
    (found,) = answers(chat).predict({"messages": TURNS, "stop": [stop]})
    assert content(found) == whole[: whole.index(stop)]
    assert found["choices"][0]["finish_reason"] == "stop"
    (again,) = answers(chat).predict({"messages": TURNS, "stop": stop})
    assert content(again) == content(found)


def test_an_answer_that_ends_by_itself_says_so(tmp_path: Path) -> None:
    folder = tiny.model_folder(tmp_path / "export", seed=3)
    model = answers(folder)
    loaded, tokenizer = model._model()
    prompt = tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        first = int(loaded(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
    loaded.generation_config.eos_token_id = first
    (found,) = model.predict({"messages": TURNS})
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] == 1


def test_a_temperature_is_obeyed(chat: Path) -> None:
    model = answers(chat)
    request = {"messages": TURNS, "temperature": 5.0, "top_p": 0.99}
    torch.manual_seed(0)
    drawn = {content(model.predict(request)[0]) for _ in range(4)}
    assert len(drawn) > 1
    calm = [content(model.predict({**request, "temperature": 0})[0]) for _ in range(2)]
    assert len(set(calm)) == 1
    hot = answers(chat, defaults={"max_tokens": 8, "temperature": 5.0})
    assert len({content(hot.predict({"messages": TURNS})[0]) for _ in range(4)}) > 1


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {"max_tokens": 256, "temperature": 0.0}),
        ({"temperature": 0.6}, {"max_tokens": 256, "temperature": 0.0}),
        ({"do_sample": True}, {"max_tokens": 256, "temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.6, "max_new_tokens": 9},
            {"max_tokens": 9, "temperature": 0.6},
        ),
    ],
)
def test_a_model_answers_as_its_generation_configuration_says(
    generation: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert model_package._defaults(generation) == expected


def test_what_cannot_be_done_is_refused(chat: Path) -> None:
    model = answers(chat)
    with pytest.raises(ValueError, match="presence_penalty, n: this model cannot do that"):
        model.predict({"messages": TURNS, "presence_penalty": 0.5, "n": 2})
    assert model.predict({"messages": TURNS, "presence_penalty": 0.0, "n": 1})
    long = [{"role": "user", "content": "a cat " * 200}]
    with pytest.raises(ValueError, match=r"the model 128 positions for it and an answer"):
        model.predict({"messages": long})


def test_an_answer_ends_with_the_models_positions(chat: Path) -> None:
    (found,) = answers(chat).predict({"messages": TURNS, "max_tokens": 10_000})
    assert found["usage"]["total_tokens"] <= 128


def test_tools_reach_the_template(tmp_path: Path) -> None:
    template = "{{ tools | length if tools else 0 }}" + tiny.CHATML
    folder = tiny.model_folder(tmp_path / "export", chat_template=template)
    few = answers(folder).predict({"messages": TURNS, "max_tokens": 1})
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    many = answers(folder).predict({"messages": TURNS, "tools": [tool] * 10, "max_tokens": 1})
    assert many[0]["usage"]["prompt_tokens"] == few[0]["usage"]["prompt_tokens"] + 1


def test_a_text_is_not_taken_to_be_at_its_end(tmp_path: Path) -> None:
    """Some tokenizers end every text with an end token: nothing would follow."""
    folder = tiny.model_folder(tmp_path / "export", chat_template=None)
    path = folder / "tokenizer.json"
    whole = json.loads(path.read_text())
    added = whole["post_processor"]
    expected = answers(folder, "text-generation").predict("the cat")
    ending = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "</s>", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]},
            "</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]},
        },
    }
    assert added != ending
    path.write_text(json.dumps(whole | {"post_processor": ending}))
    assert answers(folder, "text-generation").predict(["the cat"]) == expected
