"""Uploads to a hub on this machine: what is there afterwards, and every way in which they fail."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from dbx_llmtrain.driver import uploading
from dbx_llmtrain.errors import ConfigError
from tests.hub_server import TOKEN, Hub, serving, with_hub

UPLOAD = """
import sys
from pathlib import Path
from dbx_llmtrain.driver import uploading
from dbx_llmtrain.errors import LlmTrainError

try:
    uploading.check_access(sys.argv[2])
    print("TO", uploading.upload(Path(sys.argv[1]), sys.argv[2], "what it is"))
except LlmTrainError as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder, as far as an upload looks at it."""
    made = tmp_path / "export"
    (made / "additional_chat_templates").mkdir(parents=True)
    (made / "config.json").write_text("{}")
    (made / "additional_chat_templates" / "tool.jinja").write_text("x")
    (made / "model.safetensors").write_bytes(b"weights")
    (made / "manifest.json").write_text("ours")
    return made


def upload(hub: Hub, folder: Path, name: str = "org/tiny", **environment: str) -> str:
    """What the program says; the token is in none of it."""
    done = with_hub(hub.address, UPLOAD, str(folder), name, **environment)
    assert done.returncode == 0, done.stderr
    for text in (done.stdout, done.stderr):
        assert environment.get("HF_TOKEN", TOKEN) not in text
    return done.stdout.strip()


def test_a_new_repository_is_private_and_has_every_file_but_the_manifest(
    hub: Hub, folder: Path
) -> None:
    assert upload(hub, folder) == f"TO {hub.address}/org/tiny"
    assert hub.files["org/tiny"] == {
        "config.json": b"{}",
        "additional_chat_templates/tool.jinja": b"x",
        "model.safetensors": b"weights",
    }
    assert hub.private["org/tiny"] is True


def test_a_repository_that_exists_keeps_its_files_but_no_older_weights(
    hub: Hub, folder: Path
) -> None:
    old = {"model-00001-of-00002.safetensors": b"1", "model-00002-of-00002.safetensors": b"2"}
    old |= {"model.safetensors.index.json": b"{}", "README.md": b"of theirs"}
    hub.files["org/tiny"], hub.private["org/tiny"] = dict(old), False
    assert upload(hub, folder) == f"TO {hub.address}/org/tiny"
    assert sorted(hub.files["org/tiny"]) == [
        "README.md", "additional_chat_templates/tool.jinja", "config.json", "model.safetensors",
    ]  # fmt: skip
    assert hub.private["org/tiny"] is False


def test_a_token_that_is_not_known_is_told_before_anything_is_uploaded(
    hub: Hub, folder: Path
) -> None:
    said = upload(hub, folder, HF_TOKEN="hf_" + "x" * 30)
    assert said.startswith("ConfigError")
    assert "push_to_hub: the hub does not know the token in HF_TOKEN" in said
    assert "GET /api/whoami-v2" in hub.asked
    assert not any(line.startswith(("POST", "PUT")) for line in hub.asked)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (
            403,
            "the token in HF_TOKEN may not write to org/tiny: it needs the right to write to org",
        ),
        (404, "the hub has no org that this token may write to: check the name org/tiny"),
        (400, "the hub cannot be reached or refuses org/tiny ("),
    ],
)
def test_a_hub_that_refuses_is_told_in_words(
    hub: Hub, folder: Path, status: int, message: str
) -> None:
    hub.refuses = status
    said = upload(hub, folder)
    assert said.startswith("CheckpointError: push_to_hub: ")
    assert message in said
    assert f"The export itself is complete: {folder}" in said


def test_no_hub_and_no_network(folder: Path) -> None:
    with socket.socket() as taken:  # nobody listens there
        taken.bind(("127.0.0.1", 0))
        nobody = Hub(address=f"http://127.0.0.1:{taken.getsockname()[1]}")
        said = upload(nobody, folder)
    assert "push_to_hub: the hub cannot be reached or refuses org/tiny" in said
    said = upload(nobody, folder, HF_HUB_OFFLINE="1")
    assert "push_to_hub: the hub cannot be reached or refuses org/tiny (OfflineMode" in said


def test_without_a_token_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="push_to_hub: needs a token: set HF_TOKEN"):
        uploading.check_access("org/tiny")


@pytest.mark.parametrize("name", ["tiny", "org/tiny/x", "https://hub/org/tiny", "", 7, "org/t y"])
def test_names_that_no_repository_has(name: object) -> None:
    (problem,) = uploading.problems(name)
    assert str(problem) == f"push_to_hub: expected ORG/NAME, found {name!r}"
    assert not uploading.problems("my-org/Model_1.0")


def test_a_token_in_place_of_a_name_is_not_shown() -> None:
    (problem,) = uploading.problems(TOKEN)
    assert TOKEN not in str(problem)
