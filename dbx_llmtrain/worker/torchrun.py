"""One call per node under ``TF_CONFIG``: it becomes torch's own launcher of the ranks of that node.

Launchers that set ``TF_CONFIG`` (Vertex AI's among them) start one process on every machine,
however many GPUs that has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from dbx_llmtrain.errors import ClusterError, Finding
from dbx_llmtrain.worker.world import launcher_environment

MODULE = "dbx_llmtrain.worker.main"


def command(environment: Mapping[str, str], world_size: int, plan: str) -> list[str] | None:
    """The command that starts this node's ranks of a plan for ``world_size``, each running the plan
    file ``plan``; ``None`` where this process is a rank itself.

    Every task of ``TF_CONFIG`` is a node with as many ranks as any other, numbered in the order of
    the tasks, and the first task's address is where they meet. Raises ``ClusterError`` where the
    plan's ranks cannot be shared evenly among the tasks.
    """
    if "RANK" in environment or "TF_CONFIG" not in environment:
        return None
    found = launcher_environment(environment)
    nodes = int(found["WORLD_SIZE"])
    if world_size == nodes:
        return None
    if world_size % nodes:
        message = (
            f"the plan is for {world_size} ranks, which the {nodes} tasks of TF_CONFIG cannot "
            "share evenly"
        )
        raise ClusterError([Finding("error", "launcher", message)])
    return [
        sys.executable,
        *("-m", "torch.distributed.run"),
        f"--nnodes={nodes}",
        f"--node-rank={found['RANK']}",
        f"--nproc-per-node={world_size // nodes}",
        f"--master-addr={found['MASTER_ADDR']}",
        f"--master-port={found['MASTER_PORT']}",
        *("-m", MODULE, plan),
    ]


def become_launcher(world_size: int, plan: str) -> None:
    """Replace this process by the launcher of its node's ranks; return where it is a rank itself.
    Signals and the exit code are the launcher's from then on."""
    words = command(os.environ, world_size, plan)
    if words is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(words[0], words)
