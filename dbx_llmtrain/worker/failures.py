"""What a failure comes of: the table of those that are known, how each shows, and what to do.

An exception is told by its type where that says enough, and by its words; a process that left none
by the signal that ended it and by the last lines that it printed. Pure, and of the standard library
alone: a rank's supervisor uses it as well as the driver.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dbx_llmtrain.errors import Cause, ConfigError

OUT_OF_MEMORY: Cause = "out_of_memory"
CONFIGURATION: Cause = "configuration"
"""A ``ConfigError`` that only a rank could find; its message says what to change."""
HOST_MEMORY: Cause = "host_memory"
LOST: Cause = "lost"
NETWORK: Cause = "network"


@dataclass(frozen=True)
class Known:
    """A failure that is known by ``name``: its ``cause`` and what to do about it.

    ``pattern`` is looked for in an error's type and words, ``kinds`` are names of exceptions (or of
    what they are derived from), ``errnos`` those of an ``OSError``, ``signals`` what ended the
    process. ``follows``: it is what a rank says when another one is gone or does not come, so that
    another error of another rank is the cause.
    """

    name: str
    cause: Cause
    advice: str
    pattern: str = r"(?!)"
    kinds: tuple[str, ...] = ()
    errnos: tuple[int, ...] = ()
    signals: tuple[int, ...] = ()
    follows: bool = False

    def says(self, text: str) -> bool:
        """Whether an error's text, ``Type: words``, is this failure."""
        kind = text.partition(":")[0].rpartition(".")[2].strip()
        return kind in self.kinds or re.search(self.pattern, text) is not None

    def is_error(self, error: BaseException) -> bool:
        """Whether an exception is this failure."""
        kinds = {kind.__name__ for kind in type(error).__mro__}
        number = error.errno if isinstance(error, OSError) else None
        return (
            bool(kinds.intersection(self.kinds)) or number in self.errnos or self.says(told(error))
        )


_AGAIN = "cluster.max_restarts has a run go on by itself"

KNOWN = (
    Known(
        "CUDA out of memory",
        OUT_OF_MEMORY,
        "the GPU's memory was full: lower train.micro_batch_size (the result stays the same) or "
        "data.max_length, or spread the model over more GPUs with parallel.kind=fsdp",
        r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
    ),
    Known(
        "a machine without memory",
        OUT_OF_MEMORY,
        "the machine's memory was full: use machines with more memory or fewer ranks on each",
        r"MemoryError|Cannot allocate memory|DefaultCPUAllocator|std::bad_alloc",
        kinds=("MemoryError",),
        errnos=(12,),
    ),
    Known(
        "a full disk",
        "disk_full",
        "a disk is full: free space on the one that is named above (checkpoint.keep_last and the "
        "node's temporary folder take most), or set cluster.local_dir or checkpoint.dir to a "
        "bigger one",
        r"No space left on device|Disk quota exceeded|\[Errno (28|122)\]"
        r"|PytorchStreamWriter failed writing|there is no room for the checkpoint",
        errnos=(28, 122),
    ),
    Known(
        "an import that fails on a worker",
        "import",
        "a package is missing or of another version on that node: install it as a library of the "
        "cluster or with %pip, which reaches every node, and run again",
        r"ModuleNotFoundError|ImportError|No module named|cannot import name",
        kinds=("ImportError", "ModuleNotFoundError", "PackageNotFoundError"),
    ),
    Known(
        "credentials that are missing or refused (401, 403)",
        "credentials",
        "the credentials are missing or were refused: set HF_TOKEN (hub) or DATABRICKS_HOST and "
        "DATABRICKS_TOKEN (MLflow) in the driver's environment, from where the ranks get them, and "
        "accept the model's terms on the hub where it is gated",
        r"\b40[13] (Client Error|Unauthorized|Forbidden)|(status|error) code:? 40[13]\b"
        r"|HTTP Error 40[13]\b|Unauthorized|[Ii]nvalid.{0,20}\b(token|credentials)"
        r"|(token|Token).{0,20}\b(expired|revoked)",
        kinds=("GatedRepoError", "RepositoryNotFoundError", "LocalTokenNotFoundError"),
    ),
    Known(
        "a permission that is missing",
        "permission",
        "the user that runs the cluster may not read or write what is named above: grant READ "
        "VOLUME and WRITE VOLUME on the volume (and USE SCHEMA, USE CATALOG above it), or give "
        "another folder in checkpoint.dir, data.cache_dir or cluster.local_dir",
        r"Permission denied|Operation not permitted|Read-only file system|PERMISSION_DENIED"
        r"|(READ|WRITE) VOLUME",
        kinds=("PermissionError",),
        errnos=(1, 13, 30),
    ),
    Known(
        "a tokenizer or weights of another model",
        "model_mismatch",
        "tokenizer and model do not go together: a token id is not below the model's vocabulary, "
        "or weights have another shape. Set model.tokenizer to the model's own, name tokens that "
        "were added in model.new_tokens, and prepare the data again (on a GPU, "
        "cluster.env={CUDA_LAUNCH_BLOCKING: '1'} makes the traceback exact)",
        r"index out of range in self|[Tt]arget \S+ is out of bounds|srcIndex < srcSelectDimSize"
        r"|Indexing\.cu|device-side assert triggered|size mismatch for |Error\(s\) in loading "
        r"state_dict",
    ),
    Known(
        "data that cannot be read or used",
        "data",
        "the prepared data is damaged or is not what the plan was made for: the rank's words say "
        "which file. Remove that folder below data.cache_dir (else .cache in checkpoint.dir) and "
        "the node's copy in cluster.local_dir, and run again: it is prepared anew",
        r"ArrowInvalid|not an Arrow file",
        kinds=("DataError", "ArrowInvalid"),
    ),
    Known(
        "a checkpoint that cannot be used",
        "data",
        "a checkpoint or an export cannot be written, read or trusted: the rank's words say why. "
        "Name an older one in checkpoint.resume, or begin again with checkpoint.resume=never",
        kinds=("CheckpointError",),
    ),
    Known(
        "ranks that do not meet",
        NETWORK,
        "the ranks did not all come to their meeting point, or could not work together there: the "
        "rank's words say who and what to set. Nodes have to let each other's ports pass; "
        f"NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME in cluster.env choose the network; {_AGAIN}",
        r"\[error\] network: ",
        follows=True,
    ),
    Known(
        "a collective operation that timed out",
        NETWORK,
        "a rank did not come to a collective operation in time: look at its log, and at the stacks "
        "beside it where there are some. Where all ranks are well, nodes cannot reach each other: "
        f"NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME in cluster.env choose the network; {_AGAIN}",
        r"Watchdog caught collective|[Tt]imed out (waiting|after)|wait timeout after|NCCL timeout"
        r"|[Ss]ocket [Tt]imeout|operation timeout|clients joined",
        follows=True,
    ),
    Known(
        "NCCL that cannot connect the GPUs",
        NETWORK,
        "NCCL could not connect the GPUs: run again with cluster.debug=true and look at the ranks' "
        "logs; NCCL_SOCKET_IFNAME in cluster.env chooses the network interface, "
        f"NCCL_IB_DISABLE: '1' does without InfiniBand; {_AGAIN}",
        r"ncclInternalError|ncclSystemError|ncclUnhandledCudaError|ncclRemoteError|NCCL error",
        follows=True,
    ),
    Known(
        "a server that cannot be reached",
        NETWORK,
        "that node cannot reach the server that is named above: give model and data as folders "
        "that every node sees, or open the network (proxy variables go into cluster.env)",
        r"HTTPS?ConnectionPool|Max retries exceeded|Name or service not known"
        r"|Temporary failure in name resolution|[Cc]ouldn't connect to",
        kinds=("LocalEntryNotFoundError", "OfflineModeIsEnabled"),
    ),
    Known(
        "a connection that was refused or lost",
        NETWORK,
        "the connection between two ranks was refused or lost: the other rank, its machine or the "
        "network between them is gone. Run again; training goes on from the last checkpoint "
        f"({_AGAIN})",
        r"[Cc]onnection (was )?([Cc]losed|[Rr]eset|[Rr]efused)|[Bb]roken pipe|[Ss]ocket closed"
        r"|recvValue failed|[Ff]ailed to recv|communicator was aborted|remote process exited"
        r"|[Pp]eer closed",
        kinds=("ConnectionError", "DistError", "DistBackendError", "DistNetworkError",
               "DistStoreError", "ConnectionResetError", "ConnectionRefusedError",
               "BrokenPipeError"),
        follows=True,
    ),
    Known(
        "a GPU that failed",
        "crash",
        "a kernel or the GPU itself failed: look for Xid in the node's kernel log and replace the "
        "node if it happens again there; on every node it is a fault of a kernel "
        "(model.use_liger_kernel=false, model.attention=eager, model.compile=false do without)",
        r"illegal memory access|uncorrectable ECC|unspecified launch failure|GPU is lost"
        r"|misaligned address|CUDA error: unknown error",
    ),
)  # fmt: skip
"""The first one that fits is it."""

KILLED_FOR_MEMORY = Known(
    "exit code -9, for lack of host memory",
    HOST_MEMORY,
    "the process was killed from outside, by the kernel because the machine's memory was full "
    "(most likely, where the message does not say that the kernel has counted it): use machines "
    "with more memory or fewer ranks on each, or lower data.max_length",
    signals=(9,),
)
ENDINGS = (
    KILLED_FOR_MEMORY,
    Known(
        "exit code -9, by somebody else",
        LOST,
        "the process was killed from outside (SIGKILL), and the kernel has counted no kill for "
        "lack of memory on that node meanwhile: the node or its container was taken back, or "
        "somebody ended it. Look at Spark's log of the executor and run again; training goes on "
        f"from the last checkpoint ({_AGAIN})",
        signals=(9,),
    ),
    Known(
        "exit code -7 (SIGBUS)",
        "crash",
        "a memory-mapped file or the shared memory (/dev/shm) ran out of space, or a mapped file "
        "became shorter: free space there",
        signals=(7,),
    ),
    Known(
        "exit code -11 or -4 (SIGSEGV, SIGILL)",
        "crash",
        "native code crashed: the stack is at the end of the log; compare the versions of torch, "
        "CUDA and the driver that probe() shows",
        signals=(11, 4),
    ),
    Known(
        "exit code -6 or -8 (SIGABRT, SIGFPE)",
        "crash",
        "native code gave up: its last words and the stack are at the end of the log; compare the "
        "versions of torch, CUDA and the driver that probe() shows",
        signals=(6, 8),
    ),
)
"""Processes that a signal ended. (What they printed last says more, where it is in ``KNOWN``.)"""

OTHERS = (
    Known(
        "a configuration that only a rank could refuse",
        CONFIGURATION,
        "change the configuration as said above, and run again",
        kinds=("ConfigError",),
    ),
    Known(
        "a rank without a word",
        LOST,
        "a machine or an executor was lost, or its processes were never started: look "
        "at Spark's log of the executors (out of memory, spot machine taken back, node "
        f"removed), and run again; training goes on from the last checkpoint ({_AGAIN})",
    ),
    Known(
        "an executor that Spark lost for lack of memory",
        HOST_MEMORY,
        "the executor's machine or container had no memory left: use machines with more memory or "
        "fewer ranks on each",
        r"Container killed.{0,80}memory|OOM ?[Kk]illed",
    ),
)
WITHOUT_A_WORD = OTHERS[1]
EXECUTOR_MEMORY = OTHERS[2]


def told(error: BaseException) -> str:
    """An exception in a line: its type and its words."""
    return f"{type(error).__name__}: {error}"


def known_error(error: BaseException) -> Known | None:
    """What an exception is. Where it was raised from others, the one that came first says it; what
    only happened before does not count."""
    if isinstance(error, ConfigError):
        return OTHERS[0]
    for one in reversed(list(_chain(error))):
        for known in KNOWN:
            if known.is_error(one):
                return known
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def known_text(text: str) -> Known | None:
    """What an error's text is, ``Type: words``."""
    return next((known for known in KNOWN if known.says(text)), None)


def cause_of_text(text: str) -> Cause:
    """The cause that an error's text tells, else nothing."""
    known = known_text(text)
    return known.cause if known else ""


def cause_of_error(error: BaseException) -> Cause:
    """What an exception comes of, else nothing."""
    known = known_error(error)
    return known.cause if known else ""
