"""What is particular to a way of sharing the work: where tensors lie, how they travel, fp16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from dbx_llmtrain.text.prepared import Example
from dbx_llmtrain.worker.evaluate import evaluate
from dbx_llmtrain.worker.starting import seed
from tests import reference, tiny
from tests.dist import checkpoint_cases as checkpoints
from tests.dist.runs import Context, Run
from tests.dist.table_cases import table


def placement(context: Context) -> dict[str, Any]:
    """Which rank holds what."""
    run = Run(context, tiny.examples())
    weight = dict(run.model.named_parameters())["model.layers.0.mlp.up_proj.weight"]
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return {
        "nodes": context.gather(context.world.node),
        "mesh": weight.device_mesh.mesh.tolist() if isinstance(weight, DTensor) else None,
        "rows": context.gather(len(local)),
        "first": context.gather(float(local.detach()[0, 0])),
        "device": str(local.device),
    }


def filled(context: Context) -> dict[str, Any]:
    """A model without storage is wrapped and then filled: gradient, ties and buffers."""
    found = {}
    for tied in (False, True):
        source = tiny.llama(tied=tied)
        with torch.device("meta"):
            model = tiny.llama(tied=tied)
        calls: list[nn.Module] = []

        def fill(target: nn.Module, source: Any = source, calls: list[nn.Module] = calls) -> None:
            calls.append(target)
            weights = dict(source.named_parameters())
            for name, parameter in target.named_parameters():
                copy_into(parameter, weights[name])
            for name, buffer in target.named_buffers():
                buffer.copy_(source.get_buffer(name))

        run = Run(context, tiny.examples(), model=model, fill=fill)
        _, expected = reference.gradients(source, run.rows)
        run.back_propagate()
        found[str(tied)] = {
            "gradient": reference.difference(run.gradients(), expected),
            "tied": model.get_input_embeddings().weight is model.get_output_embeddings().weight,
            "calls": [target is model for target in calls],
            "parameters": len(list(model.parameters())),
            "devices": sorted({str(p.device) for p in run.root.parameters()}),
            "loss_fell": _falls(run),
        }
    return found


@torch.no_grad()
def copy_into(parameter: Any, value: Tensor) -> None:
    """Fill a parameter, or this rank's shard of it."""
    if isinstance(parameter, DTensor):
        shard = distribute_tensor(value.detach(), parameter.device_mesh, parameter.placements)
        parameter.to_local().copy_(shard.to_local())
    else:
        parameter.copy_(value)


def _falls(run: Run) -> bool:
    losses = [report.loss for report in run.steps()]
    return evaluate(run.root, run.split, run.world, micro_batch=2).loss < losses[0] - 0.05


def scaled(context: Context) -> dict[str, Any]:
    """fp16: what is stored and computed, how far the gradient is off, and an overflow on the last
    rank only."""
    rows = tiny.examples()
    _, expected = reference.gradients(tiny.llama(), rows)
    run = Run(context, rows, precision="fp16", micro_batch=1, steps=3)
    seen: set[str] = set()
    watch = run.module.decoder.layers[0].mlp.register_forward_hook(
        lambda _, __, output: seen.add(str(output.dtype))
    )
    run.back_propagate()
    watch.remove()
    scale = run.strategy.state()["loss_scale"]
    norm = run.clip()
    grads = run.gradients()
    error = {name: grads[name] - expected[name] for name in expected}
    hook = None
    if context.world.rank == context.world.size - 1:
        hook = run.module.register_forward_hook(lambda _, __, loss: loss * 1e6)
    before = run.state()
    steps = run.steps()
    first = next(steps)
    unchanged = all(torch.equal(before[n], value) for n, value in run.state().items())
    after = run.strategy.state()
    if hook is not None:
        hook.remove()
    second = next(steps)
    return {
        "blocks": sorted(seen),
        "stored": sorted({str(p.dtype) for p in run.model.parameters()}),
        "error": reference.norm(error) / reference.norm(expected),
        "norm": abs(norm / reference.norm(expected) - 1),
        "skipped": context.gather([first.skipped, second.skipped]),
        "loss_was_finite": context.gather(first.loss < 1e9),
        "unchanged": context.gather(unchanged),
        "scales": context.gather([scale, after["loss_scale"]]),
        "moved": not torch.equal(before["lm_head.weight"], run.state()["lm_head.weight"]),
        "norms": [first.grad_norm == float("inf") or first.grad_norm != first.grad_norm],
        "alive": any(p.grad is not None for p in run.model.parameters()),
    }


def frozen(context: Context) -> dict[str, Any]:
    """Only the query projections are trained; the base is fp32, or bf16 with bf16 compute."""
    found = {}
    for precision in ("fp32", "bf16"):
        model = _frozen(tiny.llama(), precision)
        base = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
        run = Run(context, tiny.examples(), model=model, precision=precision, micro_batch=1)
        _, expected = reference.gradients(_frozen(tiny.llama(), "fp32"), run.rows)
        run.back_propagate()
        grads = run.gradients()
        error = {name: grads[name] - expected[name] for name in expected}
        for _ in range(5):
            list(run.steps())
        after = run.state()
        held = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
        trained = [p for p in run.model.parameters() if p.requires_grad]
        found[precision] = {
            "gradient": reference.difference(grads, expected),
            "error": reference.norm(error) / reference.norm(expected),
            "kinds": sorted({str(grad.dtype) for grad in grads.values()}),
            "unchanged": all(torch.equal(after[name], value) for name, value in base.items()),
            "types": sorted({str(after[name].dtype) for name in base}),
            "held": held == {id(p) for p in trained},
            "trained": len(trained),
        }
    return found


def _frozen(model: Any, precision: str) -> Any:
    for name, parameter in model.named_parameters():
        if "q_proj" not in name:
            parameter.requires_grad_(False)
            if precision == "bf16":
                parameter.data = parameter.data.bfloat16()
    return model


class Experts(nn.Module):
    """Two experts of a list, as transformers before 5 has them: a token goes to the one that its
    first number chooses, and one that no token goes to is not called."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.experts = nn.ModuleList([first, second])

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        chosen = (hidden[..., 0] > 0).long()
        output = torch.zeros_like(hidden)
        for number in chosen.unique().tolist():
            at = chosen == number
            output[at] = self.experts[number](hidden[at])
        return output, None


class First(nn.Module):
    """What a block takes of its experts' output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.inner(hidden)[0]
        return output


def mixture() -> Any:
    """A Llama with two experts in each block. Token 5 goes to one of the first block's, all others
    to the other."""
    model, other = tiny.llama(), tiny.llama(seed=1)
    for layer, second in zip(model.model.layers, other.model.layers, strict=True):
        layer.mlp = First(Experts(layer.mlp, second.mlp))
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 9.0
        model.model.embed_tokens.weight[5, 0] = -9.0
    return model


def unused(context: Context) -> dict[str, Any]:
    """Of 8 rows one, none or all reach the experts that the others do not."""
    found = {}
    for special in (1, 0, 8):
        lengths = [*[6] * special, *range(4, 12 - special)]
        rows = [
            Example([5 if number < special else 7] * length, [True] * length)
            for number, length in enumerate(lengths)
        ]
        run = Run(context, rows, model=mixture(), micro_batch=1, steps=1)
        model = mixture()
        reference.mean_loss(model, rows).backward()
        expected = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in model.named_parameters()
        }
        run.back_propagate()
        found[str(special)] = {
            "gradient": reference.difference(run.gradients(), expected),
            "idle": sum("experts" in name and not bool(g.any()) for name, g in expected.items()),
            "skipped": [report.skipped for report in run.steps()],
        }
    return found


def tail(context: Context) -> dict[str, Any]:
    """Seven rows, three a step, one at a time: the last step has one row."""
    run = Run(context, tiny.examples()[:7], global_batch=3, micro_batch=1)
    found = {"steps": run.plan.total_steps, "gradients": [], "losses": []}
    for step in (1, 2, 3):
        own = [run.rows[int(row)] for row in run.order.examples(step - 1)]
        expected_loss, expected = reference.gradients(tiny.llama(), own)
        loss = run.back_propagate(step)
        found["gradients"].append(reference.difference(run.gradients(), expected))
        found["losses"].append(abs(loss - expected_loss))
    return found


def never_reduced(context: Context) -> dict[str, Any]:
    """Gradients that are kept on the rank, as if there were another micro-batch to come."""
    run = Run(context, tiny.examples(), steps=1)
    run.root.set_requires_gradient_sync(False)
    return {"message": _message(lambda: next(run.steps()))}


def travels(context: Context) -> dict[str, Any]:
    """Reductions and gathers of a step of one, and of four micro-batches a rank."""
    found = {}
    for micro_batch in (4, 1):
        rows = tiny.examples() * 2
        run = Run(context, rows, global_batch=4 * context.world.size, micro_batch=micro_batch)
        run.back_propagate()
        run.optimizer.zero_grad(set_to_none=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run.back_propagate()
        counts = {event.key: event.count for event in profile.key_averages()}
        found[str(4 // micro_batch)] = {
            what: sum(n for name, n in counts.items() if name.startswith(f"c10d::{what}"))
            for what in ("_reduce_scatter", "_allgather_base", "allreduce")
        }
    return found


def wrong_calls(context: Context) -> dict[str, Any]:
    """The forward pass of the root without its hooks, and of a module within it."""
    run = Run(context, tiny.examples())
    inputs = run.order.step(0).batches[0].inputs()
    ids = inputs["input_ids"]
    return {
        "forward": _message(lambda: run.root.forward(**inputs)),
        "inner": _message(lambda: run.model(input_ids=ids)),
    }


def _message(action: Callable[[], Any]) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return ""


def accumulated(context: Context) -> dict[str, Any]:
    """32 micro-batches of a rank in bf16: the sum against that of the same gradients in fp64."""
    rows = tiny.examples(tuple(range(5, 21)) * (2 * context.world.size), seed=2)
    run = Run(context, rows, precision="bf16", global_batch=len(rows), micro_batch=1)
    work = run.order.step(0)
    assert len(work.batches) == 32
    scale = context.world.size / work.trained_total
    total: dict[str, Tensor] = {}
    for batch in work.batches:
        with run.strategy.accumulate(run.root, last=True):
            run.strategy.backward(run.root, run.root(**batch.inputs()) * scale)
        for name, grad in run.gradients().items():
            total[name] = total.get(name, torch.zeros((), dtype=torch.float64)) + grad.double()
    run.back_propagate()
    grads = run.gradients()
    _, exact = reference.gradients(tiny.llama(), rows)
    lost = {name: grads[name].double() - total[name] for name in total}
    error = {name: grads[name] - exact[name] for name in total}
    return {
        "lost": reference.norm(lost) / reference.norm(total),
        "error": reference.norm(error) / reference.norm(exact),
    }


def repeated(context: Context) -> dict[str, Any]:
    """Twice the same run with dropout, and what the ranks drop out of one row."""
    states, losses = [], []
    for _ in range(2):
        run = Run(context, [tiny.examples()[1]] * 4, model=tiny.llama(attention_dropout=0.5))
        start = run.state()
        seed(0, context.world.rank, 0)
        batch = run.order.step(0).batches[0]
        own = run.root(**batch.inputs())
        losses.append(context.gather(float(own.detach()) / max(1, batch.trained)))
        (own * 0).backward()
        run.optimizer.zero_grad(set_to_none=True)
        list(run.steps())
        states.append(run.state())
    return {
        "bitwise": all(torch.equal(states[0][n], value) for n, value in states[1].items()),
        "losses": losses,
        "starts": len(set(context.gather(sum(float(t.double().sum()) for t in start.values())))),
    }


def kept(context: Context) -> dict[str, Any]:
    """A checkpoint after two steps, read by a run with other weights; two steps more of each."""
    run = checkpoints.make(context, context.strategy)
    checkpoints.advance(run, 0, 2)
    folder = checkpoints.shared(context) / f"kept-{context.strategy}"
    checkpoints.save(run, folder)
    stored = checkpoints.everything(run)
    rest = checkpoints.advance(run, 2, 4)
    again = checkpoints.make(context, context.strategy, seed=5)
    checkpoints.load(again, folder)
    at_load = checkpoints.equal(checkpoints.everything(again), stored)
    return {
        "at_load": context.gather(at_load),
        "rest": checkpoints.advance(again, 2, 4) == rest,
        "end": checkpoints.equal(checkpoints.everything(again), checkpoints.everything(run)),
        "tensors": len(stored),
        "shape": list(stored["model.lm_head.weight"].shape),
    }


def upstream(context: Context) -> dict[str, Any]:
    """PyTorch's own factor on reduced gradients, alone and with forced sums."""
    from torch.distributed.fsdp import fully_shard

    found = {}
    for forced in (False, True):
        torch.manual_seed(0)
        layer = fully_shard(nn.Linear(4, 4, bias=False))
        layer.set_gradient_divide_factor(1.0)
        if forced:
            layer.set_force_sum_reduction_for_comms(True)
        loss = layer(torch.ones(1, 4)).sum()
        message = _message(loss.backward)
        whole = "" if message else layer.weight.grad.full_tensor()
        found[str(forced)] = message or float((whole - dist.get_world_size()).abs().max())
    return found


OF_ALL = (table, tail, frozen, unused, filled, scaled, accumulated, repeated)
"""For every strategy."""

OF_FSDP = (placement, never_reduced, travels, wrong_calls, upstream, kept)
"""For FSDP, whatever it shards."""
