"""Where a rank stands: launchers' variables and the GPUs of a host. (The group: tests/dist.)"""

from __future__ import annotations

import json
from typing import Any

import pytest

from dbx_llmtrain.errors import ClusterError
from dbx_llmtrain.worker import meeting, torchrun
from dbx_llmtrain.worker.world import _check_gpus, _Place, launcher_environment

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_the_launchers_variables_are_taken() -> None:
    assert launcher_environment(TORCHRUN | {"HOME": "/root"}) == TORCHRUN
    assert launcher_environment({"HOME": "/root"}) == {}


def test_half_a_launcher_is_an_error_that_names_the_rest() -> None:
    with pytest.raises(ClusterError, match="set RANK but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        launcher_environment({"RANK": "0"})


def test_tf_config_names_the_ranks() -> None:
    cluster = {"chief": ["a:1"], "worker": ["b:2", "c:3"], "ps": ["d:4"]}
    text = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}})
    assert launcher_environment({"TF_CONFIG": text}) == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"cluster": {"worker": ["a:1"]}, "task": {"type": "ps", "index": 0}}']
)
def test_a_tf_config_without_this_rank_is_an_error(text: str) -> None:
    with pytest.raises(ClusterError, match="TF_CONFIG names no rank for this process"):
        launcher_environment({"TF_CONFIG": text})


def _places(*ranks: tuple[str, int, tuple[str, ...]]) -> list[Any]:
    return [
        _Place(rank=i, host=host, node=host, cpus=8, local_rank=local, gpus=gpus)
        for i, (host, local, gpus) in enumerate(ranks)
    ]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        # Every rank was given a GPU of its own by Spark.
        ([("a", 0, ("g0",)), ("a", 0, ("g1",)), ("b", 0, ("h0",))], [0, 0, 0]),
        # torchrun: all see all, LOCAL_RANK tells them apart.
        ([("a", 0, ("g0", "g1")), ("a", 1, ("g0", "g1")), ("b", 0, ("h0", "h1"))], [0, 1, 0]),
        # All see all and LOCAL_RANK is 0 on each: their order on the host.
        ([("a", 0, ("g0", "g1")), ("a", 0, ("g0", "g1"))], [0, 1]),
    ],
)
def test_each_rank_has_a_gpu_of_its_own(ranks: list[Any], expected: list[int]) -> None:
    assert _check_gpus(_places(*ranks)) == expected


def test_two_ranks_on_one_gpu_are_named() -> None:
    with pytest.raises(ClusterError, match="ranks 0 and 1 on a were given the same GPU g0"):
        _check_gpus(_places(("a", 0, ("g0",)), ("a", 0, ("g0",))))


def test_a_rank_without_a_gpu_is_named() -> None:
    with pytest.raises(ClusterError, match=r"rank 1 on a is number 1 there and sees 0 GPU"):
        _check_gpus(_places(("a", 0, ("g0",)), ("a", 0, ())))


def tf_config(index: int) -> dict[str, str]:
    """Two nodes as Vertex AI tells them: a chief and a worker."""
    cluster = {"chief": ["a:2222"], "worker": ["b:2222"]}
    task = {"type": "worker" if index else "chief", "index": 0}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


@pytest.mark.parametrize("node", [0, 1])
def test_a_task_with_several_ranks_becomes_their_launcher(node: int) -> None:
    words = torchrun.command(tf_config(node), 8, "plan.json")
    assert words is not None
    assert words[1:3] == ["-m", "torch.distributed.run"]
    assert words[3:8] == [
        "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=4", "--master-addr=a",
        "--master-port=2222",
    ]  # fmt: skip
    assert words[8:] == ["-m", "dbx_llmtrain.worker.main", "plan.json"]


@pytest.mark.parametrize(
    "environment",
    [
        {},
        tf_config(0),
        tf_config(0) | {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
    ],
    ids=["no launcher", "a rank for every task", "started by a launcher"],
)
def test_a_process_that_is_a_rank_itself(environment: dict[str, str]) -> None:
    assert torchrun.command(environment, 2 if len(environment) == 1 else 4, "plan.json") is None


@pytest.mark.parametrize("ranks", [1, 3])
def test_tasks_that_cannot_share_the_ranks_evenly(ranks: int) -> None:
    with pytest.raises(ClusterError, match=f"for {ranks} ranks, which the 2 tasks of TF_CONFIG"):
        torchrun.command(tf_config(1), ranks, "plan.json")


def test_a_time_for_arriving_that_is_no_number_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(meeting.WITHIN, "soon")
    with pytest.raises(ClusterError, match="is 'soon': expected a number of seconds"):
        meeting.meet(TORCHRUN, "node-a")
