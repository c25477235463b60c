"""What training takes, measured and estimated: live tensor bytes and resident memory on CPUs.

    python benchmarks/memory.py --out benchmarks/reports

Every combination of strategy, model and settings trains two steps on random tokens, through the
same loss, strategies and optimizer as a run, and is compared with ``memory.estimate``. "live" are
the bytes of torch's tensors at the highest moment of a step (counted by its allocator), "resident"
the process's memory above what it was after imports and a first tiny step, both of the worst rank.
Bounds are 15% for live and 25% for resident bytes. "when" is the moment that the estimate takes for
the highest.

Resident memory is measured with MALLOC_MMAP_THRESHOLD_=1048576, so that glibc gives back what is
freed. By default it keeps pieces of up to 32 MB, and a process may be far larger than what it holds
(fsdp full, 87M: 1,914 MB instead of 1,161), which no estimate of tensors can know.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from dbx_llmtrain.memory import estimate
from tests.dist.memory_combinations import COMBINATIONS, Combination, shape_of
from tests.dist.memory_rank import measure

MB = 10**6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the dated report")
    parser.add_argument("--only", nargs="*", help="names of combinations")
    parser.add_argument("--known", type=Path, help="JSON lines of results: read, and added to")
    arguments = parser.parse_args()
    known = read_known(arguments.known)
    rows = []
    for name, combination in COMBINATIONS.items():
        if arguments.only and name not in arguments.only:
            continue
        if name not in known:
            known[name] = measured(combination)
            if arguments.known:
                with arguments.known.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"name": name} | known[name]) + "\n")
        rows.append(row(name, combination, known[name]))
        print(rows[-1], flush=True)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        path = arguments.out / f"{datetime.date.today():%Y-%m-%d}-memory.md"
        path.write_text(report(rows), encoding="utf-8")
        print(path)


def read_known(path: Path | None) -> dict[str, dict[str, Any]]:
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line.pop("name"): line for line in lines}


def measured(combination: Combination) -> dict[str, Any]:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        result: dict[str, Any] = dict(measure(combination, Path(folder) / "out.json"))
    return result | {"seconds": round(time.perf_counter() - started)}


def row(name: str, combination: Combination, found: dict[str, Any]) -> str:
    guess = estimate(shape_of(combination.model), combination.setup)
    cells = [
        name,
        f"{guess.total / MB:,.0f}",
        f"{found['live'] / MB:,.0f}",
        f"{guess.total / found['live'] - 1:+.1%}",
        f"{found['resident'] / MB:,.0f}",
        f"{guess.total / found['resident'] - 1:+.1%}",
        guess.moment,
        highest(found),
    ]
    return f"| {' | '.join(cells)} |"


def highest(found: dict[str, Any]) -> str:
    """The part of a step in which most was held."""
    return max(("forward", "backward", "step"), key=lambda part: found[part])


def report(rows: list[str]) -> str:
    import torch
    import transformers

    text = (__doc__ or "").strip().splitlines()
    return "\n".join(
        [
            f"# Memory of training, {datetime.date.today():%d %B %Y}",
            "",
            *text[4:],
            "",
            f"torch {torch.__version__}, transformers {transformers.__version__}, "
            f"{os.cpu_count()} CPUs, {platform.system()}. Megabytes (10^6 bytes).",
            "",
            "| combination | estimate | live | error | resident | error | when | measured in |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    main()
