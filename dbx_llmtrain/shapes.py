"""What the arithmetic of memory and time needs to know of a model, from its Hugging Face
configuration alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from dbx_llmtrain.estimates import LinearShape, ModelShape

# One thing has many names in the configurations of transformers.
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_WIDTH = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_DROPOUTS = (
    "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "resid_pdrop", "embd_pdrop",
    "hidden_dropout", "hidden_dropout_prob", "dropout", "resid_dropout", "residual_dropout",
)  # fmt: skip
_GATES = {"gate_proj", "gate_up_proj", "w3", "wi_1"}


def model_shape(config: Any, model_class: Any) -> ModelShape:
    """The shape of the model that ``model_class`` builds from ``config``.

    It is built without storage, which takes a fraction of a second at any size, so every number of
    parameters is the real one. Raises ``ValueError`` where it could be built but not compute; may
    raise whatever the model's own code raises.
    """
    from dbx_llmtrain.worker.parallel.fsdp import transformer_blocks

    model = without_storage(config, model_class)
    model.tie_weights()
    text = config.get_text_config()
    blocks = transformer_blocks(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is None or head.weight is embedding.weight
    vocab, width = (int(size) for size in embedding.weight.shape)
    hidden = _first(text, _HIDDEN) or width
    heads = _first(text, _HEADS) or 1
    experts = _first(text, _EXPERTS)
    linears = _linears(blocks)
    intermediate = _intermediate(text, experts, hidden)
    kv_heads = _first(text, _KV_HEADS) or (1 if getattr(text, "multi_query", False) else heads)
    head_dim = _first(text, ("head_dim",)) or hidden // heads
    if _turns_an_odd_number(model, head_dim):
        raise ValueError(
            f"a head has {head_dim} numbers (hidden_size {hidden}, num_attention_heads {heads}), "
            "and rotary positions turn them in pairs: expected an even number"
        )
    return ModelShape(
        model_type=config.model_type,
        parameters=_numbers(model.parameters()),
        embedding_parameters=embedding.weight.numel(),
        head_parameters=0 if tied else head.weight.numel(),
        tied=tied,
        blocks=len(blocks),
        block_parameters=max((_numbers(block.parameters()) for block in blocks), default=0),
        blocks_parameters=_numbers(p for block in blocks for p in block.parameters()),
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        gated=_gated(blocks, linears, intermediate),
        fused_qkv=any(one.outputs == (heads + 2 * kv_heads) * head_dim for one in linears),
        rotary=any("rotary" in name for name, _ in model.named_modules()),
        activation=_activation(text),
        norm="layer" if _has_layer_norm(blocks) else "rms",
        dropout=any(getattr(text, name, None) for name in _DROPOUTS),
        experts=experts,
        experts_per_token=min(_first(text, _EXPERTS_USED) or 1, experts),
        expert_parameters=_expert_parameters(blocks) if experts else 0,
        linears=linears,
    )


def without_storage(config: Any, model_class: Any) -> Any:
    """The model of ``config``, whose parameters have shapes but no values."""
    import torch

    with torch.device("meta"):
        return model_class(config)


def _turns_an_odd_number(model: Any, head_dim: int) -> bool:
    """Whether rotary positions are made for all numbers of a head, which are odd, and so for one
    more than there are. (Some versions of transformers refuse it, others round a head's size down
    and fail in the first forward pass.)"""
    return head_dim % 2 == 1 and any(
        2 * buffer.numel() == head_dim + 1
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq")
    )


def _first(config: Any, names: Iterable[str]) -> int:
    """The first of these fields that is a number above 0, else 0."""
    values = (getattr(config, name, None) for name in names)
    return next((v for v in values if isinstance(v, int) and v > 0), 0)


def _numbers(parameters: Iterable[Any]) -> int:
    """How many numbers there are in the parameters, each parameter once."""
    return sum({id(p): p.numel() for p in parameters}.values())


def _intermediate(config: Any, experts: int, hidden: int) -> int:
    """Width of the feed-forward part; of one expert where there are some."""
    names = ("moe_intermediate_size", *_WIDTH) if experts else _WIDTH
    return _first(config, names) or 4 * hidden


def _linears(blocks: Iterable[Any]) -> tuple[LinearShape, ...]:
    """The linear layers of all blocks. (GPT-2 has its own kind, whose weight is transposed.)"""
    found: Counter[tuple[str, int, int]] = Counter()
    for block in blocks:
        for name, part in block.named_modules():
            weight = getattr(part, "weight", None)
            if hasattr(part, "in_features") and hasattr(part, "out_features"):
                found[name.rpartition(".")[2], part.in_features, part.out_features] += 1
            elif type(part).__name__ == "Conv1D" and weight is not None and weight.ndim == 2:
                found[name.rpartition(".")[2], weight.shape[0], weight.shape[1]] += 1
    return tuple(
        LinearShape(name=name, inputs=inputs, outputs=outputs, count=count)
        for (name, inputs, outputs), count in found.items()
    )


def _gated(blocks: Iterable[Any], linears: Iterable[LinearShape], width: int) -> bool:
    """Whether the feed-forward part multiplies two projections of ``width``, under their usual
    names or in one matrix."""
    names = {name.rpartition(".")[2] for block in blocks for name, _ in block.named_parameters()}
    return (
        any(linear.name in _GATES or linear.outputs == 2 * width for linear in linears)
        or not _GATES.isdisjoint(names)
    )  # fmt: skip


def _activation(config: Any) -> str:
    """Name of the feed-forward part's activation; SiLU where the configuration has none."""
    names = ("hidden_act", "activation_function", "hidden_activation", "activation")
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, str)), "silu")


def _has_layer_norm(blocks: Iterable[Any]) -> bool:
    return any(
        "LayerNorm" in type(part).__name__ and "RMS" not in type(part).__name__
        for block in blocks
        for part in block.modules()
    )


def _expert_parameters(blocks: Iterable[Any]) -> int:
    """Numbers in all experts but those that every token uses (``shared_experts``)."""
    return _numbers(
        parameter
        for block in blocks
        for name, parameter in block.named_parameters()
        if "experts" in name.split(".")
    )
