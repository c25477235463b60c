"""What an exception or a text is taken for: every entry, by real errors where they can be made."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from dbx_llmtrain.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    Finding,
    Problem,
    StagingError,
)
from dbx_llmtrain.worker import failures
from dbx_llmtrain.worker.failures import CONFIGURATION, OUT_OF_MEMORY, cause_of_error, cause_of_text


def raised(call: object, *args: object) -> Exception:
    """What a call raises."""
    assert callable(call)
    with pytest.raises((RuntimeError, OSError, ImportError, IndexError, ValueError)) as caught:
        call(*args)
    return caught.value


def embedded() -> Exception:
    """torch's own words for an id that is not in the vocabulary."""
    return raised(torch.nn.Embedding(4, 2), torch.tensor([7]))


def refused() -> Exception:
    """A connection that nobody takes."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return raised(socket.create_connection, ("127.0.0.1", free.getsockname()[1]), 1.0)


def nobody_joins() -> Exception:
    """torch's store, where the other ranks never come."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    timeout = timedelta(seconds=1)
    return raised(lambda: TCPStore("127.0.0.1", 0, 2, True, timeout, wait_for_workers=True))


def other_shapes() -> Exception:
    state = torch.nn.Linear(3, 2).state_dict()
    return raised(torch.nn.Linear(2, 2).load_state_dict, state)


def no_arrow_file(folder: Path) -> Exception:
    import pyarrow as pa

    (folder / "packs.arrow").write_bytes(b"torn")
    return raised(pa.ipc.open_file, pa.memory_map(str(folder / "packs.arrow")))


TORN = OSError(errno.ENOSPC, "No space left on device", "/local_disk0/x")
HUB = "401 Client Error. (Request ID: 1) Cannot access gated repo for url https://huggingface.co/x"
MLFLOW = "API request to endpoint /api/2.0/mlflow/runs/get failed with error code 403 != 200"
NCCL = (
    "[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) "
    "ran for 600021 milliseconds before timing out"
)


class GatedRepoError(OSError):
    """As the hub's."""


class DistBackendError(RuntimeError):
    """As torch's, which has it only where it was built with a backend."""


class HTTPError(OSError):
    """As of requests."""


def cases(folder: Path) -> list[tuple[Exception, str, str]]:
    """An error, the name of its entry, its cause."""
    return [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "CUDA", "out_of_memory"),
        (RuntimeError("CUDA error: out of memory"), "CUDA out of memory", "out_of_memory"),
        (raised(torch.empty, 2**60), "without memory", "out_of_memory"),
        (MemoryError(), "without memory", "out_of_memory"),
        (TORN, "full disk", "disk_full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "full disk", "disk_full"),
        (RuntimeError("PytorchStreamWriter failed writing file data/0"), "full disk", "disk_full"),
        (raised(__import__, "no_such_package_anywhere"), "import", "import"),
        (raised(exec, "from json import no_such_name"), "import", "import"),
        (GatedRepoError("Cannot access gated repo"), "credentials", "credentials"),
        (HTTPError(HUB), "credentials", "credentials"),
        (RuntimeError(MLFLOW), "credentials", "credentials"),
        (RuntimeError("PERMISSION_DENIED: Invalid access token."), "credentials", "credentials"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/Volumes/a"),
            "permission",
            "permission",
        ),
        (OSError(errno.EROFS, "Read-only file system"), "permission", "permission"),
        (
            RuntimeError("PERMISSION_DENIED: User does not have READ VOLUME"),
            "permission",
            "permission",
        ),
        (embedded(), "another model", "model_mismatch"),
        (other_shapes(), "another model", "model_mismatch"),
        (RuntimeError("CUDA error: device-side assert triggered"), "another", "model_mismatch"),
        (DataError("rows/part-0.arrow has fewer rows than its index"), "data that", "data"),
        (no_arrow_file(folder), "data that", "data"),
        (CheckpointError("the manifest is not whole"), "checkpoint", "data"),
        (ClusterError([Finding("error", "network", "rank 1 did not come")]), "meet", "network"),
        (nobody_joins(), "timed out", "network"),
        (RuntimeError("Timed out waiting 3000ms for recv operation"), "timed out", "network"),
        (RuntimeError(NCCL), "timed out", "network"),
        (DistBackendError("NCCL error in: x.cpp:1, ncclSystemError"), "NCCL", "network"),
        (OSError("We couldn't connect to 'https://huggingface.co'"), "server", "network"),
        (refused(), "refused or lost", "network"),
        (RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]"), "lost", "network"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "lost", "network"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "GPU", "crash"),
    ]


def test_every_known_error_is_told_by_itself_and_by_its_text(tmp_path: Path) -> None:
    seen = set()
    for error, name, cause in cases(tmp_path):
        for known in (failures.known_error(error), failures.known_text(failures.told(error))):
            assert known is not None, failures.told(error)
            assert name in known.name, failures.told(error)
            assert known.cause == cause
            seen.add(known.name)
        assert cause_of_error(error) == cause_of_text(failures.told(error)) == cause
    assert seen == {known.name for known in failures.KNOWN}, "every entry has a case"


def test_an_error_is_told_by_what_it_was_raised_from() -> None:
    for error, cause in ((TORN, "disk_full"), (MemoryError(), OUT_OF_MEMORY)):
        wrapped = CheckpointError("no checkpoint")
        wrapped.__cause__ = error
        assert cause_of_error(wrapped) == cause
    text = f"StagingError: {StagingError('the model', {'a': f'OSError: {TORN}'})}"
    assert cause_of_text(text) == "disk_full"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad row"),
        RuntimeError("the gradient is not finite"),
        KeyError("memory"),
        ValueError("row 401 has no text"),
        AssertionError("403 == 404"),
    ],
)
def test_other_errors(error: Exception) -> None:
    assert cause_of_error(error) == cause_of_text(failures.told(error)) == ""
    wrapped = torch.OutOfMemoryError("CUDA out of memory")
    error.__context__ = wrapped  # only happened before
    assert cause_of_error(error) == ""


def test_a_wrong_configuration() -> None:
    error = ConfigError([Problem("model.lora", "no layer of the model has the name x")])
    assert cause_of_error(error) == CONFIGURATION
    wrapped = RuntimeError("the model cannot be built")
    wrapped.__cause__ = error
    assert cause_of_error(wrapped) == ""


def test_the_table_can_be_used() -> None:
    entries = [*failures.KNOWN, *failures.ENDINGS, *failures.OTHERS]
    names = [known.name for known in entries]
    assert len(set(names)) == len(names)
    for known in entries:
        re.compile(known.pattern)
        assert not known.advice.endswith(".")
        assert "|" not in known.advice + known.name, "it is shown in a table"
        assert all(os.strerror(number) != "Unknown error" for number in known.errnos)
