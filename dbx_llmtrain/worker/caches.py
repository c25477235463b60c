"""Where libraries keep what they download or compile: on the node's own disk, since a home folder
may be small, slow, or shared by nodes that need other binaries."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping

from dbx_llmtrain.worker import node

FOLDERS = {
    "HF_HOME": "huggingface",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
}
"""The variables that name these folders, and the folders below ``caches`` in the local one."""


def variables(
    environment: Mapping[str, str], given: Mapping[str, str], setting: str | None
) -> dict[str, str]:
    """The variables that nobody has set, with folders of the ranks of this node.

    ``environment`` is what a process has inherited, ``given`` is ``cluster.env`` and ``setting``
    ``cluster.local_dir``. Nothing is made but the local folder itself. Raises ``StagingError``
    where that cannot be written.
    """
    missing = [
        name
        for name in FOLDERS
        if name not in given and (not environment.get(name) or _is_default(environment[name]))
    ]
    if not missing:
        return {}
    folder = node.local_dir(setting) / "caches"
    return {name: str(folder / FOLDERS[name]) for name in missing}


def _is_default(folder: str) -> bool:
    """Whether torch has chosen the folder: where it compiles anything it puts its own choice into
    the environment, and who is started from there inherits it."""
    temporary = {tempfile.gettempdir(), "/tmp", "/var/tmp"}
    return any(folder.startswith(os.path.join(place, "torchinductor_")) for place in temporary)
