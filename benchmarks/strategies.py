"""What each strategy costs on two ranks of this machine's CPUs: time, memory, and what is sent.

    python benchmarks/strategies.py --out benchmarks/reports

The same model, rows, weights and optimizer in every line, through the same loss and strategies as a
run; one rank alone has the rows of both, and each has one thread. "step" is the fastest of the
steps after the first two, "CPU" what the processors took for one, of both ranks together: it hardly
depends on what else the machine does. "live" are the bytes of torch's tensors at the highest moment
of a step, "resident" the process's memory above what it was after imports and a first tiny step,
both of the worst rank. "sent" is what the loopback interface carried in a step, from both ranks:
run it where nothing else talks on it
(``unshare --net sh -c 'ip link set lo up; python benchmarks/strategies.py'``). "loss" is that of
the rows of the first step after all steps.

``torch.nn.DataParallel`` is not in the list: it copies the model to GPUs and gathers their outputs,
within one process. Without GPUs it calls the module and nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from dbx_llmtrain.memory import Setup
from tests.dist.memory_rank import ENVIRONMENT, Training, live_peaks, resident_peak, status, warm_up

MODEL, RANKS, STEPS = "llama-87m", 2, 5
"""The first two steps are not timed."""
MB = 10**6
TIMEOUT = 900


def _setup(kind: Any, **settings: Any) -> Setup:
    """64 tokens a rank in fp32."""
    common: dict[str, Any] = {"ranks": RANKS, "length": 64, "precision": "fp32", "device": "cpu"}
    return Setup(kind=kind, packed=False, **(common | settings))


SETUPS = {
    "single": _setup("single", ranks=1, micro_batch=RANKS),
    "ddp": _setup("ddp"),
    "fsdp grad_op": _setup("fsdp", shard="grad_op"),
    "fsdp full": _setup("fsdp"),
    "fsdp full, cpu_offload": _setup("fsdp", cpu_offload=True),
    "deepspeed 1": _setup("deepspeed", stage=1),
    "deepspeed 2": _setup("deepspeed", stage=2),
    "deepspeed 3": _setup("deepspeed", stage=3),
}


class SameRows(Training):
    """Every strategy trains on the same rows: a rank has its part of them."""

    def _batch(self, random: Any) -> Any:
        import torch

        size, rank = self.world.size, self.world.rank
        step = random.initial_seed() // size
        drawn = torch.Generator().manual_seed(step)
        rows = torch.randint(0, self.vocab, (RANKS, self.setup.length), generator=drawn)
        own = rows[rank::size].contiguous()
        return dataclasses.replace(super()._batch(random), input_ids=own, labels=own.clone())

    def loss(self) -> float:
        """Mean over the tokens of the first step's rows, of all ranks."""
        import torch
        import torch.distributed as dist

        from dbx_llmtrain.worker.loss import inference

        batch = self._batch(torch.Generator().manual_seed(self.world.size + self.world.rank))
        with inference(self.root):
            total = self.root(**batch.inputs()).double()
        dist.all_reduce(total)
        return float(total) / (batch.trained * self.world.size)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the dated report")
    parser.add_argument("--only", nargs="*", choices=SETUPS)
    parser.add_argument("--rank", nargs=2, metavar=("NAME", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        run_rank(*arguments.rank)
        return
    rows = [row(name, measure(name)) for name in arguments.only or SETUPS]
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        path = arguments.out / f"{datetime.date.today():%Y-%m-%d}-strategies.md"
        path.write_text(report(rows), encoding="utf-8")
        print(path)


def measure(name: str) -> dict[str, float]:
    """The worst rank's numbers. Raises ``CalledProcessError`` where a rank fails."""
    with tempfile.TemporaryDirectory(prefix="strategies-") as folder:
        out = Path(folder) / "out.json"
        ranks = SETUPS[name].ranks
        program = [str(Path(__file__).resolve()), "--rank", name, str(out)]
        if ranks > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone"]
            program = [*torchrun, f"--nproc-per-node={ranks}", *program]
        subprocess.run(
            [sys.executable, *program],
            check=True,
            timeout=TIMEOUT,
            cwd=Path(__file__).parents[1],
            env=os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": "1"},
        )
        found: dict[str, float] = json.loads(out.read_text())
        return found


def run_rank(name: str, out: str) -> None:
    import torch
    import torch.distributed as dist

    from dbx_llmtrain.worker.world import leave_process, open_world

    setup = SETUPS[name]
    with open_world(use_gpu=False, timeout_s=300) as world:
        torch.set_num_threads(1)
        found = numbers(setup, world)
        everyone: list[Any] = [None] * world.size
        dist.all_gather_object(everyone, found)
        if world.rank == 0:
            worst = {key: max(one[key] for one in everyone) for key in found}
            worst["processor"] = sum(one["processor"] for one in everyone)
            Path(out).write_text(json.dumps(worst))
    leave_process(0)


def numbers(setup: Setup, world: Any) -> dict[str, float]:
    """Time, resident memory and what is sent in one training; live bytes, which take time to be
    counted, in another."""
    warm_up(MODEL, setup, world)
    gc.collect()
    base = status("VmRSS")
    seconds: list[float] = []
    processor: list[float] = []
    sent: list[int] = []
    losses: list[float] = []

    def steps() -> None:
        training = SameRows(MODEL, setup, world)
        for number in range(1, STEPS + 1):
            started, worked, before = time.perf_counter(), time.process_time(), carried()
            training.step(number)
            seconds.append(time.perf_counter() - started)
            processor.append(time.process_time() - worked)
            sent.append(carried() - before)
        losses.append(training.loss())

    resident = resident_peak(steps) - base
    gc.collect()
    live = live_peaks(lambda: SameRows(MODEL, setup, world))
    return {
        "seconds": min(seconds[2:]),
        "processor": min(processor[2:]),
        "resident": resident,
        "live": max(live[part] for part in ("before", "forward", "backward", "step")),
        "sent": statistics.median(sent[2:]),
        "loss": losses[0],
    }


def carried() -> int:
    """Bytes that the loopback interface has carried."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    sent = next(line for line in lines if line.strip().startswith("lo:")).split(":")[1].split()[8]
    return int(sent)


def row(name: str, found: dict[str, float]) -> str:
    text = (
        f"| {name} | {found['seconds']:.2f} | {found['processor']:.2f} | {found['live'] / MB:,.0f} "
        f"| {found['resident'] / MB:,.0f} | {found['sent'] / MB:,.0f} | {found['loss']:.5f} |"
    )
    print(text, flush=True)
    return text


def report(rows: list[str]) -> str:
    import torch
    import transformers

    setup = SETUPS["ddp"]
    return "\n".join(
        [
            f"# Strategies on two ranks, {datetime.date.today():%d %B %Y}",
            "",
            *(__doc__ or "").strip().splitlines()[4:],
            "",
            f"{MODEL}, {RANKS} rows of {setup.length} tokens, AdamW, {setup.precision}; torch "
            f"{torch.__version__}, transformers {transformers.__version__}, {os.cpu_count()} CPUs, "
            f"{platform.system()}. Megabytes are 10^6 bytes.",
            "",
            "| strategy | step (s) | CPU (s) | live (MB) | resident (MB) | sent (MB) | loss |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    main()
