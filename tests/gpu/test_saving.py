"""A checkpoint of what is on a GPU, written while it is changed there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dbx_llmtrain import storage
from dbx_llmtrain.worker import checkpoint
from dbx_llmtrain.worker.gpus import read_gpus
from dbx_llmtrain.worker.saving import Saved, saving
from dbx_llmtrain.worker.world import open_world
from tests import sample

GPUS = read_gpus()[0]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="nvidia-smi shows no GPU on this machine"),
]


def test_tensors_and_generators_are_of_their_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    folder, told = storage.checkpoint_folder(tmp_path, 1), list[Saved]()
    with open_world(use_gpu=True) as world:
        network = torch.nn.Linear(2000, 2000, device=world.device)
        optimizer = torch.optim.AdamW(network.parameters())
        network(torch.ones(1, 2000, device=world.device)).sum().backward()
        optimizer.step()
        before = network.weight.detach().clone()
        moment = optimizer.state[network.weight]["exp_avg"].clone()
        with saving(
            sample.run_plan(tmp_path), world, tmp_path / "scratch", tell=told.append
        ) as saver:
            saver.save(
                folder, model=network, optimizer=optimizer, state={"step": 1}, identity={},
                metrics={},
            )  # fmt: skip
            drawn = torch.rand(5, device=world.device)
            with torch.no_grad():
                for _ in range(50):
                    network.weight.add_(1.0)
                    optimizer.state[network.weight]["exp_avg"].mul_(2.0)
        again = torch.nn.Linear(2000, 2000, device=world.device)
        other = torch.optim.AdamW(again.parameters())
        checkpoint.load(folder, model=again, optimizer=other, world=world, identity={})
        assert [saved.error for saved in told] == [""]
        assert torch.equal(again.weight, before)
        assert torch.equal(other.state[again.weight]["exp_avg"], moment)
        assert torch.equal(torch.rand(5, device=world.device), drawn)
