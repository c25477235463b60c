"""The weights of a model folder, and parts of them.

A tensor is read by rows (its first dimension), so that a rank asks for its own shard only.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

_SAMPLE = 256
_SMALL = 2**14
"""Tensors of no more numbers are compared whole, of others that many (``_SAMPLE``)."""


class WeightFiles:
    """The tensors of a folder's safetensors files, by their names there.

    ``requested`` counts the bytes that were asked for, digests left out.
    """

    def __init__(self, folder: Path) -> None:
        self.requested = 0
        opened: Any = safe_open  # untyped
        self._files: dict[str, Any] = {
            path.name: opened(path, framework="pt") for path in sorted(_files_of(folder))
        }
        self._where = {key: name for name, file in self._files.items() for key in file.keys()}

    def keys(self) -> list[str]:
        """Names of all tensors."""
        return list(self._where)

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._slice(key).get_shape())

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        """Rows ``start`` up to ``stop`` of a tensor, as they are in the file; of one without
        dimensions the whole."""
        part = self._slice(key)
        found: Tensor = part[start:stop] if part.get_shape() else self._tensor(key).reshape(1)
        self.requested += found.numel() * found.element_size()
        return found

    def digests(self) -> dict[str, str]:
        """SHA-256 of every tensor's type, shape and numbers; of a large one of a few numbers only:
        other weights have another one. (That files are whole is what staging has checked.)"""
        found = {}
        for key in sorted(self._where):
            part = self._slice(key)
            digest = hashlib.sha256(f"{part.get_dtype()} {part.get_shape()}".encode())
            digest.update(self._sample(key).numpy())
            found[key] = digest.hexdigest()
        return found

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors are alike, as far as ``digests`` would tell."""
        alike = self.shape(one) == self.shape(other)
        return alike and bool(torch.equal(self._sample(one), self._sample(other)))

    def _sample(self, key: str) -> Tensor:
        """The numbers of a small tensor, and of a large one some from the middle, as bytes."""
        part = self._slice(key)
        shape = part.get_shape()
        if math.prod(shape) <= _SMALL:
            numbers = self._tensor(key).reshape(-1)
        else:
            middle = shape[0] // 2
            width = _SAMPLE if len(shape) == 1 else 1
            numbers = part[middle : middle + width].reshape(-1)[:_SAMPLE]
        return numbers.contiguous().view(torch.uint8)

    def _slice(self, key: str) -> Any:
        return self._files[self._where[key]].get_slice(key)

    def _tensor(self, key: str) -> Tensor:
        found: Tensor = self._files[self._where[key]].get_tensor(key)
        return found


def _files_of(folder: Path) -> Iterable[Path]:
    """Those that the index names, or else the only one."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return {folder / name for name in named}
