"""The load-balancing loss of mixture-of-experts models.

It is not a sum over tokens but a product of two means over a batch, so it cannot be cut exactly
like the token loss. For an optimizer step it is defined as

    coefficient * sum over micro-batches m of all ranks: (n_m / N) * A_m

where ``A_m`` is the model family's own ``load_balancing_loss_func`` over the tokens of the
micro-batch that are not padding, ``n_m`` its trained tokens, and ``N`` those of the whole step.
Its weight does not depend on the number of ranks or micro-batches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dbx_llmtrain.errors import ConfigError, Problem

SWITCH = "output_router_logits"
"""The field of a model's configuration, and the argument of its ``forward``."""


@dataclass(frozen=True)
class RouterLoss:
    """How a model balances its experts: ``balance(router logits of every layer, number of experts,
    experts per token, mask)``, weighed by ``coefficient``."""

    balance: Callable[..., Any]
    experts: int
    per_token: int
    coefficient: float

    def __call__(self, logits: tuple[Tensor, ...], real: Tensor | None) -> Tensor:
        """``A_m`` of router logits (B * L, experts) for each layer; ``real`` (B, L): which tokens
        are no padding."""
        if real is not None:
            # A mean over no token is not a number, also where it weighs nothing.
            real = (real | ~real.any()).long()
        gates = tuple(layer.float() for layer in logits)
        value: Tensor = self.balance(gates, self.experts, self.per_token, real)
        return value


def router_loss(model: Any) -> RouterLoss | None:
    """The loss that a model's configuration asks for (``output_router_logits``), as transformers
    computes it in training; ``None`` where it does not ask.

    Raises ``ConfigError`` where it asks and the model is of no family that is known to have one.
    """
    model = getattr(model, "get_base_model", lambda: model)()
    if not _asks(model):
        return None
    balance = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    found = {
        name: getattr(model, name, None)
        for name in ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    }
    lacking = [name for name, value in found.items() if value is None]
    if balance is None or lacking:
        lacks = "no load_balancing_loss_func" if balance is None else f"no {', '.join(lacking)}"
        message = (
            f"{SWITCH} is true, but {type(model).__name__} has {lacks}, so its router loss is not "
            f"known: add {SWITCH}: false to train without it"
        )
        raise ConfigError([Problem("model.config", message)])
    experts, per_token, coefficient = (float(value or 0) for value in found.values())
    return RouterLoss(balance, int(experts), int(per_token), coefficient)


def _asks(model: Any) -> bool:
    """Whether the configuration switches the router loss on, as published MoE models seldom do."""
    config = getattr(model.config, "get_text_config", lambda: model.config)()
    return bool(getattr(config, SWITCH, False))


@contextmanager
def recorded(decoder: nn.Module) -> Iterator[list[tuple[Tensor, ...]]]:
    """Have the decoder's passes return router logits, and collect them, whoever calls it.

    (Not the model's: asked for them, it computes a loss of its own, from our 4-D mask.)
    """
    found: list[tuple[Tensor, ...]] = []

    def ask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {SWITCH: True}

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        found.append(tuple(output.router_logits))

    hooks = [
        decoder.register_forward_pre_hook(ask, with_kwargs=True),
        decoder.register_forward_hook(keep),
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
