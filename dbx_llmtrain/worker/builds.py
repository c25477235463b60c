"""What DeepSpeed's compiled operators need on this node. Standard library only: nothing is built or
imported."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

_COMPILERS = ("g++", "c++")
_HEADERS = ("/usr/include", "/usr/local/include", "/usr/include/x86_64-linux-gnu")
_BUILT = {"cpu_adam": "ops/adam/cpu_adam_op*.so", "async_io": "ops/aio/async_io_op*.so"}


def find_tools() -> list[str]:
    """Of ``g++``, ``ninja`` and ``libaio`` (its header) those that are here, and of ``cpu_adam``
    and ``async_io`` those that DeepSpeed was installed with."""
    tools = []
    if any(shutil.which(name) for name in (os.environ.get("CXX") or "", *_COMPILERS) if name):
        tools.append("g++")
    # (Ranks find what lies beside their Python, also where the PATH does not name that folder.)
    if shutil.which("ninja") or (Path(sys.executable).parent / "ninja").is_file():
        tools.append("ninja")
    if any((Path(folder) / "libaio.h").is_file() for folder in _header_folders()):
        tools.append("libaio")
    return [*tools, *_built()]


def _header_folders() -> list[str]:
    """Where the compiler looks: its own folders, and those of the usual variables."""
    folders = [*_HEADERS, str(Path(sys.prefix) / "include")]
    for name in ("CPATH", "CPLUS_INCLUDE_PATH"):
        folders += [folder for folder in os.environ.get(name, "").split(os.pathsep) if folder]
    return folders


def _built() -> list[str]:
    spec = importlib.util.find_spec("deepspeed")
    roots = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    return [
        name for name, pattern in _BUILT.items() if any(any(root.glob(pattern)) for root in roots)
    ]
