"""What a forward pass keeps for the backward one, and what the loss holds: bytes.

The sums follow what transformers' models save for autograd (a test counts it with
``torch.autograd.graph.saved_tensors_hooks``). Bytes are of one rank and one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from dbx_llmtrain.estimates import ModelShape, Setup

CHUNK_LOGITS = 1024 * 49152
"""Logits that the loss holds at once (``worker.loss`` has the same number; a test compares)."""
_MASKED_SHARE = 0.15
# Activations that transformers writes out in Python keep every intermediate result.
_WRITTEN_OUT = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh_python")


@dataclass(frozen=True)
class Kinds:
    """Bytes of a number: in matrix products (``compute``) and between the blocks (``stream``).

    ``autocast``: weights are fp32 and cast where they are used, and so is what a linear layer
    reads, for each layer anew.
    """

    compute: int
    stream: int
    autocast: bool


def kinds(setup: Setup) -> Kinds:
    """What a strategy computes in: ``single`` and ``ddp`` by autocast, the others cast the weights
    and with them everything. A frozen base is bf16 already."""
    if setup.precision == "fp32":
        return Kinds(4, 4, False)
    autocast = setup.kind in ("single", "ddp") and setup.lora is None
    return Kinds(2, 4 if autocast else 2, autocast)


def tokens(setup: Setup) -> int:
    """Places of a micro-batch."""
    return setup.micro_batch * setup.length


def kept(shape: ModelShape, setup: Setup) -> int:
    """All that is alive when the forward pass has reached the loss: what the blocks keep, the last
    norm's, the rotary tables and the mask."""
    whole, entry = block(shape, setup), tokens(setup) * shape.hidden * kinds(setup).stream
    every = setup.gradient_checkpointing
    again = -(-shape.blocks // every) if every else 0
    mask = setup.micro_batch * setup.length**2 * kinds(setup).compute if setup.packed else 0
    ends = tokens(setup) * (_norm(shape, setup) + 2 * shape.head_dim * kinds(setup).stream)
    return (shape.blocks - again) * whole + again * entry + mask + ends


def block(shape: ModelShape, setup: Setup) -> int:
    """Kept by one block that is not checkpointed."""
    per_token = (
        2 * _norm(shape, setup)
        + _casts(shape, setup)
        + _attention(shape, setup)
        + _feed_forward(shape, setup)
        + _adapters(shape, setup)
    )
    if shape.dropout:
        noise = 1 if setup.device == "cuda" else kinds(setup).compute
        per_token += 2 * shape.hidden * noise
    return tokens(setup) * per_token + _scores(shape, setup)


def block_backward(shape: ModelShape, setup: Setup) -> int:
    """Gradients alive at once in the backward pass of a block: of a gated feed-forward part those
    of both projections and of what they were made from, or of the attention's scores."""
    kind = kinds(setup)
    width = shape.intermediate * max(1, shape.experts_per_token)
    feed_forward = tokens(setup) * (3 if shape.gated else 2) * width * kind.compute
    attention = 4 * tokens(setup) * shape.heads * shape.head_dim * kind.compute
    scores = _scores(shape, setup) * 2 // 3
    return max(feed_forward, attention + scores) + 2 * tokens(setup) * shape.hidden * kind.stream


def _norm(shape: ModelShape, setup: Setup) -> int:
    """A norm, per token: RMS keeps its input and the normalised one (in fp32 inside), and what
    reads the result keeps that."""
    kind, hidden = kinds(setup), shape.hidden
    read = 0 if kind.autocast or _casts_for_adapters(setup) else kind.compute
    if shape.norm == "layer":
        return hidden * (kind.stream + read)
    # (A frozen norm needs no normalised input.)
    normalised = 0 if setup.lora is not None else 4 if kind.autocast else kind.compute
    return hidden * (4 + normalised + read)


def _casts(shape: ModelShape, setup: Setup) -> int:
    """Autocast, per token: each linear layer that reads a norm's result has its own copy of it."""
    if not kinds(setup).autocast:
        return 0
    reading = sum(linear.count for linear in shape.linears if linear.inputs == shape.hidden)
    readers = round(reading / shape.blocks) if shape.blocks else 0
    if shape.heads * shape.head_dim == shape.hidden:
        readers -= 1  # the attention's output projection reads no norm
    return 2 * shape.hidden * max(2, readers)


def _attention(shape: ModelShape, setup: Setup) -> int:
    """Queries, keys, values and the result, per token. With a mask, keys and values are repeated
    for every head that shares them."""
    every = shape.heads * shape.head_dim
    shared = shape.kv_heads * shape.head_dim
    repeated = setup.packed or setup.attention == "eager"
    read = every + 2 * (every if repeated else shared)
    kind = kinds(setup)
    # The plain implementation of sdpa, which dropout asks for on a CPU, works in fp32.
    plain = shape.dropout and setup.device == "cpu" and setup.attention == "sdpa"
    kept = read * (4 if plain else kind.compute) + every * kind.compute
    if shape.fused_qkv and plain and kind.compute == 4:
        # (It makes scaled queries and keys; the values keep the unscaled ones with them.)
        return kept + 2 * every * kind.compute
    if shape.fused_qkv and shape.rotary and not (repeated and shared < every):
        return kept + (every + shared) * kind.compute
    return kept


def _scores(shape: ModelShape, setup: Setup) -> int:
    """Scores (B, heads, L, L) of all heads, where attention keeps them: ``eager`` does (softmax in
    fp32, and in the compute type for the product), and sdpa with dropout on a CPU."""
    places = setup.micro_batch * shape.heads * setup.length**2
    compute = kinds(setup).compute
    if setup.attention == "eager":
        each = 4 + (compute if compute < 4 else 0)
        if shape.dropout:
            each += compute + (1 if setup.device == "cuda" else compute)
        return places * each
    if shape.dropout and setup.device == "cpu":
        return places * 3 * 4
    return 0


def _feed_forward(shape: ModelShape, setup: Setup) -> int:
    """Per token. Gated: gate, its activation, the other projection, and the product. Else: the
    projection and its activation. With experts all of it for every expert that a token uses, and
    what goes into and comes out of it."""
    kind = kinds(setup)
    each = 4 if shape.gated else (5 if shape.activation in _WRITTEN_OUT else 2)
    if _casts_for_adapters(setup):
        each -= 1  # the last layer's input, which its adapter has
    if not shape.experts:
        return each * shape.intermediate * kind.compute
    # transformers multiplies all experts at once, which autocast does not cast.
    inside = 4 if kind.autocast else kind.compute
    return shape.experts_per_token * (each * shape.intermediate + 2 * shape.hidden) * inside


def _casts_for_adapters(setup: Setup) -> bool:
    """Whether adapters have inputs of their own: peft turns a bf16 input into fp32 for them, and
    autocast back, for each layer anew. (Casting wrappers make the adapters bf16 instead.)"""
    low = setup.precision != "fp32" and setup.kind in ("single", "ddp")
    return setup.lora is not None and low


def _adapters(shape: ModelShape, setup: Setup) -> int:
    """LoRA, per token: what every adapter reads, and its own ``r`` numbers."""
    if setup.lora is None:
        return 0
    targets, r = setup.lora.targets, setup.lora.r
    copied = _casts_for_adapters(setup)
    numbers = sum(
        linear.count * ((linear.inputs if copied else 0) + 2 * r)
        for linear in shape.linears
        if targets == "all-linear" or linear.name in targets
    )
    return round(numbers * kinds(setup).compute / max(1, shape.blocks))


def loss_kept(shape: ModelShape, setup: Setup) -> int:
    """Kept by the loss until its backward pass begins: hidden states, their gradient, and (``mlm``)
    the logits with their probabilities."""
    kind = kinds(setup)
    if setup.masked:
        logits = int(_MASKED_SHARE * tokens(setup)) * shape.vocab
        return logits * (kind.compute + 4 + 4)
    return tokens(setup) * shape.hidden * (kind.stream + kind.compute)


def loss_chunk(shape: ModelShape, setup: Setup) -> int:
    """Bytes of the logits that are alive at once: one chunk's."""
    places, compute = tokens(setup), kinds(setup).compute
    if setup.masked:
        return int(_MASKED_SHARE * places) * shape.vocab * 4
    chunk = min(places, max(128, CHUNK_LOGITS // shape.vocab))
    one = 4 + (compute if compute < 4 else 0)
    return chunk * shape.vocab * one
