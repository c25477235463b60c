"""How fast a node gets its copy of a model, beside the best parallel copy command on the same disk.

    python benchmarks/staging.py --source /Volumes/main/ml/models --target /local_disk0

A folder of random files is copied by ``cp -r``, by ``cp`` of several files at once (``xargs -P``)
and as training stages it, in turn, into new folders of the same disk. Staging also computes the
SHA-256 of every file. The ratio is the speed of staging by that of the fastest command; its median
over the rounds is what counts. A copy counts when it is on the disk (``sync``); the source's pages
are dropped from the cache before, where this user may do that (else they are in memory for all).
``again`` is a second run, which finds the copy.
"""

from __future__ import annotations

import argparse
import os
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
from dbx_llmtrain.worker import staged

MB = 10**6
AT_ONCE = (4, 8, 16)
TIMEOUT = 3600


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", type=Path, help="where the files are made (default: temporary)")
    parser.add_argument("--target", type=Path, help="the local disk (default: temporary folder)")
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--megabytes", type=int, default=250, help="of each file")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="staging-", dir=arguments.source) as source,
        tempfile.TemporaryDirectory(prefix="staging-", dir=arguments.target) as target,
    ):
        artifact = make_files(Path(source), arguments.files, arguments.megabytes * MB)
        size = arguments.files * arguments.megabytes * MB
        print(f"{arguments.files} files of {arguments.megabytes} MB, {os.cpu_count()} CPUs")
        rounds = [one_round(artifact, Path(target), size) for _ in range(arguments.rounds)]
        print(f"median ratio {statistics.median(rounds):.2f} (1 is the best command's speed)")


def make_files(folder: Path, count: int, size: int) -> dict[str, Any]:
    for number in range(count):
        (folder / f"model-{number:05d}.safetensors").write_bytes(os.urandom(size))
    files = [entry.model_dump() for entry in storage.entries(folder)]
    return {"kind": "models", "source": str(folder), "fingerprint": "measured", "files": files}


def one_round(artifact: dict[str, Any], target: Path, size: int) -> float:
    """Copy once in every way; the speed of staging by that of the fastest command."""
    source = artifact["source"]
    seconds = {"cp -r": timed(target, lambda: run(["cp", "-r", source, str(target / "copy")]))}
    for count in AT_ONCE:
        seconds[f"xargs -P {count}"] = timed(
            target, lambda count=count: several(source, target, count)
        )
    ours = timed(target, lambda: staged.stage(artifact, str(target / "copy")), remove=False)
    began = time.perf_counter()
    staged.stage(artifact, str(target / "copy"))
    again = time.perf_counter() - began
    shutil.rmtree(target / "copy")
    best = min(seconds.values())
    told = [f"{name} {size / took / MB:,.0f} MB/s" for name, took in seconds.items()]
    told += [f"staging {size / ours / MB:,.0f} MB/s", f"again {again:.3f} s"]
    print(f"{', '.join(told)}: {best / ours:.2f}")
    return best / ours


def several(source: str, target: Path, count: int) -> None:
    (target / "copy").mkdir()
    find = f"find {source} -type f -print0 | xargs -0 -P {count} -I FILE cp FILE {target / 'copy'}"
    run(["sh", "-c", find])


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=TIMEOUT)


def timed(target: Path, copy: Callable[[], object], *, remove: bool = True) -> float:
    os.sync()
    drop_cache()
    began = time.perf_counter()
    copy()
    os.sync()
    took = time.perf_counter() - began
    if remove:
        shutil.rmtree(target / "copy")
    return took


def drop_cache() -> None:
    """What is in memory of the files, where this user may."""
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return


if __name__ == "__main__":
    main()
