"""A user's own function on every rank, by ``llm.launch``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import dbx_llmtrain as llm
from tests.spark.test_launch import left_arguments

SECRET = "hf_" + "s3cretvalue" * 3


def added(first: int, second: int) -> int:
    """Stands for a module of the user's own: no rank can import it."""
    return first + second


def total(start: int, *, step: int, staged: tuple[str, ...]) -> dict[str, Any]:
    """What every rank gives, summed over all."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    given = torch.tensor(added(start, step * dist.get_rank()))
    dist.all_reduce(given)
    dist.barrier()
    dist.destroy_process_group()
    file, folder = (Path(path) for path in staged)
    print(f"hello of rank {os.environ['RANK']}", flush=True)
    found = {"total": int(given), "rank": int(os.environ["RANK"]), "staged": staged}
    return found | {
        "file": file.read_text(),
        "folder": [path.name for path in folder.glob("[!.]*")],
    }


def test_a_function_runs_on_every_rank(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    (tmp_path / "rows.txt").write_text("three rows")
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "a.json").write_text("{}")
    cfg = llm.TrainConfig(
        model={"source": "not looked at"},
        data={"train": "not looked at"},
        cluster={"local_dir": str(tmp_path / "local"), "debug": True, "env": {"NOT": "taken"}},
        checkpoint={"dir": str(tmp_path / "not taken")},
    )
    env = {"GLOO_SOCKET_IFNAME": "lo", "MINE": "yes", "NCCL_DEBUG": "WARN"}
    found = llm.launch(
        total, 10, step=5, cfg=cfg, use_gpu=False, env=env, dir=str(tmp_path / "runs"),
        run_name="mine", stage=[str(tmp_path / "rows.txt"), str(tmp_path / "words")], spark=spark,
    )  # fmt: skip
    assert (found["total"], found["rank"]) == (25, 0)
    assert (found["file"], found["folder"]) == ("three rows", ["a.json"])
    assert all(path.startswith(str(tmp_path / "local")) for path in found["staged"])
    assert not (tmp_path / "not taken").exists()
    run_dir = tmp_path / "runs" / "mine"
    printed = capfd.readouterr()
    assert f"2 rank(s) on CPU on the workers; logs are in {run_dir}/logs" in printed.out
    for rank in (0, 1):
        log = (run_dir / "logs" / f"rank-{rank:05d}.log").read_text()
        assert f"hello of rank {rank}\n" in log
        assert f"debug: RANK={rank}" in log
        assert "debug: MINE=yes" in log
        assert "debug: HF_TOKEN=***" in log
        assert "debug: NCCL_DEBUG=WARN" in log, "what is set wins"
        assert "debug: TORCH_DISTRIBUTED_DEBUG=DETAIL" in log
    assert "debug:" not in printed.err, "it is for the logs"
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert not left_arguments(SECRET)


def broken(numbers: list[int]) -> int:
    import json

    return numbers[int(os.environ["RANK"])] + json.loads("[")


def test_a_function_that_fails(
    spark: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(llm.TrainingFailed) as caught:
        llm.launch(
            broken, [1], processes=2, local_mode=True, use_gpu=False, dir=str(tmp_path),
            run_name="mine", spark=spark,
        )  # fmt: skip
    error = caught.value
    assert error.message.startswith(("IndexError: list index", "json.decoder", "JSONDecodeError"))
    assert error.traceback.splitlines()[1].endswith(", in broken"), error.traceback
    assert error.log == str(tmp_path / "mine" / "logs" / f"rank-{error.rank:05d}.log")
    assert "dbx_llmtrain/worker/call.py" in Path(error.log).read_text(), "there it is whole"
    printed = "".join(capfd.readouterr())
    assert "Traceback" not in printed
    assert "ChildFailedError" not in printed
