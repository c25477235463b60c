"""What two ranks do with checkpoints and exports. Each case runs under DDP and under FSDP."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dbx_llmtrain import storage
from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.worker import checkpoint, export
from dbx_llmtrain.worker.generation import check_generation_config
from dbx_llmtrain.worker.loop import train_steps
from dbx_llmtrain.worker.model import check_same_weights, load_model
from tests import tiny
from tests.dist import runs
from tests.dist.runs import Context, Run, joined

IDENTITY = {"seed": 1, "optimizer": "adamw"}
STATE = {"step": 4, "nll": 1.5}
STRATEGIES = ("ddp", "fsdp")
STEPS = 7
"""Steps of a run: two of an epoch of three (8 rows, 3 at a time) more than two epochs."""


def shared(context: Context) -> Path:
    """The folder that all ranks and the test itself see."""
    return context.folder.parent


def make(context: Context, strategy: str, *, seed: int = 0, **model: Any) -> Run:
    """A run with dropout, 3 rows a step, one at a time."""
    settings = {"attention_dropout": 0.1, "seed": seed} | model
    return Run(
        replace(context, strategy=strategy),
        tiny.examples(),
        model=tiny.llama(**settings),
        global_batch=3,
        micro_batch=1,
        steps=STEPS,
        schedule="cosine",
        warmup=2,
    )


def advance(run: Run, done: int, until: int) -> list[tuple[float, float]]:
    """Run the steps after ``done`` up to ``until``; the loss and learning rate of each."""
    seen = []
    for report in train_steps(
        run.plan, run.root, run.optimizer, run.strategy, run.order, run.world, done=done
    ):
        seen.append((report.loss, report.learning_rate))
        if report.step == until:
            break
    return seen


def everything(run: Run) -> dict[str, Tensor]:
    """Every tensor of the model and the optimizer, whole."""
    tensors = checkpoint.stored_tensors(run.model, run.optimizer)
    return {name: joined(tensor).clone() for name, tensor in tensors}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Bitwise, and of the same type."""
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name])
        for name in first
    )


def draws() -> list[float]:
    """The next five numbers of every generator."""
    return [
        *(random.random() for _ in range(5)),
        *np.random.rand(5).tolist(),
        *torch.rand(5).tolist(),
    ]


def save(run: Run, folder: Path, **changes: Any) -> Path:
    return runs.save(run, folder, **({"state": STATE, "identity": IDENTITY} | changes))


def load(run: Run, folder: Path, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": run.model,
        "optimizer": run.optimizer,
        "world": run.world,
        "identity": IDENTITY,
    }
    return checkpoint.load(folder, **(arguments | changes))


def refused(action: Callable[[], Any]) -> str:
    """The message of the ``CheckpointError`` that ``action`` has to raise."""
    try:
        action()
    except CheckpointError as error:
        return str(error)
    raise AssertionError("no CheckpointError")


def resumed(context: Context) -> dict[str, Any]:
    """Seven steps at once against four, a checkpoint, and three by another process's objects."""
    found = {}
    for strategy in STRATEGIES:
        folder = shared(context) / strategy
        torch.manual_seed(100 + context.world.rank)
        run = make(context, strategy)
        first = advance(run, 0, 4)
        save(run, folder)
        stored = everything(run)
        if context.world.rank == 0:
            torch.save(stored, folder.with_suffix(".pt"))
        rest = advance(run, 4, STEPS)
        drawn = draws()
        again = make(context, strategy, seed=5)
        torch.manual_seed(77)
        state = load(again, folder)
        at_load = equal(everything(again), stored)
        found[strategy] = {
            "state": state,
            "at_load": context.gather(at_load),
            "rest_equal": context.gather(advance(again, 4, STEPS) == rest),
            "steps": len(first) + len(rest),
            "rates": [rate for _, rate in first + rest],
            "end_equal": context.gather(equal(everything(again), everything(run))),
            "draws_equal": context.gather(draws() == drawn),
            "draws_differ_on_ranks": len({str(d) for d in context.gather(drawn)}),
            "left": [path.name for path in (shared(context) / "scratch").iterdir()],
            "tensors": len(stored),
        }
    return found


def crossed(context: Context) -> dict[str, Any]:
    """Checkpoints of one process, of DDP and of FSDP, each read by DDP and by FSDP."""
    found = {}
    for origin in ("single", *STRATEGIES):
        stored = torch.load(shared(context) / f"{origin}.pt")
        for strategy in STRATEGIES:
            run = make(context, strategy, seed=9)
            load(run, shared(context) / origin)
            result = equal(everything(run), stored)
            # What was loaded has to be what is trained.
            finite = all(np.isfinite(loss) for loss, _ in advance(run, 4, 6))
            found[f"{origin}-{strategy}"] = context.gather(result and finite)
    return found


def damaged(context: Context) -> dict[str, Any]:
    """Checkpoints that must not be used."""
    origin, folder = shared(context) / "fsdp", shared(context) / "damaged"
    if context.world.rank == 0:
        shutil.copytree(origin, folder)
        path = sorted(folder.glob("*.distcp"))[-1]
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
    dist.barrier()
    run = make(context, "fsdp")
    before = everything(run)
    messages = {
        "hash": refused(lambda: load(run, folder)),
        "nothing": refused(lambda: load(run, shared(context) / "nowhere")),
        "identity": refused(lambda: load(run, origin, identity=IDENTITY | {"seed": 2})),
        "tied": refused(lambda: load(make(context, "fsdp", tied=True), origin)),
        "wider": refused(lambda: load(make(context, "ddp", vocab_size=101), origin)),
    }
    unchanged = equal(everything(run), before)
    dist.barrier()
    if context.world.rank == 0:
        sorted(folder.glob("rng-*.json"))[-1].unlink()
    dist.barrier()
    messages["incomplete"] = refused(lambda: load(run, folder))
    frozen = make(context, "ddp")
    frozen.model.model.norm.weight.requires_grad_(False)
    trained = [p for p in frozen.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    messages["frozen"] = refused(lambda: load(frozen, origin, optimizer=optimizer))
    return {"messages": context.gather(messages), "unchanged": context.gather(unchanged)}


def unwritable(context: Context) -> dict[str, Any]:
    """One rank cannot write; then all cannot."""
    run = make(context, "fsdp")
    blocked = shared(context) / "file"
    blocked.touch()
    folder = shared(context) / "never"
    scratch = blocked / "x" if context.world.rank == 1 else shared(context) / "scratch"
    one = refused(lambda: save(run, folder, scratch=scratch))
    everyone = refused(lambda: save(run, blocked / "step-1", scratch=folder.parent / "scratch"))
    dist.barrier()
    return {
        "one": context.gather(one),
        "all": context.gather(everyone),
        "exists": folder.exists(),
        "left": [path.name for path in (shared(context) / "scratch").iterdir()],
    }


def leftovers(context: Context) -> dict[str, Any]:
    """A killed attempt's folder is cleared before it is written again."""
    folder = shared(context) / "again"
    if context.world.rank == 0:
        folder.mkdir()
        (folder / "__7_0.distcp").write_text("of a run on eight ranks")
    dist.barrier()
    save(make(context, "fsdp"), folder)
    manifest = storage.read_manifest(folder)
    assert manifest is not None
    return {
        "files": sorted(path.name for path in storage.list_files(folder)),
        "named": sorted(entry["path"] for entry in manifest["files"]),
        "world_size": manifest["world_size"],
        "versions": manifest["versions"],
    }


def same_weights(context: Context) -> dict[str, Any]:
    """Equal models pass; a model that differs on one rank, in a weight or a buffer, does not."""
    model = tiny.llama()
    check_same_weights(model)
    rank = context.world.rank
    other = refused(lambda: check_same_weights(tiny.llama(seed=rank)))
    with torch.no_grad():
        model.model.rotary_emb.inv_freq[0] += rank * 1e-7
    buffer = refused(lambda: check_same_weights(model))
    return {"weights": context.gather(other), "buffer": context.gather(buffer)}


def gathered(context: Context) -> dict[str, Any]:
    """Who holds the whole model after a gather, and whether it is the model."""
    found = {}
    for strategy in STRATEGIES:
        for tied in (False, True):
            run = make(context, strategy, tied=tied)
            weights = export.gather(run.model, torch.float32, context.world)
            expected = dict(tiny.llama(tied=tied).named_parameters())
            found[f"{strategy}-{tied}"] = {
                "keys": context.gather(len(weights)),
                "equal": all(torch.equal(weights[name], expected[name]) for name in weights),
                "plain": all(type(tensor) is Tensor for tensor in weights.values()),
            }
    return found


def exported(context: Context) -> dict[str, Any]:
    """Exports of trained models: what ranks get, and what is on disk."""
    found = {}
    for strategy in STRATEGIES:
        for tied in (False, True):
            name = f"{strategy}-{tied}"
            source = shared(context) / f"source-{tied}"
            model = load_model(source, attention="sdpa")
            run = Run(
                replace(context, strategy=strategy), tiny.examples(vocab=90), model=model, steps=2
            )
            held = export.gather(run.model, torch.float32, context.world)
            untouched = {key: tensor.clone() for key, tensor in held.items()}
            list(run.steps())
            collected = export.collect(run.root, run.model, source, context.world)
            target = shared(context) / "exports" / name
            if collected is not None:
                weights = dict(collected.weights)
                export.write_export(
                    target,
                    collected=collected,
                    place=export.Place(source, context.folder / "scratch"),
                    generation=check_generation_config(source),
                )
                torch.save((untouched, weights), target.with_suffix(".pt"))
                torch.save((collected.input_ids, collected.logits), f"{target}.logits")
            found[name] = {
                "ranks": context.gather(collected is not None),
                "training": run.model.training,
            }
    return found


def objects(context: Context) -> dict[str, Any]:
    """What else has to work in the process group that checkpoints use."""
    box = [{"from": context.world.rank}]
    dist.broadcast_object_list(box, src=0)
    run = make(context, "fsdp")
    run.back_propagate()
    norm = run.clip(0.01)
    return {"object": context.gather(box[0]), "norms": len(set(context.gather(norm)))}


CASES: dict[str, Callable[[Context], dict[str, Any]]] = {
    case.__name__: case
    for case in (
        resumed,
        crossed,
        damaged,
        unwritable,
        leftovers,
        same_weights,
        gathered,
        exported,
        objects,
    )
}
