"""Bytes and floating-point operations of a training step, for every strategy: pure arithmetic.

What is added up is what this package's strategies hold. Trained weights are fp32 (4 bytes a
parameter), so are their gradients (4), AdamW keeps two numbers (8): 16 bytes a parameter, as in
mixed precision after ZeRO (arXiv 1910.02054: 2 + 2 + 12), where the 2 + 2 are of the copies that
compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dbx_llmtrain import activations
from dbx_llmtrain.activations import kinds
from dbx_llmtrain.estimates import Adapters, MemoryEstimate, ModelShape, Setup

__all__ = ["Adapters", "Setup", "estimate", "flops_per_token", "trained_parameters", "usable"]

_ADAM_8BIT = 2 * (1 + 4 / 256)
"""Two numbers of 8 bits, with a scale in fp32 for every 256 (bitsandbytes)."""
_FOUR_BIT = 0.5 + 1 / 64 + 4 / (64 * 256)
"""NF4 with scales of 8 bits for every 64 numbers, scaled in fp32 themselves (QLoRA)."""
_LIVE_ZERO3 = 1_000_000_000
_BUCKET_ZERO = 50_000_000
"""Elements: DeepSpeed's settings in ``zero_config`` (a test compares)."""
_RANK_HOST = {"cuda": 3_000_000_000, "cpu": 450_000_000}
"""Host memory of a rank's process with torch and transformers, and on a GPU the CUDA context."""


def usable(memory_total: int) -> int:
    """Of a GPU's memory in bytes, what tensors may fill: less 1.2 GB for the CUDA context, cuBLAS
    and NCCL, and 5% for what the allocator cannot use."""
    return max(0, int(memory_total * 0.95) - 1_200_000_000)


def trained_parameters(shape: ModelShape, setup: Setup) -> int:
    """Parameters with a gradient: the model's, or its adapters' (r x (inputs + outputs) each)."""
    if setup.lora is None:
        return shape.parameters
    targets = setup.lora.targets
    return sum(
        setup.lora.r * (linear.inputs + linear.outputs) * linear.count
        for linear in shape.linears
        if targets == "all-linear" or linear.name in targets
    )


def flops_per_token(
    shape: ModelShape, length: int, *, checkpointing: int = 0, lora: bool = False
) -> float:
    """Floating-point operations of training on one token, forward and backward.

    2 a multiply-add; every matrix once forward and twice backward (once where it is frozen): 6
    times the matrices' numbers, plus attention's two products over the rows' ``length`` (PaLM,
    arXiv 2204.02311, appendix B). What is checkpointed runs forward a second time.
    """
    embedding = 0 if shape.tied else shape.embedding_parameters
    matrices = shape.active_parameters - embedding
    attention = 2 * shape.blocks * shape.heads * shape.head_dim * length
    backward = 2 * (1 if lora else 2) * matrices + 4 * attention
    again = (2 * matrices + 2 * attention) / checkpointing if checkpointing else 0
    return float(2 * matrices + 2 * attention + backward + again)


@dataclass(frozen=True)
class States:
    """Bytes that stay on a rank from step to step, and ``gradients`` when they are complete."""

    weights: int
    master: int
    gradients: int
    optimizer: int


@dataclass(frozen=True)
class Moment:
    """What is held besides weights and optimizer state at one moment of a step."""

    name: Literal["loss", "backward", "step"]
    gradients: int = 0
    activations: int = 0
    logits: int = 0
    communication: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return self.gradients + self.activations + self.logits + self.communication


def estimate(shape: ModelShape, setup: Setup) -> MemoryEstimate:
    """Bytes of the worst rank at the worst moment of a step (the second or later), of its node, and
    of a checkpoint."""
    whole = states(shape, setup)
    held = on_device(whole, setup)
    moments = (*_passes(shape, setup, held), _step(shape, setup, held))
    worst = max(moments, key=lambda moment: moment.total)
    total = held.weights + held.master + held.optimizer + worst.total
    checkpoint = checkpoint_bytes(shape, setup)
    return MemoryEstimate(
        weights=held.weights,
        master=held.master,
        gradients=worst.gradients,
        optimizer=held.optimizer,
        activations=worst.activations,
        logits=worst.logits,
        communication=worst.communication,
        total=total,
        host=_host(shape, setup, whole, held, total),
        disk=_disk(shape, setup, whole, checkpoint),
        checkpoint=checkpoint,
        moment=worst.name,
    )


def shards(setup: Setup) -> int:
    """Over how many ranks FSDP or ZeRO cuts what it cuts."""
    if setup.kind == "fsdp" and setup.shard == "hybrid":
        return max(1, setup.ranks // setup.nodes)
    return setup.ranks if setup.kind in ("fsdp", "deepspeed") else 1


def stage(setup: Setup) -> int:
    """What is cut, by ZeRO's count: 0 nothing, 1 optimizer state, 2 gradients, 3 weights too."""
    if setup.kind == "fsdp":
        return 3
    if setup.kind != "deepspeed":
        return 0
    if setup.stage is not None:
        return setup.stage
    offloaded = setup.offload_params != "none" or "nvme" in (
        setup.offload_optimizer, setup.offload_params
    )  # fmt: skip
    return 3 if offloaded else 2


def states(shape: ModelShape, setup: Setup) -> States:
    """Of one rank, wherever they lie. With DeepSpeed the model holds weights of the compute type,
    and the optimizer fp32 ones of its own."""
    cut, level = shards(setup), stage(setup)
    trained = trained_parameters(shape, setup)
    own = 4 if setup.kind != "deepspeed" or setup.precision == "fp32" else 2
    weights = own * trained + (_frozen(shape, setup) if setup.lora else 0)
    each = {
        "adamw": 8.0,
        "adamw_8bit": _ADAM_8BIT,
        "sgd": 4.0 if setup.momentum else 0.0,
        "adafactor": _adafactor(shape) / max(1, shape.parameters),
    }[setup.optimizer]
    return States(
        weights=weights // (cut if level == 3 else 1),
        master=4 * trained // cut if setup.kind == "deepspeed" else 0,
        gradients=4 * trained // (cut if level >= 2 else 1),
        optimizer=int(each * trained) // (cut if level else 1),
    )


def _frozen(shape: ModelShape, setup: Setup) -> int:
    """A base without gradients: in the compute type, or its linear layers in 4 bits."""
    each = kinds(setup).compute
    if not setup.load_in_4bit:
        return each * shape.parameters
    matrices = sum(linear.inputs * linear.outputs * linear.count for linear in shape.linears)
    return int(_FOUR_BIT * matrices) + each * (shape.parameters - matrices)


def _adafactor(shape: ModelShape) -> int:
    """A number for every row and column of a matrix, in fp32."""
    rows = sum((linear.inputs + linear.outputs) * linear.count for linear in shape.linears)
    ends = (1 if shape.tied else 2) * (shape.vocab + shape.hidden)
    return 4 * (rows + ends)


def on_device(whole: States, setup: Setup) -> States:
    """What of it lies where the rank computes: everything that is not offloaded."""
    if setup.device == "cpu":
        return whole
    if setup.kind == "fsdp" and setup.cpu_offload:
        return States(0, 0, 0, 0)
    if setup.kind == "deepspeed" and setup.offload_optimizer != "none":
        weights = 0 if setup.offload_params != "none" else whole.weights
        return States(weights, 0, 0, 0)
    if setup.kind == "deepspeed" and setup.offload_params != "none":
        return States(0, whole.master, whole.gradients, whole.optimizer)
    return whole


def _passes(shape: ModelShape, setup: Setup, held: States) -> tuple[Moment, ...]:
    """The loss, and in the backward pass the last block (which comes first), the first block, and
    the end. In between one thing grows as another shrinks."""
    head = _Head(shape, setup)
    kept = activations.kept(shape, setup) + cast_weights(shape, setup)
    hidden = activations.loss_kept(shape, setup)
    every = setup.gradient_checkpointing
    block = activations.block(shape, setup)
    again = block if every > 0 and (shape.blocks - 1) % every == 0 else 0
    busy = activations.block_backward(shape, setup)
    before = _gradients_before(setup, held)
    inner = max(before, held.gradients * shape.blocks_parameters // shape.parameters)
    forward, backward, end = _gathered(shape, setup)
    chunk = activations.loss_chunk(shape, setup)
    return (
        Moment("loss", before, kept + hidden, chunk + head.loss, forward),
        Moment("backward", before, kept + hidden + again + busy, head.start, backward),
        Moment("backward", inner, block + busy, head.gradient, backward),
        Moment("backward", max(before, held.gradients) + head.end, 0, 0, end),
    )


class _Head:
    """The gradient of the head, which the loss makes before any other and sums up in fp32."""

    def __init__(self, shape: ModelShape, setup: Setup) -> None:
        numbers = shape.vocab * shape.hidden
        kind = kinds(setup)
        self.loss = self.start = self.gradient = self.end = 0
        if setup.lora is not None:
            return
        if not setup.masked:
            self.loss = self.start = 4 * numbers
            if kind.compute < 4:
                # The product of a chunk; a CPU casts it before it adds.
                self.loss += (kind.compute + (4 if setup.device == "cpu" else 0)) * numbers
                self.start += kind.compute * numbers
            if kind.autocast:
                self.loss += kind.compute * numbers
        # Tied: the embedding's gradient comes last and finds the head's. DDP copies into buckets,
        # and what there is from an earlier micro-batch is added to.
        grad = 4 if setup.kind in ("single", "ddp") else kind.compute
        added = setup.kind == "ddp" or (setup.kind == "single" and setup.accumulation > 1)
        self.gradient = grad * numbers
        self.end = grad * numbers * (shape.tied + added)


def _gradients_before(setup: Setup, held: States) -> int:
    """Gradients that are there already when a micro-batch begins: those of the micro-batches before
    it (what is sharded is reduced after each); DDP's and ZeRO 3's buffers always."""
    always = setup.kind == "ddp" or (setup.kind == "deepspeed" and stage(setup) == 3)
    return held.gradients if always or setup.accumulation > 1 else 0


def cast_weights(shape: ModelShape, setup: Setup) -> int:
    """Autocast keeps its copies of the blocks' weights until the backward pass has used them."""
    if not kinds(setup).autocast:
        return 0
    return 2 * sum(linear.inputs * linear.outputs * linear.count for linear in shape.linears)


def _gathered(shape: ModelShape, setup: Setup) -> tuple[int, int, int]:
    """Whole weights and gradients that a sharding strategy holds for a while, and what it sends
    from: at the loss, in the first block of the backward pass, and at its end.

    FSDP keeps the root's weights (embeddings, head) from the forward pass to the end of the
    backward one. The next block is gathered while this one computes, and the fp32 gradients of the
    one before are being sent.
    """
    compute = kinds(setup).compute
    trained = trained_parameters(shape, setup) / shape.parameters
    root, block = shape.root_parameters, shape.block_parameters
    if setup.kind == "fsdp":
        blocks = compute * shape.blocks_parameters if setup.shard == "grad_op" else 0
        forward = compute * root + max(blocks, compute * block) + _gloo(setup, compute * block)
        gradients = round((compute + 4) * block * trained)
        backward = compute * root + max(blocks, 2 * compute * block) + gradients
        before = 2 * compute * root + 4 * block
        sending = (compute + 4) * root + _gloo(setup, 4 * root)
        if setup.lora is not None:
            return forward, backward, compute * root
        # (The root's part of the gradient is made last, from what is sent.)
        own = 4 * root // shards(setup)
        return forward, backward, max(before - own, sending)
    if setup.kind == "deepspeed":
        return _gathered_by_deepspeed(shape, setup)
    return 0, 0, 0


def _gathered_by_deepspeed(shape: ModelShape, setup: Setup) -> tuple[int, int, int]:
    """As ``_gathered``. Gradients travel in a bucket (two on a GPU, where they overlap), which
    stage 3 never gives back; a gradient that is larger travels alone, in fp32. Stage 3 keeps
    gathered weights that are used again soon, up to its limit."""
    compute, biggest = kinds(setup).compute, shape.embedding_parameters
    alone = 4 * biggest if biggest > _BUCKET_ZERO and setup.lora is None else 0
    if stage(setup) < 3:
        buckets = 2 if setup.device == "cuda" and stage(setup) == 2 else 1
        bucket = buckets * compute * _BUCKET_ZERO
        return 0, bucket + compute * shape.block_parameters, bucket + alone + compute * biggest
    bucket = 4 * _BUCKET_ZERO
    live = compute * min(shape.parameters, _LIVE_ZERO3) if setup.ranks > 1 else 0
    return bucket + live, bucket + live + alone, bucket + live + alone


def _gloo(setup: Setup, sent: int) -> int:
    """On a CPU the collectives copy the part of what is sent that is a rank's own."""
    return sent // shards(setup) if setup.device == "cpu" and setup.ranks > 1 else 0


def _step(shape: ModelShape, setup: Setup, held: States) -> Moment:
    """The optimizer's step: gradients, and what the optimizer needs besides its state."""
    temporary = 0
    if setup.optimizer == "adafactor":
        temporary = 2 * 4 * max(shape.embedding_parameters, shape.block_parameters // 3)
    if setup.kind == "deepspeed" and stage(setup) == 3:
        return Moment("step", held.gradients, communication=4 * _BUCKET_ZERO)
    if setup.kind == "deepspeed":
        temporary = 4 * trained_parameters(shape, setup) // shards(setup)
    if setup.kind == "fsdp" and setup.cpu_offload and setup.device == "cuda":
        return Moment("step")
    return Moment("step", held.gradients + temporary)


def checkpoint_bytes(shape: ModelShape, setup: Setup) -> int:
    """Weights in fp32 and the optimizer's state, of what is trained."""
    alone = Setup(kind="single", optimizer=setup.optimizer, momentum=setup.momentum,
                  lora=setup.lora)  # fmt: skip
    return 4 * trained_parameters(shape, setup) + states(shape, alone).optimizer


def _host(shape: ModelShape, setup: Setup, whole: States, held: States, total: int) -> int:
    """Host memory of the busiest node: processes, what is offloaded, and on rank 0 the export: the
    whole model, and once more when it is opened again to be compared."""
    ranks = -(-setup.ranks // setup.nodes)
    export = 2 * (setup.model_bytes or 2 * shape.parameters)
    each = _RANK_HOST[setup.device]
    if setup.device == "cpu":
        return ranks * (each + total) + export
    offloaded = _sum(whole) - _sum(held) if whole != held else 0
    if setup.offload_optimizer == "nvme":
        offloaded -= whole.optimizer + whole.master
    if setup.offload_params == "nvme":
        offloaded -= whole.weights
    return ranks * (each + max(0, offloaded)) + export


def _disk(shape: ModelShape, setup: Setup, whole: States, checkpoint: int) -> int:
    """Local disk of the busiest node: the staged model and data, its part of a checkpoint and rank
    0's export on their way to shared storage, and what is offloaded to it."""
    model = setup.model_bytes or 2 * shape.parameters
    ranks = -(-setup.ranks // setup.nodes)
    nvme = 0
    if setup.offload_optimizer == "nvme":
        nvme += whole.optimizer + whole.master
    if setup.offload_params == "nvme":
        nvme += whole.weights
    passing = max(-(-checkpoint // setup.nodes), model)
    return setup.model_bytes + setup.data_bytes + passing + ranks * nvme


def _sum(states: States) -> int:
    return states.weights + states.master + states.gradients + states.optimizer
