"""The package as one zip, and functions that bring it along by value."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from dbx_llmtrain.driver import cluster, shipping
from dbx_llmtrain.errors import ClusterError


def test_the_zip_is_the_source_and_always_the_same() -> None:
    first = shipping.package()
    shipping.package.cache_clear()
    assert shipping.package() == first
    names = zipfile.ZipFile(io.BytesIO(first.content)).namelist()
    assert {"dbx_llmtrain/__init__.py", "dbx_llmtrain/worker/node.py"} <= set(names)
    assert names == sorted(names)
    assert not [name for name in names if name.endswith(".pyc")]


UNPICKLE = """
import pickle, sys, types
from pathlib import Path
sys.path = [entry for entry in sys.path if "editable" not in entry]
sys.meta_path = [finder for finder in sys.meta_path if "ditable" not in repr(finder)]
function = pickle.loads(Path(sys.argv[1]).read_bytes())
from pyspark import cloudpickle
function = pickle.loads(cloudpickle.dumps(function))  # the second hop
stale = types.ModuleType("dbx_llmtrain")
stale.__file__ = "/an/older/dbx_llmtrain/__init__.py"
sys.modules["dbx_llmtrain"] = stale
sys.modules["dbx_llmtrain.worker"] = types.ModuleType("dbx_llmtrain.worker")
print(function("dbx_llmtrain.worker.node:node_id"))
import dbx_llmtrain
print(dbx_llmtrain.__file__)
"""


def test_a_function_brings_the_package_to_where_it_is_not(tmp_path: Path) -> None:
    from pyspark import cloudpickle

    (tmp_path / "function").write_bytes(cloudpickle.dumps(shipping.caller()))
    command = [sys.executable, "-c", UNPICKLE, str(tmp_path / "function")]
    environ = {"TMPDIR": str(tmp_path), "DBX_LLMTRAIN_NODE": "far away", "PATH": "/usr/bin:/bin"}
    for _ in range(2):  # the second one finds the zip
        run = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
        )
        node, code = run.stdout.splitlines()
        assert node == "far away"
        assert code.startswith(str(tmp_path))
        assert ".zip/" in code
    zips = list(tmp_path.glob("dbx_llmtrain-*/code-*.zip"))
    assert len(zips) == 1
    zips[0].write_bytes(b"damaged")
    subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, check=True)
    assert zips[0].read_bytes() == shipping.package().content


def test_a_node_that_cannot_take_the_package_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    found: list[Any] = []
    args = ("job", [], 0.0, "dbx_llmtrain.worker.node:node_id", ())
    shipping.node_task(found.append, args)(0)
    assert "NotADirectoryError" in found[0][0]["error"]
    assert "Traceback" in found[0][0]["traceback"]


def test_spark_connect_is_refused() -> None:
    class ConnectSession:
        """Looks like what serverless compute gives."""

    ConnectSession.__module__ = "pyspark.sql.connect.session"
    with pytest.raises(ClusterError, match="dedicated access mode"):
        cluster.session(ConnectSession())  # type: ignore[arg-type]


def test_no_session_is_refused() -> None:
    code = "from dbx_llmtrain.driver import cluster\ncluster.session()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ClusterError" in run.stderr
    assert "no active Spark session" in run.stderr
