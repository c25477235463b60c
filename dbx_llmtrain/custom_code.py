"""A private place to import the Python code that comes with a model.

transformers copies such code below the user's home and imports it from there under the name of the
model's folder: ranks of one node would write the same files at once, and two versions of the code
under one name would mix. Here every process has a place of its own, gone afterwards.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = "transformers_modules"
_VIEWS = "views"


@contextmanager
def private_modules(parent: Path | None, *, wanted: bool) -> Iterator[None]:
    """Let transformers import models' code from a new folder below ``parent`` (default: the
    temporary folder), and remove it at the end. Nothing happens unless ``wanted``.

    Code that this process had imported before is out of sight meanwhile, and back afterwards.
    """
    if not wanted:
        yield
        return
    from transformers import dynamic_module_utils

    before = dynamic_module_utils.HF_MODULES_CACHE
    with tempfile.TemporaryDirectory(prefix="modules-", dir=parent) as name:
        foreign = _take_out()
        sys.path.insert(0, name)
        dynamic_module_utils.HF_MODULES_CACHE = name
        try:
            yield
        finally:
            dynamic_module_utils.HF_MODULES_CACHE = before
            sys.path.remove(name)
            _take_out()
            sys.modules.update(foreign)


def _take_out() -> dict[str, ModuleType]:
    """Remove every module of models' code from ``sys.modules``, and return them."""
    names = [name for name in sys.modules if name.split(".")[0] == _PACKAGE]
    return {name: sys.modules.pop(name) for name in names}


def load_from(folder: Path, *, trusted: bool) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for a model folder: where it is, and whether its code runs.

    Code runs inside ``private_modules`` only.
    """
    if not trusted:
        return {"pretrained_model_name_or_path": folder, "trust_remote_code": False}
    return {"pretrained_model_name_or_path": _view(folder), "trust_remote_code": True}


def _view(folder: Path) -> Path:
    """The folder under a name that Python can import and no other folder has.

    transformers 4.50 takes the folder's name for a module's as it is, and copies only those files
    that the first one imports; so every file is put there before.
    """
    from transformers import dynamic_module_utils

    root = Path(dynamic_module_utils.HF_MODULES_CACHE)
    assert root.name.startswith("modules-"), "models' code is loaded outside private_modules"
    name = "model_" + hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
    view = root / _VIEWS / name
    if not view.is_symlink():
        view.parent.mkdir(exist_ok=True)
        view.symlink_to(folder.absolute(), target_is_directory=True)
    for path in sorted(folder.rglob("*.py")):
        copy = root / _PACKAGE / name / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    return view
