"""The driver's own copy of this package on every worker, and functions that find it there.

A function of a module that is installed on the driver only cannot be unpickled on a worker, and
what a Spark task can import its torchrun child cannot. So the package's source travels with each
call, as one zip, with a function that is pickled by value: it puts the zip on the node, in front of
``sys.path``, and calls ``module:function``. Workers therefore always run the driver's code, also
where an older version is installed.
"""

from __future__ import annotations

import builtins
import hashlib
import io
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

PACKAGE = "dbx_llmtrain"


@dataclass(frozen=True)
class Package:
    """The source of this package as a zip, and the SHA-256 of its bytes."""

    content: bytes
    digest: str


@cache
def package() -> Package:
    """This package as it is on the driver. The same source gives the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(_sources(resources.files(PACKAGE), PACKAGE)):
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return Package(buffer.getvalue(), hashlib.sha256(buffer.getvalue()).hexdigest())


def _sources(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        name = f"{path}/{entry.name}"
        if entry.is_dir() and entry.name != "__pycache__":
            yield from _sources(entry, name)
        elif entry.is_file() and not name.endswith(".pyc"):
            yield name, entry.read_bytes()


def caller() -> Callable[..., Any]:
    """A function ``f(target, *args)`` for ``TorchDistributor.run``: the package comes with it."""
    shipped = package()
    return partial(by_value(_call_shipped), shipped.content, shipped.digest)


def node_task(collect: Callable[[Any], None], args: tuple[Any, ...]) -> Callable[[int], None]:
    """A function for ``RDD.foreach``: runs ``node.once(*args)`` and gives ``collect`` its outcome.

    ``collect`` is the ``add`` of an accumulator of tuples, so that outcomes of tasks that have
    ended are known when the job is cancelled.
    """
    return partial(by_value(_run_on_node), caller(), collect, args)


def by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of ``function`` that every pickler takes by value, also a second time on a worker.

    cloudpickle stores a function by reference when its module can be imported where it is pickled,
    so the copy says that it is of ``__main__``. It must not use its module's globals.
    """
    assert isinstance(function, FunctionType)
    space = {"__builtins__": builtins, "__name__": "__main__"}
    copy = FunctionType(function.__code__, space, function.__name__, function.__defaults__)
    copy.__module__ = "__main__"
    copy.__qualname__ = function.__name__
    return copy


def _call_shipped(content: bytes, digest: str, target: str, *args: Any) -> Any:
    """Put the zip on this node and call ``module:function``. Pickled by value: self-contained."""
    import importlib
    import os
    import sys
    import tempfile

    folder = os.path.join(tempfile.gettempdir(), f"dbx_llmtrain-{os.getuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if os.stat(folder).st_uid != os.getuid():  # another user's: nothing in it can be trusted
        folder = tempfile.mkdtemp(prefix="dbx_llmtrain-")
    path = os.path.join(folder, f"code-{digest[:20]}.zip")
    present = b""
    if os.path.exists(path):
        with open(path, "rb") as file:
            present = file.read()
    if present != content:
        handle, temporary = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    if path in sys.path:
        sys.path.remove(path)
    sys.path.insert(0, path)
    loaded = sys.modules.get("dbx_llmtrain")
    if loaded is not None and not str(loaded.__file__).startswith(path):
        # A Python worker that Spark uses again may have loaded another version.
        for name in [name for name in sys.modules if name.partition(".")[0] == "dbx_llmtrain"]:
            del sys.modules[name]
    importlib.invalidate_caches()
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)(*args)


def _run_on_node(
    call_shipped: Callable[..., Any],
    collect: Callable[[Any], None],
    args: tuple[Any, ...],
    _number: int,
) -> None:
    """What a Spark task does. Pickled by value: self-contained.

    Faults of the target are in its outcome (``node.call``); those of putting the package on the
    node become one here.
    """
    import os
    import socket
    import traceback

    try:
        outcome = call_shipped("dbx_llmtrain.worker.node:once", *args)
    except (OSError, ImportError, SyntaxError) as error:
        outcome = {
            "node": os.environ.get("DBX_LLMTRAIN_NODE") or socket.gethostname(),
            "host": socket.gethostname(),
            "addresses": [],
            "value": None,
            "error": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
    collect((outcome,))
