"""The loss of a batch: summed over trained tokens, without ever holding the full logits.

``LossModule`` owns the forward pass and is itself what DDP or ``fully_shard`` wraps. Documents of a
row are kept apart by a block mask of our own (additive float, 4-D: it means the same to every
transformers version and attention implementation; position ids alone leak before 4.53).
``probe`` proves both on the real model before the first step and falls back where they do not hold.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dbx_llmtrain.worker.data import IGNORED, Batch, collate
from dbx_llmtrain.worker.masks import FULL, SLIDING, attention_window, block_mask

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
        """``hidden`` (K, H), ``weight`` (V, H), ``bias`` (V,), ``targets`` (K,) -> fp32 scalar."""
        wanted = [train and needed for needed in ctx.needs_input_grad[:3]]
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if wanted[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wanted[2] else None
        for start in range(0, len(targets), chunk):
            part, target = hidden[start : start + chunk], targets[start : start + chunk, None]
            logits = (part @ weight.T).float()
            if bias is not None:
                logits += bias.float()
            highest = logits.amax(dim=1, keepdim=True)
            chosen = logits.gather(1, target) - highest
            total = logits.sub_(highest).exp_().sum(dim=1, keepdim=True)
            loss += (total.log() - chosen).sum(dtype=torch.float64)
            if not any(wanted):
                continue
            slope = logits.div_(total).scatter_add_(1, target, -torch.ones_like(chosen))
            if grad_bias is not None:
                grad_bias += slope.sum(dim=0)
            slope = slope.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(slope, weight, out=grad_hidden[start : start + chunk])
            if grad_weight is not None:
                _add_product(grad_weight, slope, part)
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
    """``total += slope.T @ hidden``, summed over chunks in fp32."""
    if slope.dtype == total.dtype:
        total.addmm_(slope.T, hidden)
    else:
        total += slope.T @ hidden


def chunked_cross_entropy(
    hidden: Tensor, head: nn.Linear, targets: Tensor, *, chunk: int | None = None
) -> Tensor:
    """Cross-entropy of ``head(hidden)`` against ``targets``, summed: (K, H), (K,) -> fp32 scalar.

    Computes in the autocast type where autocast is on. ``chunk`` positions are done at a time;
    by default as many as make 50 million logits.
    """
    weight, bias = head.weight, head.bias
    chunk = chunk or max(128, _CHUNK_LOGITS // weight.shape[0])
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    train = torch.is_grad_enabled()
    with torch.autocast(kind, enabled=False):
        loss: Tensor = _ChunkedCrossEntropy.apply(
            hidden.to(dtype), weight.to(dtype), bias, targets, chunk, train
        )
    return loss


class LossModule(nn.Module):  # type: ignore[misc]  # torch is untyped
    """A causal language model whose forward pass is its loss; every strategy wraps this.

    Switches that the probe and the strategy set: ``own_logits`` takes the model's own logits
    instead of the chunked loss, ``padded`` says that a batch holds one document a row (no mask is
    passed: behind a causal model's back padding changes nothing), ``autocast`` is the compute type
    where the weights are not cast by the wrapper. ``chunk_tokens``: positions of the loss done at
    a time, by default as many as make 50 million logits.
    """

    def __init__(self, model: Any, *, chunk_tokens: int | None = None) -> None:
        super().__init__()
        self.model = model
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

    @property
    def decoder(self) -> Any:
        """The model without its head. (Not an attribute: it would be registered twice.)"""
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
    ) -> Tensor:
        """The loss of a batch (see ``Batch``) summed over its trained tokens, an fp32 scalar.

        It depends on every parameter also when there is nothing to train on, so that all ranks run
        the same collectives. With ``logits`` the model's own logits (B, L, V) instead; without
        ``segment_ids`` every row is one document.
        """
        with self._compute(input_ids.device.type):
            inputs = self._inputs(input_ids, position_ids, segment_ids)
            if logits:
                own: Tensor = self.model(**inputs).logits
                return own
            if labels is None:
                raise ValueError("labels are needed for the loss")
            if positions is None:
                positions = trained_positions(labels)
            targets = labels.flatten()[positions + 1]
            if self.own_logits:
                chosen = self.model(**inputs).logits.flatten(0, 1)[positions]
                return nn.functional.cross_entropy(chosen.float(), targets, reduction="sum")
            hidden = self.decoder(**inputs)[0].flatten(0, 1)[positions]
            head = self.model.get_output_embeddings()
            return chunked_cross_entropy(hidden, head, targets, chunk=self._chunk)

    def _compute(self, device_type: str) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        autocast: AbstractContextManager[Any] = torch.autocast(device_type, dtype=self.autocast)
        return autocast

    def _inputs(
        self, input_ids: Tensor, position_ids: Tensor | None, segment_ids: Tensor | None
    ) -> dict[str, Any]:
        """What the model is called with. A cache or a 2-D mask would switch packing off."""
        inputs: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
        if self.padded or segment_ids is None:
            return inputs
        return inputs | {
            "position_ids": position_ids,
            "attention_mask": self._mask(segment_ids),
        }

    def _mask(self, segment_ids: Tensor) -> Tensor | dict[str, Tensor]:
        length = segment_ids.shape[1]
        dtype = self.autocast or self.model.get_input_embeddings().weight.dtype
        window = self._window
        if window is None or length <= window.tokens:
            return block_mask(segment_ids, dtype)
        if window.layers == "unknown":
            raise ValueError(
                f"a row of {length} tokens is longer than the attention window of "
                f"{window.tokens}, and this version of transformers takes no mask for each kind "
                f"of layer of {self.model.config.model_type}: only padded rows are right"
            )
        near = block_mask(segment_ids, dtype, window.tokens)
        if window.layers == "all":
            return near
        return {FULL: block_mask(segment_ids, dtype), SLIDING: near}


def trained_positions(labels: Tensor) -> Tensor:
    """Places in the flattened (B, L) batch whose next token is a label: (K,) int64."""
    row, place = (labels[:, 1:] != IGNORED).nonzero(as_tuple=True)
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


@dataclass(frozen=True)
class ProbeResult:
    """What the start-up probe found. Differences are relative to the size of the logits or loss.

    ``reasons`` says in words what was fallen back from.
    """

    own_logits: bool
    padded: bool
    loss_difference: float
    packing_difference: float
    reasons: tuple[str, ...] = ()


def probe(root: nn.Module, module: LossModule, *, device: str, max_length: int) -> ProbeResult:
    """Prove on the real model that our loss is its loss and that packed documents stay apart.

    Every rank calls it (``root`` is the wrapped ``module``) and all come to the same result. Where
    the model's logits are not plainly ``head(hidden)`` (scaling, soft-cap), ``own_logits`` is
    switched on; where documents of a row influence each other, or rows of ``max_length`` tokens
    need a mask that cannot be given, ``padded``. Raises ``RuntimeError`` for a model whose logits
    are not finite.
    """
    module.own_logits = module.padded = False
    draw = np.random.default_rng(0)
    vocabulary = module.model.get_input_embeddings().weight.shape[0]
    documents = [draw.integers(0, vocabulary, length) for length in (7, 5, 9)]
    other = [draw.integers(0, vocabulary, 7), *documents[1:]]
    with inference(root):
        separate = _separate_logits(root, documents, device)
        exact = separate.dtype == torch.float32
        packing, refusal = float("inf"), "no mask can express this model's attention windows"
        if module.masks_reach(max_length):
            packing, refusal = _packing_difference(root, module, separate, documents, other, device)
        packing = _worst(packing, device)
        module.padded = not packing <= (1e-4 if exact else 0.1)
        loss = _worst(_loss_difference(root, module, documents, device), device)
        module.own_logits = not loss <= (1e-5 if exact else 2e-2)
    reasons = []
    if module.padded:
        cause = refusal or f"packed documents differ from separate ones by {packing:.1e}"
        reasons.append(f"{cause}: every document is padded to a row of its own")
    if module.own_logits:
        reasons.append(
            f"the model scales or caps what its head gives (by up to {loss:.0%}), so the loss is "
            "taken from its own logits, which are held in memory"
        )
    return ProbeResult(module.own_logits, module.padded, loss, packing, tuple(reasons))


def _batch_of(rows: list[list[Any]], device: str) -> Batch:
    everything = [[(ids, np.ones(len(ids), np.bool_)) for ids in row] for row in rows]
    return collate(everything, 0).to(device)


def _logits(root: nn.Module, batch: Batch, *, alone: bool = False) -> Tensor:
    inputs = batch.inputs()
    if alone:
        del inputs["segment_ids"], inputs["position_ids"]
    logits: Tensor = root(**inputs, logits=True)
    return logits


def _separate_logits(root: nn.Module, documents: list[Any], device: str) -> Tensor:
    """The model's own logits of each document by itself, without a mask of ours, end to end."""
    single = [_logits(root, _batch_of([[ids]], device), alone=True)[0] for ids in documents]
    separate = torch.cat(single)
    if not torch.isfinite(separate).all():
        raise RuntimeError("the model's logits are not finite before the first step")
    return separate


def _packing_difference(
    root: nn.Module,
    module: LossModule,
    separate: Tensor,
    documents: list[Any],
    other: list[Any],
    device: str,
) -> tuple[float, str]:
    """Packed against separate logits; and, where the model cannot do it at all, why.

    A second pack with another first document shows a leak in any precision: what follows must not
    change at all, and counts tenfold where it does.
    """
    if not module.takes_positions:
        return float("inf"), "the model takes no position ids"
    try:
        packed, changed = (_logits(root, _batch_of([row], device))[0] for row in (documents, other))
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        # Some families refuse a 4-D mask (GPT-2 before transformers 4.53). All ranks run the same
        # batch, so all of them come here; trouble of the machine is another matter.
        if isinstance(error, torch.OutOfMemoryError | torch.distributed.DistError):
            raise
        return float("inf"), f"the model refuses a block mask ({type(error).__name__}: {error})"
    size = max(1.0, float(separate.abs().max()))
    apart = (packed - separate).abs().max()
    leak = (packed - changed)[len(documents[0]) :].abs().max()
    return float(max(apart, 10 * leak)) / size, ""


def _loss_difference(
    root: nn.Module, module: LossModule, documents: list[Any], device: str
) -> float:
    """Our mean loss against that of the model's own logits, and the head's logits, enlarged,
    against the model's (a soft-cap bends only large ones, a new model's are small)."""
    head = module.model.get_output_embeddings()
    if head is None or module.decoder is module.model:
        return float("inf")
    rows = [[ids] for ids in documents] if module.padded else [documents]
    batch = _batch_of(rows, device)
    heads: list[Tensor] = []

    def enlarge(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        heads.append(output * 100)
        return heads[-1]

    logits = _logits(root, batch)
    targets = batch.labels.flatten()[batch.positions + 1]
    own = nn.functional.cross_entropy(logits.flatten(0, 1)[batch.positions].float(), targets)
    ours = root(**batch.inputs()) / batch.trained
    loss = float((ours - own).abs() / own.abs().clamp(min=1.0))
    hook = head.register_forward_hook(enlarge)
    try:
        large = _logits(root, batch)
    finally:
        hook.remove()
    if large.shape != heads[0].shape:
        return float("inf")
    size = heads[0].float().abs().max().clamp(min=1e-6)
    return max(loss, float((large.float() - heads[0].float()).abs().max() / size))


def _worst(value: float, device: str) -> float:
    """The largest value of all ranks (a rank on its own: its value); not a number counts as inf."""
    value = value if value == value else float("inf")
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    return float(tensor)
