"""What the ranks of a launch do. Every rank runs every case; rank 0's results are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dbx_llmtrain.text.prepared import Example
from dbx_llmtrain.worker.data import shares, step_examples
from dbx_llmtrain.worker.evaluate import evaluate
from dbx_llmtrain.worker.loop import Window
from dbx_llmtrain.worker.loss import inference
from tests import reference, tiny
from tests.dist.masked_cases import masked
from tests.dist.runs import Context, Run, whole
from tests.dist.strategy_cases import OF_ALL


def reductions(context: Context) -> dict[str, Any]:
    """How often gradients travel in a step of one and of four micro-batches a rank."""
    found = {}
    for micro_batch in (4, 1):
        run = Run(
            context, tiny.examples(), global_batch=4 * context.world.size, micro_batch=micro_batch
        )
        run.back_propagate()  # DDP settles its buckets in the first pass.
        run.optimizer.zero_grad(set_to_none=True)
        found[str(micro_batch)] = _count_reductions(run)
    return found


def _count_reductions(run: Run) -> int:
    """Gradient buckets that DDP, or parameter groups that FSDP reduces in one step."""
    calls: list[int] = []
    if isinstance(run.root, nn.parallel.DistributedDataParallel):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        # (A lambda: DDP compares annotations with types, and ours are strings.)
        run.root.register_comm_hook(
            None, lambda _, bucket: (calls.append(1), allreduce_hook(None, bucket))[1]
        )
        run.back_propagate()
        return len(calls)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run.back_propagate()
    counts = {event.key: event.count for event in profile.key_averages()}
    return sum(count for name, count in counts.items() if name.startswith("c10d::_reduce_scatter"))


def uneven(context: Context) -> dict[str, Any]:
    """Five rows, one at a time: who runs what."""
    found = {}
    for count in (5, 1):
        run = Run(context, tiny.examples()[:count], micro_batch=1)
        _, expected = reference.gradients(tiny.llama(), run.rows)
        forwards = []
        run.module.register_forward_hook(lambda *_, seen=forwards: seen.append(1))
        run.back_propagate()
        rows = [batch.rows for batch in run.order.step(0).batches]
        found[str(count)] = {
            "gradient": reference.difference(run.gradients(), expected),
            "forwards": context.gather(len(forwards)),
            "rows": context.gather(sum(rows)),
        }
    return found


def silent_rank(context: Context) -> dict[str, Any]:
    """The last rank has rows, but none of its tokens is trained."""
    rows = tiny.examples()
    last = shares(step_examples(0, 0, 0, 8, 8), context.world.size)[-1]
    for row in last[:-1] if context.world.size == 1 else last:
        rows[row] = Example(rows[row].input_ids, [False] * len(rows[row].trained))
    run = Run(context, rows)
    expected_loss, expected = reference.gradients(tiny.llama(), rows)
    loss = run.back_propagate()
    return {
        "trained": context.gather(sum(batch.trained for batch in run.order.step(0).batches)),
        "loss": abs(loss - expected_loss),
        "gradient": reference.difference(run.gradients(), expected),
    }


def silent_step(context: Context) -> dict[str, Any]:
    """Nothing is trained on any rank; then come rows that are."""
    silent = [Example([5, 6, 7], [False] * 3) for i in range(3)]
    run = Run(context, silent, steps=2)
    before = run.state()
    reports = list(run.steps())
    return {
        "skipped": context.gather([report.skipped for report in reports]),
        "losses": [report.loss for report in reports],
        "unchanged": all(torch.equal(before[n], value) for n, value in run.state().items()),
    }


def poisoned(context: Context) -> dict[str, Any]:
    """The last rank's loss is not a number in the first step."""
    run = Run(context, tiny.examples(), steps=2)
    hook = None
    if context.world.rank == context.world.size - 1:
        hook = run.module.register_forward_hook(lambda _, __, loss: loss * float("nan"))
    before = run.state()
    steps = run.steps()
    first = next(steps)
    unchanged = all(torch.equal(before[n], value) for n, value in run.state().items())
    if hook is not None:
        hook.remove()
    second = next(steps)
    moved = not torch.equal(before["lm_head.weight"], run.state()["lm_head.weight"])
    return {
        "skipped": context.gather([first.skipped, second.skipped]),
        "unchanged": context.gather(unchanged),
        "moved": moved,
        "alive": any(p.grad is not None for p in run.model.parameters()),
    }


def evaluation(context: Context) -> dict[str, Any]:
    """The exact held-out loss of 7 rows, for several batch sizes, packed and not."""
    rows = tiny.examples((3, 40, 5, 30, 4, 25, 6), seed=1)
    expected = float(reference.mean_loss(tiny.llama(), rows).detach())
    found = {}
    for packing in (False, True):
        run = Run(context, rows, packing=packing)
        forwards = []
        run.module.register_forward_hook(lambda *_, seen=forwards: seen.append(1))
        for micro_batch in (1, 2, 4):
            forwards.clear()
            report = evaluate(run.root, run.split, context.world, micro_batch=micro_batch)
            found[f"{micro_batch}-{packing}"] = {
                "loss": abs(report.loss - expected),
                "rows": report.rows,
                "ranks": len({str(item) for item in context.gather([report.loss])}),
                "forwards": len(set(context.gather(len(forwards)))),
            }
    return found


def training(context: Context) -> dict[str, Any]:
    """Ten steps; the optimizer holds the model's own parameters; evaluation between two steps
    changes nothing."""
    rows = tiny.examples()
    losses, states = [], []
    for evaluated in (False, True):
        run = Run(context, rows, global_batch=4, steps=6)
        window = Window()
        for report in run.steps():
            window.add(report)
            if evaluated:
                evaluate(run.root, run.split, context.world, micro_batch=2)
        losses.append(report.loss)
        states.append(run.state())
    held = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    first = float(reference.mean_loss(tiny.llama(), rows).detach())
    after = evaluate(run.root, run.split, context.world, micro_batch=2).loss
    return {
        "before": first,
        "after": after,
        "same": held == {id(p) for p in run.model.parameters()},
        "bitwise": all(torch.equal(states[0][n], value) for n, value in states[1].items()),
        "equal_on_ranks": len(set(context.gather(float(states[1]["lm_head.weight"].sum())))),
        "tokens": window.tokens,
    }


def logged_loss(context: Context) -> dict[str, Any]:
    """The loss of an epoch at fixed weights is the token mean over its rows."""
    rows = tiny.examples()
    expected = float(reference.mean_loss(tiny.llama(), rows).detach())
    run = Run(context, rows, global_batch=3, micro_batch=1, learning_rate=1e-30)
    window = Window()
    for report in run.steps():
        window.add(report)
    return {
        "loss": abs(window.loss - expected),
        "ranks": len(set(context.gather(window.loss))),
        "trained": window.trained,
    }


def rates(context: Context) -> dict[str, Any]:
    """Learning rates of two epochs, by micro-batch size."""
    found = {}
    for micro_batch in (1, 2):
        run = Run(
            context,
            tiny.examples(),
            global_batch=4,
            micro_batch=micro_batch,
            steps=4,
            schedule="cosine",
            warmup=1,
        )
        found[str(micro_batch)] = [report.learning_rate for report in run.steps()]
    return found


def clipping(context: Context) -> dict[str, Any]:
    """The norm before the clip, and the whole gradient's norm after it."""
    run = Run(context, tiny.examples())
    run.back_propagate()
    before = run.clip(0.01)
    return {"before": before, "after": reference.norm(run.gradients())}


def precision(context: Context) -> dict[str, Any]:
    """bf16: what is stored, what is computed, and how far the gradient is off."""
    rows = tiny.examples()
    _, expected = reference.gradients(tiny.llama(), rows)
    run = Run(context, rows, precision="bf16", micro_batch=1)
    seen: set[str] = set()
    run.module.decoder.layers[0].mlp.register_forward_hook(
        lambda _, __, output: seen.add(str(output.dtype))
    )
    inputs = run.order.step(0).batches[0].inputs()
    with inference(run.root):
        logits = run.root(**inputs, logits=True)
        loss = run.root(**inputs)
    run.back_propagate()
    stored = {str(p.dtype) for p in run.model.parameters()}
    reduced = {str(p.grad.dtype) for p in run.model.parameters()}
    grads = run.gradients()
    error = {name: grads[name] - expected[name] for name in expected}
    return {
        "blocks": sorted(seen),
        "logits": str(logits.dtype),
        "loss": str(loss.dtype),
        "stored": sorted(stored),
        "gradients": sorted(reduced),
        "buffers": sorted({str(b.dtype) for b in run.model.buffers() if b.is_floating_point()}),
        "error": reference.norm(error) / reference.norm(expected),
    }


def tying(context: Context) -> dict[str, Any]:
    """Tied embeddings stay one parameter after wrapping."""
    run = Run(context, tiny.examples(), model=tiny.llama(tied=True))
    list(run.steps())
    head, embedding = run.model.get_output_embeddings(), run.model.get_input_embeddings()
    return {
        "tied": head.weight is embedding.weight,
        "parameters": len(list(run.model.parameters())),
        "names": [name for name, _ in run.model.named_parameters()][:1],
        "shape": list(whole(head.weight).shape),
    }


def world(context: Context) -> dict[str, Any]:
    """The ranks' places, the backend, and objects across it."""
    here = context.world
    run = Run(context, tiny.examples())
    forced = [
        group.force_sum_reduction_for_comms
        for part in run.module.modules()
        if hasattr(part, "_get_fsdp_state")
        for group in part._get_fsdp_state()._fsdp_param_groups
    ]
    return {
        "name": run.strategy.name,
        "ranks": context.gather([here.rank, here.size, here.local_rank, here.ranks_on_host]),
        "nodes": len(set(context.gather((here.node, here.host)))),
        "backend": dist.get_backend(),
        "device": here.device,
        "forced_sums": forced,
    }


CASES: dict[str, Callable[[Context], dict[str, Any]]] = {
    case.__name__: case
    for case in (
        world,
        *OF_ALL,
        masked,
        reductions,
        uneven,
        silent_rank,
        silent_step,
        poisoned,
        evaluation,
        training,
        logged_loss,
        rates,
        clipping,
        precision,
        tying,
    )
}
