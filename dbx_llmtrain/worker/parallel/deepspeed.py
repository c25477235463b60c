"""DeepSpeed's ZeRO: optimizer state (stage 1), gradients (2) and parameters (3) are cut over the
ranks, and may lie in host memory or on disk.

The engine is told of one micro-batch, so it never scales a gradient; which micro-batch is the last
of a step, the learning rate and whether a step is taken are decided by the loop, as for every
strategy. bf16: the model holds bf16 weights and computes with them, the optimizer keeps fp32 ones;
gradients are summed and reduced in fp32.
"""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from dbx_llmtrain import compat, logs, zero_config
from dbx_llmtrain.errors import ClusterError, Finding
from dbx_llmtrain.model_sections import OptimConfig, ParallelConfig
from dbx_llmtrain.worker import node, optim
from dbx_llmtrain.worker.parallel.common import materialise
from dbx_llmtrain.worker.parallel.zero_pieces import ZeroPieces
from dbx_llmtrain.worker.whole import PIECES

if TYPE_CHECKING:
    from dbx_llmtrain.records import RunPlan
    from dbx_llmtrain.worker.loss import LossModule
    from dbx_llmtrain.worker.parallel import Fill
    from dbx_llmtrain.worker.world import World


class DeepSpeed:
    """A DeepSpeed engine over the loss module, in the process group that is open already."""

    name = "deepspeed"

    def __init__(
        self,
        world: World,
        precision: str,
        parallel: ParallelConfig,
        train: OptimConfig,
        plan: RunPlan | None = None,
    ) -> None:
        self._world = world
        self._precision = precision
        self._train = train
        self._stage = zero_config.stage_of(parallel)
        disk = (
            str(nvme_folder(plan, world.rank)) if plan and zero_config.uses_nvme(parallel) else None
        )
        self._config = zero_config.build(
            parallel,
            micro_batch=plan.micro_batch_size if plan else 1,
            precision=precision,
            max_grad_norm=train.max_grad_norm,
            device=world.device,
            nvme_dir=disk,
        )
        self._deepspeed = load_deepspeed(
            world.device, plan.config.tracking.log_level if plan else "warning"
        )
        # It takes the device of this number, which launchers give differently or not at all.
        os.environ["LOCAL_RANK"] = world.device.partition(":")[2] or "0"
        self._seen: set[str] = set()
        self._engine: Any = None
        self._base: Any = None
        self._cut: Any = None

    def wrap(self, module: LossModule, fill: Fill | None = None) -> nn.Module:
        """Cut the parameters where the stage does, fill them, and start the engine.

        Raises ``ValueError`` where nothing is trainable.
        """
        device = self._world.device
        if self._stage == 3:
            self._partition(module)
        elif fill is not None:
            materialise(module, device)
        else:
            module.to(device)
        if fill is not None:
            fill(module.model)
        self._base = self._optimizer(module)
        exact = self._to_bf16(module) if self._precision == "bf16" else {}
        if self._params_on_disk:
            self._to_disk(module)
        with _unmeasured():
            self._engine = self._deepspeed.initialize(
                model=module,
                optimizer=self._base,
                config=deepcopy(self._config),
                dist_init_required=False,
            )[0]
        mesh = init_device_mesh(device.split(":")[0], (self._world.size,))
        for name, parameter in module.named_parameters():
            held = ZeroPieces(parameter, self._engine, self._base, device, mesh)
            setattr(parameter, PIECES, held)
            if name in exact:
                held.put_own(exact.pop(name))
            if parameter.requires_grad:
                self._watch(name, parameter)
        root: nn.Module = self._engine
        return root

    def build_optimizer(self, model: nn.Module, train: OptimConfig) -> torch.optim.Optimizer:
        """The optimizer that the engine was started with. Its parameters are flat pieces.

        Raises ``ValueError`` where ``train`` is not what the strategy was made with.
        """
        if train != self._train:
            raise ValueError("the engine was started with other settings of train")
        assert isinstance(self._base, torch.optim.Optimizer), "wrap comes first"
        return self._base

    @contextmanager
    def accumulate(self, root: nn.Module, last: bool) -> Iterator[None]:
        """Stage 1 reduces at the last micro-batch; 2 and 3 after each, into what they keep."""
        self._engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, root: nn.Module, loss: Tensor) -> None:
        """The engine's own, as it reduces on the way; the loss is scaled already."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def missing_gradients(self, root: nn.Module) -> list[str]:
        """The engine takes the gradients away at once, so they are noted when they come."""
        names = [name for name, p in root.module.named_parameters() if p.requires_grad]
        return [name for name in names if name not in self._seen]

    def grad_norm_and_clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """The norm over every rank's part. The engine clips when it steps, by the same formula as
        ``torch.nn.utils.clip_grad_norm_``: g * min(1, max_norm / (norm + 1e-6))."""
        optimizer = self._engine.optimizer
        optimizer.clip_grad = max_norm
        own = torch.nn.utils.get_total_norm(_gradients(optimizer)).double().to(self._world.device)
        squares = own.square()
        if self._world.size > 1:
            dist.all_reduce(squares)
        return squares.sqrt().float()

    def update(self, optimizer: torch.optim.Optimizer, *, finite: bool) -> bool:
        """Step, or have the engine drop its gradients in the course of a step that does nothing.

        (Some of its optimizers skip a step that is not finite by themselves.)
        """
        self._seen.clear()
        if finite:
            self._engine.step()
        else:
            self._base.step = lambda *_, **__: None
            try:
                self._engine.step()
            finally:
                del self._base.step
        return False

    def state(self) -> dict[str, Any]:
        """Nothing: there is no loss scale."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """A loss scale of another strategy has no use here."""

    def _partition(self, module: nn.Module) -> None:
        """Give every parameter its part on this rank, one at a time: no rank ever holds more than
        one whole parameter. Tied weights stay one."""
        config = deepcopy(self._config) | {"bf16": {"enabled": False}}
        if self._params_on_disk:
            config["zero_optimization"]["offload_param"]["device"] = "cpu"  # until they are filled
        cut = self._cut = self._deepspeed.zero.Init(config_dict_or_path=config)
        made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in made:
                    new = _with_storage(parameter, self._world.device)
                    cut._convert_to_zero_parameters([new])
                    made[id(parameter)] = (parameter, new)
                part._parameters[name] = made[id(parameter)][1]
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.is_meta:
                    part._buffers[name] = torch.empty_like(buffer, device=self._world.device)
                elif buffer is not None:
                    part._buffers[name] = buffer.to(self._world.device)

    @property
    def _params_on_disk(self) -> bool:
        offload = self._config["zero_optimization"].get("offload_param", {})
        return bool(offload.get("device") == "nvme")

    def _to_disk(self, module: nn.Module) -> None:
        """Hand the parts to DeepSpeed's swapper, which keeps those above a megabyte on disk."""
        parameters = list(module.parameters())
        offload = self._config["zero_optimization"]["offload_param"]
        offload.setdefault("buffer_size", max(p.ds_tensor.ds_numel for p in parameters))
        disk = self._deepspeed.zero.Init(config_dict_or_path=deepcopy(self._config))
        swapper = self._cut.param_swapper = disk.param_swapper
        for parameter in parameters:
            part = parameter.ds_tensor
            parameter.nvme_swapper = swapper
            if swapper.swappable_tensor(numel=part.ds_numel):
                buffer = swapper.get_buffer(parameter, part.ds_numel)
                buffer.copy_(part)
                part.data = buffer.data
                part.final_location = "nvme"
                swapper.swap_out_and_release([parameter])

    def _optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of ``train``; DeepSpeed's own for the CPU where its state lies there."""
        optimizer = optim.build_optimizer(module, self._train)
        if not self._config[zero_config.CPU_ADAM]:
            return optimizer
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        settings = optimizer.defaults
        own: torch.optim.Optimizer = DeepSpeedCPUAdam(
            optimizer.param_groups,
            lr=settings["lr"],
            betas=settings["betas"],
            eps=settings["eps"],
            adamw_mode=True,
        )
        return own

    def _to_bf16(self, module: nn.Module) -> dict[str, Tensor]:
        """Turn the weights into bf16. Returns what this rank holds of the trained ones in fp32,
        where bf16 cannot hold it exactly: the optimizer starts from that."""
        exact = {}
        for name, parameter in module.named_parameters():
            held = parameter.ds_tensor if self._stage == 3 else parameter
            low = held.detach().to(torch.bfloat16)
            if parameter.requires_grad and not torch.equal(low.to(held.dtype), held):
                exact[name] = held.detach().flatten().cpu()
            held.data = low
            if self._stage == 3:
                parameter.data = parameter.data.to(torch.bfloat16)
        return exact

    def _watch(self, name: str, parameter: nn.Parameter) -> None:
        parameter.register_post_accumulate_grad_hook(lambda _: self._seen.add(name))


def load_deepspeed(device: str, log_level: str) -> Any:
    """DeepSpeed's package, for this kind of device, without its notes. Nothing is compiled.

    Raises ``ClusterError`` where it is not installed, or too old.
    """
    found = compat.installed("deepspeed")
    if not compat.at_least("deepspeed", zero_config.MINIMUM):
        raise _unusable(f"it is {found or 'not installed'}, {zero_config.MINIMUM} is needed")
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # it would take the CUDA of a build for GPUs
    logger = logging.getLogger("DeepSpeed")
    try:
        with warnings.catch_warnings(), _quiet(logger):
            warnings.simplefilter("ignore")
            import deepspeed
            from deepspeed.ops import __compatible_ops__
    except ImportError as error:
        raise _unusable(f"it cannot be imported ({error})") from error
    logger.setLevel(logs.of_libraries(log_level))
    # Collectives of a shared memory op that would be compiled on the way; only inference uses it.
    __compatible_ops__["deepspeed_shm_comm"] = False
    # New versions of PyTorch have other names for the collectives that it calls.
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".*torch\.distributed\.")
    return deepspeed


def _unusable(why: str) -> ClusterError:
    message = f"{why}: install dbx_llmtrain[deepspeed] on every node, or set parallel.kind=fsdp"
    return ClusterError([Finding("error", "deepspeed", message)])


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Without a logger's notes, also where the block sets its level."""
    logger.addFilter(_is_warning)
    try:
        yield
    finally:
        logger.removeFilter(_is_warning)


def _is_warning(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


@contextmanager
def _unmeasured() -> Iterator[None]:
    """Without the memory reports that one of the optimizers prints whatever the level of notes is;
    each also collects garbage and forgets the device's peak."""
    from deepspeed.runtime import bf16_optimizer

    original = bf16_optimizer.see_memory_usage
    bf16_optimizer.see_memory_usage = lambda *_, **__: None
    try:
        yield
    finally:
        bf16_optimizer.see_memory_usage = original


def _with_storage(parameter: nn.Parameter, device: str) -> nn.Parameter:
    """The parameter, or on ``meta`` another one like it, with room on the device."""
    if not parameter.is_meta:
        return parameter
    new = nn.Parameter(
        torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad
    )
    new.__dict__.update(parameter.__dict__)
    return new


def _gradients(optimizer: Any) -> list[Tensor]:
    """This rank's parts of the gradient, or their norms; DeepSpeed's three optimizers keep them in
    different places. Where the optimizer is offloaded, only the norms stay on the device."""
    if hasattr(optimizer, "fp32_groups_gradient_flat_partition"):
        parts: list[Tensor] = optimizer.fp32_groups_gradient_flat_partition
        return parts
    if getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
        return [torch.as_tensor(norm) for norm in optimizer.norm_for_param_grads.values()]
    groups = optimizer.averaged_gradients.values()
    return [part for group in groups if group is not None for part in group if part is not None]


def nvme_folder(plan: RunPlan, rank: int) -> Path:
    """Where a rank keeps what is offloaded to disk."""
    local = node.local_dir(plan.local_dir)
    given = plan.parallel.nvme_dir
    run = hashlib.sha256(plan.run_dir.encode()).hexdigest()[:16]
    root = Path(given) if given else local / zero_config.NVME_FOLDER
    return root / run / plan.attempt / str(rank)
