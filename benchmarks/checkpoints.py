"""What a checkpoint costs: how long training waits for it, and how long it takes to go on from one.

    python benchmarks/checkpoints.py --out benchmarks/reports

Two ranks of this machine's CPUs, each with one thread, write the model and AdamW's state to local
disk, and copy and hash the files into the run folder, which is on the same disk. "whole" is one
that nothing is trained beside, from the step's end to the manifest; "stall" what training waits for
it (the copy to host memory), "first" the same of a run's first one, whose memory has to be found.
"beside" is the whole when steps go on meanwhile, "step beside" what such a step takes ("step"
otherwise). "dcp.save" is PyTorch's own, into the run folder and without hashes; "torch.save"
gathers everything on rank 0 and writes one file; training waits for all of either. Medians, of the
worst rank; the disk's cache is not emptied.

Resuming: seconds from a rank's start to the end of its first step, of a run that begins and of one
that goes on from a checkpoint early and late in an epoch; "reading" is what hashing and loading
that checkpoint takes by itself.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from dbx_llmtrain import storage
from dbx_llmtrain.memory import Setup
from tests.dist.memory_rank import ENVIRONMENT, Training

MODEL, RANKS, STEPS, SAVES = "llama-87m", 2, 4, 4
MB = 10**6
TIMEOUT = 1200
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"kind": "ddp"},
    "fsdp": {"kind": "fsdp"},
    "zero2": {"kind": "deepspeed", "stage": 2},
    "zero3": {"kind": "deepspeed", "stage": 3},
}
ROWS, EARLY, LATE = 20_000, 3, 9_990
"""Rows of an epoch, two a step, and the steps after which a run goes on."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the dated report")
    parser.add_argument("--only", nargs="*", choices=[*STRATEGIES, "resume"])
    parser.add_argument("--rank", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        run_rank(arguments.rank[0], Path(arguments.rank[1]))
        return
    chosen = arguments.only or [*STRATEGIES, "resume"]
    writing = [write_row(name, measure(name)) for name in STRATEGIES if name in chosen]
    resuming = resume_rows() if "resume" in chosen else []
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        path = arguments.out / f"{datetime.date.today():%Y-%m-%d}-checkpoints.md"
        path.write_text(report(writing, resuming), encoding="utf-8")
        print(path)


def torchrun(*program: str) -> None:
    """Raises ``CalledProcessError`` where a rank fails."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    subprocess.run(
        [sys.executable, *launcher, *program],
        check=True,
        timeout=TIMEOUT,
        cwd=Path(__file__).parents[1],
        env=os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": "1"},
    )


def measure(name: str) -> dict[str, float]:
    """The worst rank's numbers."""
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as folder:
        torchrun(str(Path(__file__).resolve()), "--rank", name, folder)
        found: dict[str, float] = json.loads((Path(folder) / "out.json").read_text())
        return found


def run_rank(name: str, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    from dbx_llmtrain.worker.world import leave_process, open_world

    with open_world(use_gpu=False, timeout_s=600) as world:
        torch.set_num_threads(1)
        found = reading(folder, world) if name == "reading" else numbers(name, folder, world)
        everyone: list[Any] = [None] * world.size
        dist.all_gather_object(everyone, found)
        if world.rank == 0:
            worst = {key: max(one[key] for one in everyone) for key in found}
            (folder / "out.json").write_text(json.dumps(worst))
    leave_process(0)


# Writing


def numbers(name: str, folder: Path, world: Any) -> dict[str, float]:
    """One rank's times of a strategy, in seconds."""
    from dbx_llmtrain.worker.saving import saving
    from tests import sample

    setup = Setup(
        ranks=RANKS, length=64, precision="fp32", device="cpu", packed=False, **STRATEGIES[name]
    )  # fmt: skip
    training = Training(MODEL, setup, world)
    steps = [timed(lambda number=number: training.step(number)) for number in range(1, STEPS + 3)]
    plan = sample.run_plan(folder / "run", config=sample.config(checkpoint={"keep_last": 1}))
    scratch = folder / f"scratch-{world.rank}"
    with saving(plan, world, scratch, tell=lambda _: None) as saver:

        def begin(number: int) -> None:
            barrier()
            saver.save(
                storage.checkpoint_folder(folder / "run", number), model=training.network,
                optimizer=training.optimizer, state={"step": number}, identity={}, metrics={},
            )  # fmt: skip

        alone = []
        for number in range(SAVES):
            begin(number)
            alone.append(saver.wait())
        begin(SAVES)
        beside = []
        while any_rank(saver.busy):
            beside.append(timed(lambda: training.step(100 + len(beside))))
        last = saver.wait()
    assert last is not None
    assert not any(saved.error for saved in (*alone, last)), (alone, last)
    return {
        "bytes": last.bytes,
        "step": statistics.median(steps[2:]),
        "first": alone[0].seconds_stalled,
        "stall": statistics.median(saved.seconds_stalled for saved in alone[1:]),
        "whole": statistics.median(saved.seconds for saved in alone[1:]),
        "beside": last.seconds,
        "step beside": statistics.median(beside),
        **others(training, folder, world),
    }


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


def any_rank(value: bool) -> bool:
    import torch
    import torch.distributed as dist

    flag = torch.tensor(int(value))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def others(training: Training, folder: Path, world: Any) -> dict[str, float]:
    """The same tensors by PyTorch's own means, until every rank has gone on."""
    import torch
    import torch.distributed.checkpoint as dcp

    from dbx_llmtrain.worker.checkpoint import stored_tensors
    from dbx_llmtrain.worker.whole import Cut
    from tests.dist.runs import joined

    def parts() -> Any:
        return stored_tensors(training.network, training.optimizer)

    def sharded() -> None:
        # (It knows nothing of DeepSpeed's pieces.)
        tensors = {name: joined(part) if isinstance(part, Cut) else part for name, part in parts()}
        dcp.save(tensors, checkpoint_id=folder / "dcp")
        barrier()

    def gathered() -> None:
        tensors = {name: joined(part) for name, part in parts()}
        if world.rank == 0:
            torch.save(tensors, folder / "whole.pt")
        barrier()

    found: dict[str, list[float]] = {"dcp.save": [], "torch.save": []}
    for name, action in {"dcp.save": sharded, "torch.save": gathered}.items():
        for _ in range(3):
            barrier()
            found[name].append(timed(action))
            barrier()
            if world.rank == 0:
                shutil.rmtree(folder / "dcp", ignore_errors=True)
            barrier()
    return {name: statistics.median(seconds) for name, seconds in found.items()}


WRITE_HEAD = (
    "| strategy | size (MB) | whole (s) | stall (s) | stall / whole | first (s) | step (s) "
    "| step beside (s) | beside (s) | dcp.save (s) | torch.save (s) |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def write_row(name: str, found: dict[str, float]) -> str:
    seconds = ("first", "step", "step beside", "beside", "dcp.save", "torch.save")
    text = (
        f"| {name} | {found['bytes'] / MB:,.0f} | {found['whole']:.2f} | {found['stall']:.2f} "
        f"| {found['stall'] / found['whole']:.0%} | "
        + " | ".join(f"{found[key]:.2f}" for key in seconds)
        + " |"
    )
    print(text, flush=True)
    return text


# Resuming


def resume_rows() -> list[str]:
    """A run that begins, one that goes on early in its epoch, and one late in it."""
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as name:
        folder = Path(name)
        plan = make_plan(folder)
        fresh = first_step(plan, folder, stop_after=EARLY)
        early = storage.checkpoint_folder(Path(plan.run_dir), EARLY)
        late = later(early, folder / "late" / early.name, LATE)
        torchrun(str(Path(__file__).resolve()), "--rank", "reading", str(folder))
        read = json.loads((folder / "out.json").read_text())["seconds"]
        rows = [f"| a run that begins | {fresh:.1f} | |", f"| reading alone | {read:.1f} | |"]
        for label, start, step in (("early", early, EARLY), ("late", late, LATE)):
            again = plan.model_copy(
                update={"resume_from": str(start), "run_dir": str(folder / label)}
            )
            seconds = first_step(again, folder, stop_after=step + 1)
            rows.append(
                f"| after step {step:,} of {plan.steps_per_epoch:,} | {seconds:.1f} "
                f"| {seconds - fresh - read:+.1f} |"
            )
    print("\n".join(rows), flush=True)
    return rows


def make_plan(folder: Path) -> Any:
    """An epoch of many rows, with FSDP on two ranks."""
    from transformers import AutoModelForCausalLM

    from tests import tiny
    from tests.dist import plans
    from tests.dist.memory_combinations import build_config

    model = tiny.model_folder(folder / "model")
    network = AutoModelForCausalLM.from_config(build_config(MODEL))
    network.save_pretrained(model)
    rows = tiny.examples() * (ROWS // len(tiny.examples()))
    return plans.plan(
        folder, "run", rows=rows, held_out=[], model=model, strategy="fsdp", world_size=RANKS,
        export=False, train={"max_steps": ROWS // 2, "global_batch_size": 2},
    )  # fmt: skip


def first_step(plan: Any, folder: Path, *, stop_after: int) -> float:
    """Seconds from a rank's start to its first step; the run ends after ``stop_after``."""
    from dbx_llmtrain.events import read_events

    plan = plan.model_copy(update={"stop_after": stop_after, "attempt": f"to-{stop_after}"})
    (folder / "plan.json").write_text(plan.model_dump_json())
    torchrun("-m", "dbx_llmtrain.worker.main", str(folder / "plan.json"))
    events = read_events(Path(plan.run_dir) / "events.jsonl", attempt=plan.attempt)
    (finished,) = (event for event in events if event.kind == "finished")
    return float(finished.metrics["seconds_to_first_step"])


def later(checkpoint: Path, target: Path, step: int) -> Path:
    """The same checkpoint as if it had been written after another step."""
    target = storage.checkpoint_folder(target.parent.parent, step)
    shutil.copytree(checkpoint, target)
    manifest: Any = storage.read_manifest(target)
    manifest["state"]["step"] = step
    storage.write_manifest(target, manifest)
    return target


def reading(folder: Path, world: Any) -> dict[str, float]:
    """Hash and load the early checkpoint into a model that is there."""
    from dbx_llmtrain.worker import checkpoint

    setup = Setup(
        kind="fsdp", ranks=RANKS, length=64, precision="fp32", device="cpu", packed=False
    )  # fmt: skip
    training = Training(MODEL, setup, world)
    path = storage.checkpoint_folder(folder / "run", EARLY)
    identity = checkpoint.read_state(path)["identity"]

    def load() -> None:
        checkpoint.load(
            path, model=training.network, optimizer=training.optimizer, world=world,
            identity=identity,
        )  # fmt: skip

    return {"seconds": statistics.median(timed(load) for _ in range(3))}


def report(writing: list[str], resuming: list[str]) -> str:
    import torch
    import transformers

    return "\n".join(
        [
            f"# Checkpoints, {datetime.date.today():%d %B %Y}",
            "",
            *(__doc__ or "").strip().splitlines()[4:],
            "",
            f"{MODEL}, AdamW, fp32, {RANKS} ranks; torch {torch.__version__}, transformers "
            f"{transformers.__version__}, {os.cpu_count()} CPUs, {platform.system()}. Megabytes "
            "are 10^6 bytes.",
            "",
            WRITE_HEAD,
            *writing,
            "",
            "| to the first step (FSDP) | s | more than beginning and reading (s) |",
            "|---|---|---|",
            *resuming,
            "",
        ]
    )


if __name__ == "__main__":
    main()
