"""A model of the Hugging Face hub: downloaded once, on the driver, at one commit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dbx_llmtrain import storage
from dbx_llmtrain.driver.model_config import load_config
from dbx_llmtrain.driver.model_files import (
    CODE_VOCABULARIES,
    INDEX,
    MORE_TEMPLATES,
    OTHERS,
    VOCABULARIES,
    digest,
    needed_files,
    publish,
    refuse,
    small_problems,
)
from dbx_llmtrain.errors import ConfigError
from dbx_llmtrain.records import Artifact

ASK_S = 10.0
"""Seconds that the hub has to answer a question about a model."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SMALL = [*OTHERS, *VOCABULARIES, f"{MORE_TEMPLATES}/*.jinja", "*.py"]
_WEIGHTS = [INDEX, "model*.safetensors"]


def fetch(
    name: str,
    revision: str | None,
    cache_dir: Path,
    work_dir: Path | None,
    *,
    trusted: bool = False,
    objective: str = "sft",
    weights: bool = True,
    tokenizer: bool = True,
) -> tuple[Artifact, str]:
    """The model folder of hub id ``name``, and the commit that ``revision`` stands for; with its
    Python code where that is ``trusted``. What is wrong with the rest shows before the weights are
    downloaded.

    A commit that is in ``cache_dir`` is not downloaded again; where ``revision`` is one, the
    network is not used at all. Without ``weights`` only the other files are downloaded, unless the
    whole model is there already; without ``tokenizer`` it may have none. A private model needs
    HF_TOKEN in the driver's environment. Raises ``ConfigError`` when the hub cannot be reached or
    has no such model.
    """
    commit = _commit(name, revision)
    known: dict[str, Any] = {"trusted": trusted, "objective": objective, "tokenizer": tokenizer}
    # With and without its code it is not the same folder.
    code = ["code"] if trusted else []
    whole = digest("hub", name, commit, *code)
    small = not weights and storage.read_manifest(cache_dir / "models" / whole) is None

    def get(target: Path, patterns: list[str]) -> None:
        _ask(
            name,
            lambda hub: hub.snapshot_download(
                name, revision=commit, local_dir=target, allow_patterns=patterns
            ),
        )

    def download(target: Path) -> None:
        get(target, [*_SMALL, *(CODE_VOCABULARIES if trusted else ())])
        if problems := small_problems(target, name, **known):
            raise ConfigError(problems)
        load_config(target, name, trusted=trusted, objective=objective)
        if not small:
            get(target, _WEIGHTS)
        storage.remove(target / ".cache")
        needed = {*needed_files(target, name, weights=not small, **known)}
        for path in target.rglob("*"):
            if path.is_file() and path not in needed:
                path.unlink()

    key = digest("hub without weights", name, commit, *code) if small else whole
    return publish(cache_dir, key, work_dir, download), commit


def fetch_tokenizer(
    name: str, revision: str | None, cache_dir: Path, work_dir: Path | None, *, trusted: bool
) -> Path:
    """A folder with the tokenizer of hub id ``name``, and its Python code where that is
    ``trusted``. Raises ``ConfigError`` as ``fetch`` does."""
    commit = _commit(name, revision)
    patterns = [*_SMALL, *(CODE_VOCABULARIES if trusted else ())]

    def download(target: Path) -> None:
        _ask(
            name,
            lambda hub: hub.snapshot_download(
                name, revision=commit, local_dir=target, allow_patterns=patterns
            ),
        )
        storage.remove(target / ".cache")

    key = digest("hub tokenizer", name, commit, *(["code"] if trusted else []))
    return Path(publish(cache_dir, key, work_dir, download).source)


def _commit(name: str, revision: str | None) -> str:
    """The commit that a revision stands for."""
    if revision and _COMMIT.fullmatch(revision):
        return revision
    found: str = _ask(name, lambda hub: _info(hub, name, revision).sha)
    return found


def check_there(name: str, revision: str | None = None) -> None:
    """Raise ``ConfigError``, as ``fetch`` does, where the hub has no such model or does not answer
    soon: whoever opens a model by itself asks for many files, many times each. One of which this
    machine has a copy is not asked for."""

    def ask(hub: Any) -> None:
        if not isinstance(hub.try_to_load_from_cache(name, "config.json", revision=revision), str):
            _info(hub, name, revision)

    _ask(name, ask)


def _info(hub: Any, name: str, revision: str | None) -> Any:
    return hub.HfApi().model_info(name, revision=revision, timeout=ASK_S)


def fetch_config(name: str, revision: str | None, target: Path, *, trusted: bool = False) -> None:
    """Download the configuration of hub model ``name`` to ``target``, with its Python code where
    that is ``trusted``. Raises ``ConfigError`` as ``fetch`` does."""
    patterns = ["config.json", *(["*.py"] if trusted else [])]
    _ask(
        name,
        lambda hub: hub.snapshot_download(
            name, revision=revision, local_dir=target, allow_patterns=patterns
        ),
    )
    if not (target / "config.json").is_file():
        raise refuse(f"{name} has no config.json on the hub")


def _ask(name: str, question: Any) -> Any:
    """``question(huggingface_hub)``, with every failure as one ``ConfigError``."""
    import huggingface_hub

    try:
        return question(huggingface_hub)
    except Exception as error:
        # The hub's client raises its own errors, those of the HTTP library that it happens to use,
        # and those of the file system; they have no common base.
        raise _explain(name, error) from error


def _explain(name: str, error: Exception) -> ConfigError:
    kind = type(error).__name__
    if kind == "GatedRepoError":
        advice = "accept its licence on the hub, and set HF_TOKEN in the driver's environment"
    elif kind == "RepositoryNotFoundError":
        advice = "check the name; a private model needs HF_TOKEN in the driver's environment"
    elif kind == "RevisionNotFoundError":
        return refuse(f"{name} has no such revision on the hub", "model.revision")
    else:
        advice = (
            "check that the driver can reach the hub, or download the model elsewhere, put its "
            "folder on /Volumes and give that path"
        )
    first_line = (str(error).strip() or kind).splitlines()[0]
    return refuse(
        f"no folder {name}, and the Hugging Face hub did not give it ({kind}: {first_line}): "
        f"{advice}"
    )
