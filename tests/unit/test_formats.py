from __future__ import annotations

from typing import Any

import pytest

from dbx_llmtrain.data_checks import COLUMNS
from dbx_llmtrain.errors import DataError
from dbx_llmtrain.text.formats import (
    Chat,
    Dropped,
    PromptCompletion,
    Text,
    TokenIds,
    content_key,
    detect_format,
    known_columns,
    parse_rows,
)
from dbx_llmtrain.text.turns import Message

USER = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}
WHERE = "rows.jsonl, line 7"


def parse(row: dict[str, Any], fmt: Any, **columns: str) -> Any:
    """The one thing that a row holds."""
    found = parse_rows(row, fmt, columns, WHERE)
    if isinstance(found, Dropped):
        return found
    (one,) = found
    return one


def calls(*arguments: dict[str, Any], name: str = "add") -> Message:
    """An answer that calls a tool once for every set of arguments."""
    made = [
        {"type": "function", "function": {"name": name, "arguments": given}} for given in arguments
    ]
    return Message("assistant", "", {"tool_calls": made})


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["messages", "id"], "messages"),
        (["prompt", "completion"], "prompt_completion"),
        (["instruction", "input", "output"], "instruction"),
        (["instruction", "context", "response", "category"], "instruction"),
        (["text"], "text"),
        (["conversations", "tools", "system"], "sharegpt"),
        (["instruction", "instances", "id"], "instruction"),
        (["question", "answer"], "prompt_completion"),
        (["prompt", "response"], "prompt_completion"),
        (["prompt", "prompt_id", "messages"], "messages"),
        (["input_ids", "labels", "attention_mask"], "tokens"),
    ],
)
def test_format_is_recognised_by_its_columns(names: list[str], expected: str) -> None:
    assert detect_format(names, {}, WHERE) == expected


def test_an_ambiguous_row_is_refused_with_the_formats_that_fit() -> None:
    with pytest.raises(DataError, match=r"line 7.*several formats: prompt_completion, text\. Set"):
        detect_format(["prompt", "completion", "text"], {}, WHERE)


def test_a_row_of_no_known_format_is_refused_with_the_formats_there_are() -> None:
    with pytest.raises(DataError) as caught:
        detect_format(["question", "choice0", "label"], {}, WHERE)
    message = str(caught.value)
    assert message.startswith(f"{WHERE}: no known format has the columns choice0, label, question.")
    assert "Known: messages: messages; sharegpt: conversations; prompt_completion: " in message
    assert "data.columns" in message
    assert "data.formatter" in message


def test_a_renamed_column_that_is_not_there_is_named_with_the_nearest() -> None:
    missing = f"{WHERE}: data.columns.prompt: there is no column 'qeustion', found best, question"
    with pytest.raises(DataError) as caught:
        detect_format(["question", "best"], {"prompt": "qeustion", "completion": "best"}, WHERE)
    assert str(caught.value) == f"{missing}: did you mean 'question'?"
    with pytest.raises(DataError, match=r"there is no column 'q', found best, question$"):
        detect_format(["question", "best"], {"prompt": "q"}, WHERE)
    row = {"question": "x", "best": "y"}
    for fmt, ours in (("prompt_completion", "completion"), ("text", "text")):
        columns = {"prompt": "question", ours: "bast"}
        with pytest.raises(DataError) as caught:
            parse_rows(row, fmt, columns, WHERE)  # type: ignore[arg-type]
        assert str(caught.value) == (
            f"{WHERE}: expected a column 'bast' (data.columns: {ours}), found best, question: "
            "did you mean 'best'?"
        )


def test_names_of_columns_are_those_of_the_configuration() -> None:
    assert known_columns() == COLUMNS


def test_a_row_without_any_pair_of_columns_is_told_all_of_them() -> None:
    with pytest.raises(DataError) as caught:
        parse_rows({"messages": []}, "prompt_completion", {}, WHERE)
    assert str(caught.value) == (
        f"{WHERE}: expected the columns prompt and completion, or prompt and response, or question "
        "and answer, found messages"
    )
    with pytest.raises(DataError, match="expected a column 'answer', found question"):
        parse_rows({"question": "x"}, "prompt_completion", {}, WHERE)


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
            "message 1 to have a role of system, user, assistant, tool, found str 'bot'",
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
            "message 1 to have tool calls with the name of a function, found int '1'",
        ),
        (
            {"messages": [USER, {**ANSWER, "tool_calls": "{"}]},
            "messages",
            "message 1 to have tool_calls that are a list or JSON (",
        ),
        (
            {"messages": [USER, {**ANSWER, "tool_calls": {"a": 1}}]},
            "messages",
            "message 1 to have a list of tool_calls, found dict",
        ),
        (
            {"messages": [USER, {**ANSWER, "tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
            "messages",
            "message 1 to have arguments of a tool call that are an object, found str '[1]'",
        ),
        (
            {"messages": [USER, {**ANSWER, "tool_calls": [{"name": "f", "arguments": "{a}"}]}]},
            "messages",
            "message 1 to have arguments of a tool call that are JSON (",
        ),
        (
            {"messages": [{**USER, "tool_calls": [{"name": "f"}]}, ANSWER]},
            "messages",
            "message 0 to have no tool_calls in a message of role user",
        ),
        (
            {"messages": [USER, {**ANSWER, "function_call": {"name": "f"}}]},
            "messages",
            "message 1 to have tool_calls in place of function_call",
        ),
        (
            {"messages": [USER, {**ANSWER, "weight": 0}]},
            "messages",
            "message 1 to have no weight other than 1",
        ),
        (
            {"messages": [{"role": "user", "content": " "}, ANSWER]},
            "messages",
            "message 0 to have a content that is not empty, found an empty string",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]},
            "messages",
            "message 0 to have a content of text parts, found dict",
        ),
        (
            {"messages": [USER, ANSWER], "tools": "[{]"},
            "messages",
            "column 'tools': expected JSON schemas of tools (",
        ),
        (
            {"messages": [USER, ANSWER], "tools": 5},
            "messages",
            "column 'tools': expected a list of tools, or such a list as JSON, found int '5'",
        ),
        (
            {"messages": [USER, ANSWER], "tools": [{"type": "function"}]},
            "messages",
            "column 'tools': expected tools that have a function with a name, found dict",
        ),
        (
            {"conversations": [{"from": "bot", "value": "x"}]},
            "sharegpt",
            "column 'conversations': expected message 0 to have a from of system, human, user, gpt",
        ),
        (
            {"conversations": [{"from": "gpt", "value": None}]},
            "sharegpt",
            "message 0 to have a value that is a string, found nothing (null)",
        ),
        (
            {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": ""}]},
            "sharegpt",
            "message 1 to have an answer that is not empty, found an empty string",
        ),
        (
            {"conversations": ["x"]},
            "sharegpt",
            "message 0 to have a from and a value, found str 'x'",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "add(1)"}]},
            "sharegpt",
            "message 0 to have a function_call that is JSON (",
        ),
        (
            {"conversations": [{"from": "human", "value": "x"}]},
            "sharegpt",
            "column 'conversations': expected at least one assistant message, found the roles user",
        ),
        (
            {"conversations": [{"from": "system", "value": "x"}], "system": "y"},
            "sharegpt",
            "expected one system message, found the column 'system' and a system turn",
        ),
        (
            {"question": "x", "answer": "y", "prompt": "a", "response": "b"},
            "prompt_completion",
            "expected one prompt with one completion, found prompt + response and question + answe",
        ),
        (
            {"instruction": "x", "instances": []},
            "instruction",
            "column 'instances': expected a non-empty list, found list '[]'",
        ),
        (
            {"instruction": "x", "instances": ["y"]},
            "instruction",
            "column 'instances': expected instance 0 to be an object, found str 'y'",
        ),
        ({"input_ids": "1 2"}, "tokens", "column 'input_ids': expected a list of integers, found"),
        ({"input_ids": [1, True]}, "tokens", "a list of integers, found bool 'True'"),
        ({"input_ids": [1, 2.0]}, "tokens", "a list of integers, found float '2.0'"),
        (
            {"input_ids": [1, 2], "labels": [1]},
            "tokens",
            "column 'labels': expected 2 labels, as there are input_ids, found int '1'",
        ),
        (
            {"input_ids": [1, 2], "labels": [-100, 3]},
            "tokens",
            "column 'labels': expected -100 or the input id 2 at position 1, found int '3'",
        ),
        (
            {"input_ids": [1, 2], "attention_mask": [1]},
            "tokens",
            "column 'attention_mask': expected 2 values, as input_ids, found int '1'",
        ),
        (
            {"input_ids": [1, 2], "attention_mask": [1, 2]},
            "tokens",
            "column 'attention_mask': expected zeros and ones, found list '[1, 2]'",
        ),
        (
            {"input_ids": [1, 2, 3, 4], "attention_mask": [0, 1, 0, 1]},
            "tokens",
            "expected ones without a gap, and zeros at the ends only, found str '0 at 2'",
        ),
        (
            {"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [0, 1]},
            "tokens",
            "column 'labels': expected -100 where attention_mask is 0",
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


def test_a_row_of_another_format_in_the_same_file_is_refused() -> None:
    with pytest.raises(DataError, match="expected a column 'messages', found completion, prompt"):
        parse({"prompt": "x", "completion": "y"}, "messages")


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + "a1" * 17,
        "sk-proj-" + "b2" * 10,
        "dapi" + "0f" * 16,
        "https://me:pass@host/x",
        "0123456789abcdef" * 4,
    ],
)
def test_what_looks_like_a_secret_is_not_shown(secret: str) -> None:
    with pytest.raises(DataError) as caught:
        parse({"messages": f"my key is {secret}, keep it"}, "messages")
    assert "my key is " in str(caught.value)
    assert "***" in str(caught.value)
    assert secret[-8:] not in str(caught.value).replace("host/x", "")


def test_a_long_value_is_shown_shortened() -> None:
    with pytest.raises(DataError) as caught:
        parse({"messages": "word " * 1000}, "messages")
    assert len(str(caught.value)) < 200


def test_question_and_answer_and_prompt_and_response() -> None:
    expected = PromptCompletion("Why?", "Because.", user="Why?")
    assert parse({"question": "Why?", "answer": "Because."}, "prompt_completion") == expected
    row = {"prompt": "Why?", "response": "Because.", "completion": None}
    assert parse(row, "prompt_completion") == expected


def test_messages_as_tables_keep_them() -> None:
    """Nulls stand for keys that a message does not have, arrays for lists."""
    import numpy as np

    turns = [
        {"role": "user", "content": "1 + 1?", "name": None, "tool_calls": None},
        {
            "role": "assistant",
            "content": None,
            "name": None,
            "tool_calls": np.array(
                [{"function": {"name": "add", "arguments": {"a": 1, "b": None}}}], dtype=object
            ),
        },
        {"role": "tool", "content": "", "name": "add", "tool_calls": None},
        {"role": "assistant", "content": [{"type": "text", "text": "2"}], "tool_calls": []},
    ]
    schema = {"name": "add", "parameters": {"a": {"type": "integer"}, "b": None}}
    row = {"messages": np.array(turns, dtype=object), "tools": [schema]}
    found = parse(row, "messages")
    assert found.messages == (
        Message("user", "1 + 1?"),
        calls({"a": 1}),
        Message("tool", "", {"name": "add"}),
        Message("assistant", "2"),
    )
    function = {"name": "add", "parameters": {"a": {"type": "integer"}}}
    assert found.tools == ({"type": "function", "function": function},)


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "function", "function": {"name": "add"}}],
        [{"name": "add"}],
        ['{"name": "add"}'],
        '[{"name": "add"}]',
        {"name": "add"},
    ],
)
def test_tools_in_every_way_they_are_written(tools: Any) -> None:
    found = parse({"messages": [USER, ANSWER], "tools": tools}, "messages")
    assert found.tools == ({"type": "function", "function": {"name": "add"}},)


@pytest.mark.parametrize("tools", [None, "", "[]", []])
def test_no_tools(tools: Any) -> None:
    assert parse({"messages": [USER, ANSWER], "tools": tools}, "messages").tools == ()


def test_arguments_of_a_call_are_an_object_also_where_they_are_json() -> None:
    given = [
        {"name": "add", "arguments": '{"a": null}'},
        {"id": "1", "function": {"name": "add", "arguments": ""}},
    ]
    row = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": given}]}
    made = parse(row, "messages").messages[1].extra["tool_calls"]
    assert [call["function"]["arguments"] for call in made] == [{"a": None}, {}]
    assert [call.get("id") for call in made] == [None, "1"]


def test_keys_that_templates_know_are_kept() -> None:
    row = {"messages": [USER, {**ANSWER, "reasoning_content": "Hm.", "weight": 1}]}
    assert parse(row, "messages").messages[1].for_template() == {
        **ANSWER,
        "reasoning_content": "Hm.",
    }


def test_sharegpt_with_a_system_column_and_tools() -> None:
    row = {
        "system": "Be brief.",
        "tools": '[{"name": "add", "description": "adds"}]',
        "conversations": [
            {"from": "human", "value": "1 + 1?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "It is 2."},
            {"from": "user", "value": "And?"},
            {"from": "function_call", "value": '[{"name": "add", "arguments": {"a": 1}}]'},
            {"from": "tool", "value": "2"},
            {"from": "assistant", "value": "2."},
        ],
    }
    found = parse(row, "sharegpt")
    assert found.messages == (
        Message("system", "Be brief."),
        Message("user", "1 + 1?"),
        calls({"a": 1}),
        Message("tool", "2"),
        Message("assistant", "It is 2."),
        Message("user", "And?"),
        calls({"a": 1}),
        Message("tool", "2"),
        Message("assistant", "2."),
    )
    assert found.tools == (
        {"type": "function", "function": {"name": "add", "description": "adds"}},
    )


def test_sharegpt_with_roles_and_contents_and_an_empty_system_column() -> None:
    found = parse({"conversations": [USER, ANSWER], "system": " "}, "sharegpt")
    assert found == Chat((Message("user", "Why?"), Message("assistant", "Because.")))


def test_instances() -> None:
    row = {"instruction": "Add.", "instances": [{"input": "1", "output": "1"}, {"output": "0"}]}
    found = parse_rows(row, "instruction", {}, WHERE)
    assert isinstance(found, tuple)
    assert [one.user for one in found if isinstance(one, PromptCompletion)] == ["Add.\n\n1", "Add."]


def test_tokens() -> None:
    row = {"input_ids": (1, 2, 3), "labels": [-100, 2, -100], "attention_mask": [1, 1, 0]}
    assert parse(row, "tokens") == TokenIds((1, 2), (-100, 2))
    assert parse({"input_ids": [4]}, "tokens") == TokenIds((4,))
    assert parse({"input_ids": []}, "tokens") == Dropped("no tokens")


def test_the_key_depends_on_the_content_alone() -> None:
    rows = [
        Text("a"),
        Text("b"),
        PromptCompletion("a", "b", user="a"),
        Chat((Message("user", "a"), Message("assistant", "b"))),
        Chat((Message("user", "a"), Message("assistant", "b")), completion_from=1),
        Chat((Message("user", "a"), Message("assistant", "b", {"name": "c"}))),
        Chat((Message("user", "a"), Message("assistant", "b")), tools=({"name": "c"},)),
        TokenIds((1, 2)),
        TokenIds((1, 2), (-100, 2)),
    ]
    keys = [content_key(row) for row in rows]
    assert len(set(keys)) == len(rows)
    assert keys == [content_key(row) for row in rows]
    assert content_key(rows[0], rows[1]) not in keys
    assert all(len(key) == 32 and int(key, 16) >= 0 for key in keys)
