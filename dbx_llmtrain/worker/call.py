"""A user's own function on a rank: ``python -m dbx_llmtrain.worker.call plan.json``.

The function finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment, as
under torchrun; a process group is for it to open.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dbx_llmtrain import storage
from dbx_llmtrain.calls import CallPlan, artifacts
from dbx_llmtrain.errors import CheckpointError, ConfigError, Problem
from dbx_llmtrain.outcomes import RankResult
from dbx_llmtrain.records import FileEntry
from dbx_llmtrain.worker import handover, network, staged
from dbx_llmtrain.worker.world import leave_process

VALUE = "value.pkl"
LIMIT = 64 * 1024 * 1024
"""Bytes of a returned value. Anything bigger belongs into a file."""
_PATH = "launch"


def main(argv: Sequence[str]) -> int:
    """Call the function that the plan in the named file is about. Returns 0 when it has returned;
    what it returned on rank 0 is in the run folder then."""
    with handover.handed_over():
        plan = CallPlan.model_validate_json(Path(argv[0]).read_text(encoding="utf-8"))
        os.environ.update(plan.config.cluster.env)
        os.environ.update(network.variables(os.environ))
        function, args, kwargs = load(plan)
        held = staged.hold([one.model_dump() for one in artifacts(plan)], plan.local_dir)
        if held:
            names = (one.fingerprint for one in artifacts(plan))
            folders = dict(zip(names, (copy.folder for copy in held), strict=True))
            kwargs["staged"] = tuple(
                str(folders[given.artifact.fingerprint] / given.name) for given in plan.stage
            )
        value = function(*args, **kwargs)
        if os.environ["RANK"] == "0":
            handover.Handover().result(
                RankResult(
                    steps=0, metrics={}, checkpoint=None, model_path=None, value=keep(value, plan)
                )
            )
    return 0


def load(plan: CallPlan) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function and its arguments. Nothing of a file with another hash is unpickled: raises
    ``CheckpointError`` for it."""
    path = storage.local_path(plan.run_dir) / plan.call.path
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != plan.call.sha256:
        raise CheckpointError(f"the function {path} is not the one that was sent: other hash")
    function, args, kwargs = pickle.loads(content)
    return function, args, kwargs


def keep(value: Any, plan: CallPlan) -> FileEntry:
    """Put what the function returned into the run folder. Raises ``ConfigError`` for what cannot be
    sent, or is too big."""
    import cloudpickle

    try:
        content = cloudpickle.dumps(value)
    except Exception as error:
        raise _refuse(
            f"expected a value that can be pickled from the function, found "
            f"{type(value).__name__} ({type(error).__name__}: {error}): return plain values"
        ) from error
    if len(content) > LIMIT:
        raise _refuse(
            f"expected a value of at most {LIMIT >> 20} MiB from the function, found one of "
            f"{len(content) >> 20} MiB: write it to storage and return its path"
        )
    with tempfile.TemporaryDirectory(prefix="dbx_llmtrain-") as folder:
        local = Path(folder) / VALUE
        local.write_bytes(content)
        digest = storage.copy_file(local, storage.local_path(plan.run_dir) / VALUE)
    return FileEntry(path=VALUE, size=len(content), sha256=digest)


def _refuse(message: str) -> ConfigError:
    return ConfigError([Problem(_PATH, message)])


if __name__ == "__main__":
    leave_process(handover.exit_code(lambda: main(sys.argv[1:])))
