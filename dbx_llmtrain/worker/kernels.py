"""Liger's fused kernels for norms, rotary positions and gated layers: where they are installed, and
only if the first batch has the same loss with them. The loss itself stays ours.

Liger changes transformers' modules, classes and functions for the whole process. What it changes
there is taken back: only this model's parts keep their new ``forward``, and a function only for
tensors on a GPU. The export, which is opened again on the CPU, is computed as it always was.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dbx_llmtrain.compat import installed
from dbx_llmtrain.errors import ConfigError, Problem
from dbx_llmtrain.records import RunPlan
from dbx_llmtrain.worker.data import Batch, Order
from dbx_llmtrain.worker.loss import inference
from dbx_llmtrain.worker.world import World

FIELD = "model.use_liger_kernel"
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3, "fp16": 5e-3}
"""Largest difference of the mean loss, relative to it (TF32 rounds products in fp32 as well)."""

_ABSENT = object()


def check_liger(wanted: bool | str, *, use_gpu: bool) -> None:
    """Raise ``ConfigError`` where the kernels are asked for outright and cannot be had."""
    if wanted is not True:
        return
    if not use_gpu:
        raise _refused("Liger's kernels run on GPUs only, and this run has none: set it to auto")
    if installed("liger-kernel") is None:
        raise _refused(
            "liger-kernel is not installed on this machine: install it, or set it to auto"
        )


def fuse(plan: RunPlan, world: World, root: nn.Module, model: Any, order: Order) -> tuple[str, ...]:
    """Give the Hugging Face ``model`` the kernels if the plan wants them and they do not change the
    loss of the first batch of ``order``; what was done, in words.

    Every rank calls it, and all come to the same result. ``root`` is the wrapped loss module.
    Raises ``ConfigError`` where they are wanted outright (``True``) and there are none, or they
    change the loss.
    """
    wanted = plan.config.model.use_liger_kernel
    if wanted is False or not plan.use_gpu or installed("liger-kernel") is None:
        return ()
    batch = order.step(0).batches[0].to(world.device)
    before, _ = _mean_loss(root, batch)
    patches = _apply(getattr(model, "get_base_model", lambda: model)())
    if not patches.parts:
        return _without(wanted, f"Liger has no kernels for {type(model).__name__}")
    after, fault = _mean_loss(root, batch)
    difference = abs(after - before) / max(abs(before), 1.0)
    if not difference <= TOLERANCE[plan.precision]:
        patches.undo()
        cause = fault or f"the loss differs by {difference:.1e} of itself"
        return _without(wanted, f"with Liger's kernels {cause}")
    return (f"Liger's kernels are used in {patches.parts} parts of the model",)


def _without(wanted: bool | str, cause: str) -> tuple[str, ...]:
    if wanted is True:
        raise _refused(f"{cause}: set it to false")
    return (f"{cause}: they are not used",)


def _refused(message: str) -> ConfigError:
    return ConfigError([Problem(FIELD, message)])


def _mean_loss(root: nn.Module, batch: Batch) -> tuple[float, str]:
    """Mean loss over the batches of all ranks; not a number, and why, where the model fails on any
    of them (as it does with a Liger that does not fit this transformers)."""
    fault, loss = "", torch.full((), torch.nan, device=batch.input_ids.device)
    try:
        with inference(root):
            loss = root(**batch.inputs())
    except _failures() as error:
        if isinstance(error, torch.OutOfMemoryError | dist.DistError):
            raise
        fault = f"the model fails ({type(error).__name__}: {error})"
    total = torch.stack([loss.double(), torch.full_like(loss, batch.trained).double()])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    nll, count = total.tolist()
    return nll / max(count, 1.0), fault


def _failures() -> tuple[type[Exception], ...]:
    """What is raised where a kernel cannot be built or run, or does not fit the model."""
    own = (RuntimeError, ValueError, TypeError, AttributeError, LookupError)
    if installed("triton") is None:
        return own
    from triton.errors import TritonError

    return (*own, TritonError)


@dataclass
class _Patches:
    """What Liger changed and is kept: attributes of the model's parts, and functions."""

    parts: int = 0
    _changes: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)

    def keep(self, attributes: dict[str, Any], name: str, before: Any) -> None:
        """Remember how an attribute was."""
        self._changes.append((attributes, name, before))

    def undo(self) -> None:
        """Make everything as it was."""
        for attributes, name, before in reversed(self._changes):
            if before is _ABSENT:
                del attributes[name]
            else:
                attributes[name] = before


def _apply(model: Any) -> _Patches:
    """Let Liger change the model, without its losses, and take back what reaches further."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    parts = list(model.modules())
    classes = {kind for part in parts for kind in type(part).__mro__ if _is_modeling(kind)}
    modules = [sys.modules[name] for name in sorted({kind.__module__ for kind in classes})]
    before_parts, before_classes, before_modules = (
        [(holder, dict(vars(holder))) for holder in holders]
        for holders in (parts, classes, modules)
    )
    _apply_liger_kernel_to_instance(
        model=model, cross_entropy=False, fused_linear_cross_entropy=False
    )
    for kind, before in before_classes:
        for name, old, _ in _changed(kind, before):
            if old is _ABSENT:
                delattr(kind, name)
            else:
                setattr(kind, name, old)
    patches = _Patches()
    for module, before in before_modules:
        for name, old, new in _changed(module, before):
            setattr(module, name, old)
            if callable(old) and not isinstance(old, type):
                patches.keep(vars(module), name, old)
                setattr(module, name, _on_gpu(new, old))
    for part, before in before_parts:
        for name, old, _ in _changed(part, before):
            patches.keep(vars(part), name, old)
            patches.parts += name == "forward"
    return patches


def _is_modeling(kind: type) -> bool:
    """Whether a class is of a model of transformers, and not of its machinery."""
    return kind.__module__.startswith("transformers.models.")


def _changed(holder: Any, before: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name, old and new value of the attributes that are not what they were."""
    for name, new in list(vars(holder).items()):
        old = before.get(name, _ABSENT)
        if old is not new:
            yield name, old, new


def _on_gpu(fused: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """``fused`` for tensors on a GPU, ``plain`` for others (the export is computed on the CPU)."""

    @functools.wraps(plain)
    def function(*args: Any, **kwargs: Any) -> Any:
        on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in args)
        return (fused if on_gpu else plain)(*args, **kwargs)

    return function
