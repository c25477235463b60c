"""Which strategy, micro-batch and gradient checkpointing fit, and which of them is taken. Pure
arithmetic: every strategy is asked for its memory, and the cheapest in communication that fits is
taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dbx_llmtrain import batches, memory, optimizers, zero_config
from dbx_llmtrain.batches import MicroBatch
from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.display import size
from dbx_llmtrain.estimates import Adapters, MemoryEstimate, ModelShape, Setup
from dbx_llmtrain.forecasts import StrategyRow, strategy_name
from dbx_llmtrain.hardware import Precision
from dbx_llmtrain.layout import Place
from dbx_llmtrain.model_sections import ParallelConfig


@dataclass(frozen=True)
class Case:
    """What decides how much memory a run takes, but for the strategy. ``length`` is the most
    tokens of a row; ``model_bytes`` and ``data_bytes`` are staged on every node."""

    cfg: TrainConfig
    shape: ModelShape
    place: Place
    precision: Precision
    length: int
    model_bytes: int = 0
    data_bytes: int = 0

    @property
    def micro(self) -> MicroBatch:
        """What the configuration says of the micro-batch."""
        return batches.micro_batch(self.cfg, self.place.ranks)

    @property
    def checkpointing(self) -> tuple[int, ...]:
        """See ``checkpointing_of``."""
        return checkpointing_of(self.cfg)


@dataclass(frozen=True)
class Choice:
    """Every strategy's row, the one that is taken (``None``: nothing fits), and why."""

    rows: tuple[StrategyRow, ...]
    chosen: StrategyRow | None
    reason: str = ""


def checkpointing_of(cfg: TrainConfig) -> tuple[int, ...]:
    """Which gradient checkpointing may be taken, the fastest first: every n-th block, or 0."""
    wanted = cfg.model.gradient_checkpointing
    if isinstance(wanted, int):
        return (wanted,)
    return {"auto": (0, 1), "none": (0,), "full": (1,)}[wanted]


def _parallel(kind: str, **options: Any) -> ParallelConfig:
    return ParallelConfig.model_validate({"kind": kind, **options})


SINGLE = _parallel("single")
DDP = _parallel("ddp")
GRAD_OP = _parallel("fsdp", shard="grad_op")
FULL = _parallel("fsdp", shard="full")
HYBRID = _parallel("fsdp", shard="hybrid")
OFFLOAD = _parallel("fsdp", shard="full", cpu_offload=True)
ZERO = tuple(_parallel("deepspeed", stage=stage) for stage in (1, 2, 3))
ZERO_OFFLOAD = (
    _parallel("deepspeed", stage=2, offload_optimizer="cpu"),
    _parallel("deepspeed", stage=3, offload_optimizer="cpu"),
    _parallel("deepspeed", stage=3, offload_optimizer="cpu", offload_params="cpu"),
)
ZERO_NVME = _parallel("deepspeed", stage=3, offload_optimizer="nvme", offload_params="nvme")
_ALL = (DDP, GRAD_OP, FULL, HYBRID, OFFLOAD, *ZERO, *ZERO_OFFLOAD, ZERO_NVME)


def resolve(parallel: ParallelConfig) -> ParallelConfig:
    """The strategy that a configuration names, with what it leaves to us decided."""
    if parallel.kind != "deepspeed":
        return parallel
    return parallel.model_copy(update={"stage": zero_config.stage_of(parallel)})


def choose(case: Case) -> Choice:
    """The rows of all strategies, and the configured one, or the cheapest in communication.

    Within what stays on the GPUs one without gradient checkpointing comes before the others, since
    that computes a third more; what is offloaded comes last.
    """
    one = case.place.ranks == 1
    listed = (SINGLE, *_ALL) if one else _ALL
    if case.cfg.parallel.kind != "auto":
        wanted = resolve(case.cfg.parallel)
        row = best(case, wanted)
        others = [best(case, each) for each in listed if strategy_name(each) != row.name]
        chosen = row if row.estimate else None
        return _choice([row, *others], chosen, "as configured")
    in_order = order_of(case)
    rows = {strategy_name(each): best(case, each) for each in (*listed, *in_order)}
    order = [rows[strategy_name(each)] for each in in_order]
    resident = [row for row in order if not offloads(row.parallel)]
    first = min(case.checkpointing)
    tiers = (
        [row for row in resident if row.gradient_checkpointing == first],
        resident,
        [row for row in order if offloads(row.parallel)],
    )
    taken = next((row for tier in tiers for row in tier if row.fits is not False), None)
    full = rows.get(strategy_name(FULL))
    if taken and taken.fits is None and taken in resident and full in resident:
        assert full is not None
        return _choice(list(rows.values()), full, f"{full.why}; sharding needs least of it")
    reason = _reason(case, order, taken) if taken else ""
    return _choice(list(rows.values()), taken, reason)


def _choice(rows: list[StrategyRow], taken: StrategyRow | None, reason: str) -> Choice:
    chosen = taken.model_copy(update={"chosen": True}) if taken else None
    return Choice(tuple(chosen if chosen and row is taken else row for row in rows), chosen, reason)


def order_of(case: Case) -> list[ParallelConfig]:
    """Strategies by how much ranks have to send, the least first.

    A step of DDP sends the gradients. ``grad_op`` also gathers the parameters once a micro-batch;
    ``hybrid`` does so twice, within a host, and ``full`` twice over all hosts. What is offloaded
    also passes through the hosts' memory. Options of FSDP that are set beside ``auto`` hold for it.
    """
    place, given = case.place, case.cfg.parallel
    sharded = [GRAD_OP, FULL] if place.uneven() else [GRAD_OP, HYBRID, FULL]
    offloaded = [OFFLOAD]
    if given.shard != "full":
        sharded = [_parallel("fsdp", shard=given.shard)]
        offloaded = [_parallel("fsdp", shard=given.shard, cpu_offload=True)]
    if given.cpu_offload:
        sharded = []
    resident = [SINGLE] if place.ranks == 1 else [DDP, *sharded]
    # On CPUs everything is in host memory already.
    more = [*offloaded, *ZERO_OFFLOAD] if place.device == "cuda" else []
    return [*resident, *(more or (offloaded if given.cpu_offload else []))]


def offloads(parallel: ParallelConfig) -> bool:
    """Whether something is kept in the hosts' memory or on their disks."""
    places = {parallel.offload_optimizer, parallel.offload_params}
    return parallel.cpu_offload or places != {"none"}


def best(case: Case, parallel: ParallelConfig) -> StrategyRow:
    """A strategy with the largest micro-batch that fits, without gradient checkpointing where that
    is possible; where nothing fits, the setting that lacks least."""
    if why := refusal(case, parallel):
        return StrategyRow(
            name=strategy_name(parallel), parallel=parallel, micro_batch_size=0,
            gradient_checkpointing=0, estimate=None, fits=False, spare=None, why=f"no: {why}",
        )  # fmt: skip
    micro = case.micro
    sizes = range(micro.most, 0, -1) if micro.free else (micro.most,)
    tried = []
    for again in case.checkpointing:
        for size_ in sizes:
            row = _row(case, parallel, size_, again)
            if row.fits is not False:
                return row
            tried.append(row)
    return max(reversed(tried), key=lambda row: row.spare or 0)


def _row(case: Case, parallel: ParallelConfig, micro: int, again: int) -> StrategyRow:
    found = memory.estimate(case.shape, setup_of(case, parallel, micro, again))
    fits, spare, why = verdict(case.place, found, offloads=offloads(parallel))
    return StrategyRow(
        name=strategy_name(parallel), parallel=parallel, micro_batch_size=micro,
        gradient_checkpointing=again, estimate=found, fits=fits, spare=spare, why=why,
    )  # fmt: skip


def setup_of(case: Case, parallel: ParallelConfig, micro: int, again: int) -> Setup:
    """What the arithmetic of memory is asked about."""
    cfg, place, optimizer = case.cfg, case.place, case.cfg.train.optimizer
    lora = cfg.model.lora
    targets = lora.target_modules if lora else ""
    return Setup(
        kind="single" if parallel.kind == "auto" else parallel.kind,
        shard=parallel.shard,
        stage=parallel.stage,
        cpu_offload=parallel.cpu_offload,
        offload_optimizer=parallel.offload_optimizer,
        offload_params=parallel.offload_params,
        ranks=place.ranks,
        nodes=place.nodes,
        precision=case.precision,
        optimizer=optimizer if isinstance(optimizer, str) else optimizer.name,
        momentum=bool(optimizers.options_of(optimizer).get("momentum")),
        micro_batch=micro,
        accumulation=batches.accumulation_of(cfg, place.ranks, micro),
        length=case.length,
        packed=bool(cfg.data.packing),
        masked=cfg.data.objective == "mlm",
        gradient_checkpointing=again,
        attention="eager" if cfg.model.attention == "eager" else "sdpa",
        # (A pattern is taken for all layers, which is the most that it can match.)
        lora=Adapters(lora.r, tuple(targets) if isinstance(targets, list) else "all-linear")
        if lora
        else None,
        load_in_4bit=cfg.model.load_in_4bit,
        device=place.device,
        model_bytes=case.model_bytes,
        data_bytes=case.data_bytes,
    )


def verdict(
    place: Place, found: MemoryEstimate, *, offloads: bool
) -> tuple[bool | None, int | None, str]:
    """Whether it fits (``None``: not known), how much is left or lacking, and that in words."""
    needs = [("host memory", place.host_memory, found.host), ("disk", place.disk, found.disk)]
    if place.device == "cuda":
        needs.insert(0, ("GPU", place.device_memory, found.total))
    known = [(name, room - need) for name, room, need in needs if room]
    short = [f"{name} {size(-left)} short" for name, left in known if left < 0]
    main = needs[0][0]
    spare = min((left for name, left in known if name != "disk"), default=None)
    if short:
        return False, spare, f"no: {', '.join(short)}"
    if main not in dict(known):
        return None, None, f"not known: {size(needs[0][2])} of {main}"
    if offloads and "host memory" not in dict(known):
        return None, spare, f"if each node has {size(found.host)} free"
    return True, spare, f"yes, {size(dict(known)[main])} to spare"


def refusal(case: Case, parallel: ParallelConfig) -> str:
    """Why this cluster cannot run a strategy, or not with these settings; empty where it can."""
    cfg, place = case.cfg, case.place
    if parallel.kind == "single" and place.ranks > 1:
        return f"one rank, there are {place.ranks}"
    if parallel.kind == "fsdp" and parallel.shard == "hybrid" and (why := place.uneven()):
        return why
    if cfg.model.load_in_4bit and parallel.kind in ("fsdp", "deepspeed"):
        return "4-bit weights are not sharded yet"
    if optimizers.strategy_problems(cfg.train, parallel.kind):
        return f"not with {optimizers.name_of(cfg.train.optimizer)}"
    if parallel.kind != "deepspeed":
        return ""
    if case.precision == "fp16":
        return "not with fp16"
    return _zero_refusal(case, parallel)


def _zero_refusal(case: Case, parallel: ParallelConfig) -> str:
    missing = case.place.missing
    if "deepspeed" in missing:
        return "deepspeed is not installed on every node"
    if zero_config.needs_cpu_adam(parallel, zero_config.read(parallel.config)):
        if optimizers.name_of(case.cfg.train.optimizer) != "adamw":
            return "the offloaded optimizer is adamw"
        if lacking := missing_for_operator("cpu_adam", missing):
            return f"nodes lack {lacking}"
    if zero_config.uses_nvme(parallel) and (lacking := missing_for_operator("async_io", missing)):
        return f"nodes lack {lacking}"
    return ""


def missing_for_operator(operator: str, missing: frozenset[str]) -> str:
    """What a node lacks to build this operator of DeepSpeed's; empty: nothing, or it is built."""
    needed = ("g++", "ninja", *(("libaio",) if operator == "async_io" else ()))
    return ", ".join(name for name in needed if name in missing) if operator in missing else ""


def _reason(case: Case, order: Sequence[StrategyRow], taken: StrategyRow) -> str:
    """Why this one: what came before it, and by how much it was rejected."""
    rejected = []
    for row in order:
        if row is taken:
            break
        if row.fits is False:
            rejected.append(f"{row.name} ({row.why.removeprefix('no: ').removeprefix('no, ')})")
        else:
            rejected.append(f"{row.name} (only with gradient checkpointing)")
    fits = taken.why.replace("yes,", "fits with")
    if taken.fits is None and offloads(taken.parallel):
        fits = f"fits only {taken.verdict}"
    if case.place.ranks == 1 and not rejected:
        return f"one process, {fits}"
    reason = f"the least communication that fits: {fits.removeprefix('fits with ')}"
    return f"{reason}; rejected: {', '.join(rejected)}" if rejected else reason


def with_nodes(case: Case, nodes: int) -> Case:
    """The same on so many nodes like the busiest one."""
    return replace(case, place=replace(case.place, per_node=(case.place.busiest,) * nodes))
