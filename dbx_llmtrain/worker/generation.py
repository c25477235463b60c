"""The generation configuration of the export, settled before the first step.

transformers refuses to save a configuration that contradicts itself, and a model that was taught to
end its answers with a token that is not among its end tokens never stops. Both show after the
training is paid for, unless they are looked for before.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GENERATION_FILE = "generation_config.json"

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p")


@dataclass(frozen=True)
class Generation:
    """What the export's ``generation_config.json`` holds; ``None``: the model's own file, as it is.

    ``notes`` say what was repaired, in words for the user; ``ends`` are the tokens with which the
    answers in the data end.
    """

    content: dict[str, Any] | None
    notes: tuple[str, ...]
    ends: tuple[int, ...] = ()


def check_generation_config(folder: Path, end_tokens: Sequence[int] = ()) -> Generation:
    """Read a model folder's generation configuration and repair what would not save or not stop.

    A contradiction between sampling settings and ``do_sample`` is taken as the wish to sample; what
    is still invalid loses everything but its token ids. ``end_tokens``, with which the trained
    answers end, join ``eos_token_id``.
    """
    path = folder / GENERATION_FILE
    content: dict[str, Any] = {}
    notes: list[str] = []
    if path.is_file():
        content, note = _valid(json.loads(path.read_text(encoding="utf-8")))
        notes += [note] if note else []
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ids = {key: content.get(key, config.get(key)) for key in _TOKEN_IDS}
    known = as_list(ids["eos_token_id"])
    added = [token for token in end_tokens if token not in known]
    if added:
        present = {key: value for key, value in ids.items() if value is not None}
        content = present | content | {"eos_token_id": [*known, *added]}
        ends = ", ".join(map(str, added))
        notes.append(f"eos_token_id: added {ends}, with which the answers in the data end")
    return Generation(content if notes else None, tuple(notes), tuple(end_tokens))


def sampling_keys() -> frozenset[str]:
    """Settings of generation that old models carry in ``config.json``, where saving refuses them.

    Token ids and the cache belong to both.
    """
    from transformers import GenerationConfig

    return frozenset(GenerationConfig().to_dict()) - {*_TOKEN_IDS, "use_cache"}


def _valid(content: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The configuration, or the nearest one that can be saved and what was changed."""
    problem = _fault(content)
    if not problem:
        return content, ""
    if any(content.get(key) is not None for key in _SAMPLING) and not content.get("do_sample"):
        sampling = content | {"do_sample": True}
        if not _fault(sampling):
            found = ", ".join(f"{k}={content[k]}" for k in _SAMPLING if content.get(k) is not None)
            return sampling, f"do_sample: set to true, because {found} needs it"
    kept = {key: content[key] for key in _TOKEN_IDS if content.get(key) is not None}
    return kept, f"reset to defaults but for token ids, because it is invalid: {problem}"


def _fault(content: dict[str, Any]) -> str:
    """Why transformers would refuse to save it; empty when it would not."""
    from transformers import GenerationConfig

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = GenerationConfig.from_dict(content)
            # The older generation counts warnings, and so must be let to warn.
            warnings.simplefilter("always")
            config.save_pretrained(folder)
        except (ValueError, TypeError) as error:
            return " ".join(str(error).split())[:400]
    return ""


def as_list(ids: Any) -> list[int]:
    """Token ids of a configuration, where one or several may stand, or none."""
    if ids is None:
        return []
    return list(ids) if isinstance(ids, (list, tuple)) else [ids]
