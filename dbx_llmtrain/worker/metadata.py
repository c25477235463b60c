"""Reading checkpoint files of PyTorch's format without trusting them.

``.metadata`` is a pickle, which could run anything: here it may name the classes that describe
tensors and nothing else. The tensors' own files are read by PyTorch with ``weights_only``; one that
would be read without it (anything that is no tensor) is not among those classes.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from dbx_llmtrain.errors import CheckpointError

METADATA = ".metadata"

_IN_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    (_IN_METADATA, "Metadata"),
    (_IN_METADATA, "MetadataIndex"),
    (_IN_METADATA, "TensorStorageMetadata"),
    (_IN_METADATA, "ChunkStorageMetadata"),
    (_IN_METADATA, "TensorProperties"),
    (_IN_METADATA, "StorageMeta"),
    (_IN_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),  # older versions
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),  # of the folder that it was written to
    ("pathlib._local", "PosixPath"),  # the same, by Python 3.13
}


def _member(owner: Any, name: str) -> Any:
    """An entry of an enumeration that is allowed. Python 3.11 before 3.11.4 pickles entries as what
    ``getattr`` returns, which by itself would reach anything."""
    if not (isinstance(owner, type) and issubclass(owner, Enum)):
        raise CheckpointError(
            f"{METADATA} asks for {name} of {owner!r}, which has no place in a checkpoint and may "
            "be an attack: nothing of it was run. Use another checkpoint"
        )
    return owner[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Raises ``CheckpointError`` for what has no place in a description of tensors."""
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _ALLOWED:
            raise CheckpointError(
                f"{METADATA} names {module}.{name}, which has no place in a checkpoint and may be "
                "an attack: nothing of it was run. Use another checkpoint"
            )
        return super().find_class(module, name)


def read_metadata(folder: Path, files: Collection[str]) -> Metadata:
    """What a checkpoint's ``.metadata`` says of its tensors; ``files`` are those of its manifest.

    Raises ``CheckpointError`` where it is no such description, names a class that does not belong
    there, or a file that the manifest does not have.
    """
    try:
        with (folder / METADATA).open("rb") as file:
            found = _Unpickler(file).load()
    except (
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(f"{METADATA} cannot be read: {error}") from error
    described = isinstance(found, Metadata) and isinstance(found.storage_data, dict)
    if not described or not all(
        isinstance(meta, TensorStorageMetadata) for meta in found.state_dict_metadata.values()
    ):
        raise CheckpointError(f"{METADATA} does not describe tensors")
    others = {info.relative_path for info in found.storage_data.values()} - set(files)
    if others:
        raise CheckpointError(
            f"{METADATA} refers to files that are not in the manifest: {', '.join(sorted(others))}"
        )
    metadata: Metadata = found
    return metadata


class Reader(dcp.FileSystemReader):  # type: ignore[misc]  # torch is untyped
    """PyTorch's reader, with our way to read ``.metadata``."""

    def __init__(self, folder: Path, files: Collection[str]) -> None:
        super().__init__(folder)
        self._folder = folder
        self._files = files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See ``read_metadata``."""
        metadata = read_metadata(self._folder, self._files)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata
