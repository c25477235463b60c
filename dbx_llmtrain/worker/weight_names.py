"""Which tensor of the weight files is which of the model's, and which the model's are computed from
several (merged experts, split projections)."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dbx_llmtrain.compat import at_least
from dbx_llmtrain.worker.weight_files import WeightFiles


@dataclass
class Conversion:
    """Tensors of the model that transformers computes together, by one of its converters, from
    some of the files' (name there, and which of the converter's patterns it fits)."""

    first: str
    converter: Any
    sources: list[tuple[str, str]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The model's names of what is computed."""
        patterns = self.converter.target_patterns
        return [self.first.replace(patterns[0], pattern) for pattern in patterns]

    def tensors(self, files: WeightFiles, model: Any) -> dict[str, Tensor]:
        """What is computed, by the model's names."""
        converter = copy.deepcopy(self.converter)
        for key, pattern in sorted(self.sources, key=lambda source: _natural(source[0])):
            shape = files.shape(key)
            rows = files.rows(key, 0, shape[0] if shape else 1)
            converter.add_tensor(self.first, key, pattern, rows)
        found = converter.convert(self.first, model=model, config=model.config)
        return {
            name: tensor[0] if isinstance(tensor, list) else tensor
            for name, tensor in found.items()
        }


@dataclass(frozen=True)
class Match:
    """The model's tensors by its own names: those that the files have (``keys``: their names
    there), and those that are ``computed``."""

    keys: dict[str, str]
    computed: dict[str, Conversion]


def match(model: Any, keys: Iterable[str]) -> Match | None:
    """Find the model's tensors among those of the files; what the model does not know is left out.

    ``None`` where only transformers itself can tell: in some releases before 5, and where names are
    of old there.
    """
    state = model.state_dict(keep_vars=True)
    if at_least("transformers", "5.0"):
        return _match_by_rules(model, state, list(keys))
    found = _match_by_name(model, state, list(keys))
    return found if found is None else Match(found, {})


def _match_by_rules(model: Any, state: Mapping[str, Any], keys: Sequence[str]) -> Match | None:
    """As transformers 5 does it: by its table of renamings and conversions."""
    found: dict[str, str] = {}
    groups: dict[str, Conversion] = {}
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )

        mapping = get_model_conversion_mapping(model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {
            pattern: converter for converter in converters for pattern in converter.source_patterns
        }
        prefix = model.base_model_prefix
        for key in keys:
            name, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, pattern = rename_source_key(key, [], [], prefix, state)
            if name not in state:
                continue
            if pattern is None:
                found.setdefault(name, key)
            else:
                group = groups.setdefault(name, Conversion(name, by_pattern[pattern]))
                group.sources.append((key, pattern))
        computed = {name: group for group in groups.values() for name in group.names}
    except (ImportError, TypeError, AttributeError, KeyError):
        return None  # another release does it in another way
    return Match(found, computed)


def _match_by_name(
    model: Any, state: Mapping[str, Any], keys: Sequence[str]
) -> dict[str, str] | None:
    """The same name, with or without the prefix of the model's body. All have to be there."""
    if getattr(model, "_checkpoint_conversion_mapping", None):
        return None
    prefix = f"{model.base_model_prefix}."
    found: dict[str, str] = {}
    for key in keys:
        names = (key, f"{prefix}{key}", key.removeprefix(prefix))
        name = next((name for name in names if name in state), None)
        if name is not None:
            found.setdefault(name, key)
    shared = {id(state[name]) for name in found}
    return found if all(id(tensor) in shared for tensor in state.values()) else None


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts numbers in names by their value, as experts are counted."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]
