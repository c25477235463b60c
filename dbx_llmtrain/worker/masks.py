"""Which tokens of a packed row see each other, and how a model is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def block_mask(
    segment_ids: Tensor, dtype: torch.dtype, window: int | None = None, *, causal: bool = True
) -> Tensor:
    """Additive mask (B, 1, L, L): 0 where a token sees another, the type's lowest number elsewhere.

    A token sees itself and what stands before it in its own document, at most ``window`` tokens in
    all; where not ``causal`` also what stands behind it, at most ``window`` tokens to either side.
    Padding is a document of its own: no row is without a visible token.
    """
    import torch

    place = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    distance = place[:, None] - place[None, :]
    visible = segment_ids[:, :, None] == segment_ids[:, None, :]
    if causal:
        visible = visible & (distance >= 0)
    if window is not None:
        visible = visible & (distance.abs() < window + (not causal))
    mask = torch.zeros(visible.shape, dtype=dtype, device=segment_ids.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


@dataclass(frozen=True)
class Window:
    """Attention that reaches ``tokens`` back (where a model sees to both sides: to either): in
    every layer (``all``), in some (``mixed``, told apart by a dict of masks), or in a way that a
    mask of ours cannot express (``unknown``)."""

    tokens: int
    layers: Literal["all", "mixed", "unknown"]


FULL, SLIDING = "full_attention", "sliding_attention"


def attention_window(config: Any) -> Window | None:
    """The limited attention that a model's configuration asks for, if any.

    ``layer_types`` came to transformers together with dicts of masks (4.53). Before, the models
    that mix full and sliding layers can only be told by name or by their own settings.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk and "chunked_attention" in kinds:
        return Window(int(chunk), "unknown")
    tokens = getattr(config, "sliding_window", None)
    if not tokens or not getattr(config, "use_sliding_window", True):
        return None
    if kinds:
        if SLIDING not in kinds:
            return None
        if kinds == {SLIDING}:
            return Window(int(tokens), "all")
        return Window(int(tokens), "mixed" if kinds == {FULL, SLIDING} else "unknown")
    mixes = hasattr(config, "sliding_window_pattern") or hasattr(config, "max_window_layers")
    if mixes or config.model_type == "gemma2":
        return Window(int(tokens), "unknown")
    return Window(int(tokens), "all")
