"""What was written, opened again as anyone would: the same tensors, logits and end tokens.

Nothing is taken from the model that was trained but digests of its tensors and its logits for one
batch, so that only one model is in memory at a time.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dbx_llmtrain import custom_code
from dbx_llmtrain.compat import dtype_argument
from dbx_llmtrain.errors import CheckpointError
from dbx_llmtrain.worker.generation import as_list
from dbx_llmtrain.worker.model import check_loading, digest, model_class, named_weights

logger = logging.getLogger(__name__)

_NEW_TOKENS = 2
"""The first comes of the prompt, the second of the cache."""


@dataclass(frozen=True)
class Expected:
    """What a folder has to hold and to compute.

    ``tensors`` has the type that each was written in and its digest; ``input_ids`` (1, L) and
    ``logits`` (1, L, V) are those of the model that it was made of. ``ends``: ids with which the
    answers in the data end. ``four_bit``: that model has fewer bits than what was written.
    """

    tensors: Mapping[str, tuple[torch.dtype, str]]
    input_ids: Tensor
    logits: Tensor
    objective: str = "sft"
    ends: tuple[int, ...] = ()
    four_bit: bool = False


def tensors_of(weights: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, str]]:
    """Type and digest of each tensor."""
    return {name: (tensor.dtype, digest(tensor)) for name, tensor in weights.items()}


def check_model(folder: Path, expected: Expected, *, trusted: bool) -> None:
    """Re-open the folder: no key too few or too many, the same tensors bit by bit, logits that
    differ from the model's by no more than the types round, and a generation that can end.

    Raises ``CheckpointError``.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reopened, report = model_class(expected.objective).from_pretrained(
            **custom_code.load_from(folder, trusted=trusted),
            local_files_only=True,
            output_loading_info=True,
            **dtype_argument("auto"),
        )
    check_loading(folder, report, strict=True)
    _check_tensors(reopened, expected)
    rounding = {dtype for dtype, _ in expected.tensors.values()} - {torch.float32}
    model = reopened.float().eval()
    check_logits(model, expected, exact=not rounding)
    if expected.objective != "mlm":
        _check_generation(model, expected)


def _check_tensors(reopened: nn.Module, expected: Expected) -> None:
    """Bitwise, in the type that was written. NaN equals NaN: the run reports those itself."""
    found = dict(named_weights(reopened))
    differing = [
        name
        for name, (dtype, wanted) in expected.tensors.items()
        if name not in found or digest(found[name].detach().to(dtype)) != wanted
    ]
    if differing or found.keys() - expected.tensors.keys():
        names = ", ".join(sorted({*differing, *(found.keys() - expected.tensors.keys())})[:8])
        raise CheckpointError(f"the export does not hold the trained weights: {names} differ")


def check_logits(
    reopened: nn.Module, expected: Expected, *, exact: bool, what: str = "export"
) -> None:
    """Relative error (L2) of all logits. 1e-5 is fp32 on one kind of device, 1e-4 between two, 0.1
    the rounding of bf16 weights or sums over dozens of layers, 0.5 that of 4 bits; another model is
    off by 1 or more.
    """
    with torch.no_grad():
        ours = reopened(input_ids=expected.input_ids.cpu()).logits.float()
    theirs = expected.logits.float().cpu()
    error = float(torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs))
    exact = exact and expected.logits.dtype == torch.float32
    limit = 1e-5 if expected.logits.device.type == "cpu" else 1e-4
    if not exact:
        limit = 0.1
    if expected.four_bit:
        limit = 0.5  # what runs has fewer bits than what its adapter is put on
    if not error <= limit:
        raise CheckpointError(
            f"the {what}'s logits are {error:.1e} off the running model's (limit {limit:.0e}), "
            "although it holds the same weights: its configuration is not the one that was trained"
        )


def _check_generation(model: Any, expected: Expected) -> None:
    """Raise unless generation ends where the answers in the data do, and try a short one.

    One that fails is told, and no more than that: code that comes with a model may be too old for
    this transformers, and its weights are as good.
    """
    if not model.can_generate():
        return
    known = as_list(model.generation_config.eos_token_id)
    if missing := sorted(set(expected.ends) - set(known)):
        raise CheckpointError(
            f"generation with the export would not stop: the answers in the data end with the "
            f"tokens {missing}, the end tokens of its generation_config.json are {known}"
        )
    ids = expected.input_ids.cpu()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=_NEW_TOKENS,
                pad_token_id=known[0] if known else 0,
            )
    except Exception as error:
        # Anything that code of the model's own may raise.
        logger.warning(
            "the export holds what was trained, but this transformers cannot generate with it: "
            "%s: %s",
            type(error).__name__,
            error,
            exc_info=True,
        )
