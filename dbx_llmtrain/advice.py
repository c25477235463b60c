"""What would fit where nothing does, with numbers from the same arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dbx_llmtrain.choosing import Case, Choice, choose, offloads, order_of, with_nodes
from dbx_llmtrain.display import size
from dbx_llmtrain.errors import Problem
from dbx_llmtrain.forecasts import StrategyRow, strategy_name
from dbx_llmtrain.model_sections import LoraConfig, ParallelConfig

_MOST_NODES = 1024
_SHORTEST = 256
_IN_FOUR_BITS = "model.load_in_4bit=true"


def what_would_fit(case: Case) -> list[str]:
    """Every single change that makes it fit, each with the line to write; may be empty."""
    makers: tuple[Callable[[Case], str], ...] = (
        _any_strategy, _smaller_batch, _checkpointing, _nodes, _lora, _four_bits, _shorter,
        _float16,
    )  # fmt: skip
    return [found for make in makers if (found := make(case))]


def nearest(case: Case, choice: Choice) -> StrategyRow | None:
    """Of strategies that do not fit, the one that lacks least; what was asked for comes first."""
    if choice.chosen:
        return choice.chosen
    names = [strategy_name(each) for each in order_of(case)]
    rows = [row for row in choice.rows if row.name in names and row.spare is not None]
    return max(rows, key=lambda row: row.spare or 0, default=None)


def _with(case: Case, section: str, **fields: Any) -> Case:
    """The same with other settings, whose sections are valid by themselves."""
    changed = getattr(case.cfg, section).model_copy(update=fields)
    return replace(case, cfg=case.cfg.model_copy(update={section: changed}))


def refused(parallel: ParallelConfig, why: str) -> Problem:
    """A strategy that this cluster cannot run, with the line to change."""
    path, advice = "parallel.kind", "use ddp, fsdp or auto"
    if parallel.kind == "fsdp" and parallel.shard == "hybrid":
        path, advice = "parallel.shard", "set parallel.shard=full, or even out the hosts"
    return Problem(path, f"{strategy_name(parallel)} cannot run here: {why}: {advice}")


def nothing_fits(case: Case, choice: Choice) -> Problem:
    """That no strategy fits, or not the one that was asked for, with what would."""
    advice = what_would_fit(case) or ["a smaller model, or machines with more memory"]
    row = nearest(case, choice)
    found = refusals(choice)
    if row is not None:
        lacks = f"{row.name} does not fit" if choice.chosen else f"{row.name} comes nearest"
        found = f"{lacks} ({row.why.removeprefix('no: ')})"
        if "disk" in row.why:
            advice.insert(0, "cluster.local_dir on a bigger disk")
    head = "" if choice.chosen else "no strategy fits: "
    return Problem(
        "parallel.kind",
        f"{head}{case.shape.parameters:,} parameters on {case.place.ranks} rank(s): {found}. "
        f"What would: {'; '.join(advice)}",
    )


def refusals(choice: Choice) -> str:
    """Every strategy with what it lacks."""
    return "; ".join(f"{row.name}: {row.why.removeprefix('no: ')}" for row in choice.rows)


def without_offloading(case: Case, row: StrategyRow) -> str:
    """With how many nodes nothing has to be offloaded, where ``row`` does; else empty."""
    if not offloads(row.parallel) or case.cfg.parallel.kind != "auto":
        return ""
    return _nodes(case, resident=True)


def _told(case: Case, line: str, *, conditional: bool = False) -> str:
    """The line, and what fits with it for certain; empty where nothing does. ``conditional``: also
    what fits where nodes have enough memory, if nobody knows how much they have."""
    row = choose(case).chosen
    if row is None or row.estimate is None or not (row.fits or (conditional and row.fits is None)):
        return ""
    need = row.estimate.total if case.place.device == "cuda" else row.estimate.host
    what = "a GPU" if case.place.device == "cuda" else "a node"
    host = ""
    if row.fits is None:
        host = f", if each node has {size(row.estimate.host)} of free memory"
    return f"{line} ({row.name} takes {size(need)} of {what}{host})"


def _auto(case: Case) -> Case:
    return replace(case, cfg=case.cfg.model_copy(update={"parallel": ParallelConfig()}))


def _any_strategy(case: Case) -> str:
    if case.cfg.parallel.kind == "auto":
        return ""
    return _told(_auto(case), "parallel.kind=auto", conditional=True)


def _smaller_batch(case: Case) -> str:
    if case.micro.free or case.micro.most == 1 or case.cfg.train.micro_batch_size == "auto":
        return ""
    return _told(_with(case, "train", micro_batch_size=1), "train.micro_batch_size=1")


def _checkpointing(case: Case) -> str:
    if 1 in case.checkpointing:
        return ""
    again = _with(case, "model", gradient_checkpointing="full")
    return _told(again, "model.gradient_checkpointing=full")


def _nodes(case: Case, *, resident: bool = False) -> str:
    """The least number of such nodes, by doubling and halving; ``resident``: on which nothing is
    offloaded, which is what more nodes are bought for. (Where nobody knows the nodes' memory,
    offloading never fits for certain.)"""
    if case.cfg.parallel.kind == "single":
        return ""
    here = len(case.place.per_node)

    def fits(nodes: int) -> bool:
        row = choose(with_nodes(case, nodes)).chosen
        fit = row is not None and row.fits is True
        return fit and not (resident and row is not None and offloads(row.parallel))

    most = here
    while most < _MOST_NODES and not fits(most):
        most *= 2
    if most == here or not fits(most):
        return ""
    least = most // 2
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if fits(middle) else (middle, most)
    return _told(with_nodes(case, most), f"{most} nodes like these instead of {here}")


def _lora(case: Case) -> str:
    if case.cfg.model.lora is not None:
        return ""
    return _told(_with(case, "model", lora=LoraConfig()), "LoRA: model.lora={}")


def _four_bits(case: Case) -> str:
    """With 4-bit weights, and shorter rows where that alone is not enough. They are not sharded: a
    strategy that was asked for and shards gives way."""
    model = case.cfg.model
    if model.load_in_4bit or model.init == "random" or case.place.device == "cpu":
        return ""
    lines = [_IN_FOUR_BITS] if model.lora else ["model.lora={}", _IN_FOUR_BITS]
    four = _with(case, "model", lora=model.lora or LoraConfig(), load_in_4bit=True)
    if case.cfg.parallel.kind in ("fsdp", "deepspeed"):
        four = _auto(four)
        lines.append("parallel.kind=auto")
    line = f"QLoRA: {' and '.join(lines)}"
    return _told(four, line) or _shorter(four, f"{line} and ")


def _shorter(case: Case, before: str = "") -> str:
    """The longest length that fits, of those that are half, a quarter, ... of it."""
    length = case.length // 2
    while length >= _SHORTEST:
        shorter = replace(_with(case, "data", max_length=length), length=length)
        if told := _told(shorter, f"{before}data.max_length={length}"):
            return told
        length //= 2
    return ""


def _float16(case: Case) -> str:
    """Half the bytes where bf16 is not there."""
    if case.precision != "fp32" or case.place.device == "cpu":
        return ""
    return _told(replace(case, precision="fp16"), "train.precision=fp16")
