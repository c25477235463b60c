"""What a plan foresees of memory and time, for every strategy: data only."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_serializer

from dbx_llmtrain.config import TrainConfig
from dbx_llmtrain.estimates import MemoryEstimate, ModelShape
from dbx_llmtrain.model_sections import ParallelConfig


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Decision(_Record):
    """A number or choice of the plan with its reason."""

    name: str
    value: Any
    reason: str


def strategy_name(parallel: ParallelConfig) -> str:
    """A strategy with its options: ``fsdp full, cpu_offload``, ``deepspeed 3, all on cpu``."""
    if parallel.kind == "fsdp":
        return f"fsdp {parallel.shard}" + (", cpu_offload" if parallel.cpu_offload else "")
    if parallel.kind != "deepspeed":
        return parallel.kind
    name = f"deepspeed {parallel.stage}"
    optimizer, params = parallel.offload_optimizer, parallel.offload_params
    if optimizer == params != "none":
        return f"{name}, all on {params}"
    if optimizer != "none":
        name += f", optimizer on {optimizer}"
    return name if params == "none" else f"{name}, params on {params}"


class StrategyRow(_Record):
    """One strategy on this cluster at the best setting that fits, else at the smallest.

    ``spare`` is the least of what is left: of a GPU (or, on CPUs, of a node's memory) and of the
    nodes' host memory, in bytes; below 0 so much is lacking, ``None`` where it is not known.
    ``fits`` is ``None`` where that decides it. ``why`` says what the verdict is about. ``estimate``
    is ``None`` for a strategy that this cluster cannot run at all.
    """

    name: str
    parallel: ParallelConfig
    micro_batch_size: int
    gradient_checkpointing: int
    estimate: MemoryEstimate | None
    fits: bool | None
    spare: int | None
    why: str
    chosen: bool = False

    @property
    def verdict(self) -> str:
        """``why``, outside of a table: what has to be free is memory."""
        return self.why.replace(" free", " of free memory") if self.fits is None else self.why


class TimeEstimate(_Record):
    """How long a run takes by data sheet: an estimate, which the first steps correct.

    ``flops_per_token`` of the model (without what is computed again for gradient checkpointing),
    ``utilisation`` the share of the GPUs' stated ``flops_per_second`` (each) that a run is taken to
    reach, ``tokens_per_second`` of all ranks together. ``tokens``, ``seconds``, ``node_hours`` and
    ``gpu_hours`` of the whole run, ``None`` where its length is not known. With an unknown speed
    only ``flops_per_token``, ``tokens`` and ``why`` are there.
    """

    flops_per_token: float
    flops_per_second: float | None = None
    utilisation: float | None = None
    tokens_per_second: float | None = None
    tokens: int | None = None
    seconds: float | None = None
    node_hours: float | None = None
    gpu_hours: float | None = None
    why: str

    def hours_per_million_tokens(self) -> float | None:
        """Hours of the whole cluster for a million tokens."""
        return 1e6 / self.tokens_per_second / 3600 if self.tokens_per_second else None


class Forecast(_Record):
    """What ``train`` would do on a cluster that is only told of (``cluster``), from the model's
    configuration alone. ``total_steps`` is ``None`` where that takes the data to know.

    ``fits`` is false where no strategy does; ``parallel`` is then the one that comes nearest.
    ``advice`` says what would fit, also where that depends on host memory that is not known.
    """

    cluster: str
    config: TrainConfig
    model: str
    shape: ModelShape
    world_size: int
    nodes: int
    parallel: ParallelConfig
    precision: Literal["fp32", "bf16", "fp16"]
    gradient_checkpointing: int
    global_batch_size: int
    micro_batch_size: int
    accumulation: int
    total_steps: int | None
    fits: bool
    advice: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()
    strategies: tuple[StrategyRow, ...] = ()
    time: TimeEstimate

    @field_serializer("config")
    def _as_given(self, config: TrainConfig) -> dict[str, Any]:
        """The fields that were set: a default is no setting, and might be refused as one."""
        return config.to_dict()

    @property
    def strategy(self) -> str:
        """``single``, ``ddp``, ``fsdp`` or ``deepspeed``."""
        return self.parallel.kind

    @property
    def memory(self) -> MemoryEstimate | None:
        """What the chosen strategy takes."""
        return next((row.estimate for row in self.strategies if row.chosen), None)

    def __repr__(self) -> str:
        from dbx_llmtrain.display_plan import forecast_text

        return forecast_text(self)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        from dbx_llmtrain.display_plan import forecast_html

        return forecast_html(self)
