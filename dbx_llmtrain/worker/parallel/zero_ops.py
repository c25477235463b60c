"""DeepSpeed's compiled operators: built once a node, before the ranks wait for each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dbx_llmtrain import storage, zero_config
from dbx_llmtrain.errors import ClusterError, Finding
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import builds, node
from dbx_llmtrain.worker.handover import note_folder
from dbx_llmtrain.worker.locks import file_lock
from dbx_llmtrain.worker.parallel.deepspeed import load_deepspeed, nvme_folder

_INSTALL = {
    zero_config.CPU_ADAM_OP: (
        "it needs g++ and ninja on every node (apt-get install g++; pip install ninja); "
        f"parallel.config={{{zero_config.CPU_ADAM}: false}} takes torch's AdamW, which is slower"
    ),
    zero_config.ASYNC_IO_OP: (
        "it needs g++, ninja and libaio on every node (apt-get install g++ libaio-dev; pip install "
        "ninja); offload to cpu instead of nvme"
    ),
}


@contextmanager
def offloading(plan: RunPlan, rank: int, tell: Callable[[str], object]) -> Iterator[None]:
    """What the plan's offloading needs on this node: compiled operators, and a folder on disk for
    this rank, gone afterwards. What a killed attempt of the same run left is removed, too. ``tell``
    hears what takes minutes, before it is begun.

    Raises ``ClusterError`` where an operator cannot be built.
    """
    build(plan, tell)
    if plan.strategy != "deepspeed" or not zero_config.uses_nvme(plan.parallel):
        yield
        return
    folder = nvme_folder(plan, rank)
    runs = folder.parent.parent
    runs.mkdir(parents=True, exist_ok=True)
    for other in runs.iterdir():
        if other.name != plan.attempt:
            storage.remove(other)
    folder.mkdir(parents=True, exist_ok=True)
    note_folder(folder)
    try:
        yield
    finally:
        storage.remove(folder)
        with suppress(OSError):  # not empty: another rank is not done yet
            folder.parent.rmdir()
            runs.rmdir()


def build(plan: RunPlan, tell: Callable[[str], object] = lambda _: None) -> None:
    """Build what the plan's offloading needs, where this node does not have it. Minutes, once: the
    first rank of a node builds, the others wait; libraries are kept in ``TORCH_EXTENSIONS_DIR``.

    Raises ``ClusterError`` where an operator cannot be built.
    """
    if plan.strategy != "deepspeed":
        return
    names = zero_config.operators(plan.parallel)
    if not names:
        return
    deepspeed = load_deepspeed("cuda" if plan.use_gpu else "cpu", plan.config.tracking.log_level)
    local = node.local_dir(plan.local_dir)
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(local / "caches" / "torch_extensions"))
    locks = local / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if not _is_built(deepspeed, name)]
    if missing:
        tell(f"building DeepSpeed's {' and '.join(missing)} (minutes, once a node)")
    with file_lock(locks / "deepspeed-operators"):
        for name in names:
            _load(deepspeed, name)


def _is_built(deepspeed: Any, name: str) -> bool:
    """Whether an operator came with DeepSpeed, or lies where torch keeps what it has built."""
    builder = _builder(deepspeed, name)
    own = str(getattr(builder, "name", name))
    kept = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / own / f"{own}.so"
    return name in builds.find_tools() or kept.is_file()


def _builder(deepspeed: Any, name: str) -> Any:
    return deepspeed.accelerator.get_accelerator().create_op_builder(_BUILDERS[name])


def _load(deepspeed: Any, name: str) -> None:
    """Load an operator, which builds it first where that is not done."""
    builder = _builder(deepspeed, name)
    # What a rank that was killed while it built has left: others would wait for it without end.
    # Here is nobody who builds, as we hold the lock of this node.
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / str(getattr(builder, "name", name))
    (folder / "lock").unlink(missing_ok=True)
    try:
        builder.load(verbose=False)
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ClusterError(
            [
                Finding(
                    "error",
                    "deepspeed",
                    f"the operator {name} cannot be built on {node.node_id()} ({first}): "
                    f"{_INSTALL[name]}",
                )
            ]
        ) from error


_BUILDERS = {
    zero_config.CPU_ADAM_OP: "CPUAdamBuilder",
    zero_config.ASYNC_IO_OP: "AsyncIOBuilder",
}
