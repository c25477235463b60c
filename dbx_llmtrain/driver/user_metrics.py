"""The user's own metrics function: checked, pickled by value into a file beside the plan."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from dbx_llmtrain import storage
from dbx_llmtrain.errors import ConfigError, Problem
from dbx_llmtrain.records import FileEntry, RunPlan

Metrics = Callable[[Any, Any], Mapping[str, float]]
"""Gets the Hugging Face model (in evaluation mode) and its tokenizer, on every rank.

It is called at every evaluation, on all ranks at once, and what rank 0 gives counts: numbers by
names of its own. Inputs go to ``model.device``. Weights may be sharded, so every rank has to call
the model (or its ``generate``) as often as the others. It runs without gradients; modes and random
states are put back afterwards.
"""

FILE = "metrics.pkl"
_PATH = "metrics"


def check(function: Any) -> Metrics | None:
    """``function`` itself; asked before anything is started. Raises ``ConfigError`` for what cannot
    be called with a model and a tokenizer, or cannot be sent to the ranks."""
    if function is None:
        return None
    if not callable(function):
        raise _refuse(
            f"expected a function of the model and its tokenizer, found {type(function).__name__}"
        )
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise _refuse(
            f"expected a function of two arguments, the model and its tokenizer: {error}"
        ) from error
    except ValueError:
        pass  # a builtin without a signature
    pickled(function)
    return function  # type: ignore[no-any-return]


def ship(plan: RunPlan, function: Metrics | None) -> RunPlan:
    """Put the function into the run folder, from which the ranks take it; the plan that names the
    file by its hash. Raises ``ConfigError`` for one that cannot be pickled."""
    if function is None:
        return plan
    content = pickled(function)
    with tempfile.TemporaryDirectory(prefix="dbx_llmtrain-") as folder:
        local = Path(folder) / FILE
        local.write_bytes(content)
        digest = storage.copy_file(local, storage.local_path(plan.run_dir) / FILE)
    entry = FileEntry(path=FILE, size=len(content), sha256=digest)
    return plan.model_copy(update={"metrics": entry})


def pickled(function: Any, path: str = _PATH) -> bytes:
    """A function (or what holds some) as bytes that a rank can load which has none of the user's
    modules. Raises ``ConfigError``, whose problem is ``path``'s."""
    import cloudpickle

    with _own_by_value(cloudpickle):
        try:
            return bytes(cloudpickle.dumps(function))
        except Exception as error:
            # Whatever an object's own __reduce__ raises.
            raise _refuse(
                f"the function cannot be sent to the ranks ({type(error).__name__}: {error}): let "
                "it use plain values only, and make other objects inside it",
                path,
            ) from error


@contextmanager
def _own_by_value(cloudpickle: Any) -> Iterator[None]:
    """Take what is of the user's own modules by value: a rank may not be able to import them."""
    known = cloudpickle.list_registry_pickle_by_value()
    paths = map(sysconfig.get_path, ("purelib", "platlib", "stdlib", "platstdlib"))
    installed = tuple(f"{path}{os.sep}" for path in paths)
    own = [module for name, module in sys.modules.items() if _is_own(name, module, installed)]
    added = [module for module in own if module.__name__ not in known]
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)


def _is_own(name: str, module: Any, installed: tuple[str, ...]) -> bool:
    """Whether a module is the user's: neither installed nor Python's or this package's."""
    if not isinstance(module, ModuleType) or module.__name__ != name or name == "__main__":
        return False
    file = getattr(module, "__file__", None)
    of_ours = name.partition(".")[0] == "dbx_llmtrain"
    return bool(file) and not of_ours and not str(file).startswith(installed)


def _refuse(message: str, path: str = _PATH) -> ConfigError:
    return ConfigError([Problem(path, message)])
