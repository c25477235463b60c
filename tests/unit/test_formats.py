from __future__ import annotations

from typing import Any

import pytest

from dbx_llmtrain.errors import DataError
from dbx_llmtrain.text.formats import (
    Chat,
    Dropped,
    Message,
    PromptCompletion,
    Text,
    content_key,
    detect_format,
    parse_row,
)

USER = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}
WHERE = "rows.jsonl, line 7"


def parse(row: dict[str, Any], fmt: Any, **columns: str) -> Any:
    return parse_row(row, fmt, columns, WHERE)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["messages", "id"], "messages"),
        (["prompt", "completion"], "prompt_completion"),
        (["instruction", "input", "output"], "instruction"),
        (["instruction", "context", "response", "category"], "instruction"),
        (["text"], "text"),
    ],
)
def test_format_is_recognised_by_its_columns(names: list[str], expected: str) -> None:
    assert detect_format(names, {}, WHERE) == expected


def test_an_ambiguous_row_is_refused_with_the_formats_that_fit() -> None:
    with pytest.raises(DataError, match=r"line 7.*several formats: prompt_completion, text\. Set"):
        detect_format(["prompt", "completion", "text"], {}, WHERE)


def test_a_row_of_no_known_format_is_refused_with_the_formats_there_are() -> None:
    with pytest.raises(DataError, match=r"columns answer, question\. Known: messages: messages; "):
        detect_format(["question", "answer"], {}, WHERE)


def test_renamed_columns_decide_the_format() -> None:
    columns = {"prompt": "question", "completion": "answer"}
    assert detect_format(["question", "answer", "text"], columns, WHERE) == "prompt_completion"
    row = {"question": "Why?", "answer": "Because."}
    expected = PromptCompletion("Why?", "Because.", user="Why?")
    assert parse(row, "prompt_completion", **columns) == expected


def test_messages() -> None:
    row = {"messages": [{"role": "system", "content": "Be brief."}, USER, ANSWER]}
    assert parse(row, "messages") == Chat(
        (
            Message("system", "Be brief."),
            Message("user", "Why?"),
            Message("assistant", "Because."),
        )
    )


def test_prompt_and_completion_of_messages() -> None:
    chat = parse({"prompt": [USER], "completion": [ANSWER]}, "prompt_completion")
    expected = (Message("user", "Why?"), Message("assistant", "Because."))
    assert chat == Chat(expected, completion_from=1)


@pytest.mark.parametrize(
    ("extra", "answer"), [("input", "output"), ("context", "response"), ("input", "response")]
)
def test_instructions_with_alpaca_and_dolly_names(extra: str, answer: str) -> None:
    row = parse({"instruction": "Add.", extra: "1 2", answer: "3"}, "instruction")
    assert row.user == "Add.\n\n1 2"
    assert row.prompt == "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n"
    assert row.completion == "3"


@pytest.mark.parametrize("extra", [{}, {"input": ""}, {"input": None}, {"input": "  "}])
def test_an_instruction_without_input(extra: dict[str, Any]) -> None:
    row = parse({"instruction": "Smile.", "output": ":-)", **extra}, "instruction")
    assert row.user == "Smile."
    assert row.prompt == "### Instruction:\nSmile.\n\n### Response:\n"


@pytest.mark.parametrize("text", ["", "  \n", None])
def test_empty_text_is_dropped_with_its_reason(text: str | None) -> None:
    assert parse({"text": text}, "text") == Dropped("empty text")


def test_text() -> None:
    assert parse({"text": " as it is\n"}, "text") == Text(" as it is\n")


@pytest.mark.parametrize(
    ("row", "fmt", "message"),
    [
        ({"a": 1}, "text", "expected a column 'text', found a"),
        ({}, "text", "expected a column 'text', found no columns"),
        ({"text": 5}, "text", "column 'text': expected a string, found int '5'"),
        ({"prompt": "x"}, "prompt_completion", "expected a column 'completion', found prompt"),
        (
            {"prompt": "x", "completion": " "},
            "prompt_completion",
            "column 'completion': expected a non-empty string, found an empty string",
        ),
        (
            {"prompt": None, "completion": "y"},
            "prompt_completion",
            "column 'prompt': expected a string, found nothing (null)",
        ),
        (
            {"prompt": "x", "completion": [ANSWER]},
            "prompt_completion",
            "column 'prompt': expected a non-empty list of messages, found str 'x'",
        ),
        (
            {"prompt": [USER], "completion": [USER]},
            "prompt_completion",
            "column 'completion': expected at least one assistant message",
        ),
        (
            {"instruction": "x", "output": ""},
            "instruction",
            "column 'output': expected a non-empty string",
        ),
        ({"instruction": "x"}, "instruction", "expected a column 'output', found instruction"),
        (
            {"instruction": "x", "output": "y", "response": "z"},
            "instruction",
            "one of the columns 'output' and 'response', found both",
        ),
        ({"messages": []}, "messages", "expected a non-empty list of messages, found list '[]'"),
        ({"messages": "hi"}, "messages", "expected a non-empty list of messages, found str 'hi'"),
        (
            {"messages": [USER]},
            "messages",
            "expected at least one assistant message, found the roles user",
        ),
        ({"messages": ["hi"]}, "messages", "message 0 to have a role and a content, found str"),
        (
            {"messages": [USER, {"role": "bot", "content": "x"}]},
            "messages",
            "message 1 to have a role of system, user, assistant, found str 'bot'",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": None}]},
            "messages",
            "message 1 to have a content that is a string, found nothing (null)",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "\n"}]},
            "messages",
            "message 1 to have an answer that is not empty",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [1]}]},
            "messages",
            "message 1 to have no tool_calls",
        ),
    ],
)
def test_a_bad_row_names_file_row_column_and_what_was_found(
    row: dict[str, Any], fmt: str, message: str
) -> None:
    with pytest.raises(DataError) as caught:
        parse(row, fmt)
    assert str(caught.value).startswith(f"{WHERE}: ")
    assert message in str(caught.value)


def test_the_users_own_column_name_is_in_the_error() -> None:
    with pytest.raises(DataError, match="column 'answer': expected a string"):
        parse({"prompt": "x", "answer": 3}, "prompt_completion", completion="answer")


def test_the_key_depends_on_the_content_alone() -> None:
    rows = [
        Text("a"),
        Text("b"),
        PromptCompletion("a", "b", user="a"),
        Chat((Message("user", "a"), Message("assistant", "b"))),
        Chat((Message("user", "a"), Message("assistant", "b")), completion_from=1),
    ]
    keys = [content_key(row) for row in rows]
    assert len(set(keys)) == len(rows)
    assert keys == [content_key(row) for row in rows]
    assert all(len(key) == 32 and int(key, 16) >= 0 for key in keys)
