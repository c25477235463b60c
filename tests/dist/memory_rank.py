"""What training really takes: live tensor bytes and resident memory of one combination.

Started on every rank by ``measure``; it trains through ``LossModule`` and the strategy, as a run
does, on a random model and random tokens.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dbx_llmtrain.memory import Adapters, Setup
from tests.dist.launch import run_ranks
from tests.dist.memory_combinations import MODELS, Combination, build_config

TIMEOUT = 280
"""Seconds of one combination (a quiet machine needs ten to thirty)."""

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""glibc gives memory back when it is freed. By default it keeps pieces of up to 32 MB for later,
and a process is larger than all it holds by what it has happened to keep."""


def measure(combination: Combination, out: Path) -> dict[str, int]:
    """Bytes of the worst rank at their peak: ``live`` tensors, ``resident`` above the base after
    imports. Raises ``AssertionError`` with the ranks' output when they fail or take too long."""
    ranks = combination.setup.ranks
    text = json.dumps({"model": combination.model, "setup": asdict(combination.setup)})
    run_ranks(["tests.dist.memory_rank", text, str(out)], ranks, ENVIRONMENT, TIMEOUT)
    result: dict[str, int] = json.loads(out.read_text())
    return result


def read_setup(values: dict[str, Any]) -> Setup:
    lora = values.pop("lora")
    if lora is not None:
        targets = lora["targets"]
        lora = Adapters(lora["r"], targets if isinstance(targets, str) else tuple(targets))
    return Setup(**values, lora=lora)


class Training:
    """A wrapped model with its optimizer; ``step`` runs one optimizer step."""

    def __init__(self, model: str, setup: Setup, world: Any) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from dbx_llmtrain.model_sections import OptimConfig
        from dbx_llmtrain.worker import compute, lora
        from dbx_llmtrain.worker.loss import LossModule
        from dbx_llmtrain.worker.parallel import make_strategy

        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(
            build_config(model), attn_implementation=setup.attention
        )
        network.config.use_cache = False
        train = OptimConfig(optimizer=setup.optimizer, learning_rate=1e-4)
        plan = plan_of(setup, train, world)
        self.network = lora.adapt(network.train(), plan)
        compute.prepare(self.network, plan)
        module = LossModule(self.network)
        module.padded = not setup.packed
        self.setup, self.world = setup, world
        self.strategy = make_strategy(
            setup.kind, world, setup.precision, parallel=parallel(setup), train=train,
            plan=plan,
        )  # fmt: skip
        self.root = self.strategy.wrap(module)
        self.on_backward: Callable[[], None] = lambda: None
        self.root.register_forward_hook(lambda *_: self.on_backward())
        self.optimizer = self.strategy.build_optimizer(self.network, train)
        self.vocab = network.config.vocab_size

    def step(self, number: int, mark: Callable[[str], None] = lambda part: None) -> None:
        """One optimizer step; ``mark`` is told which part of it begins."""
        import torch

        from dbx_llmtrain.worker.data import StepBatches
        from dbx_llmtrain.worker.loop import back_propagate

        random = torch.Generator().manual_seed(number * self.world.size + self.world.rank)
        batches = [self._batch(random) for _ in range(self.setup.accumulation)]
        trained = sum(batch.trained for batch in batches) * self.world.size
        work = StepBatches(batches, trained, trained, len(batches))
        mark("forward")
        self.on_backward = lambda: mark("backward")
        back_propagate(self.root, self.strategy, work, self.world)
        mark("step")
        assert not self.strategy.missing_gradients(self.root)
        parameters = [p for p in self.network.parameters() if p.requires_grad]
        self.strategy.grad_norm_and_clip(parameters, 1.0)
        self.strategy.update(self.optimizer, finite=True)

    def _batch(self, random: Any) -> Any:
        """Full rows; packed ones have two documents."""
        import torch

        from dbx_llmtrain.worker.data import Batch
        from dbx_llmtrain.worker.loss import trained_positions

        rows, length = self.setup.micro_batch, self.setup.length
        ids = torch.randint(0, self.vocab, (rows, length), generator=random)
        documents = 2 if self.setup.packed else 1
        place = torch.arange(length) % (length // documents)
        segment = 1 + torch.arange(length) // (length // documents)
        return Batch(
            input_ids=ids,
            labels=ids.clone(),
            position_ids=place.expand(rows, -1).clone(),
            segment_ids=segment.expand(rows, -1).clone(),
            positions=trained_positions(ids),
            rows=rows * documents,
            tokens=rows * length,
            trained=rows * (length - 1),
        )


def parallel(setup: Setup) -> Any:
    from dbx_llmtrain.model_sections import ParallelConfig

    return ParallelConfig(
        kind=setup.kind, shard=setup.shard, stage=setup.stage, cpu_offload=setup.cpu_offload,
        offload_optimizer=setup.offload_optimizer, offload_params=setup.offload_params,
    )  # fmt: skip


def plan_of(setup: Setup, train: Any, world: Any) -> Any:
    """The plan of such a run."""
    from tests import sample

    model: dict[str, Any] = {"source": "random"}
    if setup.lora is not None:
        targets = setup.lora.targets
        model["lora"] = {
            "r": setup.lora.r,
            "target_modules": targets if isinstance(targets, str) else list(targets),
        }
    return sample.run_plan(
        config=sample.config(train=train, model=model),
        world_size=world.size,
        use_gpu=setup.device == "cuda",
        strategy=setup.kind,
        precision=setup.precision,
        parallel=parallel(setup),
        gradient_checkpointing=setup.gradient_checkpointing,
        micro_batch_size=setup.micro_batch,
        accumulation=setup.accumulation,
        global_batch_size=setup.micro_batch * setup.accumulation * world.size,
    )


def resident_peak(run: Callable[[], Any]) -> int:
    """The highest resident memory while ``run`` runs, in bytes (Linux resets the mark on a 5)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    run()
    return status("VmHWM")


def status(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def live_peaks(make: Callable[[], Training]) -> dict[str, int]:
    """The highest sum of live CPU tensors' bytes within the parts of a training's second step, as
    torch's allocator reports them: ``forward``, ``backward``, ``step``; and ``before`` it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        training = make()
        training.step(1)
        mark("before")
        training.step(2, mark)
        mark("end")
    return peaks(recorded.profiler.kineto_results.experimental_event_tree())


def mark(name: str) -> None:
    """Leave a sign in the record: the part of this name begins."""
    import torch

    with torch.profiler.record_function(f"mark:{name}"):
        pass


def peaks(tree: Any) -> dict[str, int]:
    """Of every part: the most that was held since its sign.

    Only what the rank's own thread allocates and frees is reported, and gloo's threads free some of
    it: memory at an address that is given out again has been freed.
    """
    events, waiting = [], list(tree)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]" or event.name.startswith("mark:"):
            events.append(event)
    found: dict[str, int] = {}
    sizes: dict[int, int] = {}
    held, part = 0, "make"
    for event in sorted(events, key=lambda e: e.start_time_ns):
        if event.name == "[memory]":
            address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
            held -= sizes.pop(address, 0)
            if size > 0:
                sizes[address] = size
                held += size
        else:
            part = event.name.removeprefix("mark:")
        found[part] = max(found.get(part, held), held)
    return found


def main() -> None:
    import torch.distributed as dist

    from dbx_llmtrain.worker.world import leave_process, open_world

    values = json.loads(sys.argv[1])
    setup = read_setup(values["setup"])
    gpu = setup.device == "cuda"
    with open_world(use_gpu=gpu, timeout_s=120) as world:
        found = (on_gpu if gpu else on_cpu)(values["model"], setup, world)
        everyone: list[Any] = [None] * world.size
        dist.all_gather_object(everyone, found)
        if world.rank == 0:
            worst = {key: max(one[key] for one in everyone) for key in everyone[0]}
            Path(sys.argv[2]).write_text(json.dumps(worst))
    leave_process(0)


def on_gpu(model: str, setup: Setup, world: Any) -> dict[str, int]:
    """Most allocated and most reserved memory of the device in two steps."""
    import torch

    training = Training(model, setup, world)
    training.step(1)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    training.step(2)
    return {
        "live": torch.cuda.max_memory_allocated(),
        "resident": torch.cuda.max_memory_reserved(),
    }


def on_cpu(model: str, setup: Setup, world: Any) -> dict[str, int]:
    """Most live and most resident memory, in two trainings: counting takes memory itself."""
    found = resident(model, setup, world)
    live = live_peaks(lambda: Training(model, setup, world))
    found["live"] = max(live[part] for part in ("before", "forward", "backward", "step"))
    return found | live


def resident(model: str, setup: Setup, world: Any) -> dict[str, int]:
    """Highest resident memory of two steps above the base, which is taken when everything is
    imported and has run once."""
    warm_up(model, setup, world)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    base = status("VmRSS")
    training = Training(model, setup, world)
    peak = resident_peak(lambda: [training.step(number) for number in (1, 2)])
    return {"resident": peak - base, "base": base}


def warm_up(model: str, setup: Setup, world: Any) -> None:
    """A step of a model of the same kind that is next to nothing."""
    small = dict(MODELS[model])
    if small["model_type"] == "gpt2":
        small |= {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 97}
    else:
        small |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                  "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 97}  # fmt: skip
    MODELS["warm-up"] = small
    Training("warm-up", replace(setup, micro_batch=1, length=16, accumulation=1), world).step(0)


if __name__ == "__main__":
    main()
