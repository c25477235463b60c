"""What looks like a secret is refused in every field of a configuration, and never shown."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from dbx_llmtrain import cli, credentials, secret_text
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.model_sections import ModelConfig

PART = "AbCd1234EfGh5678IjKl"
_JSON = base64.urlsafe_b64encode(b'{"alg": "HS256"}').decode().rstrip("=")
SECRETS = {
    f"hf_{PART}": "Hugging Face",
    f"dapi{'0a1b2c3d' * 4}": "Databricks",
    f"dapi{'0a1b2c3d' * 4}-2": "Databricks",
    f"sk-{PART}": "API key",
    f"sk-proj-{PART}_x-{PART}": "API key",
    f"ghp_{PART}": "GitHub",
    f"gho_{PART}": "GitHub",
    f"github_pat_{PART}_{PART}": "GitHub",
    "AKIAABCDEFGHIJKLMNOP": "AWS",
    f"xoxb-123-{PART}": "Slack",
    f"{_JSON}.{_JSON}.{PART}": "JSON web token",
    f"https://me:{PART}@host/model": "password within an address",
    f"https://{PART}@host/model": "password within an address",
    f"s3://me:{PART}@bucket/x": "password within an address",
    f"https://host/x?sv=1&sig={PART}": "key within an address",
    f"-----BEGIN RSA PRIVATE KEY-----\n{PART}\n-----END RSA PRIVATE KEY-----": "private key",
}
PLAIN = [
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "hf-internal-testing/tiny-random-LlamaForCausalLM",
    "/Volumes/main/ml/task-specific-question-answering-2024/sk-learn",
    "abfss://container@account.dfs.core.windows.net/x",
    "http://localhost:5000/a@b",
    "8f3c2a1b9d7e6f5a4b3c2d1e0f9a8b7c6d5e4f3a",
    "{% for m in messages %}{{ m.role ~ ': ' ~ m.content }}{% endfor %}",
]


def base() -> dict[str, Any]:
    return {"model": {"source": "m"}, "data": {"train": "d"}}


def refused(values: dict[str, Any], *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_dict(values, *overrides)
    return caught.value


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize(
    "path", ["model.source", "tracking.tags.team", "cluster.env.X", "checkpoint.dir", "data.train"]
)
def test_a_secret_is_refused_by_the_name_of_its_field(path: str, secret: str) -> None:
    values = base()
    *parents, name = path.split(".")
    inner = values
    for parent in parents:
        inner = inner.setdefault(parent, {})
    inner[name] = secret
    error = refused(values)
    assert [problem.path for problem in error.problems] == [path]
    assert SECRETS[secret] in str(error)
    assert "set it in the driver's environment" in str(error)
    assert PART not in str(error)
    assert secret not in str(error)


@pytest.mark.parametrize("text", PLAIN)
def test_ordinary_values_are_let_through(text: str) -> None:
    assert secret_text.secret_kind(text) is None
    assert secret_text.hide(text) == text
    values = base() | {"tracking": {"tags": {"a": text}}}
    assert TrainConfig.from_dict(values).tracking.tags["a"] == text


def test_wherever_it_is() -> None:
    secret = f"hf_{PART}"
    sources = [{"path": "a.jsonl"}, {"path": "b", "revision": secret}]
    nested = base() | {"data": {"train": sources}, "tracking": {"tags": {secret: "x"}}}
    error = refused(nested)
    assert [problem.path for problem in error.problems] == [
        "data.train.1.revision",
        "tracking.tags",
    ]
    assert PART not in str(error)
    unknown = refused(base() | {"hub": {"value": secret}, secret: 1})
    assert PART not in str(unknown)
    with pytest.raises(ConfigError, match=r"model\.source: has a token") as caught:
        TrainConfig(model=ModelConfig(source=secret), data={"train": "d"})
    assert PART not in str(caught.value)


def test_other_faults_are_told_with_it_and_without_it() -> None:
    error = refused(
        base() | {"train": {"seed": -1, "schedule": f"hf_{PART}"}}, f"cluster.env.A=ghp_{PART}"
    )
    assert [problem.path for problem in error.problems] == [
        "train.schedule", "cluster.env.A", "train.seed",
    ]  # fmt: skip
    assert PART not in str(error)


@pytest.mark.parametrize("text", [f"hf_{PART}", f"train.seed: hf_{PART}", f"a=[hf_{PART}"])
def test_an_override_that_is_none_is_not_repeated(text: str) -> None:
    assert PART not in str(refused(base(), text))


def test_the_shell_does_not_show_it(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {source: m}\ndata: {train: d}\n")
    assert cli.run(["plan", str(path), f"model.source=https://me:{PART}@host/x"]) == 2
    told = capsys.readouterr()
    assert "model.source: has a password within an address in it" in told.err
    assert PART not in told.err + told.out


@pytest.mark.parametrize("secret", SECRETS)
def test_it_is_hidden_in_what_is_written(secret: str) -> None:
    found = credentials.redact(f"before {secret} after", {})
    assert PART not in found
    assert secret not in found
    assert found.startswith("before ")
    assert found.endswith(" after")


@pytest.mark.parametrize(
    ("name", "secret"),
    [("HF_TOKEN", True), ("my_api_key", True), ("AWS_SECRET_ACCESS_KEY", True), ("HF_HOME", False)],
)
def test_secret_names(name: str, secret: bool) -> None:
    assert secret_text.is_secret_name(name) is secret
