"""The start-up probe: proof on the real model that our loss is its loss and packing is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dbx_llmtrain.worker.data import IGNORED, Batch, lay_out
from dbx_llmtrain.worker.loss import LossModule, inference
from dbx_llmtrain.worker.whole import shape_of


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
    vocabulary = shape_of(module.model.get_input_embeddings().weight)[0]
    # (Where positions start late, they are counted by the tokens that are not padding.)
    lowest = module.first_position
    documents = [draw.integers(lowest, vocabulary, length) for length in (7, 5, 9)]
    other = [draw.integers(lowest, vocabulary, 7), *documents[1:]]
    with inference(root):
        separate = _separate_logits(root, module, documents, device)
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


def _batch_of(module: LossModule, rows: list[list[Any]], device: str) -> Batch:
    """Every token is a label but the first of a document, as when it is trained on."""
    everything = [[(ids, np.append(IGNORED, ids[1:])) for ids in row] for row in rows]
    return lay_out(everything, 0, shift=module.shift).to(device)


def _logits(root: nn.Module, batch: Batch, *, alone: bool = False) -> Tensor:
    inputs = batch.inputs()
    if alone:
        del inputs["segment_ids"], inputs["position_ids"]
    logits: Tensor = root(**inputs, logits=True)
    return logits


def _separate_logits(
    root: nn.Module, module: LossModule, documents: list[Any], device: str
) -> Tensor:
    """The model's own logits of each document by itself, without a mask of ours, end to end."""
    single = [_logits(root, _batch_of(module, [[ids]], device), alone=True)[0] for ids in documents]
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
        packed, changed = (
            _logits(root, _batch_of(module, [row], device))[0] for row in (documents, other)
        )
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
    if module.decoder is module.model or (head is None and not module.masked):
        return float("inf")
    rows = [[ids] for ids in documents] if module.padded else [documents]
    batch = _batch_of(module, rows, device)
    heads: list[Tensor] = []

    def enlarge(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        heads.append(output * 100)
        return heads[-1]

    logits = _logits(root, batch)
    targets = batch.labels.flatten()[batch.positions + module.shift]
    own = nn.functional.cross_entropy(logits.flatten(0, 1)[batch.positions].float(), targets)
    ours = root(**batch.inputs()) / batch.trained
    loss = float((ours - own).abs() / own.abs().clamp(min=1.0))
    if module.masked:
        return loss  # the logits of the model's own head
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
