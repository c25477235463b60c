"""The shape of a model and the memory that training it takes: data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class LinearShape(_Record):
    """Linear layers of one name (the last part of it) within the blocks: ``count`` matrices of
    ``inputs`` x ``outputs`` numbers."""

    name: str
    inputs: int
    outputs: int
    count: int


class ModelShape(_Record):
    """What the arithmetic of memory and time needs to know of a model. Numbers are of parameters
    unless said otherwise; tied ones count once.

    ``blocks`` (of ``block_parameters`` in the largest) hold ``blocks_parameters`` together; the
    rest is the embeddings, the head and the last norm. ``head_parameters`` is 0 where the head is
    the embedding (``tied``). ``expert_parameters`` are those of all experts, of which a token uses
    ``experts_per_token`` of ``experts``.
    """

    model_type: str
    parameters: int
    embedding_parameters: int
    head_parameters: int
    tied: bool
    blocks: int
    block_parameters: int
    blocks_parameters: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True
    """The feed-forward part multiplies two projections (SwiGLU), else it has one and a GELU."""
    fused_qkv: bool = False
    """Queries, keys and values come from one matrix: one that is kept keeps all."""
    rotary: bool = True
    """Positions turn queries and keys, which makes new ones."""
    activation: str = "silu"
    """Of the feed-forward part, by its name in transformers."""
    norm: Literal["rms", "layer"] = "rms"
    """RMS norms are written out in fp32; ``layer``: PyTorch's own LayerNorm."""
    dropout: bool = False
    """Dropout is on in training: a mask of every place that it is applied to is kept."""
    experts: int = 0
    experts_per_token: int = 0
    expert_parameters: int = 0
    linears: tuple[LinearShape, ...] = ()
    """What ``all-linear`` adapters are put on: everything in the blocks, not the head."""

    @property
    def root_parameters(self) -> int:
        """Everything outside the blocks."""
        return self.parameters - self.blocks_parameters

    @property
    def active_parameters(self) -> int:
        """Those that one token meets."""
        if not self.experts:
            return self.parameters
        idle = self.experts - self.experts_per_token
        return self.parameters - self.expert_parameters * idle // self.experts


@dataclass(frozen=True)
class Adapters:
    """LoRA: rank ``r`` on the linear layers of these names (last parts), or on all of them."""

    r: int
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"


@dataclass(frozen=True)
class Setup:
    """One way to train, as memory sees it. Fields are named as in the configuration; ``ranks`` are
    those of all ``nodes``. ``gradient_checkpointing``: every n-th block, 0 for none.
    """

    kind: Literal["single", "ddp", "fsdp", "deepspeed"]
    shard: Literal["full", "grad_op", "hybrid"] = "full"
    stage: Literal[1, 2, 3] | None = None
    cpu_offload: bool = False
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    offload_params: Literal["none", "cpu", "nvme"] = "none"
    ranks: int = 1
    nodes: int = 1
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    optimizer: Literal["adamw", "adamw_8bit", "sgd", "adafactor"] = "adamw"
    momentum: bool = False
    """SGD with momentum."""
    micro_batch: int = 1
    accumulation: int = 1
    length: int = 1024
    """Tokens of a row, at most."""
    packed: bool = True
    """Several documents in a row: attention needs a mask."""
    masked: bool = False
    """``data.objective: mlm``: logits of the hidden tokens, with the model's own head."""
    gradient_checkpointing: int = 0
    attention: Literal["sdpa", "eager"] = "sdpa"
    lora: Adapters | None = None
    load_in_4bit: bool = False
    device: Literal["cuda", "cpu"] = "cuda"
    model_bytes: int = 0
    """Of the staged model's files."""
    data_bytes: int = 0
    """Of the staged data."""


class MemoryEstimate(_Record):
    """Bytes at the moment at which the worst rank holds most, by what they are for, and their sum
    ``total``; per node the ``host`` memory and the local ``disk``; of a whole ``checkpoint``.

    On GPUs ``total`` is of the GPU, on CPUs of the process above its base after imports. ``moment``
    says when it is: in the ``loss``, the ``backward`` pass, or the optimizer's ``step``.
    """

    weights: int
    master: int = 0
    gradients: int
    optimizer: int
    activations: int
    logits: int
    communication: int
    total: int
    host: int
    disk: int
    checkpoint: int
    moment: Literal["loss", "backward", "step"] = "backward"
