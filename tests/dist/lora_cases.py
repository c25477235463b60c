"""Adapters on real ranks: what the ranks of a launch do, see ``cases``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dbx_llmtrain.compat import dtype_argument
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker import checkpoint, lora
from dbx_llmtrain.worker.export import collect
from dbx_llmtrain.worker.loop import train_steps
from dbx_llmtrain.worker.parts import part_of
from dbx_llmtrain.worker.weights import Fill
from dbx_llmtrain.worker.whole import whole
from tests import reference, sample, tiny
from tests.dist.runs import Context, Run, save

LORAS: dict[str, dict[str, Any]] = {
    "all-linear": {},
    "dora": {"use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    "embeddings": {"modules_to_save": ["embed_tokens", "norm"], "target_modules": ["v_proj"]},
    "head": {"target_modules": ["lm_head", "o_proj"], "bias": "lora_only"},
}
"""``model.lora`` by name. The model's embeddings are tied for ``embeddings``."""


def folder_of(context: Context, *, tied: bool) -> Path:
    """A model folder that rank 0 has made (transformers saves on no other)."""
    folder = context.folder.parent / f"model-{tied}"
    if context.world.rank == 0 and not folder.exists():
        tiny.model_folder(folder, tied=tied)
    dist.barrier()
    return folder


def plan_of(name: str, precision: str = "fp32") -> RunPlan:
    """A plan of which only the model's part is used."""
    config = sample.config(model={"source": "m", "lora": {"r": 4} | LORAS[name]})
    return sample.run_plan(config=config, precision=precision, attention="sdpa")


def stir(model: nn.Module) -> None:
    """Adapters that are no longer at their start, where they would add nothing."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "magnitude" not in name:
            held = part_of(parameter)
            drawn = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
            generator = torch.Generator().manual_seed(drawn)
            held.put(0, torch.randn(held.shape, generator=generator) * 0.05)


def adapted(
    context: Context, name: str, precision: str = "fp32", *, stirred: bool = True
) -> tuple[nn.Module, Callable[[nn.Module], None]]:
    """A model with adapters and without storage, and what fills it."""
    plan = plan_of(name, precision)
    folder = folder_of(context, tied=name == "embeddings")
    fill = Fill(plan, folder, context.world)

    def filled(model: nn.Module) -> None:
        fill(model)
        if stirred:
            with torch.no_grad():
                stir(model)

    return lora.adapt(fill.build(), plan), filled


def plain(context: Context, name: str) -> nn.Module:
    """The same in this process alone, fp32."""
    from transformers import AutoModelForCausalLM

    tied = name == "embeddings"
    model = AutoModelForCausalLM.from_pretrained(
        folder_of(context, tied=tied), **dtype_argument(torch.float32)
    )
    lora.adapt(model, plan_of(name))
    lora.initialise(model, 0)
    with torch.no_grad():
        stir(model)
    return model.train()


def digest(tensors: dict[str, Tensor]) -> str:
    """Of all bytes, by name."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        found.update(name.encode() + flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def frozen(run: Run) -> dict[str, Tensor]:
    return {n: whole(p).clone() for n, p in run.model.named_parameters() if not p.requires_grad}


def gradients(context: Context) -> dict[str, Any]:
    """Gradients of a step against the textbook's in one process, for each kind of adapter."""
    found = {}
    rows = tiny.examples()
    for name in LORAS:
        loss, expected = reference.gradients(plain(context, name), rows)
        model, fill = adapted(context, name)
        run = Run(context, rows, model=model, fill=fill, micro_batch=1)
        ours = run.back_propagate()
        grads = run.gradients()
        found[name] = {
            "difference": reference.difference(grads, expected),
            "loss": abs(loss - ours),
            "names": sorted(grads) == sorted(expected),
            "trained": len(grads),
            "own_logits": run.probed.own_logits,
        }
    return found


def training(context: Context) -> dict[str, Any]:
    """Ten steps in fp32 and in bf16: what changes, and in which types it is held."""
    found = {}
    for precision in ("fp32", "bf16"):
        model, fill = adapted(context, "all-linear", precision, stirred=False)
        run = Run(
            context, tiny.examples(), model=model, fill=fill, precision=precision, steps=10,
            global_batch=4, weight_decay=0.1,
        )  # fmt: skip
        before, start = frozen(run), run.state()
        losses = [report.loss for report in run.steps()]
        after, end = frozen(run), run.state()
        moved = [name for name in end if not torch.equal(end[name], start[name])]
        held = [p for group in run.optimizer.param_groups for p in group["params"]]
        stored = {name: p.dtype for name, p in run.model.named_parameters()}
        found[precision] = {
            "frozen": len(before),
            "unchanged": all(torch.equal(before[name], after[name]) for name in before),
            "moved": sorted(set(moved) - before.keys()) == sorted(end.keys() - before.keys()),
            "start": digest({name: start[name].float() for name in end.keys() - before.keys()}),
            "held": len(held),
            "base": sorted({str(stored[name]) for name in before}),
            "adapters": sorted({str(end[name].dtype) for name in end.keys() - before.keys()}),
            "losses": losses,
            "ranks": len(set(context.gather(digest(end)))),
        }
    return found


def saving(context: Context) -> dict[str, Any]:
    """A checkpoint after two steps, loaded into another model, goes on as the first one does."""
    runs = []
    for number in range(2):
        model, fill = adapted(context, "embeddings", stirred=number == 0)
        runs.append(Run(context, tiny.examples(), model=model, fill=fill, steps=4, global_batch=2))
    first, second = runs
    steps = first.steps()
    next(steps), next(steps)
    folder = context.folder.parent / f"checkpoint-{context.strategy}"
    save(first, folder, state={}, identity={}, scratch=context.folder / "scratch")
    checkpoint.load(
        folder, model=second.model, optimizer=second.optimizer, world=context.world, identity={}
    )
    loaded = digest(second.state()) == digest(first.state())
    next(steps)
    next(
        train_steps(
            second.plan, second.root, second.optimizer, second.strategy, second.order,
            second.world, done=2,
        )
    )  # fmt: skip
    from torch.distributed.checkpoint import FileSystemReader

    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        "loaded": loaded,
        "goes_on": digest(second.state()) == digest(first.state()),
        "model": sorted(name for name in stored if name.startswith("model.")),
        "states": len([name for name in stored if name.endswith("exp_avg")]),
        "trained": sorted(
            f"model.{name}" for name, p in first.model.named_parameters() if p.requires_grad
        ),
    }


def exporting(context: Context) -> dict[str, Any]:
    """The merged model's logits against those of the model with adapters, and the adapter's own
    tensors, for each kind."""
    from transformers import AutoModelForCausalLM

    found = {}
    for name in LORAS:
        model, fill = adapted(context, name)
        run = Run(context, tiny.examples(), model=model, fill=fill)
        before = digest(run.state())
        source = folder_of(context, tied=name == "embeddings")
        collected = collect(run.root, run.model, source, context.world)
        same = digest(run.state()) == before
        if collected is None:
            continue
        assert collected.adapter is not None
        fresh = AutoModelForCausalLM.from_pretrained(source, **dtype_argument(torch.float32))
        base = fresh(collected.input_ids).logits.detach()
        missing = fresh.load_state_dict(collected.weights, strict=False)
        fresh.tie_weights()
        logits = fresh.eval()(collected.input_ids).logits.detach()
        found[name] = {
            "difference": float((logits - collected.logits).abs().max()),
            "effect": float((base - collected.logits).abs().max()),
            "unexpected": missing.unexpected_keys,
            "missing": missing.missing_keys,
            "adapter": digest(collected.adapter.tensors),
            "unchanged": same,
        }
    return found


CASES: dict[str, Callable[[Context], dict[str, Any]]] = {
    case.__name__: case for case in (gradients, training, saving, exporting)
}
