"""Whether the kernel has killed processes here for lack of memory: its own counts, twice.

Standard library only. A process that was killed cannot say why; the counters of its control group
(version 1 and 2) and of the machine can.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def counts(root: Path = Path("/")) -> dict[str, int]:
    """Kills for lack of memory so far, by the file that counts them. What cannot be read is not
    there: then nothing is known."""
    found = {}
    for path in _files(root):
        try:
            count = _COUNT.search(path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
        if count:
            found[str(path)] = int(count[1])
    return found


def _files(root: Path) -> list[Path]:
    groups = root / "sys/fs/cgroup"
    found = [root / "proc/vmstat", groups / "memory.events", groups / "memory/memory.oom_control"]
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return found
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        path = path.lstrip(os.sep)
        if not controllers:
            found.append(groups / path / "memory.events")
        elif "memory" in controllers.split(","):
            found.append(groups / "memory" / path / "memory.oom_control")
    return list(dict.fromkeys(found))


def counted(before: Mapping[str, int], after: Mapping[str, int]) -> bool | None:
    """Whether a kill was counted in between; ``None`` where nothing could be read."""
    both = before.keys() & after.keys()
    return any(after[name] > before[name] for name in both) if both else None
