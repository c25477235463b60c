"""Caches of libraries lie on the node's own disk, unless somebody has said where."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dbx_llmtrain.errors import StagingError
from dbx_llmtrain.worker import caches


def test_what_nobody_has_set_lies_in_the_local_folder(tmp_path: Path) -> None:
    environment = {"HF_HOME": "/given", "TRITON_CACHE_DIR": ""}
    found = caches.variables(environment, {}, str(tmp_path / "x"))
    assert found == {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "x/caches/torchinductor"),
        "TRITON_CACHE_DIR": str(tmp_path / "x/caches/triton"),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "x/caches/torch_extensions"),
    }
    assert caches.variables(dict.fromkeys(caches.FOLDERS, "/given"), {}, "/no/such") == {}
    assert caches.variables({}, dict.fromkeys(caches.FOLDERS, "/given"), "/no/such") == {}


def test_what_torch_put_into_the_environment_itself_counts_for_nothing(tmp_path: Path) -> None:
    code = (
        "import os; from torch._inductor.runtime import cache_dir_utils as utils;"
        "utils.cache_dir();"
        "print(os.environ['TORCHINDUCTOR_CACHE_DIR'], utils.triton_cache_dir(0))"
    )
    clean = {name: value for name, value in os.environ.items() if name not in caches.FOLDERS}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True
    )
    chosen = dict(zip(list(caches.FOLDERS)[1:3], done.stdout.split(), strict=True))
    found = caches.variables(chosen, {}, str(tmp_path))
    assert found.keys() == caches.FOLDERS.keys()
    assert caches.variables({}, chosen, str(tmp_path)).keys().isdisjoint(chosen), "cluster.env"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StagingError, match=r"cluster\.local_dir"):
        caches.variables({}, {}, str(tmp_path / "file" / "x"))
