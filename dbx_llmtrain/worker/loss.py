"""The loss of a batch: summed over trained tokens, without ever holding the full logits.

``LossModule`` owns the forward pass and is itself what DDP or ``fully_shard`` wraps. Documents of a
row are kept apart by a block mask of our own (additive float, 4-D: it means the same to every
transformers version and attention implementation; position ids alone leak before 4.53).
``probe.probe`` proves both on the real model before the first step and falls back where they do not
hold.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dbx_llmtrain.worker.data import IGNORED
from dbx_llmtrain.worker.masks import FULL, SLIDING, attention_window, block_mask
from dbx_llmtrain.worker.router import SWITCH, recorded, router_loss

_CHUNK_LOGITS = 1024 * 49152
"""Logits held at once: 200 MB in fp32, 1,024 positions of a 49k vocabulary."""


class _ChunkedCrossEntropy(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped
    """Summed cross-entropy of ``hidden @ weight.T + bias``, a chunk of positions at a time.

    The gradient is computed with the loss, in the forward pass, because the logits it needs are
    gone afterwards: d loss / d logits = softmax(logits) - onehot(target). Logits, loss and the
    weight's gradient are fp32 whatever the compute type is.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk: int,
        train: bool,
    ) -> Tensor:
        """``hidden`` (K, H), ``weight`` (V, H), ``bias`` (V,), ``targets`` (K,) -> fp32 scalar.

        Computes in the type of ``hidden``; the gradient of an fp32 weight is never rounded to it.
        """
        wanted = [train and needed for needed in ctx.needs_input_grad[:3]]
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if wanted[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wanted[2] else None
        matrix = weight.to(hidden.dtype)
        for start in range(0, len(targets), chunk):
            part, target = hidden[start : start + chunk], targets[start : start + chunk, None]
            logits = (part @ matrix.T).float()
            if bias is not None:
                logits += bias.float()
            highest = logits.amax(dim=1, keepdim=True)
            chosen = logits.gather(1, target) - highest
            total = logits.sub_(highest).exp_().sum(dim=1, keepdim=True)
            loss += (total.log() - chosen).sum(dtype=torch.float64)
            if not any(wanted):
                del logits
                continue
            slope = logits.div_(total).scatter_add_(1, target, -torch.ones_like(chosen))
            if grad_bias is not None:
                grad_bias += slope.sum(dim=0)
            slope = slope.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(slope, matrix, out=grad_hidden[start : start + chunk])
            if grad_weight is not None:
                _add_product(grad_weight, slope, part)
            del logits, slope  # or they would be there while the next chunk's are made
        ctx.gradients = (grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return loss.float()

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]  # as above
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what the forward pass computed; in place, the graph is walked once."""
        gradients = [
            None if gradient is None else gradient.mul_(grad_loss).to(dtype)
            for gradient, dtype in zip(ctx.gradients, ctx.dtypes, strict=True)
        ]
        ctx.gradients = None
        return (*gradients, None, None, None)


def _add_product(total: Tensor, slope: Tensor, hidden: Tensor) -> None:
    """``total += slope.T @ hidden``, summed over chunks in fp32.

    No loss scale can help where a sum over the positions of a chunk overflows fp16 (it is applied
    later): ``hidden`` is made smaller by a power of two, so that it cannot. A slope is at most 1.
    """
    if slope.dtype == total.dtype:
        total.addmm_(slope.T, hidden)
    elif slope.dtype == torch.float16 and len(hidden):
        bound = hidden.abs().amax().float() * len(hidden)
        factor = torch.exp2(torch.log2(2**15 / bound).floor().clamp(min=-40, max=0))
        total += (slope.T @ (hidden * factor).half()).float() / factor
    else:
        total += slope.T @ hidden


def positions_at_once(vocabulary: int) -> int:
    """How many positions of the loss are done at a time."""
    return max(128, _CHUNK_LOGITS // vocabulary)


def chunked_cross_entropy(
    hidden: Tensor, head: nn.Linear, targets: Tensor, *, chunk: int | None = None
) -> Tensor:
    """Cross-entropy of ``head(hidden)`` against ``targets``, summed: (K, H), (K,) -> fp32 scalar.

    Computes in the autocast type where autocast is on. ``chunk`` positions are done at a time;
    by default as many as make 50 million logits.
    """
    weight, bias = head.weight, head.bias
    chunk = chunk or positions_at_once(weight.shape[0])
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    train = torch.is_grad_enabled()
    with torch.autocast(kind, enabled=False):
        loss: Tensor = _ChunkedCrossEntropy.apply(
            hidden.to(dtype), weight, bias, targets, chunk, train
        )
    return loss


def _head_loss(head: nn.Module, hidden: Tensor, targets: Tensor, chunk: int | None) -> Tensor:
    """The loss of what the head would give. The head itself is called, with another ``forward``:
    a strategy that keeps weights in pieces puts them together in a hook of the module."""
    attributes = vars(head)
    own = {name: attributes[name] for name in ("forward",) if name in attributes}
    attributes["forward"] = lambda part: chunked_cross_entropy(part, head, targets, chunk=chunk)
    try:
        loss: Tensor = head(hidden)
    finally:
        del attributes["forward"]
        attributes.update(own)
    return loss


class LossModule(nn.Module):  # type: ignore[misc]  # torch is untyped
    """A language model whose forward pass is its loss; every strategy wraps this.

    Switches that the probe and the strategy set: ``own_logits`` takes the model's own logits
    instead of the chunked loss, ``padded`` says that a batch holds one document a row (a causal
    model then needs no mask: behind its back padding changes nothing), ``autocast`` is the compute
    type where the weights are not cast by the wrapper. ``masked``: the model predicts masked tokens
    in place and sees to both sides; it gives a document's first token ``first_position``.
    ``chunk_tokens``: positions of the loss done at a time, by
    default as many as make 50 million logits.
    """

    def __init__(
        self, model: Any, *, masked: bool = False, chunk_tokens: int | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.masked = masked
        self.own_logits = False
        self.padded = False
        self.autocast: torch.dtype | None = None
        self._chunk = chunk_tokens
        text_config = getattr(model.config, "get_text_config", lambda: model.config)()
        self._window = attention_window(text_config)
        # An embedding with a padding index gets no gradient for that id, also where it is a real
        # end-of-turn token. Our padding is never seen, so the loss must not know a pad id.
        embedding = model.get_input_embeddings()
        if isinstance(embedding, nn.Embedding):
            embedding.padding_idx = None
        self._router = router_loss(model)
        self.first_position = _first_position(model) if masked else 0

    @property
    def shift(self) -> int:
        """How many places before a token the model predicts it."""
        return 0 if self.masked else 1

    @property
    def decoder(self) -> Any:
        """The model without its head. (Not an attribute: it would be registered twice.)"""
        if self.masked:
            return self.model.base_model
        decoder = getattr(self.model, "get_decoder", lambda: None)()
        return self.model.base_model if decoder in (None, self.model) else decoder

    @property
    def takes_positions(self) -> bool:
        """Whether the model can be told that positions restart within a row."""
        parameters = inspect.signature(self.decoder.forward).parameters
        return "position_ids" in parameters

    def masks_reach(self, length: int) -> bool:
        """Whether a mask of ours can say who sees whom in rows of ``length`` tokens."""
        window = self._window
        return window is None or length <= window.tokens or window.layers != "unknown"

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        logits: bool = False,
        use: Callable[[Any], None] | None = None,
    ) -> Tensor:
        """The loss of a batch (see ``Batch``) summed over its trained tokens, an fp32 scalar.

        It depends on every parameter also when there is nothing to train on, so that all ranks run
        the same collectives. With ``logits`` the model's own logits (B, L, V) instead; without
        ``segment_ids`` every row is one document. A router loss (see ``router``) is not in the
        value, only in the gradient.

        ``use`` is called with the model instead, which is whole for it: its outermost weights are
        gathered, and its blocks gather their own when they are called.
        """
        with self._compute(input_ids.device.type):
            if use is not None:
                use(self.model)
                return torch.zeros((), device=input_ids.device)
            inputs = self._inputs(input_ids, position_ids, segment_ids)
            if logits:
                own: Tensor = self.model(**inputs).logits
                return own
            if labels is None:
                raise ValueError("labels are needed for the loss")
            if positions is None:
                positions = trained_positions(labels, self.shift)
            targets = labels.flatten()[positions + self.shift]
            if self._router is None or not torch.is_grad_enabled():
                return self._token_loss(inputs, positions, targets)
            with recorded(self.decoder) as gates:
                loss = self._token_loss(inputs, positions, targets)
            real = None if segment_ids is None else segment_ids > 0
            balance = self._router(gates[0], real) * (self._router.coefficient * len(positions))
            return loss + (balance - balance.detach())

    def _token_loss(self, inputs: dict[str, Any], positions: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy at ``positions`` (K,) against ``targets`` (K,)."""
        head = self.model.get_output_embeddings()
        # (A head with adapters is more than its matrix.)
        if self.own_logits or hasattr(head, "base_layer"):
            chosen = self.model(**inputs).logits.flatten(0, 1)[positions]
            return nn.functional.cross_entropy(chosen.float(), targets, reduction="sum")
        if self.masked:
            chosen = self._logits_at(inputs, positions)
            return nn.functional.cross_entropy(chosen.float(), targets, reduction="sum")
        hidden = self.decoder(**inputs)[0].flatten(0, 1)[positions]
        return _head_loss(head, hidden, targets, self._chunk)

    def _logits_at(self, inputs: dict[str, Any], positions: Tensor) -> Tensor:
        """The model's own logits (K, V) at some places only: its head, which is more than one
        matrix in masked models, is given the hidden states of no others."""

        def choose(_: nn.Module, __: Any, output: Any) -> Any:
            chosen = output[0].flatten(0, 1)[positions][None]
            if isinstance(output, tuple):
                return (chosen, *output[1:])
            output.last_hidden_state = chosen
            return output

        hook = self.decoder.register_forward_hook(choose)
        try:
            logits: Tensor = self.model(**inputs).logits[0]
        finally:
            hook.remove()
        return logits

    def _compute(self, device_type: str) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        autocast: AbstractContextManager[Any] = torch.autocast(device_type, dtype=self.autocast)
        return autocast

    def _inputs(
        self, input_ids: Tensor, position_ids: Tensor | None, segment_ids: Tensor | None
    ) -> dict[str, Any]:
        """What the model is called with. A cache or a 2-D mask would switch packing off."""
        inputs: dict[str, Any] = {"input_ids": input_ids}
        if not self.masked:
            inputs["use_cache"] = False
        if self._router is not None:
            inputs[SWITCH] = False
        if segment_ids is None or (self.padded and not self.masked):
            return inputs
        if self.padded:
            # A row of nothing but padding sees itself: it must see something.
            real = segment_ids > 0
            return inputs | {"attention_mask": (real | ~real.any(dim=1, keepdim=True)).long()}
        return inputs | {
            "position_ids": None if position_ids is None else position_ids + self.first_position,
            "attention_mask": self._mask(segment_ids),
        }

    def _mask(self, segment_ids: Tensor) -> Tensor | dict[str, Tensor]:
        length = segment_ids.shape[1]
        dtype = self.autocast or self.model.get_input_embeddings().weight.dtype
        window, causal = self._window, not self.masked
        if window is None or length <= window.tokens:
            everything = block_mask(segment_ids, dtype, causal=causal)
            mixed = self.masked and window is not None and window.layers == "mixed"
            return {FULL: everything, SLIDING: everything} if mixed else everything
        if window.layers == "unknown":
            raise ValueError(
                f"a row of {length} tokens is longer than the attention window of "
                f"{window.tokens}, and this version of transformers takes no mask for each kind "
                f"of layer of {self.model.config.model_type}: only padded rows are right"
            )
        near = block_mask(segment_ids, dtype, window.tokens, causal=causal)
        if window.layers == "all":
            return near
        return {FULL: block_mask(segment_ids, dtype, causal=causal), SLIDING: near}


def _first_position(model: Any) -> int:
    """The position that a model gives its first token: 0, but in the family of RoBERTa the one
    behind its padding index."""
    for name, part in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding):
            return 0 if part.padding_idx is None else part.padding_idx + 1
    return 0


def trained_positions(labels: Tensor, shift: int = 1) -> Tensor:
    """Places in the flattened (B, L) batch whose next token is a label (``shift`` 0: which are
    labels themselves): (K,) int64."""
    row, place = (labels[:, shift:] != IGNORED).nonzero(as_tuple=True)
    return row * labels.shape[1] + place


@contextmanager
def inference(root: nn.Module) -> Iterator[None]:
    """Run ``root`` without gradients and leave training as it was: modes, random state, shards."""
    from torch.distributed.fsdp import FSDPModule

    modes = [(module, module.training) for module in root.modules()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    root.eval()
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
            # The root stays gathered after a forward pass without a backward one; weights that are
            # loaded or stepped next would not be seen.
            if isinstance(module, FSDPModule):
                module.reshard()
