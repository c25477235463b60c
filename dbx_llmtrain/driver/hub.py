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
) -> tuple[Artifact, str]:
    """The model folder of hub id ``name``, and the commit that ``revision`` stands for; with its
    Python code where that is ``trusted``. What is wrong with the rest shows before the weights are
    downloaded.

    A commit that is in ``cache_dir`` is not downloaded again; where ``revision`` is one, the
    network is not used at all. Without ``weights`` only the other files are downloaded, unless the
    whole model is there already. A private model needs HF_TOKEN in the driver's environment. Raises
    ``ConfigError`` when the hub cannot be reached or has no such model.
    """
    if revision and _COMMIT.fullmatch(revision):
        commit = revision
    else:
        commit = _ask(name, lambda hub: hub.HfApi().model_info(name, revision=revision).sha)

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
        problems = small_problems(target, name, trusted=trusted, objective=objective)
        if problems:
            raise ConfigError(problems)
        load_config(target, name, trusted=trusted, objective=objective)
        if not small:
            get(target, _WEIGHTS)
        storage.remove(target / ".cache")
        needed = set(
            needed_files(target, name, weights=not small, trusted=trusted, objective=objective)
        )
        for path in target.rglob("*"):
            if path.is_file() and path not in needed:
                path.unlink()

    key = digest("hub without weights", name, commit, *code) if small else whole
    return publish(cache_dir, key, work_dir, download), commit


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
