"""What ranks do with DeepSpeed alone: rows of section I, and how its state is kept and moved."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dbx_llmtrain import storage
from dbx_llmtrain.model_sections import OptimConfig
from dbx_llmtrain.worker import checkpoint, export
from dbx_llmtrain.worker.evaluate import evaluate
from dbx_llmtrain.worker.generation import check_generation_config
from dbx_llmtrain.worker.parallel import make_strategy
from dbx_llmtrain.worker.parallel.deepspeed import load_deepspeed
from dbx_llmtrain.worker.parallel.zero_pieces import ZeroPieces
from dbx_llmtrain.worker.whole import pieces, shape_of, stored_states
from tests import reference, tiny
from tests.dist import runs
from tests.dist.runs import OPTIONS, Context, Run

# DeepSpeed collects garbage at every start; what is imported by now is none.
load_deepspeed("cpu", "error")
gc.freeze()

STANDING = 1e-30
"""A learning rate at which the weights stay what they are."""
IDENTITY = {"seed": 1}


def shared(context: Context) -> Path:
    """The folder that all ranks, all strategies and the test itself see."""
    return context.folder.parent


def engine(run: Run) -> Any:
    """DeepSpeed's engine of a run."""
    return run.root


@contextmanager
def optimizer_sees(run: Run) -> Iterator[list[float]]:
    """The norm of all ranks' gradients each time that the torch optimizer steps."""
    base, norms = run.optimizer, []
    original = base.step

    def step(*arguments: Any, **options: Any) -> Any:
        own = [p.grad for group in base.param_groups for p in group["params"]]
        norms.append(float(sum((g.double() ** 2).sum() for g in own)))
        return original(*arguments, **options)

    base.step = step
    try:
        yield norms
    finally:
        del base.step


def parity(context: Context) -> dict[str, Any]:
    """Gradient, loss and norm of 8 rows against the textbook, by model and micro-batch."""
    rows, size = tiny.examples(), context.world.size
    models = {"untied": tiny.llama, "tied": lambda: tiny.llama(tied=True)}
    found = {}
    for name, build in models.items():
        loss, expected = reference.gradients(build(), rows)
        for micro_batch in (8 // size, 1):
            run = Run(context, rows, model=build(), micro_batch=micro_batch)
            ours = run.back_propagate()
            missing = run.strategy.missing_gradients(run.root)
            norm = run.clip()
            found[f"{name}, {8 // size // micro_batch} micro-batches"] = {
                "loss": abs(ours - loss),
                "norm": abs(norm - reference.norm(expected)),
                "gradient": reference.difference(run.gradients(), expected),
                "ranks": len(set(context.gather(norm))),
                "missing": missing,
                "parameters": len(list(run.model.parameters())),
                "heads": run.model.get_output_embeddings().weight
                is run.model.get_input_embeddings().weight,
            }
    return found


def unscaled(context: Context) -> dict[str, Any]:
    """103: the norm with as many micro-batches as rows, and with the engine's own scaling."""
    rows = tiny.examples()
    _, expected = reference.gradients(tiny.llama(), rows)
    run = Run(context, rows, micro_batch=1)
    run.back_propagate()
    return {
        "micro_batches": len(run.order.step(0).batches),
        "told": engine(run).gradient_accumulation_steps(),
        "norm": run.clip() / reference.norm(expected),
        "engine_norm": _engine_norm(context, rows) / reference.norm(expected),
    }


def _engine_norm(context: Context, rows: list[Any]) -> float:
    """What the engine makes of the same losses when it is told of 4 micro-batches and asked to
    scale: the trap that is avoided."""
    run = Run(context, rows, micro_batch=1)
    root = engine(run)
    root._config.gradient_accumulation_steps = 4
    work = run.order.step(0)
    for number, batch in enumerate(work.batches, start=1):
        root.set_gradient_accumulation_boundary(number == len(work.batches))
        loss = root(**batch.inputs()) * (run.world.size / work.trained_total)
        root.backward(loss)
    return run.clip()


def tail(context: Context) -> dict[str, Any]:
    """104: 8 rows, 6 a step, one at a time: the second step has fewer micro-batches."""
    rows = tiny.examples()
    run = Run(context, rows, global_batch=6, micro_batch=1, steps=2, learning_rate=STANDING)
    reports = list(run.steps())
    # Rows and their gradients are proven for DDP (test_parity).
    other = Run(
        replace(context, strategy="ddp"), rows, global_batch=6, micro_batch=1, steps=2,
        learning_rate=STANDING,
    )  # fmt: skip
    expected = list(other.steps())
    return {
        "steps": len(reports),
        "engine_steps": context.gather(engine(run).global_steps),
        "micro_batches": [len(run.order.step(step).batches) for step in range(2)],
        "rows": [report.rows for report in reports],
        "norms": [
            abs(ours.grad_norm - theirs.grad_norm)
            for ours, theirs in zip(reports, expected, strict=True)
        ],
    }


def first_update(context: Context) -> dict[str, Any]:
    """105: AdamW's first update in bf16, as a share of the learning rate."""
    run = Run(context, tiny.examples(), precision="bf16", max_grad_norm=0)
    before = run.state()
    report = next(iter(run.steps()))
    moved = torch.cat([(run.state()[n] - t).abs().flatten() for n, t in before.items()])
    return {
        "share": float(moved[moved > 0].mean()) / report.learning_rate,
        "kept": sorted({str(t.dtype) for t in before.values()}),
        "held": sorted({str(p.dtype) for p in run.model.parameters()}),
        "start": reference.difference(
            before, {n: p.detach() for n, p in tiny.llama().named_parameters()}
        ),
        "buffers": sorted({str(b.dtype) for b in run.model.buffers() if b.is_floating_point()}),
    }


def summed(context: Context) -> dict[str, Any]:
    """106: bf16 gradients of 32 micro-batches a rank against fp32."""
    lengths = [3 + 5 * (i % 9) for i in range(32 * context.world.size)]
    rows = tiny.examples(lengths)
    _, expected = reference.gradients(tiny.llama(), rows)
    run = Run(context, rows, global_batch=len(rows), micro_batch=1, precision="bf16")
    run.back_propagate()
    found = run.gradients()
    error = {name: found[name] - expected[name] for name in expected}
    return {
        "micro_batches": len(run.order.step(0).batches),
        "error": reference.norm(error) / reference.norm(expected),
        "types": [str(kind) for kind in engine(run).get_data_types()],
        "reduced": str(engine(run).communication_data_type),
    }


def clipping(context: Context) -> dict[str, Any]:
    """107: the norm that is reported, and that of what the optimizer steps with."""
    _, expected = reference.gradients(tiny.llama(), tiny.examples())
    found = {}
    for limit in (0.01, 100.0, 0.0):
        run = Run(context, tiny.examples(), max_grad_norm=limit)
        with optimizer_sees(run) as squares:
            report = next(iter(run.steps()))
        after = sum(sum(part) for part in context.gather(squares)) ** 0.5
        found[str(limit)] = {
            "reported": abs(report.grad_norm - reference.norm(expected)),
            "after": after,
            "expected": reference.norm(expected),
            "engine": float(engine(run).get_global_grad_norm()),
        }
    return found


def never_quiet(context: Context) -> dict[str, Any]:
    """108: a step where ``no_sync`` would raise, and what it does in stages 2 and 3."""
    run = Run(context, tiny.examples(), micro_batch=1)
    refused = ""
    try:
        with engine(run).no_sync():
            pass
    except AssertionError as error:
        refused = str(error)
    engine(run).no_sync = None
    return {"refused": refused, "loss": next(iter(run.steps())).loss}


def offloaded(context: Context) -> dict[str, Any]:
    """109: the optimizer on the CPU with torch's AdamW, against the same run without."""
    found: dict[str, Any] = {}
    states = {}
    for name, changes in _offloads(context).items():
        run = Run(
            context, tiny.examples(), global_batch=4, micro_batch=1, parallel=changes, steps=3
        )
        reports = list(run.steps())
        states[name] = run.state()
        found[name] = {"losses": [r.loss for r in reports], "norms": [r.grad_norm for r in reports]}
    return {
        "runs": found,
        "apart": max(reference.difference(states["none"], s) for s in states.values()),
    }


def _offloads(context: Context) -> dict[str, Any]:
    own = copy.deepcopy(dict(context.parallel.config or {}))
    config = own | {"zero_force_ds_cpu_optimizer": False}
    changes: dict[str, Any] = {"none": {}, "optimizer": {"offload_optimizer": "cpu"}}
    if context.parallel.stage == 3:
        changes["params"] = {"offload_params": "cpu"}
        changes["both"] = {"offload_optimizer": "cpu", "offload_params": "cpu"}
    return {
        name: context.parallel.model_copy(update={"config": config} | change)
        for name, change in changes.items()
    }


def poisoned(context: Context) -> dict[str, Any]:
    """110: the last rank's loss is not a number in the second of three steps."""
    found = {}
    for precision in ("fp32", "bf16"):
        run = Run(context, tiny.examples(), global_batch=8, steps=3, precision=precision)
        steps = run.steps()
        first = next(steps)
        before, state = run.state(), _optimizer_state(run)
        hook = None
        if context.world.rank == context.world.size - 1:
            hook = run.module.register_forward_hook(lambda _, __, loss: loss * float("nan"))
        second = next(steps)
        unchanged = _equal(before, run.state()) and _equal(state, _optimizer_state(run))
        if hook is not None:
            hook.remove()
        third = next(steps)
        again = Run(context, tiny.examples(), global_batch=8, steps=3, precision=precision)
        others = again.steps()
        next(others)
        found[precision] = {
            "skipped": context.gather([bool(r.skipped) for r in (first, second, third)]),
            "unchanged": context.gather(unchanged),
            # Nothing of the poisoned gradient is left: the third step is a second one, with the
            # same rows in another order.
            "norms": abs(next(others).grad_norm - third.grad_norm) / third.grad_norm,
            "after": reference.difference(run.state(), again.state()),
        }
    return found


def uneven(context: Context) -> dict[str, Any]:
    """110: five rows, and one row, one at a time: forward passes of each rank; evaluation too."""
    found = {}
    for count in (5, 1):
        rows = tiny.examples()[:count]
        run = Run(context, rows, micro_batch=1)
        forwards: list[int] = []
        run.module.register_forward_hook(lambda *_, seen=forwards: seen.append(1))
        _, expected = reference.gradients(tiny.llama(), rows)
        run.back_propagate()
        gradient = reference.difference(run.gradients(), expected)
        trained = len(forwards)
        report = evaluate(run.root, run.split, context.world, micro_batch=2)
        exact = float(reference.mean_loss(tiny.llama(), rows).detach())
        found[str(count)] = {
            "forwards": context.gather([trained, len(forwards)]),
            "gradient": gradient,
            "evaluated": abs(report.loss - exact),
        }
    return found


def _optimizer_state(run: Run) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": runs.joined(value).clone()
        for name, parameter in run.model.named_parameters()
        for key, value in stored_states(run.optimizer, parameter)
    }


def _equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def make(
    context: Context, strategy: str = "", *, seed: int = 0, dropout: float = 0.0, **changes: Any
) -> Run:
    """A run of six steps with two groups of parameters."""
    settings: dict[str, Any] = {"weight_decay": 0.1, "schedule": "cosine", "warmup": 2}
    return Run(
        replace(context, strategy=strategy or context.strategy),
        tiny.examples(),
        model=tiny.llama(attention_dropout=dropout, seed=seed),
        global_batch=4,
        micro_batch=1,
        steps=6,
        **(settings | changes),
    )


def advance(run: Run, done: int, until: int) -> list[float]:
    """The losses of the steps after ``done`` up to ``until``."""
    from dbx_llmtrain.worker.loop import train_steps

    losses = []
    for report in train_steps(
        run.plan, run.root, run.optimizer, run.strategy, run.order, run.world, done=done
    ):
        losses.append(report.loss)
        if report.step == until:
            break
    return losses


def save(run: Run, folder: Path) -> Path:
    return runs.save(run, folder, state={"step": 3}, identity=IDENTITY)


def load(run: Run, folder: Path) -> dict[str, Any]:
    return checkpoint.load(
        folder, model=run.model, optimizer=run.optimizer, world=run.world, identity=IDENTITY
    )


def resumed(context: Context) -> dict[str, Any]:
    """Six steps at once against three, a checkpoint, and three by other objects; bf16 too."""
    found = {}
    for precision in ("fp32", "bf16"):
        folder = shared(context) / f"{context.strategy}-{context.world.size}-{precision}"
        torch.manual_seed(100 + context.world.rank)
        run = make(context, precision=precision, dropout=0.1)
        advance(run, 0, 3)
        save(run, folder)
        stored, state = run.state(), _optimizer_state(run)
        rest = advance(run, 3, 6)
        again = make(context, precision=precision, seed=5, dropout=0.1)
        load(again, folder)
        found[precision] = {
            "at_load": context.gather(
                _equal(again.state(), stored) and _equal(_optimizer_state(again), state)
            ),
            "states": sorted({name.rpartition(".")[2] for name in state}),
            "rest": context.gather(advance(again, 3, 6) == rest),
            "end": context.gather(_equal(again.state(), run.state())),
        }
        if context.world.rank == 0:
            torch.save(stored | state, folder.with_suffix(".pt"))
    return found


def moved(context: Context) -> dict[str, Any]:
    """Checkpoints of other strategies, and what lies there of other numbers of ranks."""
    found = {}
    others = {
        "fsdp": shared(context) / f"{context.strategy}-fsdp",
        "ddp": shared(context) / f"{context.strategy}-ddp",
    }
    for kind, folder in others.items():
        other = make(context, kind)
        advance(other, 0, 3)
        save(other, folder)
        kept = other.state()
        run = make(context, seed=7)
        load(run, folder)
        there = make(context, kind, seed=8)
        back = shared(context) / f"{context.strategy}-to-{kind}"
        save(run, back)
        load(there, back)
        found[kind] = {
            "read": context.gather(_equal(run.state(), kept)),
            "given": context.gather(_equal(there.state(), kept)),
            "apart": max(
                abs(a - b) for a, b in zip(advance(run, 3, 6), advance(there, 3, 6), strict=True)
            ),
        }
    for folder in sorted(shared(context).glob("zero*-[0-9]-*32")):
        if folder.is_dir():
            stored = torch.load(folder.with_suffix(".pt"), weights_only=True)
            run = make(context, seed=9)
            load(run, folder)
            equal = _equal(run.state() | _optimizer_state(run), stored)
            losses = advance(run, 3, 6)
            found[folder.name] = {"read": context.gather(equal), "losses": losses}
    return found


def exported(context: Context) -> dict[str, Any]:
    """101: a model that was trained a step, as a Hugging Face folder."""
    source = shared(context) / f"source-{context.strategy}"
    if context.world.rank == 0:
        tiny.model_folder(source)
    context.gather(None)
    from dbx_llmtrain.worker.model import load_model

    model = load_model(source, attention="sdpa")
    run = Run(context, tiny.examples(), model=model)
    list(run.steps())
    collected = export.collect(run.root, run.model, source, context.world)
    if collected is None:
        return {}
    target = export.write_export(
        shared(context) / f"export-{context.strategy}",
        collected=collected,
        place=export.Place(source, shared(context) / "scratch"),
        generation=check_generation_config(source, ()),
    )
    from safetensors.torch import load_file

    again = load_model(target, attention="sdpa")
    with torch.no_grad():
        logits = again.eval()(input_ids=collected.input_ids).logits
    return {
        "bytes": (target / "model.safetensors").stat().st_size,
        "keys": sorted(load_file(target / "model.safetensors"))
        == sorted(load_file(source / "model.safetensors")),
        "logits": float((logits - collected.logits).abs().max()),
        "moved": reference.difference(
            {n: p.detach() for n, p in again.named_parameters()},
            {n: p.detach() for n, p in load_model(source, attention="sdpa").named_parameters()},
        ),
        "complete": storage.read_manifest(target) is not None,
    }


def without_storage(context: Context) -> dict[str, Any]:
    """A tied model on ``meta``: what each rank makes room for, and what it holds in the end."""
    ready = tiny.llama(tied=True)
    values = dict(ready.named_parameters())
    with torch.device("meta"):
        empty = tiny.llama(tied=True)
    held: dict[str, int] = {}

    def fill(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            part = getattr(parameter, "ds_tensor", None)
            target = parameter.data if part is None else part
            held[name] = target.numel()
            flat = values[name].detach().flatten()
            start = 0 if part is None else part.numel() * context.world.rank
            own = flat[start : start + target.numel()]
            target.view(-1)[: own.numel()].copy_(own)
        for (_, buffer), (_, value) in zip(
            model.named_buffers(), ready.named_buffers(), strict=True
        ):
            buffer.copy_(value)

    run = Run(context, tiny.examples(), model=empty, fill=fill)
    loss, expected = reference.gradients(ready, tiny.examples())
    return {
        "loss": abs(run.back_propagate() - loss),
        "gradient": reference.difference(run.gradients(), expected),
        "tied": run.model.get_output_embeddings().weight is run.model.get_input_embeddings().weight,
        "share": sum(held.values()) / sum(v.numel() for v in values.values()),
        "shapes": all(
            tuple(shape_of(p)) == tuple(values[n].shape) for n, p in run.model.named_parameters()
        ),
        "held": all(isinstance(pieces(p), ZeroPieces) for p in run.model.parameters()),
    }


def rates(context: Context) -> dict[str, Any]:
    """The loop's learning rates reach the engine's optimizer; decay is on matrices alone."""
    run = make(context)
    seen: list[list[float]] = []
    original = run.optimizer.step

    def step(*arguments: Any, **options: Any) -> Any:
        seen.append(sorted({group["lr"] for group in run.optimizer.param_groups}))
        return original(*arguments, **options)

    run.optimizer.step = step
    told = [report.learning_rate for report in run.steps()]
    groups = engine(run).optimizer.param_groups
    return {
        "told": told,
        "seen": sorted({rate for step in seen for rate in step}),
        "decays": [group["weight_decay"] for group in groups],
    }


def misuse(context: Context) -> dict[str, str]:
    """What is refused by the strategy itself."""
    run = Run(context, tiny.examples())
    found = {}
    actions = {
        "train": lambda: run.strategy.build_optimizer(run.model, OptimConfig(learning_rate=0.5)),
        "fp16": lambda: make_strategy(
            "deepspeed", context.world, "fp16", parallel=OPTIONS["zero2"]
        ),
    }
    for name, action in actions.items():
        try:
            action()
        except ValueError as error:
            found[name] = str(error)
    return found


CASES = {
    case.__name__: case
    for case in (
        parity, unscaled, tail, first_update, summed, clipping, never_quiet, offloaded, poisoned,
        uneven, resumed, moved, exported, without_storage, rates, misuse,
    )
}  # fmt: skip
