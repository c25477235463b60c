"""What nodes and the cluster say of themselves: data alone, JSON both ways."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from dbx_llmtrain.errors import Finding


class Record(BaseModel):
    """Base of the records. A loss that is not a number stays one in JSON, and is not ``null``."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), ser_json_inf_nan="constants"
    )


class GpuInfo(Record):
    """One GPU as ``nvidia-smi`` reports it. Memory in bytes; ``capability`` like ``9.0``."""

    index: int
    uuid: str
    name: str
    memory_total: int
    memory_used: int
    driver: str
    capability: str | None = None


class GpuProcess(Record):
    """A process that holds memory (bytes) of a GPU (its uuid). ``name``: its command, as far as it
    is to be seen."""

    pid: int
    memory: int
    gpu: str
    name: str = ""


class NodeCopy(Record):
    """A copy of a model or of data on a node's own disk: ``kind/fingerprint``, its bytes, and
    whether a process uses it or makes it."""

    name: str
    size: int
    in_use: bool


class NodeReport(Record):
    """One machine. Memory and disk in bytes; ``problem`` says what could not be read.

    ``tools`` are those that DeepSpeed builds its operators with (``g++``, ``ninja``, ``libaio``),
    and the operators that are built already (``cpu_adam``, ``async_io``). ``cuda`` is the newest
    CUDA of the GPUs' driver, ``interface`` the network interface toward Spark's driver, ``tried``
    what went wrong with what was tried there (``run folder``, ``MLflow``; empty: nothing).
    """

    node: str
    host: str
    addresses: tuple[str, ...] = ()
    gpus: tuple[GpuInfo, ...] = ()
    cpus: int
    memory_total: int
    memory_available: int
    local_dir: str
    disk_free: int
    copies: tuple[NodeCopy, ...] = ()
    python: str
    packages: dict[str, str] = Field(default_factory=dict)
    tools: tuple[str, ...] = ()
    cuda: str = ""
    gpu_processes: tuple[GpuProcess, ...] = ()
    interface: str = ""
    tried: dict[str, str] = Field(default_factory=dict)
    problem: str = ""


class PairSpeed(Record):
    """Bytes a second between two machines, measured by the ranks' own backend."""

    first: str
    second: str
    bytes_per_second: float


class ClusterReport(Record):
    """Every machine of the cluster, and what Spark offers on them.

    ``executors`` are the live ones' addresses (host or IP); ``slots`` the tasks that can run at
    once; ``missing`` the executor hosts that did not answer in time. ``local`` is true where Spark
    has no executors of its own (``local[N]``): the ranks then run on the driver's machine.
    ``findings`` are the checks of ``probe(full=True)``, ``speeds`` what it measured between hosts.
    """

    master: str
    spark_version: str
    local: bool
    executors: tuple[str, ...]
    slots: int
    task_gpus: str | None = None
    driver: NodeReport
    nodes: tuple[NodeReport, ...]
    missing: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    speeds: tuple[PairSpeed, ...] = ()

    def __repr__(self) -> str:
        from dbx_llmtrain.display import cluster_text

        return cluster_text(self)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        from dbx_llmtrain.display import cluster_html

        return cluster_html(self)
